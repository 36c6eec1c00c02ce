// SPDX-License-Identifier: Apache-2.0
//! Owns a simulation's settings and the engine that follows from them under each policy.

use super::cost::CostModel;
use super::misses::MissModel;
use super::worker::Sizes;
use crate::config::{CoordinatorConfig, HostCopy, ReleasePoint};
use crate::error::{Error, Expected, Result};
use crate::geometry::{HostLayout, LayerPacking};
use crate::sim::engine::{EngineConfig, ServingPolicy};
use crate::sim::topk::ReuseTail;
use crate::sim::workload::Conversation;

/// Most conversations of a run.
const MAX_CONVERSATIONS: u64 = 100_000;
/// Most tokens of all answers of a run: each leaves a time of 8 bytes behind.
const MAX_ANSWER_TOKENS: u64 = 50_000_000;

/// Settings of one run: a policy and a number of users.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulationConfig {
    /// What happens when GPU blocks run short.
    pub policy: ServingPolicy,
    /// Layers of each index group, by KV cache group.
    pub packing: LayerPacking,
    /// Tokens per block.
    pub block_size: u32,
    /// Bytes of one token in one layer.
    pub row_bytes: u32,
    /// Bytes for KV on one GPU.
    pub kv_bytes: u64,
    /// Bytes of a block of the pool that hotpage's groups share.
    pub block_bytes: u64,
    /// Bytes of a block with ordinary residency, which holds a page of all layers.
    pub ordinary_block_bytes: u64,
    /// Bytes of the host pool.
    pub host_pool_bytes: u64,
    /// Bytes from one block of the host pool to the next.
    pub host_block_bytes: u64,
    /// Bytes of the indexer's rows of one page.
    pub indexer_page_bytes: u64,
    /// Rows that the indexer selects for each decode row.
    pub top_k: u32,
    /// Hot rows of one request in each layer.
    pub hot_rows: u32,
    /// Draft tokens of a decode step.
    pub num_draft_tokens: u32,
    /// Chance, in parts per million, that a draft is right if all before it were.
    pub acceptance_ppm: u32,
    /// Most tokens of a step.
    pub step_tokens: u32,
    /// Tokens that may be computed but not settled, which admission keeps room for.
    pub in_flight_tokens: u32,
    /// Most requests that run at once.
    pub max_running: u32,
    /// Longest request in tokens.
    pub max_model_len: u32,
    /// Steps that a request stays fully resident before its hot region is returned.
    pub hot_return_steps: u32,
    /// How often hot regions miss.
    pub reuse_tail: ReuseTail,
    /// Conversations, taken in turn.
    pub conversations: Vec<Conversation>,
    /// Users: each has one conversation at a time and answers at once.
    pub num_users: u32,
    /// Conversations that they have in all.
    pub num_conversations: u32,
    /// Constants of a step's cost.
    pub cost: CostModel,
    /// Seed of the drafts that are right.
    pub seed: u64,
}

impl SimulationConfig {
    /// Checks what the engine does not check.
    ///
    /// # Errors
    /// `Config` for no conversation, no user or too many.
    pub(super) fn validate(&self) -> Result<()> {
        let at_least_one = |name, got: u64, remedy| match got {
            0 => Err(Error::Config { name, got: 0, expected: Expected::AtLeast(1), remedy }),
            _ => Ok(()),
        };
        at_least_one("concurrency", self.num_users.into(), "give one user or more")?;
        at_least_one("conversations", self.conversations.len() as u64, "serve one or more")?;
        at_least_one("conversations", self.num_conversations.into(), "serve one or more")?;
        at_least_one("block_bytes", self.block_bytes, "a block holds rows")?;
        at_least_one("ordinary_block_bytes", self.ordinary_block_bytes, "a block holds rows")?;
        at_least_one("host_block_bytes", self.host_block_bytes, "a block holds rows")?;
        at_most("conversations", self.num_conversations.into(), MAX_CONVERSATIONS)?;
        self.reuse_tail.validate()?;
        self.conversations.iter().try_for_each(|conversation| conversation.validate(0))?;
        at_most("answer tokens", self.num_answer_tokens(), MAX_ANSWER_TOKENS)
    }

    /// Tokens of all answers of the run.
    fn num_answer_tokens(&self) -> u64 {
        let all = self.conversations.iter().cycle().take(self.num_conversations as usize);
        all.flat_map(|one| &one.turns).map(|turn| u64::from(turn.output_tokens)).sum()
    }

    /// The engine's settings. hotpage's pool has a block for each KV cache group and one for the
    /// indexer; with ordinary residency one block holds all of a page.
    ///
    /// # Errors
    /// `Config` for a pool of more blocks than have ids.
    pub fn engine(&self) -> Result<EngineConfig> {
        let is_hotpage = self.policy == ServingPolicy::Hotpage;
        let all = self.packing.kv_groups.concat();
        let ordinary = LayerPacking { kv_groups: vec![all] };
        let gpu_block = if is_hotpage { self.block_bytes } else { self.ordinary_block_bytes };
        // The indexer's rows of hotpage's pages are kept beside the pool, not in it.
        let host_block =
            self.host_block_bytes + if is_hotpage { 0 } else { self.indexer_page_bytes };
        Ok(EngineConfig {
            policy: self.policy,
            packing: if is_hotpage { self.packing.clone() } else { ordinary },
            block_size: self.block_size,
            row_bytes: self.row_bytes,
            host_layout: HostLayout::RowInterleaved,
            gpu_blocks: blocks("GPU blocks", self.kv_bytes, gpu_block)?,
            host_blocks: blocks("host blocks", self.host_pool_bytes, host_block)?,
            other_blocks_per_page: u32::from(is_hotpage),
            top_k: self.top_k,
            hot_rows: self.hot_rows,
            num_draft_tokens: self.num_draft_tokens,
            acceptance_ppm: self.acceptance_ppm,
            num_ranks: self.cost.ranks,
            num_host_writers: 1,
            host_copy: HostCopy::Mirrored,
            release_point: ReleasePoint::Enqueued,
            hot_return_steps: self.hot_return_steps,
            chunk_tokens: self.step_tokens,
            step_tokens: self.step_tokens,
            max_running: self.max_running,
            max_model_len: self.max_model_len,
            system_tokens: 0,
            think_steps: 0,
            seed: self.seed,
            copy_failure_ppm: 0,
            mirror_loss_ppm: 0,
            fault: None,
        })
    }

    /// The Coordinator's settings: admission keeps room for what vLLM has in flight.
    pub(super) fn coordinator(&self, engine: &EngineConfig) -> CoordinatorConfig {
        let admission_window_pages = self.in_flight_tokens.div_ceil(self.block_size.max(1));
        CoordinatorConfig { admission_window_pages, ..engine.coordinator() }
    }

    /// Sizes that the worker side counts with.
    pub(super) fn sizes(&self) -> Sizes {
        let layers: u32 = self.packing.kv_groups.iter().flatten().sum();
        let rows = u64::from(layers) * u64::from(self.row_bytes);
        let indexer_page_bytes = self.indexer_page_bytes;
        let block_size = u64::from(self.block_size.max(1));
        Sizes {
            misses: MissModel {
                tail: self.reuse_tail,
                top_k: f64::from(self.top_k),
                hot_rows: f64::from(self.hot_rows),
            },
            block_size: self.block_size,
            top_k: self.top_k,
            num_ranks: self.cost.ranks,
            num_host_writers: 1,
            mirrors: self.policy.has_host_pool(),
            resolves: self.policy == ServingPolicy::Hotpage,
            token_bytes: rows + indexer_page_bytes / block_size,
            page_bytes: rows * block_size + indexer_page_bytes,
            indexer_page_bytes,
        }
    }
}

fn at_most(name: &'static str, got: u64, bound: u64) -> Result<()> {
    if got <= bound {
        return Ok(());
    }
    // OK because the bounds are small; a number past them only has to show as large.
    let (got, bound) = (i64::try_from(got).unwrap_or(i64::MAX), bound as i64);
    let remedy = "serve fewer conversations";
    Err(Error::Config { name, got, expected: Expected::AtMost(bound), remedy })
}

/// Whole blocks of a pool.
fn blocks(name: &'static str, pool_bytes: u64, block_bytes: u64) -> Result<u32> {
    let blocks = pool_bytes / block_bytes.max(1);
    u32::try_from(blocks).map_err(|_| Error::Config {
        name,
        got: i64::try_from(blocks).unwrap_or(i64::MAX),
        expected: Expected::AtMost(u32::MAX.into()),
        remedy: "use a smaller pool",
    })
}
