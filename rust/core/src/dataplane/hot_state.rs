// SPDX-License-Identifier: Apache-2.0
//! Owns what one request's hot region holds in one index group, and the age of each row.

use crate::error::{Error, Result};

/// Row map and row LRU of one (state row, index group).
///
/// The epoch is unbounded here. A kernel may keep 16-bit stamps if it renormalises them so that
/// the victims stay the same.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HotState {
    pub(super) row_map: Vec<i32>,
    pub(super) last_used: Vec<u64>,
    pub(super) epoch: u64,
}

impl HotState {
    /// An empty map of `hot_rows` hot slots.
    #[must_use]
    pub fn new(hot_rows: usize) -> Self {
        Self { row_map: vec![-1; hot_rows], last_used: vec![0; hot_rows], epoch: 0 }
    }

    /// Hot slots.
    #[must_use]
    pub fn hot_rows(&self) -> usize {
        self.row_map.len()
    }

    /// `[H]` host row held by each hot slot, -1 where it is free.
    #[must_use]
    pub fn row_map(&self) -> &[i32] {
        &self.row_map
    }

    /// `[H]` epoch in which each hot slot was last read, 0 where it is free.
    #[must_use]
    pub fn last_used(&self) -> &[u64] {
        &self.last_used
    }

    /// Resolves that read a host-only page since the last reset.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Empties the map: a state row that gets a hot region starts with nothing in it.
    pub fn reset(&mut self) {
        self.row_map.fill(-1);
        self.last_used.fill(0);
        self.epoch = 0;
    }

    /// Frees one hot slot: it holds nothing and is the oldest.
    pub(super) fn free(&mut self, hot_slot: usize) {
        self.row_map[hot_slot] = -1;
        self.last_used[hot_slot] = 0;
    }

    /// Checks that no host row sits in two hot slots and that ages agree with the map. For tests
    /// and debug builds: it sorts a copy.
    ///
    /// # Errors
    /// `Invariant` (rule 6) naming what was found.
    pub fn check_invariants(&self) -> Result<()> {
        let mut held: Vec<i32> = self.row_map.iter().copied().filter(|&row| row != -1).collect();
        held.sort_unstable();
        if let Some(&row) = held.first().filter(|&&row| row < 0) {
            return Err(broken("smallest host row in the map", i64::from(row), 0));
        }
        if held.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(broken("hot slots that hold one host row", 2, 1));
        }
        for (&row, &used) in self.row_map.iter().zip(&self.last_used) {
            if used > self.epoch || (row == -1) != (used == 0) {
                let got = i64::try_from(used).unwrap_or(i64::MAX);
                return Err(broken("age of a hot slot", got, i64::from(row != -1)));
            }
        }
        Ok(())
    }
}

#[cold]
fn broken(what: &'static str, got: i64, expected: i64) -> Error {
    Error::Invariant { rule: 6, what, got, expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_in_two_hot_slots_breaks_the_invariant() {
        let mut state = HotState { row_map: vec![7, -1, 9], last_used: vec![1, 0, 2], epoch: 2 };
        state.check_invariants().unwrap();
        state.row_map[2] = 7;
        assert!(state.check_invariants().is_err());
    }

    #[test]
    fn a_free_hot_slot_with_an_age_or_a_future_age_breaks_the_invariant() {
        let good = HotState { row_map: vec![7, -1], last_used: vec![1, 0], epoch: 1 };
        good.check_invariants().unwrap();
        for last_used in [[1, 1], [0, 0], [2, 0]] {
            let bad = HotState { last_used: last_used.to_vec(), ..good.clone() };
            assert!(bad.check_invariants().is_err(), "{last_used:?}");
        }
    }

    #[test]
    fn reset_leaves_nothing_of_the_last_request() {
        let mut state = HotState { row_map: vec![7, 8], last_used: vec![1, 2], epoch: 2 };
        state.reset();
        assert_eq!(state, HotState::new(2));
    }
}
