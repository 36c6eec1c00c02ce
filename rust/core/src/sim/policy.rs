// SPDX-License-Identifier: Apache-2.0
//! Owns the replay of top-k traces against one hot region: misses by replacement policy and size.
//! It knows no bytes and no device; the data plane has the resolve that kernels are checked with.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::error::{Error, Expected, Result};
use crate::sim::rng::{derive, mix};

/// Which hot rows make room for a step's misses. Rows that the step itself uses never do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Rows last used in the oldest step first; ties by slot.
    Lru,
    /// Rows copied in the oldest step first; ties by slot.
    Fifo,
    /// Rows drawn without replacement.
    Random {
        /// Seed of the draws.
        seed: u64,
    },
    /// Rows whose next use lies furthest ahead: no policy that must copy every miss does better.
    Belady,
}

/// A recorded or generated sequence of top-k steps of one request and one index group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    positions: Vec<i32>,
    ends: Vec<usize>,
}

impl Trace {
    /// An empty trace.
    #[must_use]
    pub const fn new() -> Self {
        Self { positions: Vec::new(), ends: Vec::new() }
    }

    /// Appends one step: the logical top-k of all its verification rows, `[rows * k]`, in any
    /// order; negative entries are padding and are dropped.
    pub fn push(&mut self, step: &[i32]) {
        self.positions.extend(step.iter().filter(|&&position| position >= 0));
        self.ends.push(self.positions.len());
    }

    /// Number of steps.
    #[must_use]
    pub fn num_steps(&self) -> usize {
        self.ends.len()
    }

    /// Valid references of a step; empty for a step that the trace does not have.
    #[must_use]
    pub fn step(&self, step: usize) -> &[i32] {
        self.range(step).and_then(|range| self.positions.get(range)).unwrap_or_default()
    }

    fn range(&self, step: usize) -> Option<Range<usize>> {
        let end = *self.ends.get(step)?;
        let start = step.checked_sub(1).and_then(|before| self.ends.get(before)).copied();
        Some(start.unwrap_or(0)..end)
    }

    /// `[references]` step of each reference's next use, `u64::MAX` if there is none.
    fn next_uses(&self) -> Vec<u64> {
        let mut next_uses = vec![u64::MAX; self.positions.len()];
        let mut upcoming: HashMap<i32, u64> = HashMap::new();
        for step in (0..self.num_steps()).rev() {
            let range = self.range(step).unwrap_or(0..0);
            // Two passes, because the rows of one step may name a position twice.
            for (reference, position) in range.clone().zip(self.step(step)) {
                next_uses[reference] = upcoming.get(position).copied().unwrap_or(u64::MAX);
            }
            upcoming.extend(self.step(step).iter().map(|&position| (position, step as u64)));
        }
        next_uses
    }
}

/// What a replay counted over the measured steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MissCounts {
    /// Steps measured.
    pub steps: u64,
    /// Valid top-k entries of all verification rows.
    pub references: u64,
    /// Distinct rows, step by step.
    pub union: u64,
    /// Distinct rows that were not hot and had to be copied.
    pub misses: u64,
}

impl MissCounts {
    /// Misses over references; 0 without references.
    #[must_use]
    pub fn miss_fraction(&self) -> f64 {
        if self.references == 0 { 0.0 } else { self.misses as f64 / self.references as f64 }
    }
}

/// Replays the whole trace against `hot_rows` hot slots that start empty and counts the steps of
/// `measured`. Steps outside it warm the region up, or let `Belady` see ahead.
///
/// # Errors
/// `Config` if a step's union does not fit into `hot_rows`.
pub fn replay(
    trace: &Trace,
    policy: Policy,
    hot_rows: u32,
    measured: Range<usize>,
) -> Result<MissCounts> {
    let next_uses = if policy == Policy::Belady { trace.next_uses() } else { Vec::new() };
    let mut region = Region::new(policy, hot_rows);
    let mut counts = MissCounts::default();
    for step in 0..trace.num_steps() {
        let first = trace.range(step).map_or(0, |range| range.start);
        let next_uses = next_uses.get(first..).unwrap_or_default();
        let (union, misses) = region.step(step as u64 + 1, trace.step(step), next_uses)?;
        if measured.contains(&step) {
            counts.steps += 1;
            counts.references += trace.step(step).len() as u64;
            counts.union += union;
            counts.misses += misses;
        }
    }
    Ok(counts)
}

/// One hot slot; step numbers start at 1, so 0 marks a slot that was never filled.
#[derive(Debug, Clone, Copy)]
struct HotSlot {
    position: i32,
    used: u64,
    copied: u64,
    next_use: u64,
}

struct Region {
    policy: Policy,
    slots: Vec<HotSlot>,
    slot_of: HashMap<i32, u32>,
    missed: Vec<(i32, u64)>,
    victims: Vec<(u64, u32)>,
}

impl Region {
    fn new(policy: Policy, hot_rows: u32) -> Self {
        let empty = HotSlot { position: -1, used: 0, copied: 0, next_use: u64::MAX };
        Self {
            policy,
            slots: vec![empty; hot_rows as usize],
            slot_of: HashMap::new(),
            missed: Vec::new(),
            victims: Vec::new(),
        }
    }

    /// Serves one step; returns its union and its misses.
    fn step(&mut self, step: u64, positions: &[i32], next_uses: &[u64]) -> Result<(u64, u64)> {
        self.missed.clear();
        let mut hits = 0;
        for (reference, &position) in positions.iter().enumerate() {
            let next_use = next_uses.get(reference).copied().unwrap_or(u64::MAX);
            match self.slot_of.get(&position) {
                Some(&slot) => {
                    let slot = &mut self.slots[slot as usize];
                    hits += usize::from(slot.used != step);
                    slot.used = step;
                    slot.next_use = next_use;
                }
                None => self.missed.push((position, next_use)),
            }
        }
        // Rows of one step may miss the same position: the first mention decides the slot order.
        let mut seen = HashSet::with_capacity(self.missed.len());
        self.missed.retain(|&(position, _)| seen.insert(position));
        let union = hits + self.missed.len();
        if union > self.slots.len() {
            return Err(Error::Config {
                name: "hot_rows",
                got: self.slots.len() as i64,
                expected: Expected::AtLeast(union as i64),
                remedy: "give the region at least one step's distinct rows",
            });
        }
        self.choose_victims(step);
        self.fill(step);
        Ok((union as u64, self.missed.len() as u64))
    }

    /// Puts the slots that give way, first to go first, into `victims`.
    fn choose_victims(&mut self, step: u64) {
        self.victims.clear();
        let misses = self.missed.len();
        if misses == 0 {
            return;
        }
        let policy = self.policy;
        let idle = self.slots.iter().enumerate().filter(|(_, slot)| slot.used != step);
        self.victims.extend(idle.map(|(index, slot)| {
            let rank = match policy {
                // Empty slots first, whatever the policy.
                _ if slot.copied == 0 => 0,
                Policy::Lru => slot.used,
                Policy::Fifo => slot.copied,
                Policy::Random { seed } => mix(derive(seed, step) ^ index as u64).max(1),
                Policy::Belady => u64::MAX - slot.next_use + 1,
            };
            (rank, index as u32)
        }));
        // OK because union <= slots: at least as many slots are idle as positions were missed.
        if misses < self.victims.len() {
            self.victims.select_nth_unstable(misses - 1);
            self.victims.truncate(misses);
        }
        self.victims.sort_unstable();
    }

    fn fill(&mut self, step: u64) {
        for (&(position, next_use), &(_, index)) in self.missed.iter().zip(&self.victims) {
            let slot = &mut self.slots[index as usize];
            if slot.copied != 0 {
                self.slot_of.remove(&slot.position);
            }
            *slot = HotSlot { position, used: step, copied: step, next_use };
            self.slot_of.insert(position, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(steps: &[&[i32]]) -> Trace {
        let mut trace = Trace::new();
        for step in steps {
            trace.push(step);
        }
        trace
    }

    fn misses(trace: &Trace, policy: Policy, hot_rows: u32) -> u64 {
        replay(trace, policy, hot_rows, 0..usize::MAX).unwrap().misses
    }

    #[test]
    fn policies_differ_where_they_should() {
        // Row 1 is used again and again, 2 to 5 come once, then 2 returns.
        let trace = trace(&[&[1], &[2], &[1], &[3], &[1], &[2]]);
        // LRU with 2 rows: 1 2 miss, 1 hits, 3 evicts 2, 1 hits, 2 misses.
        assert_eq!(misses(&trace, Policy::Lru, 2), 4);
        // FIFO: 3 evicts 1, 1 evicts 2, 2 evicts 3.
        assert_eq!(misses(&trace, Policy::Fifo, 2), 5);
        // Belady at 3's miss gives up 2 (used later than 1): the same count as LRU.
        assert_eq!(misses(&trace, Policy::Belady, 2), 4);
        assert_eq!(misses(&trace, Policy::Lru, 3), 3);
    }

    #[test]
    fn belady_keeps_what_returns_soonest() {
        let cycle: Vec<Vec<i32>> = (0..30).map(|step| vec![step % 3]).collect();
        let mut trace = Trace::new();
        cycle.iter().for_each(|step| trace.push(step));
        // A cycle of 3 through 2 slots: LRU always misses, Belady every second time.
        assert_eq!(misses(&trace, Policy::Lru, 2), 30);
        assert_eq!(misses(&trace, Policy::Belady, 2), 16);
    }

    #[test]
    fn a_steps_own_rows_are_never_victims() {
        // The second step needs 1 (oldest), 4 and 5: the victims must be 2 and 3.
        let trace = trace(&[&[1, 2, 3], &[1, 4, 5], &[1, 4, 5]]);
        for policy in [Policy::Lru, Policy::Fifo, Policy::Random { seed: 1 }, Policy::Belady] {
            assert_eq!(misses(&trace, policy, 3), 5, "{policy:?}");
        }
    }

    #[test]
    fn lru_ties_go_by_slot() {
        // After step 1 slots 0..3 hold 1, 2, 3 with one age; 4 takes slot 0, so 2 and 3 stay hot.
        let trace = trace(&[&[1, 2, 3], &[4], &[2, 3]]);
        assert_eq!(misses(&trace, Policy::Lru, 3), 4);
    }

    #[test]
    fn the_union_of_rows_is_copied_once_and_references_count_all() {
        let trace = trace(&[&[1, 2, 3, 2, 3, 4, -1], &[4, 3]]);
        let counts = replay(&trace, Policy::Lru, 4, 0..2).unwrap();
        assert_eq!(counts, MissCounts { steps: 2, references: 8, union: 6, misses: 4 });
        assert_eq!(counts.miss_fraction(), 0.5);
    }

    #[test]
    fn only_measured_steps_are_counted() {
        let trace = trace(&[&[1, 2], &[1, 2], &[3, 1]]);
        let counts = replay(&trace, Policy::Lru, 2, 1..3).unwrap();
        assert_eq!(counts, MissCounts { steps: 2, references: 4, union: 4, misses: 1 });
    }

    #[test]
    fn a_region_under_one_union_is_refused() {
        let error = replay(&trace(&[&[1, 2, 3]]), Policy::Lru, 2, 0..1).unwrap_err();
        assert!(matches!(
            error,
            Error::Config { name: "hot_rows", got: 2, expected: Expected::AtLeast(3), .. }
        ));
    }

    #[test]
    fn no_policy_beats_belady() {
        let mut rng = crate::sim::rng::SplitMix64::new(3);
        let mut trace = Trace::new();
        for _ in 0..200 {
            let step: Vec<i32> = (0..4).map(|_| (rng.below(6) * rng.below(6)) as i32).collect();
            trace.push(&step);
        }
        let best = misses(&trace, Policy::Belady, 8);
        for policy in [Policy::Lru, Policy::Fifo, Policy::Random { seed: 1 }] {
            assert!(best < misses(&trace, policy, 8), "{policy:?}");
        }
    }
}
