// SPDX-License-Identifier: Apache-2.0
//! Owns the Coordinator's counters; they are never read to decide anything.

/// Counts since construction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Stats {
    /// Requests admitted.
    pub admitted: u64,
    /// Requests freed because they finished or were aborted.
    pub finished: u64,
    /// Requests freed because they were preempted.
    pub preempted: u64,
    /// Page copies planned, GPU to host, acknowledgements of mirrored pages counted.
    pub spills_planned: u64,
    /// Page copies that every writer completed.
    pub spills_completed: u64,
    /// Page copies that some writer could not make.
    pub spills_failed: u64,
    /// Restores planned.
    pub restores_planned: u64,
    /// Pages whose GPU blocks were given up while their request ran.
    pub pages_released: u64,
    /// Pages whose GPU blocks were taken by somebody else while their request ran.
    pub pages_lost: u64,
    /// Host-only pages that found a readable GPU copy.
    pub pages_adopted: u64,
    /// Pages pinned again because there was room.
    pub pages_repinned: u64,
    /// Hot regions granted.
    pub hot_regions_granted: u64,
    /// Hot regions given back while their request ran on.
    pub hot_regions_returned: u64,
    /// Pages published for prefix reuse.
    pub pages_published: u64,
    /// Drafted rows that were rejected.
    pub rows_rejected: u64,
}
