// SPDX-License-Identifier: Apache-2.0
//! Owns the demonstration: one workload served under each policy from the same memory.
//! No clock, no I/O: the caller advances it and prints.
//!
//! NOTE: a scaled-down run is no forecast. A restore moves the whole context, which shrinks with
//! the scale; misses shrink with the decode rows and with top-k, hence with its square. The smaller
//! the scale, the better hotpage looks beside dense offloading in bytes, and the fewer requests it
//! runs: blocks, and so the tail of every request, stay as large while the pools shrink.

mod sizes;

use crate::config::{HostCopy, ReleasePoint};
use crate::error::{Error, Expected, Result};
use crate::geometry::HostLayout;
use crate::sim::engine::{Engine, EngineConfig, EngineReport, ServingPolicy};
use crate::sim::worker::{Mismatch, StatesSeen};
use crate::sim::workload::Conversation;
use sizes::{at_most, engine_config};

/// Most conversations: each has tables of its own, and a demonstration should end.
const MAX_CONVERSATIONS: u32 = 10_000;
/// Most draft tokens, so that no product with top-k wraps.
const MAX_DRAFT_TOKENS: u32 = 1_000;

/// Settings of a demonstration. `None` takes what suits the workload.
#[derive(Debug, Clone, PartialEq)]
pub struct DemoConfig {
    /// Conversations to serve, token counts as they are; empty for the default shape.
    pub workload: Vec<Conversation>,
    /// Factor on the default shape's tokens, on top-k and on the tokens of a prefill step.
    pub scale: f64,
    /// Conversations of the default shape; not looked at with a `workload`.
    pub num_conversations: u32,
    /// Bytes of the GPU pool, the same for every policy.
    pub gpu_pool_bytes: Option<u64>,
    /// Bytes of the host pool, the same for every policy that has one.
    pub host_pool_bytes: Option<u64>,
    /// Rows that the indexer selects for each decode row.
    pub top_k: Option<u32>,
    /// Hot rows of one request in each index group.
    pub hot_rows: Option<u32>,
    /// Tokens per block.
    pub block_size: u32,
    /// Bytes of one token in one layer.
    pub row_bytes: u32,
    /// Order of rows in the host pool.
    pub host_layout: HostLayout,
    /// How rows reach the host pool.
    pub host_copy: HostCopy,
    /// When a GPU block may be handed on.
    pub release_point: ReleasePoint,
    /// Ranks that acknowledge on their own.
    pub num_ranks: u32,
    /// Most prompt tokens that one request computes in a step; a step has twice as many tokens.
    pub chunk_tokens: Option<u32>,
    /// Draft tokens of a decode step.
    pub num_draft_tokens: u32,
    /// Leading tokens that all conversations share.
    pub system_tokens: u32,
    /// Steps between the first turns of two conversations.
    pub stagger_steps: u32,
    /// Steps between the end of a turn and the next turn of its conversation.
    pub think_steps: u32,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Flips one byte under the first policy, to show that the comparison notices.
    pub plant_wrong_row: bool,
    /// Policies in the order in which they run.
    pub policies: Vec<ServingPolicy>,
}

impl Default for DemoConfig {
    fn default() -> Self {
        Self {
            workload: Vec::new(),
            scale: 1.0 / 16.0,
            num_conversations: 12,
            gpu_pool_bytes: None,
            host_pool_bytes: None,
            top_k: None,
            hot_rows: None,
            block_size: 16,
            row_bytes: 656,
            host_layout: HostLayout::RowInterleaved,
            host_copy: HostCopy::Mirrored,
            release_point: ReleasePoint::Enqueued,
            num_ranks: 2,
            chunk_tokens: None,
            num_draft_tokens: 0,
            system_tokens: 0,
            stagger_steps: 4,
            think_steps: 8,
            seed: 1,
            plant_wrong_row: false,
            policies: ServingPolicy::ALL.to_vec(),
        }
    }
}

/// How far a demonstration has come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Policy that runs, as an index into the configuration's list; its length at the end.
    pub policy_index: usize,
    /// Steps of that policy so far.
    pub step: u64,
    /// Share of all policies' turns that have ended, 0 to 1.
    pub done: f64,
    /// True when nothing is left to do.
    pub finished: bool,
}

/// What one policy came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyReport {
    /// The policy.
    pub policy: ServingPolicy,
    /// Blocks of its GPU pool, the null block not counted.
    pub gpu_blocks: u32,
    /// Blocks of its host pool, the null block not counted; 0 without one.
    pub host_blocks: u32,
    /// Counts of the run.
    pub engine: EngineReport,
}

/// What a demonstration came to so far, a policy at a time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DemoReport {
    /// Policies that have run or are running, in their order.
    pub policies: Vec<PolicyReport>,
}

impl DemoReport {
    /// Attended rows compared under all policies.
    #[must_use]
    pub fn rows_checked(&self) -> u64 {
        self.policies.iter().map(|policy| policy.engine.verdict.rows_checked).sum()
    }

    /// Rows among them that were wrong.
    #[must_use]
    pub fn mismatches(&self) -> u64 {
        self.policies.iter().map(|policy| policy.engine.verdict.mismatches).sum()
    }

    /// The first wrong row and its policy.
    #[must_use]
    pub fn first_mismatch(&self) -> Option<(ServingPolicy, Mismatch)> {
        let mut found = self.policies.iter();
        found.find_map(|p| Some((p.policy, p.engine.verdict.first_mismatch?)))
    }

    /// Residency states met under any policy.
    #[must_use]
    pub fn states_seen(&self) -> StatesSeen {
        let mut seen = StatesSeen::default();
        for StatesSeen { full, mixed, none } in self.policies.iter().map(|p| p.engine.states) {
            seen.full |= full;
            seen.mixed |= mixed;
            seen.none |= none;
        }
        seen
    }

    /// Blocks that a policy which has ended did not give back.
    #[must_use]
    pub fn leaked_blocks(&self) -> u64 {
        self.policies.iter().map(|policy| policy.engine.leased_blocks).sum()
    }
}

/// A demonstration in progress.
#[derive(Debug)]
pub struct Demo {
    config: DemoConfig,
    conversations: Vec<Conversation>,
    engines: Vec<EngineConfig>,
    num_turns: u64,
    engine: Option<Engine>,
    ended: Vec<PolicyReport>,
}

impl Demo {
    /// Checks the settings of every policy; nothing large is allocated yet.
    ///
    /// # Errors
    /// `Config` for a setting out of bounds, `Capacity` for a pool that cannot hold one request.
    pub fn new(config: DemoConfig) -> Result<Self> {
        let files = u32::try_from(config.workload.len()).unwrap_or(u32::MAX);
        let served = if files > 0 { files } else { config.num_conversations };
        at_most("conversations", served, MAX_CONVERSATIONS, "serve fewer")?;
        at_most("num_draft_tokens", config.num_draft_tokens, MAX_DRAFT_TOKENS, "draft fewer")?;
        let conversations = conversations(&config)?;
        let policies = config.policies.iter().enumerate();
        let engines = policies
            .map(|(at, &policy)| engine_config(&config, &conversations, policy, at == 0))
            .collect::<Result<Vec<_>>>()?;
        let num_turns = conversations.iter().map(|c| c.turns.len() as u64).sum();
        Ok(Self { config, conversations, engines, num_turns, engine: None, ended: Vec::new() })
    }

    /// Settings of the engine under each policy.
    #[must_use]
    pub fn engines(&self) -> &[EngineConfig] {
        &self.engines
    }

    /// Runs up to `max_steps` steps.
    ///
    /// # Errors
    /// `Protocol` or `Invariant` for a bug in this crate, `Capacity` if a request can never run.
    pub fn advance(&mut self, max_steps: u64) -> Result<Progress> {
        for _ in 0..max_steps {
            let Some(config) = self.engines.get(self.ended.len()) else { break };
            let mut engine = match self.engine.take() {
                Some(engine) => engine,
                None => self.start(config.clone())?,
            };
            if engine.is_drained() {
                engine.check_invariants()?;
                self.ended.push(report_of(&engine));
                continue;
            }
            let stepped = engine.step();
            self.engine = Some(engine);
            stepped?;
        }
        Ok(self.progress())
    }

    /// How far it has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let policy_index = self.ended.len();
        let (step, turns) = match &self.engine {
            Some(engine) => {
                let report = engine.report();
                (report.steps, report.finished)
            }
            None => (0, 0),
        };
        let all = (self.num_turns * self.engines.len() as u64).max(1);
        let done = (policy_index as u64 * self.num_turns + turns) as f64 / all as f64;
        let finished = policy_index == self.engines.len();
        Progress { policy_index, step, done: if finished { 1.0 } else { done }, finished }
    }

    /// What it has come to so far.
    #[must_use]
    pub fn report(&self) -> DemoReport {
        let running = self.engine.as_ref().map(report_of);
        DemoReport { policies: self.ended.iter().copied().chain(running).collect() }
    }

    fn start(&self, config: EngineConfig) -> Result<Engine> {
        let mut engine = Engine::new(config)?;
        for (number, conversation) in (0_u64..).zip(&self.conversations) {
            let delay = number * u64::from(self.config.stagger_steps);
            engine.submit(number, conversation.clone(), delay)?;
        }
        Ok(engine)
    }
}

fn report_of(engine: &Engine) -> PolicyReport {
    let config = engine.config();
    PolicyReport {
        policy: config.policy,
        gpu_blocks: config.gpu_blocks.saturating_sub(1),
        host_blocks: config.num_host_blocks().saturating_sub(1),
        engine: engine.report(),
    }
}

fn conversations(config: &DemoConfig) -> Result<Vec<Conversation>> {
    if !(config.scale.is_finite() && config.scale > 0.0) {
        return Err(Error::Config {
            name: "scale",
            got: 0,
            expected: Expected::AtLeast(1),
            remedy: "give a positive factor such as 0.0625",
        });
    }
    let conversations = if config.workload.is_empty() {
        vec![Conversation::multi_turn(config.scale); config.num_conversations as usize]
    } else {
        config.workload.clone()
    };
    if conversations.is_empty() {
        return Err(Error::Config {
            name: "conversations",
            got: 0,
            expected: Expected::AtLeast(1),
            remedy: "serve one or more",
        });
    }
    for conversation in &conversations {
        conversation.validate(config.system_tokens)?;
    }
    Ok(conversations)
}

#[cfg(test)]
mod tests {
    use super::sizes::check_default_hot_rows;
    use super::*;
    use crate::error::Pool;
    use crate::sim::workload::Turn;

    fn small() -> DemoConfig {
        DemoConfig { scale: 1.0 / 48.0, num_conversations: 8, ..DemoConfig::default() }
    }

    fn run(config: DemoConfig) -> DemoReport {
        let mut demo = Demo::new(config).unwrap();
        let mut done = 0.0;
        loop {
            let progress = demo.advance(50).unwrap();
            assert!(progress.done >= done && progress.done <= 1.0);
            done = progress.done;
            if progress.finished {
                assert_eq!(demo.advance(1).unwrap(), progress);
                return demo.report();
            }
        }
    }

    #[test]
    fn every_turn_is_served_under_every_policy_with_the_right_bytes_and_no_leak() {
        let report = run(small());
        assert_eq!(report.policies.len(), 3);
        assert_eq!(report.first_mismatch(), None);
        assert_eq!((report.mismatches(), report.leaked_blocks()), (0, 0));
        assert!(report.rows_checked() > 50_000, "{}", report.rows_checked());
        assert_eq!(report.states_seen(), StatesSeen { full: true, mixed: true, none: true });
        for policy in &report.policies {
            assert_eq!(policy.engine.finished, 8 * 13, "{}", policy.policy);
        }
    }

    #[test]
    fn the_policies_differ_as_they_should() {
        let report = run(small());
        let [hotpage, preempt, offload] = [0, 1, 2].map(|at| report.policies[at].engine);
        assert!(hotpage.running_mean() > 1.2 * preempt.running_mean());
        assert!(hotpage.running_mean() > 1.2 * offload.running_mean());
        assert!(5 * hotpage.recomputed_tokens < preempt.recomputed_tokens);
        assert!(hotpage.preemptions <= preempt.preemptions);
        assert!(hotpage.bytes_to_gpu < offload.bytes_to_gpu);
        assert!(hotpage.hot_hit_rate().is_some() && preempt.hot_hit_rate().is_none());
        assert_eq!((preempt.bytes_to_gpu, preempt.bytes_to_host), (0, 0));
    }

    #[test]
    fn a_planted_wrong_row_is_found_and_belongs_to_the_first_policy() {
        let report = run(DemoConfig { plant_wrong_row: true, ..small() });
        assert!(report.mismatches() > 0);
        assert_eq!(report.first_mismatch().unwrap().0, ServingPolicy::Hotpage);
        assert_eq!(report.policies[1].engine.verdict.mismatches, 0);
    }

    #[test]
    fn drafts_and_other_modes_serve_the_same_turns() {
        for num_draft_tokens in [0, 3] {
            let config = DemoConfig {
                num_draft_tokens,
                host_layout: HostLayout::LayerMajor,
                host_copy: HostCopy::Spilled,
                release_point: ReleasePoint::Completed,
                num_ranks: 3,
                system_tokens: 40,
                policies: vec![ServingPolicy::Hotpage],
                ..small()
            };
            let report = run(config);
            assert_eq!((report.mismatches(), report.leaked_blocks()), (0, 0));
            assert_eq!(report.policies[0].engine.rejected_rows > 0, num_draft_tokens > 0);
        }
    }

    #[test]
    fn a_given_workload_of_uneven_conversations_is_served_as_it_is() {
        let turn = |prompt_tokens, output_tokens| Turn { prompt_tokens, output_tokens };
        let workload = vec![
            Conversation { turns: vec![turn(700, 40), turn(3, 1)] },
            Conversation { turns: vec![turn(1, 1)] },
            Conversation { turns: vec![turn(20, 300), turn(500, 2), turn(1, 60)] },
        ];
        let report = run(DemoConfig { workload, ..small() });
        assert_eq!((report.mismatches(), report.leaked_blocks()), (0, 0));
        assert!(report.policies.iter().all(|policy| policy.engine.finished == 6));
    }

    #[test]
    fn the_least_pool_that_a_refusal_names_is_enough_and_one_mib_less_is_not() {
        let with = |pool, mib: u64| {
            let bytes = Some(mib << 20);
            Demo::new(match pool {
                Pool::Gpu => DemoConfig { gpu_pool_bytes: bytes, ..small() },
                Pool::Host => DemoConfig { host_pool_bytes: bytes, ..small() },
            })
        };
        for pool in [Pool::Gpu, Pool::Host] {
            // Policies differ in what they need, and the first that is short is refused.
            let mut mib = 1;
            while let Err(error) = with(pool, mib) {
                let Error::Config { expected: Expected::AtLeast(least), .. } = error else {
                    panic!("{error}");
                };
                assert!(least.unsigned_abs() > mib, "{pool}: {least} after {mib}");
                mib = least.unsigned_abs();
            }
            assert!(with(pool, mib - 1).is_err(), "{pool}");
        }
    }

    #[test]
    fn hot_rows_that_follow_from_other_settings_are_refused_by_the_names_of_those() {
        let error = |config| Demo::new(config).map(|_| ()).unwrap_err().to_string();
        let wide = error(DemoConfig { top_k: Some(20_000), ..small() });
        assert!(wide.starts_with("top_k is 20000, expected at most 16384; "), "{wide}");
        Demo::new(DemoConfig { top_k: Some(16_384), ..small() }).unwrap();
        let many = DemoConfig { num_draft_tokens: 1_000, ..small() };
        let text = error(many.clone());
        let [_, most] = text.split(", expected at most ").collect::<Vec<_>>()[..] else {
            panic!("{text}");
        };
        assert!(text.starts_with("num_draft_tokens is 1000, "), "{text}");
        let most: u32 = most.split(';').next().unwrap().parse().unwrap();
        let drafts = |num_draft_tokens| {
            check_default_hot_rows(&DemoConfig { num_draft_tokens, ..many.clone() }, 43)
        };
        assert!(drafts(most).is_ok() && drafts(most + 1).is_err());
    }

    #[test]
    fn settings_that_cannot_work_are_refused_with_one_sentence() {
        let error = |config| Demo::new(config).map(|_| ()).unwrap_err().to_string();
        let tiny = error(DemoConfig { gpu_pool_bytes: Some(1 << 20), ..small() });
        assert!(tiny.starts_with("gpu_pool_mib is 1, expected at least "), "{tiny}");
        let tiny = error(DemoConfig { host_pool_bytes: Some(1 << 20), ..small() });
        assert!(tiny.starts_with("host_pool_mib is 1, expected at least "), "{tiny}");
        let none = error(DemoConfig { gpu_pool_bytes: Some(0), ..small() });
        assert!(none.starts_with("gpu_pool_mib is 0, expected at least 1"), "{none}");
        let huge = error(DemoConfig { gpu_pool_bytes: Some(u64::MAX), ..small() });
        assert!(
            huge.starts_with("gpu_pool_mib is 17592186044415, expected at most 65536"),
            "{huge}"
        );
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(error(DemoConfig { scale, ..small() }).starts_with("scale"), "{scale}");
        }
        let none = error(DemoConfig { num_conversations: 0, ..small() });
        assert!(none.starts_with("conversations is 0, expected at least 1"), "{none}");
        let many = error(DemoConfig { num_conversations: u32::MAX, ..small() });
        assert!(many.starts_with("conversations is 4294967295, expected at most 10000"), "{many}");
        let narrow = error(DemoConfig { hot_rows: Some(16), top_k: Some(32), ..small() });
        assert!(narrow.starts_with("hot_rows is 16, expected at least 32"), "{narrow}");
        let odd = error(DemoConfig { row_bytes: 652, ..small() });
        assert!(odd.starts_with("row_bytes is 652, expected a positive multiple of 16"), "{odd}");
        for block_size in [0, 2_000, u32::MAX] {
            let odd = error(DemoConfig { block_size, ..small() });
            assert!(odd.starts_with("block_size is "), "{odd}");
        }
        let empty = DemoConfig { workload: vec![Conversation::default()], ..small() };
        assert!(error(empty).starts_with("turns of a conversation is 0"));
        assert!(error(DemoConfig { num_ranks: 0, ..small() }).starts_with("num_ranks is 0"));
        let many = error(DemoConfig { num_draft_tokens: u32::MAX, ..small() });
        assert!(
            many.starts_with("num_draft_tokens is 4294967295, expected at most 1000"),
            "{many}"
        );
    }
}
