// SPDX-License-Identifier: Apache-2.0
//! Owns leases: counted holds on blocks that end exactly once.
//!
//! A lease is not `Clone`, so the compiler sees to it that it is released at most once; what
//! sees to "at least once" is the invariant that nothing is leased after all requests are gone.

use smallvec::SmallVec;

/// Block ids of one lease; a page of up to eight KV cache groups stays inline.
pub type Blocks = SmallVec<[i32; 8]>;

/// A hold on blocks of one pool.
#[must_use = "a lease that is dropped keeps its blocks for ever"]
#[cfg_attr(any(test, feature = "testing"), derive(Clone))]
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    blocks: Blocks,
}

impl Lease {
    /// Takes one more hold on `blocks`: they are appended to the list that the pool touches.
    pub fn touch(blocks: &[i32], touched: &mut Vec<i32>) -> Self {
        touched.extend_from_slice(blocks);
        Self { blocks: Blocks::from_slice(blocks) }
    }

    /// Takes over a hold that the pool granted with the allocation of `blocks`.
    pub fn adopt(blocks: &[i32]) -> Self {
        Self { blocks: Blocks::from_slice(blocks) }
    }

    /// The blocks held.
    #[must_use]
    pub fn blocks(&self) -> &[i32] {
        &self.blocks
    }

    /// Ends the hold: the blocks are appended to the list that the pool releases.
    pub fn release(self, released: &mut Vec<i32>) {
        released.extend_from_slice(&self.blocks);
    }
}
