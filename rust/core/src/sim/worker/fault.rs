// SPDX-License-Identifier: Apache-2.0
//! Owns planted faults: what tests break on purpose to prove that the comparison notices.

/// One thing that goes wrong once, at the first opportunity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A byte of the newest row of a decoding request flips in the GPU pool.
    GpuRow,
    /// A byte of a host row flips just before the row is copied to its hot slot.
    HostRow,
    /// A state row gets a hot region, and the row map of its last request is not emptied although
    /// it names rows that the new request reads.
    StaleHotSlots,
    /// A row is acknowledged as mirrored although its bytes never reached the host pool.
    UnmirroredRow,
}

/// A fault that waits for its opportunity.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planted {
    pending: Option<Fault>,
}

impl Planted {
    pub(super) const fn new(pending: Option<Fault>) -> Self {
        Self { pending }
    }

    /// True if this fault still waits.
    pub(super) fn waits(self, fault: Fault) -> bool {
        self.pending == Some(fault)
    }

    /// True once, if this fault still waits.
    pub(super) fn strike(&mut self, fault: Fault) -> bool {
        let strikes = self.waits(fault);
        if strikes {
            self.pending = None;
        }
        strikes
    }
}
