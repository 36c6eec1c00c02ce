// SPDX-License-Identifier: Apache-2.0
//! Owns the crate's one error type; what each family means for the caller is in its variants.

use core::fmt;

use crate::ids::{BlockId, HostBlockId, PageIndex, RequestId, TransferId};

/// Result with the crate's error.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Everything that can go wrong. A failing call leaves the object it was made on unchanged.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A setting is out of bounds; raised at construction only.
    #[error("{name} is {got}, expected {expected}; {remedy}")]
    Config {
        /// The setting's name as the user writes it.
        name: &'static str,
        /// The value that was given.
        got: i64,
        /// The bound it breaks.
        expected: Expected,
        /// What to change.
        remedy: &'static str,
    },
    /// A pool cannot hold even one request; raised at construction only.
    #[error("{pool} has {have} blocks, one request needs {need}; {remedy}")]
    Capacity {
        /// Which pool.
        pool: Pool,
        /// Blocks that one request needs.
        need: i64,
        /// Blocks that the pool has, the null block not counted.
        have: i64,
        /// What to change.
        remedy: &'static str,
    },
    /// The caller broke the event protocol: a bug in the engine or the adapter.
    #[error("protocol fault: {0}")]
    Protocol(#[from] ProtocolFault),
    /// An internal rule does not hold: a bug in this crate.
    #[error("invariant {rule} broken: {what} (got {got}, expected {expected})")]
    Invariant {
        /// Number of the rule in the life-cycle section of the README.
        rule: u8,
        /// What was compared.
        what: &'static str,
        /// Value found.
        got: i64,
        /// Value expected.
        expected: i64,
    },
}

/// What an error means for the caller; bindings map each family to one exception class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Change a setting.
    Config,
    /// Give a pool more blocks.
    Capacity,
    /// Mend the engine; the state is as before the call.
    Protocol,
    /// Stop the engine: a bug in this crate.
    Invariant,
}

impl Error {
    /// What the error means for the caller.
    #[must_use]
    pub const fn family(&self) -> Family {
        match self {
            Self::Config { .. } => Family::Config,
            Self::Capacity { .. } => Family::Capacity,
            Self::Protocol(_) => Family::Protocol,
            Self::Invariant { .. } => Family::Invariant,
        }
    }
}

/// The bound that a configuration value breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// The value must be this or more.
    AtLeast(i64),
    /// The value must be this or less.
    AtMost(i64),
    /// The value must be a positive multiple of this.
    MultipleOf(i64),
    /// The value must be exactly this.
    Exactly(i64),
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(bound) => write!(f, "at least {bound}"),
            Self::AtMost(bound) => write!(f, "at most {bound}"),
            Self::MultipleOf(unit) => write!(f, "a positive multiple of {unit}"),
            Self::Exactly(value) => write!(f, "exactly {value}"),
        }
    }
}

/// The two pools that block ids come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pool {
    /// GPU blocks: resident pages, hot regions, indexer pages.
    Gpu,
    /// Pinned host blocks.
    Host,
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "the GPU pool",
            Self::Host => "the host pool",
        })
    }
}

/// How an event contradicts what the Coordinator knows.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolFault {
    /// No admission with this id is live.
    #[error("request {request} is unknown or was freed")]
    UnknownRequest {
        /// The id in the event.
        request: RequestId,
    },
    /// The id is still live, or its last transfers have not ended.
    #[error("request {request} is admitted already or not retired yet")]
    RequestInUse {
        /// The id in the event.
        request: RequestId,
    },
    /// The request's block table would be longer than positions can be counted.
    #[error("request {request} would hold {pages} pages, expected at most {limit}")]
    TooManyPages {
        /// The request.
        request: RequestId,
        /// Pages with this event.
        pages: usize,
        /// Most pages that a request can have.
        limit: u32,
    },
    /// No transfer with this id is in flight: unknown, or acknowledged in full before.
    #[error("transfer {transfer} is unknown or was completed before")]
    UnknownTransfer {
        /// The id in the event.
        transfer: TransferId,
    },
    /// More acknowledgements than ranks that owe one.
    #[error("transfer {transfer} got {got} acknowledgements, expected at most {required}")]
    TooManyAcks {
        /// The transfer acknowledged.
        transfer: TransferId,
        /// Acknowledgements with this event.
        got: u32,
        /// Acknowledgements it needs in all.
        required: u32,
    },
    /// A rank completed a transfer that it never enqueued.
    #[error("transfer {transfer} completed {completed} times but was enqueued {enqueued} times")]
    CompletedBeforeEnqueued {
        /// The transfer acknowledged.
        transfer: TransferId,
        /// Completions with this event.
        completed: u32,
        /// Enqueues so far.
        enqueued: u32,
    },
    /// A number of an event cannot be meant.
    #[error("{what} is {got}, expected {min} to {max}")]
    OutOfRange {
        /// Which number.
        what: &'static str,
        /// Its value.
        got: i64,
        /// Smallest value allowed.
        min: i64,
        /// Largest value allowed.
        max: i64,
    },
    /// An array of an event has the wrong length.
    #[error("{what} has {got} elements, expected {expected}")]
    WrongLength {
        /// Which array.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length its siblings imply.
        expected: usize,
    },
    /// A block id is out of range, or the null block where a real one is needed.
    #[error("GPU block {block} is not a block of this pool")]
    BadBlock {
        /// The id in the event.
        block: BlockId,
    },
    /// A host block id is out of range, or the null block where a real one is needed.
    #[error("host block {block} is not a block of this pool")]
    BadHostBlock {
        /// The id in the event.
        block: HostBlockId,
    },
    /// A block was handed out although a page still needs it.
    #[error("GPU block {block} was handed out although a page still holds it")]
    BlockHeld {
        /// The id in the event.
        block: BlockId,
    },
    /// A host block was handed out although a page or a transfer still uses it.
    #[error("host block {block} was handed out although a page or a transfer still uses it")]
    HostBlockHeld {
        /// The id in the event.
        block: HostBlockId,
    },
    /// A hold was taken on, or given back for, a block that nobody holds.
    #[error("block {block} of {pool} is not leased")]
    NotLeased {
        /// Which pool.
        pool: Pool,
        /// The block.
        block: i32,
    },
    /// Pages must be appended in order.
    #[error("request {request} got page {got}, expected page {expected}")]
    PageOutOfOrder {
        /// The request.
        request: RequestId,
        /// First page in the event.
        got: PageIndex,
        /// Length of its block table.
        expected: PageIndex,
    },
    /// The request holds a hot region already.
    #[error("request {request} holds a hot region already")]
    HotRegionHeld {
        /// The request.
        request: RequestId,
    },
    /// The request reads from the host but holds no hot region, so a miss has nowhere to go.
    #[error("request {request} has host-only pages but no hot region")]
    HotRegionMissing {
        /// The request.
        request: RequestId,
    },
    /// The request computes past the pages it holds.
    #[error("request {request} is scheduled to token {tokens}, its pages hold {capacity}")]
    ScheduledPastPages {
        /// The request.
        request: RequestId,
        /// One past the last token written this step.
        tokens: u64,
        /// Tokens its pages hold.
        capacity: u64,
    },
    /// One request appears twice in one batch.
    #[error("request {request} appears twice in one batch")]
    DuplicateRequest {
        /// The request.
        request: RequestId,
    },
    /// A page is not in a state in which this event can happen.
    #[error("page {page} of request {request} cannot take this event in its state")]
    WrongPageState {
        /// The request.
        request: RequestId,
        /// The page.
        page: PageIndex,
    },
    /// The event needs a host pool, a hot region or imports that this configuration has not.
    #[error("{what} is not part of this configuration")]
    NotConfigured {
        /// What is missing.
        what: &'static str,
    },
    /// The Coordinator was shut down.
    #[error("the coordinator was shut down")]
    ShutDown,
}
