// SPDX-License-Identifier: Apache-2.0
//! Owns the prefix index of the embedded engine: which blocks hold the page with a given key.
//! It holds no blocks; pools watch them and tell when one gets other contents.

use std::collections::HashMap;

use smallvec::SmallVec;

/// Key of no page.
const NO_KEY: u64 = 0;

/// Published pages by key. Keys are chained, so a page is only found with all pages before it.
#[derive(Debug, Clone)]
pub struct PrefixIndex {
    pages: HashMap<u64, SmallVec<[i32; 4]>>,
    /// `[blocks of the pool]` key of the page that the block is part of.
    key_of_block: Vec<u64>,
}

impl PrefixIndex {
    /// An empty index over the blocks of one pool of `num_blocks` blocks.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        Self { pages: HashMap::new(), key_of_block: vec![NO_KEY; num_blocks as usize] }
    }

    /// Blocks of the page with this key.
    #[must_use]
    pub fn get(&self, key: u64) -> Option<&[i32]> {
        self.pages.get(&key).map(SmallVec::as_slice)
    }

    /// Pages published.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// True without pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Publishes a page; false, and nothing happens, if its key is published or one of the blocks
    /// is part of a published page.
    pub fn insert(&mut self, key: u64, blocks: &[i32]) -> bool {
        let part_of_a_page = |&block: &i32| self.key_of(block) != NO_KEY;
        if self.pages.contains_key(&key) || blocks.iter().any(part_of_a_page) {
            return false;
        }
        for &block in blocks {
            self.set_key(block, key);
        }
        self.pages.insert(key, SmallVec::from_slice(blocks));
        true
    }

    /// The pool handed the block out: the page that it was part of is gone.
    pub fn on_reused(&mut self, block: i32) {
        if let Some(blocks) = self.pages.remove(&self.key_of(block)) {
            for block in blocks {
                self.set_key(block, NO_KEY);
            }
        }
    }

    /// Forgets all pages.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.key_of_block.fill(NO_KEY);
    }

    fn key_of(&self, block: i32) -> u64 {
        let at = usize::try_from(block).ok();
        at.and_then(|at| self.key_of_block.get(at)).copied().unwrap_or(NO_KEY)
    }

    fn set_key(&mut self, block: i32, key: u64) {
        let slot = usize::try_from(block).ok().and_then(|at| self.key_of_block.get_mut(at));
        if let Some(slot) = slot {
            *slot = key;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_gone_when_any_of_its_blocks_is_reused() {
        for reused in [3, 4, 5] {
            let mut index = PrefixIndex::new(10);
            assert!(index.insert(77, &[3, 4, 5]));
            assert!(index.insert(78, &[6, 7, 8]));
            index.on_reused(reused);
            assert_eq!((index.get(77), index.len()), (None, 1));
            index.on_reused(reused);
            assert_eq!(index.get(78), Some(&[6, 7, 8][..]));
            assert!(index.insert(79, &[3, 4, 5]), "no block is still taken for the old page's");
        }
    }

    #[test]
    fn the_first_copy_of_a_page_stays_published() {
        let mut index = PrefixIndex::new(10);
        assert!(index.insert(77, &[3]));
        assert!(!index.insert(77, &[4]));
        assert!(!index.insert(78, &[3]));
        index.on_reused(4);
        assert_eq!(index.get(77), Some(&[3][..]));
        index.clear();
        assert!(index.is_empty() && index.insert(78, &[3]));
    }
}
