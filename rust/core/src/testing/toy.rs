// SPDX-License-Identifier: Apache-2.0
//! Owns what stands in for the engine's pools and for the workers: counted blocks, and memory
//! whose rows are tags, so that reading the wrong row shows.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Check, ensure};
use crate::error::Pool;
use crate::pool::BlockPool;
use crate::step::StepPlan;

/// Rows of a block in the toy memory; `block_size` may be less.
pub const MAX_ROWS: usize = 4;

/// The tag of each row of a block.
pub type Rows = [u32; MAX_ROWS];

/// Tag of a row that a failed copy left behind.
pub const GARBAGE: u32 = u32::MAX;

/// Tag of a row that belongs to nobody who is tested.
pub const FOREIGN: u32 = u32::MAX - 1;

/// A pool whose holds can be counted block by block.
pub trait CountedPool {
    /// Holds on each block, the null block counted.
    fn holds(&self) -> Cow<'_, [u32]>;

    /// Checks that the pool is consistent in itself.
    ///
    /// # Errors
    /// Rule 1.
    fn check(&self) -> Check;
}

impl CountedPool for ToyPool {
    fn holds(&self) -> Cow<'_, [u32]> {
        Cow::Borrowed(self.refs())
    }

    fn check(&self) -> Check {
        Self::check(self)
    }
}

impl CountedPool for BlockPool {
    fn holds(&self) -> Cow<'_, [u32]> {
        let blocks = 0..=i32::try_from(self.num_total()).unwrap_or(i32::MAX);
        Cow::Owned(blocks.map(|block| self.num_holds(block)).collect())
    }

    fn check(&self) -> Check {
        let found = self.check_invariants().err();
        ensure(1, found.is_none(), || found.map_or_else(String::new, |error| error.to_string()))
    }
}

/// A pool that counts the holds on each block. It hands blocks out first in, first out, or
/// lowest id first, which makes most block ids interchangeable.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ToyPool {
    pool: Pool,
    refs: Vec<u32>,
    watched: Vec<bool>,
    free: VecDeque<i32>,
    lowest_first: bool,
}

impl ToyPool {
    /// A pool of `blocks` blocks, the null block counted.
    #[must_use]
    pub fn new(pool: Pool, blocks: u32) -> Self {
        let free = (1..i32::try_from(blocks).unwrap_or(1)).collect();
        let len = blocks as usize;
        Self { pool, refs: vec![0; len], watched: vec![false; len], free, lowest_first: false }
    }

    /// Hands out the lowest ids first from now on.
    pub fn hand_out_lowest_first(&mut self) {
        self.lowest_first = true;
        self.free.make_contiguous().sort_unstable();
    }

    /// True if nobody can read the block: it is free and not watched.
    #[must_use]
    pub fn is_blank(&self, block: usize) -> bool {
        self.refs.get(block) == Some(&0) && self.watched.get(block) == Some(&false)
    }

    /// Blocks that can be handed out.
    #[must_use]
    pub fn num_free(&self) -> u32 {
        u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    /// Holds on each block.
    #[must_use]
    pub fn refs(&self) -> &[u32] {
        &self.refs
    }

    /// Hands out `n` blocks and lists those of them that were watched; `None` if there are fewer.
    pub fn try_allocate(&mut self, n: usize, reused: &mut Vec<i32>) -> Option<Vec<i32>> {
        if n > self.free.len() {
            return None;
        }
        let blocks: Vec<i32> = self.free.drain(..n).collect();
        for &block in &blocks {
            let at = block.unsigned_abs() as usize;
            self.refs[at] = 1;
            if core::mem::take(&mut self.watched[at]) {
                reused.push(block);
            }
        }
        Some(blocks)
    }

    /// Takes one more hold on each block.
    ///
    /// # Errors
    /// Rule 1 for a block that is not one of this pool.
    pub fn touch(&mut self, blocks: &[i32]) -> Check {
        for &block in blocks {
            let at = self.index(block)?;
            if self.refs[at] == 0 {
                self.free.retain(|&free| free != block);
            }
            self.refs[at] += 1;
        }
        Ok(())
    }

    /// Ends one hold on each block.
    ///
    /// # Errors
    /// Rule 1 for a block that nobody holds.
    pub fn release(&mut self, blocks: &[i32]) -> Check {
        for &block in blocks {
            let at = self.index(block)?;
            ensure(1, self.refs[at] > 0, || format!("{} block {block} freed twice", self.pool))?;
            self.refs[at] -= 1;
            if self.refs[at] == 0 {
                let sorted = self.free.iter().position(|&free| free > block);
                let at = sorted.filter(|_| self.lowest_first).unwrap_or(self.free.len());
                self.free.insert(at, block);
            }
        }
        Ok(())
    }

    /// Ends one hold on each block and reports when it is handed out.
    ///
    /// # Errors
    /// Rule 1 for a block that nobody holds.
    pub fn unpin(&mut self, blocks: &[i32]) -> Check {
        for &block in blocks {
            let at = self.index(block)?;
            self.watched[at] = true;
        }
        self.release(blocks)
    }

    /// Checks that the pool is consistent: a block is either free or held, the null block neither.
    ///
    /// # Errors
    /// Rule 1.
    pub fn check(&self) -> Check {
        let listed: BTreeSet<i32> = self.free.iter().copied().collect();
        ensure(1, listed.len() == self.free.len(), || {
            format!("{} lists a block twice", self.pool)
        })?;
        for (at, &refs) in self.refs.iter().enumerate() {
            let free = i32::try_from(at).is_ok_and(|block| listed.contains(&block));
            let expected = at != 0 && refs == 0;
            ensure(1, free == expected, || {
                format!("{} block {at} has {refs} holds and free is {free}", self.pool)
            })?;
        }
        Ok(())
    }

    fn index(&self, block: i32) -> Check<usize> {
        let at = usize::try_from(block).unwrap_or(usize::MAX);
        ensure(1, at != 0 && at < self.refs.len(), || {
            format!("block {block} named to {}", self.pool)
        })?;
        Ok(at)
    }
}

/// What one request's state row holds on the workers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct StateRow {
    /// `[page]` GPU blocks; missing where the page is host-only.
    pub residency: BTreeMap<i32, Vec<i32>>,
    /// Blocks of the hot region.
    pub hot: Vec<i32>,
    /// Host blocks whose rows were copied into the hot region, with the rows, by rank.
    pub hot_rows: BTreeMap<(usize, i32), Rows>,
}

/// The workers of all ranks: memory, and the tables that residency deltas keep up to date.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ToyWorker {
    /// `[rank][GPU block]`
    pub gpu: Vec<Vec<Rows>>,
    /// `[writer][host block]`
    pub host: Vec<Vec<Rows>>,
    /// State rows by request.
    pub rows: BTreeMap<i32, StateRow>,
    num_groups: usize,
    hot_region: usize,
}

impl ToyWorker {
    /// Workers with foreign rows everywhere.
    #[must_use]
    pub fn new(config: &crate::config::CoordinatorConfig) -> Self {
        let memory = |blocks: u32, ranks: u32| {
            vec![vec![[FOREIGN; MAX_ROWS]; blocks as usize]; ranks as usize]
        };
        Self {
            gpu: memory(config.gpu_blocks, config.num_ranks),
            host: memory(config.host_blocks, config.num_host_writers),
            rows: BTreeMap::new(),
            num_groups: config.num_kv_groups as usize,
            hot_region: config.hot_region_blocks() as usize,
        }
    }

    /// The rank's view of the host pool: its own, or the only one.
    #[must_use]
    pub fn host_of_rank(&self, rank: usize) -> usize {
        rank.min(self.host.len().saturating_sub(1))
    }

    /// Overwrites GPU blocks on every rank, as a new owner does at any moment.
    pub fn scribble_gpu(&mut self, blocks: &[i32]) {
        for memory in &mut self.gpu {
            for &block in blocks {
                memory[block.unsigned_abs() as usize] = [FOREIGN; MAX_ROWS];
            }
        }
    }

    /// Overwrites host blocks on every writer.
    pub fn scribble_host(&mut self, blocks: &[i32]) {
        for memory in &mut self.host {
            for &block in blocks {
                memory[block.unsigned_abs() as usize] = [FOREIGN; MAX_ROWS];
            }
        }
    }

    /// Applies what a plan says about residency tables and hot regions.
    ///
    /// # Errors
    /// The event protocol, for arrays of unequal length.
    pub fn apply_tables(&mut self, plan: &StepPlan) -> Check {
        for &block in &plan.recycled_host_blocks {
            for row in self.rows.values_mut() {
                row.hot_rows.retain(|&(_, host), _| host != block);
            }
        }
        for &request in &plan.residency.cleared {
            // The row map keeps what another request left there: a new region must empty it.
            let row = self.rows.entry(request).or_default();
            row.residency.clear();
            row.hot.clear();
        }
        let deltas = &plan.residency;
        let n = deltas.request.len();
        ensure(0, deltas.page.len() == n && deltas.blocks.len() == n * self.num_groups, || {
            "residency deltas have unequal lengths".into()
        })?;
        for (at, blocks) in deltas.blocks.chunks(self.num_groups).enumerate() {
            let row = self.rows.entry(deltas.request[at]).or_default();
            if blocks.iter().all(|&block| block == 0) {
                row.residency.remove(&deltas.page[at]);
            } else {
                row.residency.insert(deltas.page[at], blocks.to_vec());
            }
        }
        for &request in &plan.hot_regions_returned {
            let row = self.rows.entry(request).or_default();
            row.hot.clear();
        }
        let hot = &plan.hot_regions;
        ensure(0, hot.blocks.len() == hot.request.len() * self.hot_region, || {
            "hot regions have unequal lengths".into()
        })?;
        for (at, blocks) in hot.blocks.chunks(self.hot_region.max(1)).enumerate() {
            let row = self.rows.entry(hot.request[at]).or_default();
            row.hot = blocks.to_vec();
            row.hot_rows.clear();
        }
        Ok(())
    }
}
