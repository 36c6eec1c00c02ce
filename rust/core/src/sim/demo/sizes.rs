// SPDX-License-Identifier: Apache-2.0
//! Owns what follows from the demonstration's settings: sizes, pools, and the refusal of what
//! cannot work, in the names of the settings that were given.

use super::DemoConfig;
use crate::config::MAX_HOT_ROWS;
use crate::error::{Error, Expected, Pool, Result};
use crate::geometry::{Geometry, LayerPacking};
use crate::sim::engine::{EngineConfig, ServingPolicy};
use crate::sim::worker::Fault;
use crate::sim::workload::{Conversation, scale_tokens};

/// Rows that a full-size model selects for each decode row.
const FULL_TOP_K: u32 = 2_048;
/// Tokens of a full-size prefill step.
const FULL_CHUNK_TOKENS: u32 = 4_096;
/// Least values after scaling, so that a tiny workload still has something to select.
const MIN_TOP_K: u32 = 16;
const MIN_CHUNK_TOKENS: u32 = 32;
/// Most bytes of both pools together; a typing error should not exhaust the machine.
const MAX_POOL_BYTES: u64 = 64 << 30;
/// Most bytes that the default host pool takes.
const MAX_DEFAULT_HOST_BYTES: u64 = 1 << 30;

/// Settings of the engine under a policy; what was not given follows from the workload.
pub(super) fn engine_config(
    config: &DemoConfig,
    conversations: &[Conversation],
    policy: ServingPolicy,
    is_first: bool,
) -> Result<EngineConfig> {
    let scaled = |tokens, least| scale_tokens(tokens, config.scale).max(least);
    let top_k = config.top_k.unwrap_or_else(|| scaled(FULL_TOP_K, MIN_TOP_K));
    let chunk_tokens = config.chunk_tokens.unwrap_or_else(|| {
        scaled(FULL_CHUNK_TOKENS, MIN_CHUNK_TOKENS).max(config.num_draft_tokens.saturating_add(1))
    });
    let lengths = conversations.iter().map(|c| c.num_tokens(config.system_tokens));
    // OK because every conversation was checked to be shorter than 2^30 tokens.
    let max_model_len = lengths.max().unwrap_or(0) as u32;
    let mut engine = EngineConfig {
        policy,
        packing: LayerPacking { kv_groups: vec![vec![4], vec![1, 1]] },
        block_size: config.block_size,
        row_bytes: config.row_bytes,
        host_layout: config.host_layout,
        gpu_blocks: 2,
        host_blocks: 2,
        other_blocks_per_page: 1,
        top_k,
        hot_rows: config.hot_rows.unwrap_or_else(|| default_hot_rows(config, top_k)),
        num_draft_tokens: config.num_draft_tokens,
        acceptance_ppm: 700_000,
        num_ranks: config.num_ranks,
        num_host_writers: 1,
        host_copy: config.host_copy,
        release_point: config.release_point,
        hot_return_steps: 16,
        chunk_tokens,
        step_tokens: chunk_tokens.saturating_mul(2),
        max_running: u32::try_from(conversations.len()).unwrap_or(u32::MAX),
        max_model_len,
        system_tokens: config.system_tokens,
        think_steps: config.think_steps,
        seed: config.seed,
        copy_failure_ppm: 0,
        mirror_loss_ppm: 0,
        fault: (config.plant_wrong_row && is_first).then_some(Fault::GpuRow),
    };
    let unit = engine.geometry()?;
    check_default_hot_rows(config, top_k)?;
    let default = default_pool_bytes(config, conversations, &engine, &unit);
    let gpu_bytes = config.gpu_pool_bytes.unwrap_or(default.0);
    let host_bytes = config.host_pool_bytes.unwrap_or(default.1);
    engine.gpu_blocks = num_blocks(Pool::Gpu, gpu_bytes, unit.block_bytes())?;
    engine.host_blocks = num_blocks(Pool::Host, host_bytes, unit.host_block_bytes())?;
    match engine.validate() {
        Err(Error::Capacity { pool, need, .. }) => Err(match pool {
            Pool::Gpu => too_small(pool, need, gpu_bytes, unit.block_bytes()),
            Pool::Host => too_small(pool, need, host_bytes, unit.host_block_bytes()),
        }),
        checked => checked.map(|()| engine),
    }
}

/// A pool that cannot hold one request beside its null block, in MiB as users give it.
fn too_small(pool: Pool, need: i64, bytes: u64, block_bytes: u64) -> Error {
    let least = need.unsigned_abs().saturating_add(1).saturating_mul(block_bytes);
    let mib = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    Error::Config {
        name: pool_setting(pool),
        got: mib(bytes >> 20),
        expected: Expected::AtLeast(mib(least.div_ceil(1 << 20))),
        remedy: "one request of this workload and scale needs as much",
    }
}

/// Name of a pool's setting.
fn pool_setting(pool: Pool) -> &'static str {
    match pool {
        Pool::Gpu => "gpu_pool_mib",
        Pool::Host => "host_pool_mib",
    }
}

/// Checks that the hot rows which follow from top-k and the drafts are not too many; what is named
/// is the one of the two that was given.
pub(super) fn check_default_hot_rows(config: &DemoConfig, top_k: u32) -> Result<()> {
    let rows = default_hot_rows(config, top_k);
    if config.hot_rows.is_some() || rows <= MAX_HOT_ROWS {
        return Ok(());
    }
    let block_size = config.block_size.max(1);
    let most_rows = MAX_HOT_ROWS / block_size * block_size;
    let most_drafts = (most_rows / top_k.max(1)).saturating_sub(2);
    if config.top_k.is_none() && config.num_draft_tokens > 0 && most_drafts > 0 {
        let remedy = "draft fewer, or give top_k";
        return at_most("num_draft_tokens", config.num_draft_tokens, most_drafts, remedy);
    }
    let remedy = "a request has (num_draft_tokens + 2) x top_k hot rows, 32768 at most";
    at_most("top_k", top_k, most_rows / hot_rows_multiple(config), remedy)
}

/// Default hot rows over top-k.
fn hot_rows_multiple(config: &DemoConfig) -> u32 {
    config.num_draft_tokens.saturating_add(2)
}

/// Twice top-k, or one top-k more than the verification rows can select together; whole blocks.
fn default_hot_rows(config: &DemoConfig, top_k: u32) -> u32 {
    let rows = top_k.saturating_mul(hot_rows_multiple(config));
    // What does not fit is refused, as more than a hot region can have.
    rows.checked_next_multiple_of(config.block_size.max(1)).unwrap_or(u32::MAX)
}

/// GPU and host pool: two and a half average conversations under dense residency, or one and a
/// quarter of the longest; every conversation's pages, and some.
fn default_pool_bytes(
    config: &DemoConfig,
    conversations: &[Conversation],
    engine: &EngineConfig,
    unit: &Geometry,
) -> (u64, u64) {
    let bs = u64::from(config.block_size.max(1));
    let pages = |c: &Conversation| c.num_tokens(config.system_tokens).div_ceil(bs);
    let all: u64 = conversations.iter().map(pages).sum();
    let longest = conversations.iter().map(pages).max().unwrap_or(0);
    let per_page = engine.packing.kv_groups.len() as u64 + u64::from(engine.other_blocks_per_page);
    let average = all / (conversations.len() as u64).max(1);
    let gpu = (average * 5 / 2).max(longest * 5 / 4) + 1;
    let host_bytes = unit.host_block_bytes();
    let least = 2 * longest + 16;
    let host = (all + all / 8 + 16).min(least.max(MAX_DEFAULT_HOST_BYTES / host_bytes));
    (gpu * per_page * unit.block_bytes(), host * host_bytes)
}

/// A setting that has an upper bound.
pub(super) fn at_most(
    name: &'static str,
    got: u32,
    bound: u32,
    remedy: &'static str,
) -> Result<()> {
    if got <= bound {
        return Ok(());
    }
    let expected = Expected::AtMost(i64::from(bound));
    Err(Error::Config { name, got: i64::from(got), expected, remedy })
}

fn num_blocks(pool: Pool, bytes: u64, block_bytes: u64) -> Result<u32> {
    if bytes > MAX_POOL_BYTES {
        return Err(Error::Config {
            name: pool_setting(pool),
            got: i64::try_from(bytes >> 20).unwrap_or(i64::MAX),
            expected: Expected::AtMost((MAX_POOL_BYTES >> 20) as i64),
            remedy: "it lies in this machine's memory; give less, or lower the scale",
        });
    }
    if bytes < 2 * block_bytes {
        return Err(too_small(pool, 1, bytes, block_bytes));
    }
    // OK because a block has at least 16 bytes, and the bound above is 2^36.
    Ok((bytes / block_bytes.max(16)) as u32)
}
