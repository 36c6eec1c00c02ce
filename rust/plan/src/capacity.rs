// SPDX-License-Identifier: Apache-2.0
//! Owns the blocks of one request and the number of requests that a pool carries.

use crate::packing::Packing;

/// Newest pages of a request that never leave the GPU: a step in flight may still write them.
pub const TAIL_PAGES: u64 = 2;

/// Blocks that one request of a length takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Pages of the request: host blocks, and indexer blocks on the GPU.
    pub pages: u64,
    /// Blocks of an ordinary pool.
    pub ordinary: u64,
    /// GPU blocks of its hot region.
    pub hot: u64,
    /// GPU blocks of its tail.
    pub tail: u64,
    /// GPU blocks that admitting it takes: every page in flight resident.
    pub admission: u64,
    /// GPU blocks once it reads from host.
    pub steady: u64,
    /// GPU blocks if every page stays resident and no hot region is needed.
    pub full: u64,
}

impl Footprint {
    /// Blocks of a request of `tokens` tokens when up to `in_flight_tokens` may be computed but
    /// not settled.
    #[must_use]
    pub fn new(packing: &Packing, tokens: u64, in_flight_tokens: u64) -> Self {
        let groups = packing.num_groups();
        let pages = packing.pages(tokens);
        let window = packing.pages(in_flight_tokens.min(tokens));
        let hot = packing.hot_blocks();
        let tail = groups * window.min(TAIL_PAGES);
        let fixed = pages + packing.request_blocks;
        Self {
            pages,
            ordinary: fixed,
            hot,
            tail,
            admission: fixed + hot + groups * window,
            steady: fixed + hot + tail,
            full: fixed + groups * pages,
        }
    }
}

/// Requests that an ordinary pool holds, as vLLM 0.33 prints it at start.
#[must_use]
pub fn ordinary(num_blocks: u64, request: &Footprint) -> f64 {
    num_blocks as f64 / request.ordinary as f64
}

/// Requests that run once they read from host: all but one in the steady state and one being
/// admitted (vLLM 0.33's `get_hisparse_steady_state_concurrency`). Under 1 if not even one can be
/// admitted.
#[must_use]
pub fn steady_state(num_blocks: u64, request: &Footprint) -> f64 {
    if num_blocks < request.admission {
        return num_blocks as f64 / request.admission as f64;
    }
    1.0 + (num_blocks - request.admission) as f64 / request.steady as f64
}

/// Requests that stay wholly resident in the same pool.
#[must_use]
pub fn resident(num_blocks: u64, request: &Footprint) -> f64 {
    num_blocks as f64 / request.full as f64
}

/// Requests whose pages a host pool holds.
#[must_use]
pub fn host(host_blocks: u64, request: &Footprint) -> f64 {
    host_blocks as f64 / request.pages as f64
}
