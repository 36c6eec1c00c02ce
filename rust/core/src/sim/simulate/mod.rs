// SPDX-License-Identifier: Apache-2.0
//! Owns the simulation of a deployment: the real Coordinator and pools serve conversations of real
//! length by events alone, and a cost model says how long each step takes.
//!
//! The embedded engine plays vLLM's part, as in the demonstration; no byte moves. Users have one
//! conversation each at a time, ask the next question as soon as they are answered, and start the
//! next conversation when one has ended. It is a model: what it leaves out (the cost of everything
//! that has no constant in [`CostModel`]) makes every policy look faster than it is.

mod config;
mod cost;
mod misses;
mod report;
mod turns;
mod worker;

pub use config::SimulationConfig;
pub use cost::{CostModel, GroupCost, PeerCost, StepLoad, StepTime};
pub use report::{Latency, Moved, SimulationReport, TokenCounts};

use crate::error::Result;
use crate::sim::engine::Engine;
use crate::sim::workload::Conversation;
use report::Sums;
use turns::Turns;
use worker::Acknowledger;

/// One policy serving one number of users.
#[derive(Debug)]
pub struct Simulation {
    config: SimulationConfig,
    engine: Engine<Acknowledger>,
    turns: Turns,
    /// Conversations that have begun.
    num_begun: u32,
    /// Seconds since the start.
    now: f64,
    sums: Sums,
}

impl Simulation {
    /// A run that has not begun.
    ///
    /// # Errors
    /// `Config` for a setting out of bounds, `Capacity` for a pool under one request.
    pub fn new(config: SimulationConfig) -> Result<Self> {
        config.validate()?;
        let engine = config.engine()?;
        let coordinator = config.coordinator(&engine);
        let worker = Acknowledger::new(config.sizes());
        let engine = Engine::with_worker(engine, coordinator, worker)?;
        let (turns, sums) = (Turns::default(), Sums::default());
        Ok(Self { config, engine, turns, num_begun: 0, now: 0.0, sums })
    }

    /// Runs up to `max_steps` steps; true when nothing is left.
    ///
    /// # Errors
    /// `Config` for a conversation longer than the engine's longest request, `Capacity` if one
    /// can never run, `Protocol` or `Invariant` for a bug in this crate.
    pub fn advance(&mut self, max_steps: u64) -> Result<bool> {
        for _ in 0..max_steps {
            self.begin_conversations()?;
            if self.engine.is_drained() {
                self.engine.check_invariants()?;
                return Ok(true);
            }
            self.step()?;
        }
        Ok(false)
    }

    /// Share of the conversations that have ended, 0 to 1.
    #[must_use]
    pub fn fraction(&self) -> f64 {
        self.turns.num_conversations as f64 / f64::from(self.config.num_conversations)
    }

    /// What the run has come to.
    #[must_use]
    pub fn report(&self) -> SimulationReport {
        SimulationReport::new(&self.config, &self.engine.report(), &self.turns, &self.sums)
    }

    /// Users without a conversation start one.
    fn begin_conversations(&mut self) -> Result<()> {
        while self.num_begun < self.config.num_conversations
            && self.engine.num_conversations() < self.config.num_users as usize
        {
            let number = u64::from(self.num_begun);
            let conversation = self.conversation(number).clone();
            self.turns.begin(number, &conversation, self.now);
            self.engine.submit(number, conversation, 0)?;
            self.num_begun += 1;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let before = self.engine.report().running_sum;
        self.engine.step()?;
        // OK because a step adds the requests that run, and their number is a u32.
        let running = (self.engine.report().running_sum - before) as u32;
        let load = StepLoad { running, ..self.engine.worker().load() };
        let time = self.config.cost.step(&load);
        self.now += time.step;
        self.sums.add(&self.config.cost, &load, &time);
        for &computed in self.engine.worker().computed() {
            // OK because some conversation computed, so there is one.
            let at = computed.stream as usize % self.config.conversations.len();
            self.turns.on_computed(computed, &self.config.conversations[at], self.now)?;
        }
        Ok(())
    }

    fn conversation(&self, number: u64) -> &Conversation {
        // OK because a configuration without conversations was refused.
        &self.config.conversations[number as usize % self.config.conversations.len()]
    }
}

#[cfg(test)]
mod tests;
