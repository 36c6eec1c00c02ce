// SPDX-License-Identifier: Apache-2.0
//! Owns the embedded engine's settings, and what each serving policy makes of them.

use core::fmt;

use crate::config::{CoordinatorConfig, HostCopy, ReleasePoint};
use crate::error::{Error, Expected, Result};
use crate::geometry::{Geometry, HostLayout, LayerPacking};
use crate::sim::topk::{MAX_POSITIONS, TopkParams};
use crate::sim::worker::{Fault, MAX_COMPLETE_STEPS, MAX_ENQUEUE_STEPS, WorkerConfig};

/// What the engine does when GPU blocks run short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ServingPolicy {
    /// Requests give up residency page by page and read selected rows from the host pool.
    Hotpage,
    /// Ordinary residency, no host pool: requests are preempted and computed again.
    Preempt,
    /// Dense residency with host copies: a request needs every page on the GPU to run, and gets
    /// them back from the host pool instead of computing them again.
    Offload,
}

impl ServingPolicy {
    /// All policies, in the order in which they are shown.
    pub const ALL: [Self; 3] = [Self::Hotpage, Self::Preempt, Self::Offload];

    /// Name as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hotpage => "hotpage",
            Self::Preempt => "preempt",
            Self::Offload => "offload",
        }
    }

    /// True if pages are copied to a host pool.
    #[must_use]
    pub const fn has_host_pool(self) -> bool {
        !matches!(self, Self::Preempt)
    }
}

impl fmt::Display for ServingPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Everything that an engine must know before the first request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// What happens when GPU blocks run short.
    pub policy: ServingPolicy,
    /// Layers by KV cache group and index group.
    pub packing: LayerPacking,
    /// Tokens per block.
    pub block_size: u32,
    /// Bytes of one token in one layer.
    pub row_bytes: u32,
    /// Order of rows in the host pool.
    pub host_layout: HostLayout,
    /// Blocks of the GPU pool, the null block counted.
    pub gpu_blocks: u32,
    /// Blocks of the host pool, the null block counted; not looked at without a host pool.
    pub host_blocks: u32,
    /// GPU blocks that the indexer takes for each page.
    pub other_blocks_per_page: u32,
    /// Rows that the indexer selects for each decode row.
    pub top_k: u32,
    /// Hot rows of one request in each index group.
    pub hot_rows: u32,
    /// Draft tokens of a decode step.
    pub num_draft_tokens: u32,
    /// Chance, in parts per million, that a draft is right if all before it were.
    pub acceptance_ppm: u32,
    /// Ranks that acknowledge restores.
    pub num_ranks: u32,
    /// Ranks that acknowledge spills.
    pub num_host_writers: u32,
    /// How rows reach the host pool of a policy that has one.
    pub host_copy: HostCopy,
    /// When a GPU block may be handed on.
    pub release_point: ReleasePoint,
    /// Steps that a request stays fully resident before its hot region is returned.
    pub hot_return_steps: u32,
    /// Most prompt tokens that one request computes in a step.
    pub chunk_tokens: u32,
    /// Most tokens of a step.
    pub step_tokens: u32,
    /// Most requests that run at once.
    pub max_running: u32,
    /// Longest request in tokens.
    pub max_model_len: u32,
    /// Leading tokens that all conversations share.
    pub system_tokens: u32,
    /// Steps between the end of a turn and the next turn of its conversation.
    pub think_steps: u32,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Chance, in parts per million, that a page copy is reported failed.
    pub copy_failure_ppm: u32,
    /// Chance, in parts per million, that a token's row is not mirrored; half of the losses are
    /// reported, of the others only the mirror mask knows.
    pub mirror_loss_ppm: u32,
    /// What goes wrong on purpose.
    pub fault: Option<Fault>,
}

impl EngineConfig {
    /// Sizes of both pools.
    ///
    /// # Errors
    /// `Config` as `Geometry::new` says.
    pub fn geometry(&self) -> Result<Geometry> {
        let Self { block_size, row_bytes, gpu_blocks, host_layout, .. } = *self;
        let host_blocks = self.num_host_blocks();
        Geometry::new(&self.packing, block_size, row_bytes, gpu_blocks, host_blocks, host_layout)
    }

    /// Blocks of the host pool; 0 for a policy without one.
    #[must_use]
    pub fn num_host_blocks(&self) -> u32 {
        if self.policy.has_host_pool() { self.host_blocks } else { 0 }
    }

    /// Checks every bound, without allocating a pool.
    ///
    /// # Errors
    /// `Config` for a value out of bounds, `Capacity` for a pool under one request.
    pub fn validate(&self) -> Result<()> {
        at_least("chunk_tokens", self.chunk_tokens, 1, "a prefill step computes tokens")?;
        at_least("max_running", self.max_running, 1, "let one request run")?;
        let rows = self.num_draft_tokens.saturating_add(1);
        at_least("step_tokens", self.step_tokens, rows, "a decode step has 1 + MTP tokens")?;
        at_least(
            "max_model_len",
            self.max_model_len,
            self.system_tokens.saturating_add(2),
            "leave room for a prompt and an answer",
        )?;
        if self.max_model_len > MAX_POSITIONS {
            return Err(Error::Config {
                name: "max_model_len",
                got: i64::from(self.max_model_len),
                expected: Expected::AtMost(i64::from(MAX_POSITIONS)),
                remedy: "shorten the conversations or lower the scale",
            });
        }
        if self.policy.has_host_pool() && self.host_copy == HostCopy::None {
            return Err(Error::Config {
                name: "host_copy",
                got: 0,
                expected: Expected::AtLeast(1),
                remedy: "this policy copies pages: choose mirrored or spilled",
            });
        }
        TopkParams::for_top_k(self.top_k).validate()?;
        self.coordinator().validate()?;
        for (name, blocks) in [("GPU rows", self.gpu_blocks), ("host rows", self.num_host_blocks())]
        {
            let rows = i64::from(blocks) * i64::from(self.block_size);
            if rows > i64::from(i32::MAX) {
                return Err(Error::Config {
                    name,
                    got: rows,
                    expected: Expected::AtMost(i64::from(i32::MAX)),
                    remedy: "row ids are int32; use a smaller pool",
                });
            }
        }
        self.geometry().map(|_| ())
    }

    /// The Coordinator's settings under this policy.
    #[must_use]
    pub fn coordinator(&self) -> CoordinatorConfig {
        let host_copy = if self.policy.has_host_pool() { self.host_copy } else { HostCopy::None };
        CoordinatorConfig {
            block_size: self.block_size,
            // OK because a model has few KV cache groups.
            num_kv_groups: self.packing.kv_groups.len() as u32,
            gpu_blocks: self.gpu_blocks,
            host_blocks: self.num_host_blocks(),
            other_blocks_per_page: self.other_blocks_per_page,
            hot_rows: self.hot_rows,
            top_k: self.top_k,
            verification_rows: self.num_draft_tokens.saturating_add(1),
            num_ranks: self.num_ranks,
            num_host_writers: self.num_host_writers,
            host_copy,
            release_point: self.release_point,
            transition: self.policy == ServingPolicy::Hotpage,
            transition_watermark: None,
            hot_return_steps: self.hot_return_steps,
            admission_window_pages: self.admission_window_pages(),
            num_reprefillable_tokens: 0,
            max_model_len: self.max_model_len,
        }
    }

    /// A prefill step's pages as often as the copies of the first one may take steps to let its
    /// blocks go, the step itself and the one after it counted, and the tail.
    fn admission_window_pages(&self) -> u32 {
        let steps = match self.release_point {
            ReleasePoint::Enqueued => MAX_ENQUEUE_STEPS,
            ReleasePoint::Completed => MAX_ENQUEUE_STEPS + MAX_COMPLETE_STEPS,
        };
        let chunk_pages = self.chunk_tokens.div_ceil(self.block_size.max(1)).saturating_add(1);
        chunk_pages.saturating_mul(steps + 2).saturating_add(crate::config::TAIL_PAGES)
    }

    /// The worker's settings.
    ///
    /// # Errors
    /// `Config` as `Geometry::new` says.
    pub fn worker(&self) -> Result<WorkerConfig> {
        Ok(WorkerConfig {
            geometry: self.geometry()?,
            topk: TopkParams::for_top_k(self.top_k),
            hot_rows: self.hot_rows,
            num_state_rows: self.max_running as usize,
            max_pages: self.max_model_len.div_ceil(self.block_size),
            num_ranks: self.num_ranks,
            num_host_writers: self.num_host_writers,
            release_point: self.release_point,
            mirrors: self.policy.has_host_pool() && self.host_copy == HostCopy::Mirrored,
            copy_failure_ppm: self.copy_failure_ppm,
            mirror_loss_ppm: self.mirror_loss_ppm,
            seed: self.seed,
            fault: self.fault,
        })
    }
}

fn at_least(name: &'static str, got: u32, bound: u32, remedy: &'static str) -> Result<()> {
    if got >= bound {
        return Ok(());
    }
    let expected = Expected::AtLeast(i64::from(bound));
    Err(Error::Config { name, got: i64::from(got), expected, remedy })
}
