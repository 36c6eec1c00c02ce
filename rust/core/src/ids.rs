// SPDX-License-Identifier: Apache-2.0
//! Owns the identifier types: what an integer means is part of its type.

use core::fmt;

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident($repr:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

id_type! {
    /// One admission of one request. Dense, chosen by the engine, and never used again before
    /// the Coordinator has reported it retired: a preempted request is admitted under a fresh id,
    /// so a late acknowledgement can never be taken for a later admission's.
    RequestId(u32)
}
id_type! {
    /// A GPU block of the one pool that all resident and hot KV cache groups share.
    BlockId(i32)
}
id_type! {
    /// A block of the host pool; one host block backs one page of every sparse-MLA layer.
    HostBlockId(i32)
}
id_type! {
    /// One position of a request's block table.
    PageIndex(u32)
}
id_type! {
    /// One copy between GPU and host, named in a `StepPlan` and in acknowledgements.
    TransferId(i64)
}

impl BlockId {
    /// Placeholder block: never leased, freed, written or read as KV.
    pub const NULL: Self = Self(0);

    /// True for the placeholder.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == Self::NULL.0
    }
}

impl HostBlockId {
    /// Placeholder host block: never leased, freed, written or read as KV.
    pub const NULL: Self = Self(0);

    /// True for the placeholder.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == Self::NULL.0
    }
}

impl RequestId {
    /// Ids must be below this, so that tables indexed by id stay within megabytes. A million
    /// admissions at once are far beyond what pools can hold.
    pub const LIMIT: u32 = 1 << 20;

    /// Index of this request in dense per-request tables.
    #[must_use]
    pub const fn index(self) -> usize {
        // OK because usize is at least 32 bits wide on every target that runs vLLM.
        self.0 as usize
    }
}

impl PageIndex {
    /// Index of this page in dense per-page tables.
    #[must_use]
    pub const fn index(self) -> usize {
        // OK because usize is at least 32 bits wide on every target that runs vLLM.
        self.0 as usize
    }
}
