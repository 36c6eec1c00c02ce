// SPDX-License-Identifier: Apache-2.0
//! Owns hot regions: leased all or nothing in every hot KV cache group, and given back whole.

use crate::lease::Lease;

/// What a request has of its hot region.
#[cfg_attr(any(test, feature = "testing"), derive(Clone))]
#[derive(Debug, Default, Hash)]
pub enum HotRegion {
    /// Nothing: no page of the request may be released.
    #[default]
    None,
    /// All blocks, `[G][blocks per hot group]`; the worker has not been told yet.
    Granted(Lease),
    /// All blocks; the worker has emptied the row map and reads through it.
    Live(Lease),
}

impl HotRegion {
    /// True if the request holds its whole region.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        matches!(self, Self::Granted(_) | Self::Live(_))
    }

    /// Blocks held, `[G][blocks per hot group]`.
    #[must_use]
    pub fn blocks(&self) -> &[i32] {
        match self {
            Self::None => &[],
            Self::Granted(lease) | Self::Live(lease) => lease.blocks(),
        }
    }

    /// Marks a granted region live; true if it was not before.
    pub fn announce(&mut self) -> bool {
        match core::mem::take(self) {
            Self::Granted(lease) => {
                *self = Self::Live(lease);
                true
            }
            other => {
                *self = other;
                false
            }
        }
    }

    /// Gives the region back.
    pub fn take(&mut self) -> Option<Lease> {
        match core::mem::take(self) {
            Self::None => None,
            Self::Granted(lease) | Self::Live(lease) => Some(lease),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_announced_once_and_taken_once() {
        let mut hot = HotRegion::Granted(Lease::adopt(&[4, 5]));
        assert!(hot.is_held() && hot.announce() && !hot.announce());
        assert_eq!(hot.blocks(), [4, 5]);
        let mut freed = Vec::new();
        hot.take().unwrap().release(&mut freed);
        assert_eq!(freed, [4, 5]);
        assert!(!hot.is_held() && hot.take().is_none());
    }
}
