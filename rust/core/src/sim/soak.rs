// SPDX-License-Identifier: Apache-2.0
//! Owns the soak: random events without end in small embedded engines, bytes compared all along.

use crate::config::{HostCopy, ReleasePoint};
use crate::error::Result;
use crate::geometry::{HostLayout, LayerPacking};
use crate::sim::engine::{Engine, EngineConfig, EngineReport, ServingPolicy};
use crate::sim::rng::{SplitMix64, derive};
use crate::sim::workload::{Conversation, Turn};

/// Conversations that an engine has at once.
const CONVERSATIONS: usize = 14;
/// Most tokens of a conversation: 4 turns.
const MAX_TURNS: u32 = 4;
const MAX_PROMPT_TOKENS: u32 = 120;
const MAX_OUTPUT_TOKENS: u32 = 30;
/// Steps that a drained engine may take to get rid of its last requests and copies.
const MAX_DRAIN_STEPS: u32 = 100_000;
/// Steps between two checks of the pools.
const CHECK_STEPS: u64 = 64;

/// What a soak has come to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SoakReport {
    /// Engines that were started, each with another configuration than the last.
    pub engines: u64,
    /// Events that Coordinators were told.
    pub events: u64,
    /// Steps.
    pub steps: u64,
    /// Requests admitted again after a preemption.
    pub preemptions: u64,
    /// Turns cancelled.
    pub aborted: u64,
    /// Turns finished.
    pub finished: u64,
    /// Page copies that ranks reported failed.
    pub failed_copies: u64,
    /// Attended rows compared.
    pub rows_checked: u64,
    /// Rows among them that were wrong.
    pub mismatches: u64,
    /// Blocks that drained engines did not give back.
    pub leaked_blocks: u64,
}

impl SoakReport {
    fn add(&mut self, engine: &EngineReport) {
        self.events += engine.events;
        self.steps += engine.steps;
        self.preemptions += engine.preemptions;
        self.aborted += engine.aborted;
        self.finished += engine.finished;
        self.failed_copies += engine.failed_copies;
        self.rows_checked += engine.verdict.rows_checked;
        self.mismatches += engine.verdict.mismatches;
    }
}

/// A soak in progress.
#[derive(Debug)]
pub struct Soak {
    seed: u64,
    rng: SplitMix64,
    next_stream: u64,
    report: SoakReport,
}

impl Soak {
    /// A soak whose events are a function of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        let rng = SplitMix64::new(derive(seed, 0));
        let report = SoakReport {
            engines: 0,
            events: 0,
            steps: 0,
            preemptions: 0,
            aborted: 0,
            finished: 0,
            failed_copies: 0,
            rows_checked: 0,
            mismatches: 0,
            leaked_blocks: 0,
        };
        Self { seed, rng, next_stream: 0, report }
    }

    /// What it has come to so far.
    #[must_use]
    pub const fn report(&self) -> SoakReport {
        self.report
    }

    /// Runs one more engine for at least `events` events, then drains it.
    ///
    /// # Errors
    /// `Protocol` or `Invariant` for a bug in this crate.
    pub fn run_engine(&mut self, events: u64) -> Result<()> {
        let mut engine = Engine::new(self.config())?;
        self.report.engines += 1;
        while engine.report().events < events {
            self.disturb(&mut engine)?;
            engine.step()?;
            if engine.report().steps % CHECK_STEPS == 0 {
                engine.check_invariants()?;
            }
        }
        for id in engine.conversations().collect::<Vec<_>>() {
            if self.rng.below(2) == 0 {
                engine.abort(id)?;
            }
        }
        for _ in 0..MAX_DRAIN_STEPS {
            if engine.is_drained() {
                break;
            }
            engine.step()?;
        }
        engine.check_invariants()?;
        let report = engine.report();
        self.report.leaked_blocks += report.leased_blocks;
        self.report.add(&report);
        Ok(())
    }

    /// New conversations, and now and then an abort, a preemption or a prefix reset.
    fn disturb(&mut self, engine: &mut Engine) -> Result<()> {
        while engine.num_conversations() < CONVERSATIONS {
            let conversation = self.conversation();
            // A stream that comes again finds its prefix, as a repeated prompt does.
            let again = self.next_stream > 0 && self.rng.below(4) == 0;
            let number = if again { self.next_stream - 1 } else { self.next_stream };
            self.next_stream += u64::from(!again);
            let delay = u64::from(self.rng.below(6));
            engine.submit(number, conversation, delay)?;
        }
        let pick = self.rng.below(CONVERSATIONS as u32) as usize;
        let picked = engine.conversations().nth(pick);
        match self.rng.below(400) {
            0..8 => {
                if let Some(id) = picked {
                    engine.abort(id)?;
                }
            }
            8..16 => {
                if let Some(id) = picked {
                    engine.preempt(id)?;
                }
            }
            16 => engine.reset_prefix_cache()?,
            _ => {}
        }
        Ok(())
    }

    fn conversation(&mut self) -> Conversation {
        let turns = 1 + self.rng.below(MAX_TURNS);
        let turn = |_| Turn {
            prompt_tokens: 1 + self.rng.below(MAX_PROMPT_TOKENS),
            output_tokens: 1 + self.rng.below(MAX_OUTPUT_TOKENS),
        };
        Conversation { turns: (0..turns).map(turn).collect() }
    }

    /// Settings drawn for the next engine; pools between one request and all of them.
    fn config(&mut self) -> EngineConfig {
        let rng = &mut self.rng;
        let policy = match rng.below(6) {
            0 => ServingPolicy::Preempt,
            1 => ServingPolicy::Offload,
            _ => ServingPolicy::Hotpage,
        };
        let mut choose = || rng.below(2) == 0;
        let host_layout =
            if choose() { HostLayout::RowInterleaved } else { HostLayout::LayerMajor };
        let host_copy = if choose() { HostCopy::Mirrored } else { HostCopy::Spilled };
        let release_point = if choose() { ReleasePoint::Enqueued } else { ReleasePoint::Completed };
        let (drafts, one_rank, one_writer, exact) = (choose(), choose(), choose(), choose());
        let num_draft_tokens = if drafts { 1 + rng.below(3) } else { 0 };
        let num_ranks = if one_rank { 1 } else { 3 };
        let system_tokens = 10 * rng.below(3);
        let longest = MAX_TURNS * (MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS) + system_tokens;
        EngineConfig {
            policy,
            packing: LayerPacking { kv_groups: vec![vec![2], vec![1, 1]] },
            block_size: 8,
            row_bytes: 16,
            host_layout,
            gpu_blocks: 330 + rng.below(400),
            host_blocks: 100 + rng.below(600),
            other_blocks_per_page: 1,
            top_k: 16,
            hot_rows: (2 + num_draft_tokens) * 16,
            num_draft_tokens,
            acceptance_ppm: 600_000,
            num_ranks,
            num_host_writers: if one_writer { 1 } else { num_ranks },
            host_copy,
            release_point,
            hot_return_steps: 1 + rng.below(20),
            chunk_tokens: 8 + rng.below(40),
            step_tokens: 64 + rng.below(64),
            max_running: 10,
            max_model_len: longest,
            system_tokens,
            think_steps: rng.below(10),
            seed: derive(self.seed, self.report.engines + 1),
            copy_failure_ppm: if exact { 0 } else { 20_000 },
            mirror_loss_ppm: if exact { 0 } else { 3_000 },
            fault: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_events_in_many_engines_leave_no_wrong_row_and_no_block() {
        let mut soak = Soak::new(3);
        for _ in 0..24 {
            soak.run_engine(3_000).unwrap();
            let report = soak.report();
            assert_eq!((report.mismatches, report.leaked_blocks), (0, 0), "{report:?}");
        }
        let report = soak.report();
        assert!(report.events >= 72_000 && report.rows_checked > 100_000);
        assert!(report.preemptions > 20 && report.aborted > 20 && report.failed_copies > 20);
    }
}
