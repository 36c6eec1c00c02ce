// SPDX-License-Identifier: Apache-2.0
//! Owns the block pools of the embedded engine: who holds which block, and what is reused next.
//! It knows no pages and no residency; under vLLM its place is taken by vLLM's own pools.
//!
//! A block is *leased* (counted holds), *free*, or *unpinned*: nobody holds it, but its contents
//! can still be found, so that handing it out produces a notice. All operations are O(1) a block.

use crate::error::{Error, Pool, ProtocolFault, Result};
use crate::ids::{BlockId, HostBlockId};

const NONE: u32 = u32::MAX;

/// Where a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Leased,
    Free,
    Unpinned,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    holds: u32,
    older: u32,
    newer: u32,
    place: Place,
    /// True if a notice is due when the block is handed out. It outlives the block's time as an
    /// unpinned one: whoever holds it in between changes nothing about who may find its contents.
    watched: bool,
}

/// Doubly linked through `Entry`, oldest first.
#[derive(Debug, Clone, Copy)]
struct Queue {
    oldest: u32,
    newest: u32,
    len: u32,
}

impl Queue {
    const EMPTY: Self = Self { oldest: NONE, newest: NONE, len: 0 };
}

/// One pool of equal blocks, ids from 1; block 0 is the null block and never handed out.
#[derive(Debug, Clone)]
pub struct BlockPool {
    pool: Pool,
    entries: Vec<Entry>,
    free: Queue,
    unpinned: Queue,
    notices: Vec<i32>,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block counted, all free and in order of their ids.
    #[must_use]
    pub fn new(pool: Pool, num_blocks: u32) -> Self {
        let entry =
            Entry { holds: 0, older: NONE, newer: NONE, place: Place::Leased, watched: false };
        let mut this = Self {
            pool,
            entries: vec![entry; num_blocks as usize],
            free: Queue::EMPTY,
            unpinned: Queue::EMPTY,
            notices: Vec::new(),
        };
        for block in 1..num_blocks {
            this.append(block, Place::Free);
        }
        this
    }

    /// Blocks of the pool, the null block not counted.
    #[must_use]
    pub fn num_total(&self) -> u32 {
        // OK because the pool was made from a u32 count.
        (self.entries.len() as u32).saturating_sub(1)
    }

    /// Blocks that nobody holds and whose contents nobody can find.
    #[must_use]
    pub fn num_free(&self) -> u32 {
        self.free.len
    }

    /// Blocks that nobody holds and whose contents can be found.
    #[must_use]
    pub fn num_unpinned(&self) -> u32 {
        self.unpinned.len
    }

    /// Blocks that somebody holds.
    #[must_use]
    pub fn num_leased(&self) -> u32 {
        self.num_total() - self.num_available()
    }

    /// Blocks that could be handed out now.
    #[must_use]
    pub fn num_available(&self) -> u32 {
        self.free.len + self.unpinned.len
    }

    /// Holds on a block; 0 for the null block and unknown ids.
    #[must_use]
    pub fn num_holds(&self, block: i32) -> u32 {
        usize::try_from(block).ok().and_then(|at| self.entries.get(at)).map_or(0, |e| e.holds)
    }

    /// Hands out `count` blocks with one hold each, or none at all and returns false. Free blocks
    /// go first, then unpinned ones, the first unpinned first; for each of those a notice is due.
    #[must_use]
    pub fn allocate(&mut self, count: usize, out: &mut Vec<i32>) -> bool {
        if count > self.num_available() as usize {
            return false;
        }
        for _ in 0..count {
            let queue = if self.free.len > 0 { self.free } else { self.unpinned };
            let block = queue.oldest;
            self.unlink(block);
            let entry = &mut self.entries[block as usize];
            entry.holds = 1;
            // OK because pools have at most i32::MAX blocks.
            let id = block as i32;
            if core::mem::take(&mut entry.watched) {
                self.notices.push(id);
            }
            out.push(id);
        }
        true
    }

    /// Moves the blocks that were handed out although their contents could be found to `out`.
    pub fn take_notices(&mut self, out: &mut Vec<i32>) {
        out.append(&mut self.notices);
    }

    /// Takes one more hold on each block; unpinned ones become leased. Blocks may repeat.
    ///
    /// # Errors
    /// `BadBlock` or `BadHostBlock` for ids outside the pool, `NotLeased` for free blocks;
    /// nothing has changed then.
    pub fn touch(&mut self, blocks: &[i32]) -> Result<()> {
        for &block in blocks {
            let at = self.index(block)?;
            if self.entries[at].place == Place::Free {
                return Err(self.not_leased(block));
            }
        }
        for &block in blocks {
            // OK because the first pass has found every id in the pool.
            let at = block as u32;
            if self.entries[at as usize].place == Place::Unpinned {
                self.unlink(at);
            }
            self.entries[at as usize].holds += 1;
        }
        Ok(())
    }

    /// Gives back one hold on each block. A block that loses its last hold becomes free, or
    /// unpinned if it is watched. Blocks may repeat.
    ///
    /// # Errors
    /// `BadBlock` or `BadHostBlock` for ids outside the pool, `NotLeased` for more returns than
    /// holds; nothing has changed then.
    pub fn free(&mut self, blocks: &[i32]) -> Result<()> {
        for (done, &block) in blocks.iter().enumerate() {
            let fault = match self.index(block) {
                Ok(at) if self.entries[at].holds > 0 => {
                    self.entries[at].holds -= 1;
                    continue;
                }
                Ok(_) => self.not_leased(block),
                Err(error) => error,
            };
            for &earlier in &blocks[..done] {
                self.entries[earlier as usize].holds += 1;
            }
            return Err(fault);
        }
        for &block in blocks {
            // OK because the first pass has found every id in the pool.
            let at = block as u32;
            let entry = self.entries[at as usize];
            if entry.holds == 0 && entry.place == Place::Leased {
                self.append(at, if entry.watched { Place::Unpinned } else { Place::Free });
            }
        }
        Ok(())
    }

    /// Gives back one hold on each block and watches it: a notice is due when it is handed out.
    ///
    /// # Errors
    /// As `free`.
    pub fn unpin(&mut self, blocks: &[i32]) -> Result<()> {
        let mut watched = Vec::new();
        for &block in blocks {
            // Ids outside the pool are left to `free`, which refuses them.
            let Ok(at) = self.index(block) else { continue };
            if !core::mem::replace(&mut self.entries[at].watched, true) {
                watched.push(at);
            }
        }
        self.free(blocks).inspect_err(|_| {
            for at in watched {
                self.entries[at].watched = false;
            }
        })
    }

    /// Watches a leased block, because its contents can be found from now on.
    ///
    /// # Errors
    /// `BadBlock` or `BadHostBlock` for ids outside the pool, `NotLeased` if nobody holds it.
    pub fn watch(&mut self, block: i32) -> Result<()> {
        let at = self.index(block)?;
        if self.entries[at].holds == 0 {
            return Err(self.not_leased(block));
        }
        self.entries[at].watched = true;
        Ok(())
    }

    /// Checks that free, unpinned and leased blocks add up, by walking both queues. For tests and
    /// debug builds.
    ///
    /// # Errors
    /// `Invariant` (rule 1) naming what was found.
    pub fn check_invariants(&self) -> Result<()> {
        let broken = |what, got: u32, expected: u32| {
            let (got, expected) = (i64::from(got), i64::from(expected));
            Err(Error::Invariant { rule: 1, what, got, expected })
        };
        for (queue, place) in [(self.free, Place::Free), (self.unpinned, Place::Unpinned)] {
            let mut found = 0;
            let mut next = queue.oldest;
            while let Some(entry) = self.entries.get(next as usize) {
                if entry.place != place || entry.holds != 0 {
                    return broken("holds of a block in a queue", entry.holds, 0);
                }
                found += 1;
                next = entry.newer;
            }
            if found != queue.len {
                return broken("blocks in a queue", found, queue.len);
            }
        }
        let held = self.entries.iter().filter(|entry| entry.holds > 0).count();
        let leased = self.num_leased();
        if held != leased as usize {
            return broken("blocks with a hold", u32::try_from(held).unwrap_or(NONE), leased);
        }
        Ok(())
    }

    fn index(&self, block: i32) -> Result<usize> {
        let at = usize::try_from(block).ok().filter(|&at| at > 0 && at < self.entries.len());
        at.ok_or_else(|| match self.pool {
            Pool::Gpu => ProtocolFault::BadBlock { block: BlockId(block) }.into(),
            Pool::Host => ProtocolFault::BadHostBlock { block: HostBlockId(block) }.into(),
        })
    }

    fn not_leased(&self, block: i32) -> Error {
        ProtocolFault::NotLeased { pool: self.pool, block }.into()
    }

    fn queue(&mut self, place: Place) -> &mut Queue {
        if place == Place::Free { &mut self.free } else { &mut self.unpinned }
    }

    fn append(&mut self, block: u32, place: Place) {
        let queue = self.queue(place);
        let older = core::mem::replace(&mut queue.newest, block);
        queue.len += 1;
        if older == NONE {
            queue.oldest = block;
        } else {
            self.entries[older as usize].newer = block;
        }
        let entry = &mut self.entries[block as usize];
        (entry.older, entry.newer, entry.place) = (older, NONE, place);
    }

    /// Takes a block off its queue; it counts as leased from here on.
    fn unlink(&mut self, block: u32) {
        let Entry { older, newer, place, .. } = self.entries[block as usize];
        self.entries[block as usize].place = Place::Leased;
        let queue = self.queue(place);
        queue.len -= 1;
        if older == NONE {
            queue.oldest = newer;
        }
        if newer == NONE {
            queue.newest = older;
        }
        if older != NONE {
            self.entries[older as usize].newer = newer;
        }
        if newer != NONE {
            self.entries[newer as usize].older = older;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(num_blocks: u32) -> BlockPool {
        BlockPool::new(Pool::Gpu, num_blocks)
    }

    fn take(pool: &mut BlockPool, count: usize) -> Vec<i32> {
        let mut out = Vec::new();
        assert!(pool.allocate(count, &mut out));
        pool.check_invariants().unwrap();
        out
    }

    fn notices(pool: &mut BlockPool) -> Vec<i32> {
        let mut out = Vec::new();
        pool.take_notices(&mut out);
        out
    }

    #[test]
    fn blocks_are_handed_out_all_or_none_and_never_the_null_block() {
        let mut pool = pool(5);
        assert_eq!((pool.num_total(), pool.num_free()), (4, 4));
        let mut out = Vec::new();
        assert!(!pool.allocate(5, &mut out));
        assert!(out.is_empty());
        assert_eq!(take(&mut pool, 4), [1, 2, 3, 4]);
        assert!(!pool.allocate(1, &mut out));
        assert!(pool.allocate(0, &mut out));
        assert_eq!((pool.num_leased(), pool.num_available()), (4, 0));
        assert_eq!(BlockPool::new(Pool::Host, 0).num_total(), 0);
        assert_eq!(BlockPool::new(Pool::Host, 1).num_available(), 0);
    }

    #[test]
    fn free_blocks_are_reused_before_unpinned_ones_and_those_in_the_order_of_unpinning() {
        let mut pool = pool(6);
        let blocks = take(&mut pool, 5);
        pool.unpin(&[blocks[3], blocks[1]]).unwrap();
        pool.free(&[blocks[4], blocks[0]]).unwrap();
        assert_eq!((pool.num_free(), pool.num_unpinned(), pool.num_leased()), (2, 2, 1));
        assert_eq!(take(&mut pool, 3), [5, 1, 4]);
        assert_eq!(notices(&mut pool), [4]);
        assert_eq!(take(&mut pool, 1), [2]);
        assert_eq!(notices(&mut pool), [2]);
    }

    #[test]
    fn a_block_with_two_holds_is_reused_only_after_both_were_given_back() {
        let mut pool = pool(2);
        take(&mut pool, 1);
        pool.touch(&[1]).unwrap();
        pool.free(&[1]).unwrap();
        assert_eq!((pool.num_available(), pool.num_holds(1)), (0, 1));
        pool.free(&[1]).unwrap();
        assert_eq!(take(&mut pool, 1), [1]);
    }

    #[test]
    fn an_unpinned_block_keeps_its_watch_when_the_last_hold_is_only_freed() {
        // A page is unpinned while its copy still holds the block; the copy's hold ends last.
        let mut pool = pool(2);
        take(&mut pool, 1);
        pool.touch(&[1]).unwrap();
        pool.unpin(&[1]).unwrap();
        pool.free(&[1]).unwrap();
        assert_eq!(pool.num_unpinned(), 1);
        take(&mut pool, 1);
        assert_eq!(notices(&mut pool), [1]);
        // The watch ended with the notice.
        pool.free(&[1]).unwrap();
        assert_eq!(pool.num_free(), 1);
    }

    #[test]
    fn touching_an_unpinned_block_takes_it_out_of_reach() {
        let mut pool = pool(4);
        take(&mut pool, 3);
        pool.unpin(&[1, 2, 3]).unwrap();
        pool.touch(&[2, 2]).unwrap();
        pool.check_invariants().unwrap();
        assert_eq!(take(&mut pool, 2), [1, 3]);
        pool.free(&[2, 2]).unwrap();
        assert_eq!(take(&mut pool, 1), [2]);
        assert_eq!(notices(&mut pool), [1, 3, 2]);
    }

    #[test]
    fn host_blocks_with_findable_contents_are_evicted_least_recently_hit_first() {
        let mut pool = BlockPool::new(Pool::Host, 5);
        let blocks = take(&mut pool, 4);
        for &block in &blocks[..3] {
            pool.watch(block).unwrap();
        }
        pool.free(&blocks).unwrap();
        // A hit of the first one.
        pool.touch(&blocks[..1]).unwrap();
        pool.free(&blocks[..1]).unwrap();
        assert_eq!(take(&mut pool, 4), [4, 2, 3, 1]);
        assert_eq!(notices(&mut pool), [2, 3, 1]);
    }

    #[test]
    fn faults_name_the_block_and_change_nothing() {
        let mut pool = pool(4);
        take(&mut pool, 2);
        let not_leased =
            |block| Error::Protocol(ProtocolFault::NotLeased { pool: Pool::Gpu, block });
        for bad in [0, 4, -1, i32::MAX] {
            let error = Error::Protocol(ProtocolFault::BadBlock { block: BlockId(bad) });
            assert_eq!(pool.free(&[1, bad]), Err(error.clone()));
            assert_eq!(pool.unpin(&[1, bad]), Err(error.clone()));
            assert_eq!(pool.touch(&[1, bad]), Err(error.clone()));
            assert_eq!(pool.watch(bad), Err(error));
        }
        assert_eq!(pool.free(&[1, 2, 1]), Err(not_leased(1)));
        assert_eq!(pool.unpin(&[2, 3]), Err(not_leased(3)));
        assert_eq!(pool.touch(&[1, 3]), Err(not_leased(3)));
        assert_eq!(pool.watch(3), Err(not_leased(3)));
        assert_eq!((pool.num_holds(1), pool.num_holds(2), pool.num_leased()), (1, 1, 2));
        pool.check_invariants().unwrap();
        pool.free(&[1, 2]).unwrap();
        // None of the failed unpins has left a watch behind.
        assert_eq!((pool.num_free(), pool.num_unpinned()), (3, 0));
        assert_eq!(pool.free(&[1]), Err(not_leased(1)), "double free");
    }

    #[test]
    fn any_order_of_operations_conserves_blocks() {
        let mut pool = pool(9);
        let mut state = 1_u32;
        let mut held: Vec<i32> = Vec::new();
        for _ in 0..20_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let pick = (state >> 16) as usize;
            match pick % 5 {
                0 => {
                    let _ = pool.allocate(pick / 5 % 3, &mut held);
                }
                1 if !held.is_empty() => {
                    let block = held[pick / 5 % held.len()];
                    pool.touch(&[block]).unwrap();
                    held.push(block);
                }
                2 if !held.is_empty() => {
                    let block = held.swap_remove(pick / 5 % held.len());
                    pool.unpin(&[block]).unwrap();
                }
                _ if !held.is_empty() => {
                    let block = held.swap_remove(pick / 5 % held.len());
                    pool.free(&[block]).unwrap();
                }
                _ => {}
            }
            pool.check_invariants().unwrap();
            let distinct: std::collections::BTreeSet<_> = held.iter().collect();
            assert_eq!(pool.num_leased() as usize, distinct.len());
        }
    }
}
