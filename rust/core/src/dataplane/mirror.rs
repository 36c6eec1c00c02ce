// SPDX-License-Identifier: Apache-2.0
//! Owns which rows of each host block have landed, and which tokens of a step can be mirrored.
//! The bytes are moved by `ByteStores::mirror_rows`.

use super::{check_len, wrong_len};
use crate::error::{ProtocolFault, Result};
use crate::geometry::Geometry;
use crate::ids::{BlockId, HostBlockId};

/// Where one step's tokens lie in both pools. Rows count in blocks of the block size, whatever
/// the stride of a layer's view; -1 is padding.
#[derive(Debug, Clone, Copy)]
pub struct MirrorTokens<'a> {
    /// `[G][tokens]` resident row of each token in each KV cache group.
    pub resident_slot: &'a [i64],
    /// `[tokens]` host row of each token.
    pub host_row: &'a [i64],
}

/// What a mirror did with its tokens; the three add up to their number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MirrorReport {
    /// Tokens copied in every layer.
    pub copied: u64,
    /// Tokens without a resident row in any KV cache group: padding.
    pub skipped: u64,
    /// Tokens with a resident row that could not be copied, because they have no host row or lack
    /// a resident row in some KV cache group. Their pages are not durable.
    pub lost: u64,
}

/// What can be done with one token.
pub(super) enum TokenRows {
    Skipped,
    Lost,
    Real { host_block: HostBlockId, host_token: u32 },
}

impl MirrorTokens<'_> {
    pub(super) fn len(&self) -> usize {
        self.host_row.len()
    }

    /// Checks lengths and that every row lies in its pool, so that the copy cannot fail half way.
    pub(super) fn check(&self, geometry: &Geometry) -> Result<()> {
        let groups = geometry.num_kv_groups() as usize;
        check_len("resident_slot", self.resident_slot.len(), groups * self.len())?;
        let bs = i64::from(geometry.block_size());
        for &row in self.resident_slot {
            if row / bs >= i64::from(geometry.gpu_blocks()) {
                return Err(ProtocolFault::BadBlock { block: BlockId(saturate(row / bs)) }.into());
            }
        }
        for &row in self.host_row {
            if row / bs >= i64::from(geometry.host_blocks()) && row >= bs {
                let block = HostBlockId(saturate(row / bs));
                return Err(ProtocolFault::BadHostBlock { block }.into());
            }
        }
        Ok(())
    }

    pub(super) fn rows(&self, token: usize, geometry: &Geometry) -> TokenRows {
        let bs = i64::from(geometry.block_size());
        let mut resident = self.resident_slot.iter().skip(token).step_by(self.len());
        let groups = geometry.num_kv_groups() as usize;
        // Rows below the block size are -1 or lie in the null block.
        match resident.by_ref().filter(|&&row| row >= bs).count() {
            0 => TokenRows::Skipped,
            real if real == groups && self.host_row[token] >= bs => {
                let row = self.host_row[token];
                // OK because `check` has bounded the block and the rest is under the block size.
                TokenRows::Real {
                    host_block: HostBlockId((row / bs) as i32),
                    host_token: (row % bs) as u32,
                }
            }
            _ => TokenRows::Lost,
        }
    }

    /// GPU block and token in it, for a real token.
    pub(super) fn resident(&self, group: u32, token: usize, geometry: &Geometry) -> (BlockId, u32) {
        let bs = i64::from(geometry.block_size());
        let row = self.resident_slot[group as usize * self.len() + token];
        // OK because `check` has bounded the block and the rest is under the block size.
        (BlockId((row / bs) as i32), (row % bs) as u32)
    }
}

/// One bit for each row of each host block: set when the row has landed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorMask {
    block_size: u32,
    words_per_block: usize,
    words: Vec<u64>,
}

impl MirrorMask {
    /// A mask in which nothing has landed.
    #[must_use]
    pub fn new(host_blocks: u32, block_size: u32) -> Self {
        let words_per_block = block_size.div_ceil(64) as usize;
        let words = vec![0; words_per_block * host_blocks as usize];
        Self { block_size, words_per_block, words }
    }

    /// `[host blocks][ceil(block_size / 64)]` words; row r is bit `r % 64` of word `r / 64`.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// True if every row of the block has landed; false for the null block and unknown blocks.
    #[must_use]
    pub fn is_full(&self, block: HostBlockId) -> bool {
        let rows = self.block_size as usize;
        !block.is_null()
            && self.block(block).is_some_and(|words| {
                words.iter().map(|word| word.count_ones() as usize).sum::<usize>() == rows
            })
    }

    /// Forgets what landed in a block: it was allocated anew.
    ///
    /// # Errors
    /// `Protocol` for the null block and unknown blocks.
    pub fn clear(&mut self, block: HostBlockId) -> Result<()> {
        let range = self.range(block).filter(|_| !block.is_null());
        match range.and_then(|range| self.words.get_mut(range)) {
            Some(words) => words.fill(0),
            None => return Err(ProtocolFault::BadHostBlock { block }.into()),
        }
        Ok(())
    }

    /// Forgets that one row landed: it was a draft that was rejected, and is written again.
    ///
    /// # Errors
    /// `Protocol` for the null block, unknown blocks and tokens past the block's end.
    pub fn unmark(&mut self, block: HostBlockId, token: u32) -> Result<()> {
        if token >= self.block_size {
            return Err(wrong_len("rows of a block", token as usize + 1, self.block_size as usize));
        }
        let range = self.range(block).filter(|_| !block.is_null());
        match range.and_then(|range| self.words.get_mut(range)) {
            Some(words) => words[(token / 64) as usize] &= !(1 << (token % 64)),
            None => return Err(ProtocolFault::BadHostBlock { block }.into()),
        }
        Ok(())
    }

    /// Marks one row, for a block and token that were checked.
    pub(super) fn mark(&mut self, block: HostBlockId, token: u32) {
        let word = block.0 as usize * self.words_per_block + (token / 64) as usize;
        self.words[word] |= 1 << (token % 64);
    }

    pub(super) fn check(&self, geometry: &Geometry) -> Result<()> {
        if self.block_size != geometry.block_size() {
            let (got, expected) = (self.block_size as usize, geometry.block_size() as usize);
            return Err(wrong_len("rows of a mask's block", got, expected));
        }
        let blocks = geometry.host_blocks() as usize;
        check_len("mask words", self.words.len(), blocks * self.words_per_block)
    }

    fn range(&self, block: HostBlockId) -> Option<core::ops::Range<usize>> {
        let first = usize::try_from(block.0).ok()? * self.words_per_block;
        Some(first..first + self.words_per_block)
    }

    fn block(&self, block: HostBlockId) -> Option<&[u64]> {
        self.words.get(self.range(block)?)
    }
}

fn saturate(id: i64) -> i32 {
    i32::try_from(id).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_full_only_with_every_row_at_any_block_size() {
        for block_size in [1, 16, 63, 64, 65, 128] {
            let mut mask = MirrorMask::new(3, block_size);
            for missing in [0, block_size / 2, block_size - 1] {
                mask.clear(HostBlockId(2)).unwrap();
                for token in (0..block_size).filter(|&token| token != missing) {
                    mask.mark(HostBlockId(2), token);
                }
                assert!(!mask.is_full(HostBlockId(2)), "{block_size} without {missing}");
                mask.mark(HostBlockId(2), missing);
                assert!(mask.is_full(HostBlockId(2)), "{block_size}");
                assert!(!mask.is_full(HostBlockId(1)), "the neighbour is untouched");
            }
        }
    }

    #[test]
    fn the_null_block_and_unknown_blocks_are_never_full_and_cannot_be_cleared() {
        let mut mask = MirrorMask::new(2, 1);
        mask.mark(HostBlockId(0), 0);
        for block in [0, 2, -1, i32::MAX] {
            assert!(!mask.is_full(HostBlockId(block)), "{block}");
            assert!(mask.clear(HostBlockId(block)).is_err(), "{block}");
            assert!(mask.unmark(HostBlockId(block), 0).is_err(), "{block}");
        }
    }

    #[test]
    fn a_row_that_is_unmarked_has_not_landed() {
        for block_size in [1, 64, 65, 128] {
            let mut mask = MirrorMask::new(3, block_size);
            for block in [1, 2] {
                (0..block_size).for_each(|token| mask.mark(HostBlockId(block), token));
            }
            let last = block_size - 1;
            mask.unmark(HostBlockId(2), last).unwrap();
            assert!(!mask.is_full(HostBlockId(2)) && mask.is_full(HostBlockId(1)), "{block_size}");
            mask.mark(HostBlockId(2), last);
            assert!(mask.is_full(HostBlockId(2)), "{block_size}");
            assert!(mask.unmark(HostBlockId(2), block_size).is_err());
        }
    }
}
