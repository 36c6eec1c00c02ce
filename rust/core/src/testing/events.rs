// SPDX-License-Identifier: Apache-2.0
//! Owns the alphabet of the proofs. Every event is total: picks are taken modulo what there is,
//! and an event that cannot happen now changes nothing, so that any sequence can be shrunk.

use crate::step::FreeReason;

/// What a prefix hit brings besides host blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefixCopies {
    /// Nothing: every page starts host-only.
    None,
    /// The blocks of readable GPU copies where there are any.
    Readable,
    /// Fresh blocks for every page, to be restored.
    Fresh,
}

/// One rank's word about a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ack {
    /// In stream order.
    Enqueued,
    /// Done.
    Completed,
    /// Done, and the bytes cannot be trusted.
    Failed,
}

/// One request of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Item {
    /// Which live request.
    pub pick: u8,
    /// Tokens to compute, cut to what the pages hold.
    pub tokens: u8,
    /// Drafts among them, cut to all but one.
    pub drafts: u8,
    /// Drafts of the request's previous step that were accepted, cut to those there were.
    pub accepted: u8,
}

/// Something that an engine, a worker or a sibling does.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A request without a prefix, with this many pages.
    Admit {
        /// Pages.
        pages: u8,
    },
    /// A request that reuses published pages.
    AdmitPrefix {
        /// Which published page is the last to be reused.
        pick: u8,
        /// What it brings.
        copies: PrefixCopies,
    },
    /// A request whose first pages a sibling fills.
    AdmitImport {
        /// Tokens that the sibling brings.
        tokens: u8,
        /// True if the last page has GPU blocks, to be appended to.
        tail: bool,
    },
    /// An import ends with this many good tokens, or fails.
    EndImport {
        /// Which importing request.
        pick: u8,
        /// Good tokens, cut to those planned; `None` for a failure.
        tokens: Option<u8>,
    },
    /// A live request gets another page.
    Grow {
        /// Which live request.
        pick: u8,
    },
    /// A live request gets a hot region.
    GrantHot {
        /// Which live request.
        pick: u8,
    },
    /// A plan is built, carried out, and the forward pass runs.
    Step {
        /// The batch; repeated requests are dropped.
        items: Vec<Item>,
        /// Restores and host copies of this plan go wrong on the first rank.
        fail_reads: bool,
        /// The first request's rows are not mirrored on the first rank.
        lose_mirror: bool,
    },
    /// A rank speaks about a copy in flight.
    Ack {
        /// Which copy in flight.
        pick: u8,
        /// Which rank.
        rank: u8,
        /// What it says.
        ack: Ack,
    },
    /// A rank reports everything that it has put in stream order and finished, in one batch.
    Report {
        /// Which rank.
        rank: u8,
        /// The first copy that it finishes went wrong.
        fail: bool,
    },
    /// Acknowledgements that must be refused: unknown, repeated, or before their time.
    BadAck {
        /// Which copy in flight, for repeats.
        pick: u8,
        /// What is said.
        ack: Ack,
    },
    /// Somebody else takes GPU blocks.
    Tenant {
        /// How many.
        blocks: u8,
    },
    /// Everybody else gives their GPU blocks back.
    TenantsLeave,
    /// A host-only page gets a host block of its own, with GPU blocks to write it or without.
    Redirect {
        /// Which live request.
        pick: u8,
        /// True with GPU blocks.
        writable: bool,
    },
    /// A request leaves.
    Free {
        /// Which live request.
        pick: u8,
        /// Why.
        reason: FreeReason,
    },
    /// The prefix index is emptied.
    Reset,
    /// The engine stops.
    Shutdown,
}
