// SPDX-License-Identifier: Apache-2.0
//! Owns the page state machine: the states, and the one table of legal transitions.

/// Where a page's rows are valid and who holds its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum PageState {
    /// The request holds the GPU blocks; only they are valid. Ends when a spill is planned.
    Dirty = 0,
    /// The request and the spill hold the GPU blocks; the host copy is planned but some rank has
    /// not enqueued it, or has said already that it failed. Ends when every rank has enqueued it,
    /// or when all are done with a copy that failed.
    Spilling = 1,
    /// The request holds the GPU blocks; the host copy is in stream order on every rank, readable
    /// by this engine, not publishable. Ends at completion, at the first word of a failure, or at same-stream release.
    Enqueued = 2,
    /// The request holds the GPU blocks; the host copy is complete. Ends when it is unpinned.
    Clean = 3,
    /// Nobody needs the GPU blocks, they are still readable; the host copy is readable too.
    /// Ends when the pool hands one of the blocks out, or when the page is pinned again.
    Unpinned = 4,
    /// The block table holds the null block; only the host copy is valid.
    HostOnly = 5,
    /// A sibling connector writes the host block; nothing is readable. Ends with the import.
    Importing = 6,
}

/// The states by name with their numbers, as other languages see them.
pub const STATE_NUMBERS: [(&str, u8); 7] = [
    ("dirty", PageState::Dirty as u8),
    ("spilling", PageState::Spilling as u8),
    ("enqueued", PageState::Enqueued as u8),
    ("clean", PageState::Clean as u8),
    ("unpinned", PageState::Unpinned as u8),
    ("host_only", PageState::HostOnly as u8),
    ("importing", PageState::Importing as u8),
];

/// What happens to one page; commands and acknowledgements reduce to these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageEvent {
    /// A spill of the page was put into a plan.
    SpillPlanned,
    /// Every writer has put the copy in stream order.
    SpillEnqueued,
    /// Some writer has said that it could not copy, and others are not done.
    SpillDoubted,
    /// Every writer has finished the copy.
    SpillCompleted,
    /// Every writer is done and some could not copy; the GPU copy is the only good one.
    SpillFailed,
    /// The request gave up its lease on the GPU blocks.
    Unpinned,
    /// The request took its lease on the GPU blocks again.
    Repinned,
    /// The pool handed one of the GPU blocks to somebody else.
    BlockReused,
    /// A readable GPU copy of a host-only page was found and shared.
    Adopted,
    /// The bytes of an import landed in the host block.
    ImportLanded,
    /// A restore of the page into held GPU blocks was put into a plan, for appending.
    TailRestored,
    /// A restore of the page into held GPU blocks was put into a plan, for reading.
    Restored,
}

impl PageState {
    /// The state after `event`, or `None` where the event cannot happen.
    #[must_use]
    pub const fn after(self, event: PageEvent) -> Option<Self> {
        use PageEvent as E;
        use PageState as S;
        match (self, event) {
            (S::Dirty, E::SpillPlanned) => Some(S::Spilling),
            (S::Spilling, E::SpillEnqueued) => Some(S::Enqueued),
            // OK because a page that is spilling is never released: the GPU copy may be the only one.
            (S::Enqueued, E::SpillDoubted) => Some(S::Spilling),
            // A page released at "enqueued" keeps its place when the copy completes later.
            (S::Enqueued, E::SpillCompleted) => Some(S::Clean),
            (S::Unpinned, E::SpillCompleted) => Some(S::Unpinned),
            (S::HostOnly, E::SpillCompleted) => Some(S::HostOnly),
            (S::Spilling | S::Enqueued, E::SpillFailed) => Some(S::Dirty),
            (S::Enqueued | S::Clean, E::Unpinned) => Some(S::Unpinned),
            (S::Unpinned, E::Repinned) => Some(S::Clean),
            (S::Unpinned, E::BlockReused) => Some(S::HostOnly),
            (S::HostOnly, E::Adopted) => Some(S::Unpinned),
            (S::Importing, E::ImportLanded) => Some(S::HostOnly),
            (S::HostOnly, E::TailRestored) => Some(S::Dirty),
            (S::HostOnly, E::Restored) => Some(S::Clean),
            _ => None,
        }
    }

    /// True if attention can read the page from GPU blocks.
    #[must_use]
    pub const fn is_resident(self) -> bool {
        !matches!(self, Self::HostOnly | Self::Importing)
    }

    /// True if the request holds a lease on the page's GPU blocks.
    #[must_use]
    pub const fn holds_blocks(self) -> bool {
        matches!(self, Self::Dirty | Self::Spilling | Self::Enqueued | Self::Clean)
    }

    /// True if this engine can read the page from the host pool, in stream order.
    #[must_use]
    pub const fn is_host_readable(self) -> bool {
        matches!(self, Self::Enqueued | Self::Clean | Self::Unpinned | Self::HostOnly)
    }
}
