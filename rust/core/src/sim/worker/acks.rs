// SPDX-License-Identifier: Apache-2.0
//! Owns when each rank says what of a transfer: seeded delays, ranks in any order.

use std::collections::{BTreeMap, HashMap};

use smallvec::SmallVec;

use crate::ids::{HostBlockId, PageIndex, RequestId, TransferId};
use crate::sim::rng::SplitMix64;
use crate::step::{TransferAck, TransferKind};

/// Most steps from plan to "enqueued".
pub const MAX_ENQUEUE_STEPS: u32 = 1;
/// Most steps from "enqueued" to "completed"; the least is 1.
pub const MAX_COMPLETE_STEPS: u32 = 3;

/// What the ranks say at the end of a step, in the order in which the engine must report it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Acks {
    /// Pages with a row that was not mirrored.
    pub mirror_lost: Vec<(RequestId, PageIndex)>,
    /// Transfers in stream order, one entry a rank.
    pub enqueued: Vec<TransferAck>,
    /// Transfers done, one entry a rank.
    pub completed: Vec<TransferAck>,
    /// Transfers done whose bytes cannot be trusted, one entry a rank.
    pub failed: Vec<TransferAck>,
}

impl Acks {
    /// Empties the lists and keeps their memory.
    pub fn clear(&mut self) {
        self.mirror_lost.clear();
        self.enqueued.clear();
        self.completed.clear();
        self.failed.clear();
    }
}

/// One transfer on its way.
#[derive(Debug, Clone)]
pub(super) struct InFlight {
    pub(super) kind: TransferKind,
    pub(super) host_block: HostBlockId,
    /// `[G]` GPU blocks.
    pub(super) blocks: SmallVec<[i32; 4]>,
    pub(super) num_rows: u32,
    /// Ranks that acknowledge it.
    pub(super) required: u32,
    pub(super) enqueued: u32,
    pub(super) completed: u32,
    /// True if the last rank will say that it failed.
    pub(super) fails: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Enqueued,
    Completed,
}

/// Transfers on their way and what is due when.
#[derive(Debug)]
pub(super) struct AckQueue {
    in_flight: HashMap<i64, InFlight>,
    due: BTreeMap<u64, Vec<(Stage, i64)>>,
    rng: SplitMix64,
}

impl AckQueue {
    pub(super) fn new(seed: u64) -> Self {
        Self { in_flight: HashMap::new(), due: BTreeMap::new(), rng: SplitMix64::new(seed) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Draws the ranks' delays. A transfer that is `known_bad` is reported failed at once, before
    /// anybody can rely on it.
    pub(super) fn plan(&mut self, now: u64, id: TransferId, transfer: InFlight, known_bad: bool) {
        for _ in 0..transfer.required {
            let enqueued = now + u64::from(self.rng.below(MAX_ENQUEUE_STEPS + 1));
            let completed = enqueued + 1 + u64::from(self.rng.below(MAX_COMPLETE_STEPS));
            let steps = if known_bad { [now, now] } else { [enqueued, completed] };
            for (step, stage) in steps.into_iter().zip([Stage::Enqueued, Stage::Completed]) {
                self.due.entry(step).or_default().push((stage, id.0));
            }
        }
        self.in_flight.insert(id.0, transfer);
    }

    /// The next thing that is due at `now`: all of one step's "enqueued" before its "completed".
    pub(super) fn take_due(&mut self, now: u64) -> Vec<(Stage, i64)> {
        let later = self.due.split_off(&(now + 1));
        let mut due: Vec<_> =
            core::mem::replace(&mut self.due, later).into_values().flatten().collect();
        due.sort_by_key(|&(stage, _)| stage);
        due
    }

    pub(super) fn get_mut(&mut self, id: i64) -> Option<&mut InFlight> {
        self.in_flight.get_mut(&id)
    }

    pub(super) fn remove(&mut self, id: i64) {
        self.in_flight.remove(&id);
    }
}
