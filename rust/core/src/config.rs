// SPDX-License-Identifier: Apache-2.0
//! Owns the Coordinator's settings and the proof, at construction, that they can work.

use crate::error::{Error, Expected, Pool, Result};

/// Hot slots are int16 on the GPU, so a hot region has at most this many rows.
pub const MAX_HOT_ROWS: u32 = 32_768;

/// Tables of a pool are dense, so this bounds them to some gigabytes: 700 GB of GPU memory in
/// blocks of 16 rows of 656 bytes.
pub const MAX_POOL_BLOCKS: u32 = 1 << 26;

/// Most tokens of a block, KV cache groups, ranks, and GPU blocks of other groups for each page.
/// Together with `MAX_HOT_ROWS` they keep every product of settings inside 32 bits.
pub const MAX_SMALL_SETTING: u32 = 1024;

/// Newest pages of a request that are never released: an in-flight step may still write them.
pub const TAIL_PAGES: u32 = 2;

/// When a GPU block whose copy is under way may be handed to its next writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleasePoint {
    /// Every writer has put the copy in stream order. Only where each possible next writer of the
    /// block is ordered on the same stream.
    Enqueued,
    /// Every writer has finished the copy.
    Completed,
}

/// How rows reach the host pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HostCopy {
    /// No host pool: pages are never copied and never released.
    None,
    /// Each step's rows are mirrored by the worker; sealing a page only asks for the
    /// acknowledgement that all its rows have landed.
    Mirrored,
    /// Sealed pages are copied whole.
    Spilled,
}

/// Everything the Coordinator must know before the first request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoordinatorConfig {
    /// Tokens per block.
    pub block_size: u32,
    /// Resident KV cache groups (G); as many hot groups.
    pub num_kv_groups: u32,
    /// Blocks of the GPU pool, the null block counted.
    pub gpu_blocks: u32,
    /// Blocks of the host pool, the null block counted; 0 with `HostCopy::None`.
    pub host_blocks: u32,
    /// GPU blocks that other KV cache groups (the indexer) take for each page of a request.
    pub other_blocks_per_page: u32,
    /// Hot rows of one request in each index group; a multiple of `block_size`.
    pub hot_rows: u32,
    /// Rows that the indexer selects for each decode row.
    pub top_k: u32,
    /// Decode rows of one request in a step: 1 + speculative tokens.
    pub verification_rows: u32,
    /// Ranks that acknowledge restores.
    pub num_ranks: u32,
    /// Ranks that write the host pool and acknowledge spills: one when the pool is shared.
    pub num_host_writers: u32,
    /// How rows reach the host pool.
    pub host_copy: HostCopy,
    /// When a GPU block may be handed on.
    pub release_point: ReleasePoint,
    /// False keeps every page of a running request on the GPU (dense residency).
    pub transition: bool,
    /// Free GPU blocks under which requests give up residency; `None` takes the larger of one
    /// hot region and a tenth of the pool.
    pub transition_watermark: Option<u32>,
    /// Steps that a request stays fully resident before its hot region is returned.
    pub hot_return_steps: u32,
    /// Pages that admission counts as resident for a request that may transition: a prefill
    /// chunk, plus the tail, plus the pages whose copies are still on their way.
    pub admission_window_pages: u32,
    /// Newest computed tokens that an asynchronous engine may compute again; pages holding one
    /// are not sealed.
    pub num_reprefillable_tokens: u32,
    /// Longest request in tokens.
    pub max_model_len: u32,
}

impl CoordinatorConfig {
    /// Blocks of one hot region in one hot group.
    #[must_use]
    pub fn hot_blocks_per_group(&self) -> u32 {
        self.hot_rows.div_ceil(self.block_size)
    }

    /// Blocks of one hot region over all hot groups.
    #[must_use]
    pub fn hot_region_blocks(&self) -> u32 {
        self.hot_blocks_per_group().saturating_mul(self.num_kv_groups)
    }

    /// Free GPU blocks under which requests give up residency.
    #[must_use]
    pub fn watermark(&self) -> u32 {
        self.transition_watermark
            .unwrap_or_else(|| self.hot_region_blocks().max(self.gpu_blocks / 10))
    }

    /// Pages of a request of `num_tokens` tokens.
    #[must_use]
    pub fn pages_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.block_size)
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// `Config` for a value out of bounds, `Capacity` for a pool under one request.
    pub fn validate(&self) -> Result<()> {
        self.validate_settings()?;
        self.validate_pools()
    }

    /// Checks every bound but the pools' against the longest request: an engine that admits by
    /// rules of its own has checked its pools by them.
    ///
    /// # Errors
    /// `Config` for a value out of bounds.
    pub fn validate_settings(&self) -> Result<()> {
        at_least("block_size", self.block_size, 1, "use 16 to 128")?;
        at_most("block_size", self.block_size, MAX_SMALL_SETTING, "use 16 to 128")?;
        at_least("num_kv_groups", self.num_kv_groups, 1, "the model has no sparse layers")?;
        at_most(
            "num_kv_groups",
            self.num_kv_groups,
            MAX_SMALL_SETTING,
            "count the KV cache groups of the sparse layers",
        )?;
        at_most(
            "other_blocks_per_page",
            self.other_blocks_per_page,
            MAX_SMALL_SETTING,
            "count the blocks that the indexer takes for one page",
        )?;
        at_most("hot_rows", self.hot_rows, MAX_HOT_ROWS, "hot slots are int16")?;
        at_least("num_ranks", self.num_ranks, 1, "count the worker ranks")?;
        at_most("num_ranks", self.num_ranks, MAX_SMALL_SETTING, "count the worker ranks")?;
        at_least("verification_rows", self.verification_rows, 1, "a decode step has one row")?;
        at_least("top_k", self.top_k, 1, "take it from the model's index_topk")?;
        at_least("max_model_len", self.max_model_len, 1, "raise max_model_len")?;
        at_least("gpu_blocks", self.gpu_blocks, 2, "block 0 is the null block")?;
        let larger = "use larger blocks or a smaller pool";
        at_most("gpu_blocks", self.gpu_blocks, MAX_POOL_BLOCKS, larger)?;
        at_most("host_blocks", self.host_blocks, MAX_POOL_BLOCKS, larger)?;
        // Positions and page numbers leave as int32.
        at_most(
            "max_model_len",
            self.max_model_len,
            i32::MAX.unsigned_abs() - MAX_SMALL_SETTING,
            "lower max_model_len",
        )?;
        if self.host_copy == HostCopy::None {
            exactly("host_blocks", self.host_blocks, 0, "choose a host copy mode or no pool")?;
            if self.transition {
                return Err(Error::Config {
                    name: "host_blocks",
                    got: 0,
                    expected: Expected::AtLeast(2),
                    remedy: "giving up residency needs a host pool",
                });
            }
        } else {
            at_least("num_host_writers", self.num_host_writers, 1, "one rank writes the pool")?;
            at_most(
                "num_host_writers",
                self.num_host_writers,
                self.num_ranks,
                "at most every rank writes the pool",
            )?;
        }
        if self.transition { self.validate_hot() } else { Ok(()) }
    }

    fn validate_hot(&self) -> Result<()> {
        if self.hot_rows == 0 || self.hot_rows % self.block_size != 0 {
            return Err(Error::Config {
                name: "hot_rows",
                got: i64::from(self.hot_rows),
                expected: Expected::MultipleOf(i64::from(self.block_size)),
                remedy: "round hot_rows up to whole blocks",
            });
        }
        // A verification row must never evict a row that another one reads, so the union of all
        // rows' selections has to fit.
        let union = u64::from(self.top_k) * u64::from(self.verification_rows);
        if u64::from(self.hot_rows) < union {
            return Err(Error::Config {
                name: "hot_rows",
                got: i64::from(self.hot_rows),
                expected: Expected::AtLeast(i64::try_from(union).unwrap_or(i64::MAX)),
                remedy: "raise hot_rows to verification rows x top-k, or speculate fewer tokens",
            });
        }
        at_least("hot_return_steps", self.hot_return_steps, 1, "use 1 or more steps")?;
        at_least(
            "admission_window_pages",
            self.admission_window_pages,
            TAIL_PAGES + 1,
            "a request needs its tail and one page to prefill into",
        )
    }

    fn validate_pools(&self) -> Result<()> {
        let pages = u64::from(self.pages_for(self.max_model_len));
        let other = pages * u64::from(self.other_blocks_per_page);
        let dense = pages * u64::from(self.num_kv_groups);
        let mixed = u64::from(self.admission_window_pages) * u64::from(self.num_kv_groups)
            + u64::from(self.hot_region_blocks());
        let need = other + if self.transition { dense.min(mixed) } else { dense };
        capacity(
            Pool::Gpu,
            need,
            self.gpu_blocks,
            "lower max_model_len or hot_rows, or give the KV cache more GPU memory",
        )?;
        if self.host_copy != HostCopy::None {
            capacity(
                Pool::Host,
                pages + u64::from(TAIL_PAGES),
                self.host_blocks,
                "raise the host pool or lower max_model_len",
            )?;
        }
        Ok(())
    }
}

fn at_least(name: &'static str, got: u32, bound: u32, remedy: &'static str) -> Result<()> {
    if got >= bound {
        return Ok(());
    }
    Err(Error::Config {
        name,
        got: i64::from(got),
        expected: Expected::AtLeast(i64::from(bound)),
        remedy,
    })
}

fn at_most(name: &'static str, got: u32, bound: u32, remedy: &'static str) -> Result<()> {
    if got <= bound {
        return Ok(());
    }
    Err(Error::Config {
        name,
        got: i64::from(got),
        expected: Expected::AtMost(i64::from(bound)),
        remedy,
    })
}

fn exactly(name: &'static str, got: u32, value: u32, remedy: &'static str) -> Result<()> {
    if got == value {
        return Ok(());
    }
    Err(Error::Config {
        name,
        got: i64::from(got),
        expected: Expected::Exactly(i64::from(value)),
        remedy,
    })
}

fn capacity(pool: Pool, need: u64, blocks: u32, remedy: &'static str) -> Result<()> {
    // The null block can hold nothing.
    let have = u64::from(blocks.saturating_sub(1));
    if have >= need {
        return Ok(());
    }
    Err(Error::Capacity {
        pool,
        need: i64::try_from(need).unwrap_or(i64::MAX),
        have: i64::try_from(have).unwrap_or(i64::MAX),
        remedy,
    })
}
