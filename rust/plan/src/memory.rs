// SPDX-License-Identifier: Apache-2.0
//! Owns what of a GPU's memory is left for KV, and how a host pool is pinned.

use crate::error::{capacity, config, size, Result};
use crate::packing::div_ceil;

/// Bytes of a GiB.
pub const GIB: f64 = (1_u64 << 30) as f64;

/// What vLLM needs of a GPU beside weights and KV (activations, graphs, collectives, workspaces),
/// in GiB. vLLM's published HiSparse calculator reserves 15 GiB; it was published with a server
/// that admits 142,000 tokens.
pub const RUNTIME_GIB: f64 = 15.0;

/// Admission limit of the server with which [`RUNTIME_GIB`] was published.
pub const RUNTIME_MODEL_LEN: u64 = 142_000;

/// Size in bytes; negative and absurd sizes were refused before.
pub(crate) fn bytes(gib: f64) -> u64 {
    (gib * GIB) as u64
}

/// Bytes of the workspace in which vLLM 0.33 gathers a prefill's context for sparse attention:
/// `factor x max_model_len` rows of 576 bf16 values, with a factor of 5 up to 256K tokens and 2
/// beyond.
#[must_use]
pub fn prefill_workspace_bytes(max_model_len: u64) -> u64 {
    workspace_factor(max_model_len) * max_model_len * 576 * 2
}

/// Bytes of the indexer's gather buffer: `576 x 2 / 132` rows for each row of the factor, 132
/// bytes each. A pooling indexer has one row for `tokens_per_indexer_row` tokens, so its need is
/// counted in rows, not in tokens.
#[must_use]
pub fn indexer_workspace_bytes(max_model_len: u64, tokens_per_indexer_row: u64) -> u64 {
    let rows = div_ceil(max_model_len, tokens_per_indexer_row);
    (576 * 2 / 132) * workspace_factor(max_model_len) * rows * 132
}

fn workspace_factor(max_model_len: u64) -> u64 {
    if max_model_len <= 256 * 1024 {
        5
    } else {
        2
    }
}

/// A GPU's memory and what else lives there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuMemory {
    /// Memory that the driver reports, in GiB.
    pub hbm_gib: f64,
    /// Share of it that the engine may use.
    pub utilization: f64,
    /// Weights of one replica, in GiB; tensor parallel ranks share them evenly.
    pub weights_gib: f64,
    /// Everything else, in GiB.
    pub runtime_gib: f64,
    /// KV cache memory as an engine printed it at start; replaces the four above.
    pub kv_gib: Option<f64>,
}

impl GpuMemory {
    /// Checks the numbers.
    ///
    /// # Errors
    /// A negative or missing size, or a utilisation outside (0, 1].
    pub fn validate(&self) -> Result<()> {
        if let Some(kv_gib) = self.kv_gib {
            size("kv_gib", kv_gib, 0.0, false, "take it from the engine's log")?;
            return Ok(());
        }
        size("hbm_gib", self.hbm_gib, 0.0, false, "take it from nvidia-smi")?;
        size("weights_gib", self.weights_gib, 0.0, false, "give the size of the checkpoint")?;
        size("runtime_gib", self.runtime_gib, 0.0, true, "leave it out for 15")?;
        let remedy = "use 0.85 to 0.95";
        size("gpu_memory_utilization", self.utilization, 0.0, false, remedy)?;
        if self.utilization > 1.0 {
            let name = "gpu_memory_utilization";
            return Err(config(name, self.utilization, "at most 1", remedy));
        }
        Ok(())
    }

    /// Bytes for KV on one GPU if the engine admits `max_model_len` tokens; 0 if nothing is left.
    #[must_use]
    pub fn kv_bytes(&self, tp: u64, max_model_len: u64, tokens_per_indexer_row: u64) -> u64 {
        if let Some(kv_gib) = self.kv_gib {
            return bytes(kv_gib);
        }
        // Attention and indexer use one workspace one after the other.
        let workspace = |tokens: u64| {
            let indexer = indexer_workspace_bytes(tokens, tokens_per_indexer_row);
            prefill_workspace_bytes(tokens).max(indexer)
        };
        // What it takes at the published length is part of the published reserve.
        let beyond = workspace(max_model_len).saturating_sub(workspace(RUNTIME_MODEL_LEN));
        let left = self.hbm_gib * self.utilization
            - self.weights_gib / tp as f64
            - self.runtime_gib
            - beyond as f64 / GIB;
        bytes(left.max(0.0))
    }
}

/// Separate registrations that pin a pool of `num_blocks` blocks, when one registration holds at
/// most `limit_bytes`: no block may lie in two, because one copy must not cross from one to
/// another.
///
/// # Errors
/// A limit under one block.
pub fn registrations(num_blocks: u64, block_stride: u64, limit_bytes: u64) -> Result<u64> {
    let blocks_in_one = limit_bytes / block_stride;
    if blocks_in_one == 0 {
        return Err(capacity(
            "registration_gib",
            limit_bytes as f64 / GIB,
            format!("at least one block of {block_stride} bytes"),
            "raise --registration-gib",
        ));
    }
    Ok(div_ceil(num_blocks, blocks_in_one))
}
