// SPDX-License-Identifier: Apache-2.0
//! Owns what an engine asks of its worker side, whether that moves bytes or only acknowledges.

use crate::dataplane::Counters;
use crate::error::Result;
use crate::ids::RequestId;
use crate::sim::worker::{Acks, Batch, StatesSeen, Traffic, Verdict, Worker};
use crate::step::StepPlan;

/// What a worker side has counted since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Bytes moved, by reason.
    pub traffic: Traffic,
    /// Hits and misses of the hot regions.
    pub hot: Counters,
    /// What the comparison of attended rows found.
    pub verdict: Verdict,
    /// Residency states that scheduled requests were in.
    pub states: StatesSeen,
}

/// The worker side of an engine. It decides nothing about residency.
pub trait WorkerSide {
    /// True if it writes rows, so that the batch must say where each token's row goes.
    const WRITES_ROWS: bool;

    /// Gives a request its state row; `key` seeds its top-k stream.
    ///
    /// # Errors
    /// `Config` for settings out of bounds; nothing has changed then.
    fn start(&mut self, request: RequestId, state_row: usize, key: u64) -> Result<()>;

    /// Takes its state row back.
    fn end(&mut self, request: RequestId);

    /// Runs one step: what the plan wants before the forward pass, the pass, what comes after.
    ///
    /// # Errors
    /// `Protocol` if plan and batch name what does not exist: a bug in the engine.
    fn execute(&mut self, plan: &StepPlan, batch: &Batch) -> Result<()>;

    /// Collects what the ranks say at the end of the step.
    ///
    /// # Errors
    /// `Protocol` for transfers of blocks that do not exist: a bug in the engine.
    fn take_acks(&mut self, acks: &mut Acks) -> Result<()>;

    /// True if no transfer is on its way.
    fn is_idle(&self) -> bool;

    /// What it has counted.
    fn tally(&self) -> Tally;
}

impl WorkerSide for Worker {
    const WRITES_ROWS: bool = true;

    fn start(&mut self, request: RequestId, state_row: usize, key: u64) -> Result<()> {
        self.start(request, state_row, key)
    }

    fn end(&mut self, request: RequestId) {
        self.end(request);
    }

    fn execute(&mut self, plan: &StepPlan, batch: &Batch) -> Result<()> {
        self.execute(plan, batch)
    }

    fn take_acks(&mut self, acks: &mut Acks) -> Result<()> {
        self.take_acks(acks)
    }

    fn is_idle(&self) -> bool {
        self.is_idle()
    }

    fn tally(&self) -> Tally {
        Tally {
            traffic: self.traffic(),
            hot: self.hot_counters(),
            verdict: self.verdict(),
            states: self.states(),
        }
    }
}
