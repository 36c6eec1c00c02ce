// SPDX-License-Identifier: Apache-2.0
//! Owns what an engine run is measured by.

use crate::dataplane::Counters;
use crate::error::Pool;
use crate::sim::worker::{StatesSeen, Traffic, Verdict};
use crate::step::Refusal;

/// Times that somebody was told to wait, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Admissions for want of GPU blocks, nothing on its way to free some.
    pub gpu_short: u64,
    /// Admissions for want of GPU blocks while copies under way were about to free some.
    pub gpu_reclaiming: u64,
    /// Admissions for want of host blocks.
    pub host_short: u64,
    /// Hot regions for want of GPU blocks.
    pub hot_region: u64,
    /// Steps that a running request sat out because it could not grow and blocks were about to
    /// become free.
    pub growth_waits: u64,
}

impl Refusals {
    /// Counts a refused admission.
    pub(super) fn count(&mut self, refusal: Refusal) {
        match refusal {
            Refusal::Short { pool: Pool::Host, .. }
            | Refusal::NeverFits { pool: Pool::Host, .. } => {
                self.host_short += 1;
            }
            Refusal::Short { reclaiming: true, .. } => self.gpu_reclaiming += 1,
            Refusal::Short { .. } | Refusal::NeverFits { .. } => self.gpu_short += 1,
        }
    }
}

/// Counts since the engine was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineReport {
    /// Steps.
    pub steps: u64,
    /// Events that the Coordinator was told: admissions, pages, reuse notices, hot regions,
    /// scheduled requests, acknowledgements, lost mirrors, requests that left, prefix resets.
    pub events: u64,
    /// Steps in which some request was running or waiting.
    pub busy_steps: u64,
    /// Sum over the busy steps of the requests that were running.
    pub running_sum: u64,
    /// Most requests that ran at once.
    pub running_max: u32,
    /// Turns that arrived.
    pub arrived: u64,
    /// Turns that ended with their last token.
    pub finished: u64,
    /// Turns that were cancelled.
    pub aborted: u64,
    /// Times that a running request lost its blocks and had to be admitted again.
    pub preemptions: u64,
    /// Preemptions among them because a page's only copy was lost.
    pub lost_page_preemptions: u64,
    /// Tokens computed by prefill steps.
    pub prefilled_tokens: u64,
    /// Tokens computed although their conversation had computed them before.
    pub recomputed_tokens: u64,
    /// Tokens whose rows decode steps computed and kept.
    pub decoded_tokens: u64,
    /// Draft rows that were rejected.
    pub rejected_rows: u64,
    /// Prompt tokens found in the prefix index.
    pub prefix_hit_tokens: u64,
    /// Bytes GPU to host, indexer pages counted.
    pub bytes_to_host: u64,
    /// Bytes host to GPU, indexer pages counted.
    pub bytes_to_gpu: u64,
    /// The same without indexer pages, by reason.
    pub traffic: Traffic,
    /// Hits and misses of the hot regions.
    pub hot: Counters,
    /// What the comparison of attended rows found.
    pub verdict: Verdict,
    /// Residency states that scheduled requests were in.
    pub states: StatesSeen,
    /// Times that somebody was told to wait.
    pub refusals: Refusals,
    /// Blocks that are leased now, in both pools.
    pub leased_blocks: u64,
    /// Page copies that the ranks reported failed.
    pub failed_copies: u64,
}

impl EngineReport {
    /// Requests running, averaged over the busy steps; 0 without any.
    #[must_use]
    pub fn running_mean(&self) -> f64 {
        if self.busy_steps == 0 { 0.0 } else { self.running_sum as f64 / self.busy_steps as f64 }
    }

    /// Union rows found in hot slots over union rows; `None` if no hot region was read.
    #[must_use]
    pub fn hot_hit_rate(&self) -> Option<f64> {
        let union = self.hot.hits + self.hot.misses;
        (union > 0).then(|| self.hot.hits as f64 / union as f64)
    }
}
