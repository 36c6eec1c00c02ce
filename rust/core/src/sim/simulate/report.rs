// SPDX-License-Identifier: Apache-2.0
//! Owns what a simulated run is measured by.

use super::SimulationConfig;
use super::cost::{CostModel, StepLoad, StepTime};
use super::turns::Turns;
use crate::sim::engine::{EngineReport, Refusals, ServingPolicy};

/// What a run has moved, on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Moved {
    /// Bytes to the host, of the rank that writes.
    pub to_host_bytes: u64,
    /// Bytes of misses.
    pub missed_bytes: f64,
    /// Bytes of contexts staged for prefill.
    pub staged_bytes: f64,
    /// Bytes of whole pages to the GPU, of the indexer's rows alone under hotpage.
    pub restored_bytes: u64,
    /// Misses of all requests in each index group.
    pub misses: f64,
}

/// Tokens of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Tokens computed by prefill steps.
    pub prefilled_tokens: u64,
    /// Tokens computed although their conversation had computed them before.
    pub recomputed_tokens: u64,
    /// Prompt tokens found in the prefix index.
    pub prefix_hit_tokens: u64,
    /// New prompt tokens of the turns answered; what was said before is not counted again.
    pub prompt_tokens: u64,
    /// Tokens of their answers.
    pub output_tokens: u64,
    /// Draft rows that were rejected.
    pub rejected_rows: u64,
}

/// Sums over the steps of a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    time: StepTime,
    /// Seconds times requests that ran.
    running_seconds: f64,
    moved: Moved,
}

impl Sums {
    pub(super) fn add(&mut self, cost: &CostModel, load: &StepLoad, time: &StepTime) {
        self.time.add(time);
        self.running_seconds += time.step * f64::from(load.running);
        self.moved.to_host_bytes += load.to_host_bytes;
        self.moved.missed_bytes += cost.missed_bytes(load);
        self.moved.staged_bytes += cost.staged_bytes(load);
        self.moved.restored_bytes += load.restored_bytes;
        self.moved.misses += load.misses;
    }
}

/// Median and 90th percentile in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latency {
    /// Half of the samples are not longer.
    pub p50: f64,
    /// Nine of ten samples are not longer.
    pub p90: f64,
}

impl Latency {
    /// A percentile is the smallest sample that so many of all do not exceed.
    fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100);
            sorted.get(rank.saturating_sub(1)).copied()
        };
        Some(Self { p50: at(50)?, p90: at(90)? })
    }
}

/// What a run of one policy and number of users has come to, on one replica.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimulationReport {
    /// The policy.
    pub policy: ServingPolicy,
    /// Users.
    pub num_users: u32,
    /// Blocks of the GPU pool, the null block not counted.
    pub gpu_blocks: u32,
    /// Blocks of the host pool, the null block not counted; 0 without one.
    pub host_blocks: u32,
    /// Seconds until the last turn was answered.
    pub seconds: f64,
    /// Steps.
    pub steps: u64,
    /// Conversations whose last turn was answered.
    pub conversations: u64,
    /// Turns that were answered.
    pub turns: u64,
    /// Requests running, averaged over time.
    pub running_mean: f64,
    /// Most requests that ran at once.
    pub running_max: u32,
    /// Times that a running request lost its blocks and had to be admitted again.
    pub preemptions: u64,
    /// Tokens computed, found, asked and answered.
    pub tokens: TokenCounts,
    /// Bytes moved.
    pub moved: Moved,
    /// Seconds between two tokens of an answer.
    pub between_tokens: Option<Latency>,
    /// Seconds from the arrival of a conversation's first turn to its first token.
    pub first_token: Option<Latency>,
    /// The same of later turns.
    pub later_first_token: Option<Latency>,
    /// Tokens a second that a user sees once an answer has begun.
    pub user_tokens_per_second: Option<f64>,
    /// Seconds by what took them.
    pub time: StepTime,
    /// Times that somebody was told to wait.
    pub refusals: Refusals,
    /// Blocks that are leased now, in both pools.
    pub leased_blocks: u64,
}

impl SimulationReport {
    pub(super) fn new(
        config: &SimulationConfig,
        engine: &EngineReport,
        turns: &Turns,
        sums: &Sums,
    ) -> Self {
        let blocks = config.engine().map_or((0, 0), |e| (e.gpu_blocks, e.num_host_blocks()));
        let rate = turns.tokens_after_first as f64 / turns.answering;
        Self {
            policy: config.policy,
            num_users: config.num_users,
            gpu_blocks: blocks.0.saturating_sub(1),
            host_blocks: blocks.1.saturating_sub(1),
            seconds: turns.last_answer,
            steps: engine.steps,
            conversations: turns.num_conversations,
            turns: turns.num_answered,
            running_mean: ratio(sums.running_seconds, sums.time.step).unwrap_or(0.0),
            running_max: engine.running_max,
            preemptions: engine.preemptions,
            tokens: TokenCounts {
                prefilled_tokens: engine.prefilled_tokens,
                recomputed_tokens: engine.recomputed_tokens,
                prefix_hit_tokens: engine.prefix_hit_tokens,
                prompt_tokens: turns.prompt_tokens,
                output_tokens: turns.output_tokens,
                rejected_rows: engine.rejected_rows,
            },
            moved: sums.moved,
            between_tokens: Latency::of(&turns.between_tokens),
            first_token: Latency::of(&turns.first_token),
            later_first_token: Latency::of(&turns.later_first_token),
            user_tokens_per_second: rate.is_finite().then_some(rate),
            time: sums.time,
            refusals: engine.refusals,
            leased_blocks: engine.leased_blocks,
        }
    }

    /// Answer tokens a second of the replica.
    #[must_use]
    pub fn output_tokens_per_second(&self) -> f64 {
        ratio(self.tokens.output_tokens as f64, self.seconds).unwrap_or(0.0)
    }

    /// New prompt tokens and answer tokens a second of the replica.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        let tokens = self.tokens.prompt_tokens + self.tokens.output_tokens;
        ratio(tokens as f64, self.seconds).unwrap_or(0.0)
    }
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let of = |samples: &[f64]| Latency::of(samples).map(|found| (found.p50, found.p90));
        assert_eq!(of(&[4.0, 1.0, 3.0, 2.0]), Some((2.0, 4.0)));
        assert_eq!(of(&[4.0]), Some((4.0, 4.0)));
        let ten: Vec<f64> = (1..=10).rev().map(f64::from).collect();
        assert_eq!(of(&ten), Some((5.0, 9.0)));
        assert_eq!(of(&[]), None);
    }
}
