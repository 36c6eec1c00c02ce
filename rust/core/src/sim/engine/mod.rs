// SPDX-License-Identifier: Apache-2.0
//! Owns the embedded engine: the part that vLLM plays around the Coordinator, on real bytes.
//!
//! One step: turns arrive; hot regions are granted; running requests get their tokens and blocks;
//! waiting ones are admitted; the Coordinator plans; the pools and the worker carry the plan out;
//! the ranks' acknowledgements go back. Steps are the only clock.

mod admission;
mod config;
mod lifecycle;
mod report;
mod request;
mod scheduler;
mod side;

pub use config::{EngineConfig, ServingPolicy};
pub use report::{EngineReport, Refusals};
pub use request::ConversationId;
pub use side::{Tally, WorkerSide};

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::config::CoordinatorConfig;
use crate::coordinator::Coordinator;
use crate::error::{Error, Pool, Result};
use crate::ids::RequestId;
use crate::pool::BlockPool;
use crate::sim::content::ContentStream;
use crate::sim::prefix::PrefixIndex;
use crate::sim::worker::{Acks, Batch, Worker};
use crate::sim::workload::Conversation;
use crate::step::{FreePlan, PoolLevels, Scheduled, StepPlan};

use lifecycle::Draining;
use request::{ConversationState, Request};

/// Bytes of one token in one indexer layer: 128 of key and 4 of scale.
const INDEXER_ROW_BYTES: u64 = 132;

/// Steps without a new row after which the engine counts as stuck. A single recomputation of the
/// longest request takes far fewer.
const MAX_IDLE_STEPS: u64 = 100_000;

/// Ids that no admission uses, lowest first.
#[derive(Debug, Default)]
struct RequestIds {
    vacant: BTreeSet<u32>,
    next: u32,
}

impl RequestIds {
    fn take(&mut self) -> RequestId {
        RequestId(self.vacant.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        }))
    }

    fn give_back(&mut self, id: u32) {
        self.vacant.insert(id);
    }
}

/// The embedded engine, by default with a worker side that moves real bytes.
#[derive(Debug)]
pub struct Engine<W = Worker> {
    config: EngineConfig,
    coordinator: Coordinator,
    worker: W,
    gpu: BlockPool,
    host: BlockPool,
    prefix: PrefixIndex,
    conversations: Vec<Option<ConversationState>>,
    vacant: Vec<ConversationId>,
    arrivals: BTreeMap<u64, Vec<ConversationId>>,
    waiting: VecDeque<ConversationId>,
    /// In the order of admission.
    running: Vec<ConversationId>,
    /// `[ids seen]` conversation of each live request.
    owners: Vec<Option<ConversationId>>,
    draining: HashMap<u32, Draining>,
    ids: RequestIds,
    state_rows: BTreeSet<usize>,
    step: u64,
    /// Step in which some conversation last got a row that it never had before.
    last_progress: u64,
    budget: u32,
    preempted: bool,
    scheduled: Vec<Scheduled>,
    batch: Batch,
    plan: StepPlan,
    free_plan: FreePlan,
    acks: Acks,
    notices: Vec<i32>,
    report: EngineReport,
}

impl Engine {
    /// An engine without conversations.
    ///
    /// # Errors
    /// `Config` for a setting out of bounds, `Capacity` for a pool under one request.
    pub fn new(config: EngineConfig) -> Result<Self> {
        config.validate()?;
        let worker = Worker::new(config.worker()?)?;
        let coordinator = config.coordinator();
        Self::with_worker(config, coordinator, worker)
    }
}

impl<W: WorkerSide> Engine<W> {
    /// An engine without conversations over a worker side, and a Coordinator whose settings are
    /// those of `config` or differ from them in what only the Coordinator looks at.
    ///
    /// # Errors
    /// `Config` for a setting out of bounds, `Capacity` for a pool under one request.
    pub fn with_worker(
        config: EngineConfig,
        coordinator: CoordinatorConfig,
        worker: W,
    ) -> Result<Self> {
        config.validate()?;
        let coordinator = Coordinator::new(coordinator)?;
        let (gpu_blocks, host_blocks) = (config.gpu_blocks, config.num_host_blocks());
        let indexed = if config.policy.has_host_pool() { host_blocks } else { gpu_blocks };
        Ok(Self {
            coordinator,
            worker,
            gpu: BlockPool::new(Pool::Gpu, gpu_blocks),
            host: BlockPool::new(Pool::Host, host_blocks),
            prefix: PrefixIndex::new(indexed),
            conversations: Vec::new(),
            vacant: Vec::new(),
            arrivals: BTreeMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            owners: Vec::new(),
            draining: HashMap::new(),
            ids: RequestIds::default(),
            state_rows: (0..config.max_running as usize).collect(),
            step: 0,
            last_progress: 0,
            budget: 0,
            preempted: false,
            scheduled: Vec::new(),
            batch: Batch::default(),
            plan: StepPlan::default(),
            free_plan: FreePlan::default(),
            acks: Acks::default(),
            notices: Vec::new(),
            report: EngineReport::default(),
            config,
        })
    }

    /// Adds a conversation with the stream `number`; its first turn arrives after `delay_steps`.
    ///
    /// # Errors
    /// `Config` for an empty conversation or one that is longer than the engine's longest request.
    pub fn submit(
        &mut self,
        number: u64,
        conversation: Conversation,
        delay_steps: u64,
    ) -> Result<ConversationId> {
        let system_tokens = self.config.system_tokens;
        conversation.validate(system_tokens)?;
        let tokens = conversation.num_tokens(system_tokens);
        if tokens > u64::from(self.config.max_model_len) {
            return Err(Error::Config {
                name: "max_model_len",
                got: i64::from(self.config.max_model_len),
                expected: crate::error::Expected::AtLeast(
                    i64::try_from(tokens).unwrap_or(i64::MAX),
                ),
                remedy: "raise it to the longest conversation",
            });
        }
        let content = ContentStream::new(number, system_tokens);
        let state = ConversationState::new(content, conversation, system_tokens);
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.conversations.push(None);
            ConversationId(self.conversations.len() - 1)
        });
        self.conversations[id.0] = Some(state);
        self.arrivals.entry(self.step + 1 + delay_steps).or_default().push(id);
        Ok(id)
    }

    /// Runs one step.
    ///
    /// # Errors
    /// `Protocol` or `Invariant` for a bug in the engine, the Coordinator or the worker.
    pub fn step(&mut self) -> Result<()> {
        self.step += 1;
        self.report.steps += 1;
        self.batch.clear();
        self.scheduled.clear();
        self.budget = self.config.step_tokens;
        self.preempted = false;
        self.arrive();
        self.grant_hot_regions()?;
        self.schedule_running()?;
        if !self.preempted {
            self.admit_waiting()?;
        }
        self.count_running();
        let levels = self.levels();
        self.report.events += self.scheduled.len() as u64;
        self.coordinator.build_step_plan(&self.scheduled, levels, &mut self.plan)?;
        self.carry_out_plan()?;
        if W::WRITES_ROWS {
            self.map_slots()?;
        }
        self.worker.execute(&self.plan, &self.batch)?;
        self.report_acks()?;
        self.finish_step()?;
        self.check_progress()
    }

    /// True when every turn has ended and every block has been given back.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.num_conversations() == 0
            && !self.coordinator.has_pending_work()
            && self.worker.is_idle()
            && self.draining.is_empty()
    }

    /// Conversations with turns to come.
    #[must_use]
    pub fn num_conversations(&self) -> usize {
        self.conversations.len() - self.vacant.len()
    }

    /// Conversations with turns to come, by rising number.
    pub fn conversations(&self) -> impl Iterator<Item = ConversationId> + '_ {
        let listed = self.conversations.iter().enumerate();
        listed.filter(|(_, state)| state.is_some()).map(|(at, _)| ConversationId(at))
    }

    /// Requests admitted and not finished, in the order of admission.
    #[must_use]
    pub fn running(&self) -> &[ConversationId] {
        &self.running
    }

    /// The Coordinator, to look at.
    #[must_use]
    pub fn coordinator(&self) -> &Coordinator {
        &self.coordinator
    }

    /// The worker side, to look at.
    #[must_use]
    pub fn worker(&self) -> &W {
        &self.worker
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Empties the prefix index, as an operator may ask at any time.
    ///
    /// # Errors
    /// `Protocol` for a Coordinator that was shut down.
    pub fn reset_prefix_cache(&mut self) -> Result<()> {
        self.report.events += 1;
        self.coordinator.on_prefix_cache_reset()?;
        self.prefix.clear();
        Ok(())
    }

    /// Checks both pools and that the Coordinator holds nothing that it should not. For tests.
    ///
    /// # Errors
    /// `Invariant` naming what was found.
    pub fn check_invariants(&self) -> Result<()> {
        self.gpu.check_invariants()?;
        self.host.check_invariants()?;
        let leased = i64::from(self.gpu.num_leased() + self.host.num_leased());
        if self.is_drained() && leased > 0 {
            let what = "blocks leased after everything has ended";
            return Err(Error::Invariant { rule: 8, what, got: leased, expected: 0 });
        }
        Ok(())
    }

    /// Checks the life-cycle rules over the Coordinator's tables and both pools, between steps.
    ///
    /// # Errors
    /// The first rule that is broken.
    #[cfg(any(test, feature = "testing"))]
    pub fn check_rules(&self) -> crate::testing::Check {
        let live = self.conversations.iter().flatten();
        let running = live.filter_map(|state| state.request.as_ref()?.running.as_ref());
        let indexer: Vec<i32> = running.flat_map(|run| &run.other_blocks).copied().collect();
        crate::testing::invariants::check(&self.coordinator, &self.gpu, &self.host, &indexer)
    }

    /// Counts since the engine was made.
    #[must_use]
    pub fn report(&self) -> EngineReport {
        let Tally { traffic, hot, verdict, states } = self.worker.tally();
        EngineReport {
            bytes_to_host: self.report.bytes_to_host + traffic.to_host(),
            bytes_to_gpu: self.report.bytes_to_gpu + traffic.to_gpu(),
            traffic,
            hot,
            verdict,
            states,
            leased_blocks: u64::from(self.gpu.num_leased()) + u64::from(self.host.num_leased()),
            failed_copies: self.coordinator.stats().spills_failed,
            ..self.report
        }
    }

    fn levels(&self) -> PoolLevels {
        PoolLevels { gpu_free: self.gpu.num_available(), host_free: self.host.num_available() }
    }

    /// Bytes of the indexer's rows of one page; they travel with the page in both directions.
    fn indexer_page_bytes(&self) -> u64 {
        if self.config.other_blocks_per_page == 0 || !self.config.policy.has_host_pool() {
            return 0;
        }
        let leaders: usize = self.config.packing.kv_groups.iter().map(Vec::len).sum();
        INDEXER_ROW_BYTES * u64::from(self.config.block_size) * leaders as u64
    }

    fn state_mut(&mut self, id: ConversationId) -> Option<&mut ConversationState> {
        self.conversations.get_mut(id.0)?.as_mut()
    }

    fn request(&self, id: ConversationId) -> Option<&Request> {
        self.conversations.get(id.0)?.as_ref()?.request.as_ref()
    }

    fn request_mut(&mut self, id: ConversationId) -> Option<&mut Request> {
        self.state_mut(id)?.request.as_mut()
    }

    /// Turns whose time has come join the waiting queue.
    fn arrive(&mut self) {
        let later = self.arrivals.split_off(&(self.step + 1));
        for id in core::mem::replace(&mut self.arrivals, later).into_values().flatten() {
            let Some(state) = self.state_mut(id) else { continue };
            let Some(turn) = state.conversation.turns.get(state.turn).copied() else { continue };
            let num_prompt = state.num_said + turn.prompt_tokens;
            state.request = Some(Request::new(num_prompt, turn.output_tokens));
            self.waiting.push_back(id);
            self.report.arrived += 1;
        }
    }

    fn count_running(&mut self) {
        if self.running.is_empty() && self.waiting.is_empty() {
            return;
        }
        // OK because at most max_running requests run, and it is a u32.
        let running = self.running.len() as u32;
        self.report.busy_steps += 1;
        self.report.running_sum += u64::from(running);
        self.report.running_max = self.report.running_max.max(running);
    }

    fn check_progress(&mut self) -> Result<()> {
        if self.running.is_empty() && self.waiting.is_empty() {
            self.last_progress = self.step;
        }
        let idle = self.step - self.last_progress;
        if idle <= MAX_IDLE_STEPS {
            return Ok(());
        }
        let what = "steps since a request last got further than ever before";
        let (got, expected) = (i64::try_from(idle).unwrap_or(i64::MAX), MAX_IDLE_STEPS as i64);
        Err(Error::Invariant { rule: 8, what, got, expected })
    }
}

#[cfg(test)]
mod tests;
