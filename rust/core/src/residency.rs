// SPDX-License-Identifier: Apache-2.0
//! Owns which GPU blocks hold which page, and which requests read them.
//!
//! A *residence* is the G GPU blocks that hold one page's rows. Requests with a common prefix
//! share it: some hold it (they have a lease), others only read it. It ends when the pool hands
//! out one of its blocks, or when nobody can find it any more.

use smallvec::SmallVec;

use crate::ids::{BlockId, HostBlockId, PageIndex, RequestId};

/// Index of a residence; `NONE` where a page has no GPU blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResidenceId(u32);

impl ResidenceId {
    /// No GPU blocks.
    pub const NONE: Self = Self(u32::MAX);

    /// True for `NONE`.
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == u32::MAX
    }

    const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What is known of one residence besides its blocks.
#[derive(Debug, Clone, Hash)]
pub struct Residence {
    /// Host block with the same rows; null without a host pool.
    pub host_block: HostBlockId,
    /// Position of the page, the same for every reader because they share the prefix.
    pub page: PageIndex,
    /// Leases of requests and transfers.
    pub holders: u32,
    /// True while the pool keeps a hold that the next plan ends: the blocks are not free before.
    pub releasing: bool,
    /// Requests whose residency table names the blocks.
    pub readers: SmallVec<[RequestId; 2]>,
}

/// Pages in a run of `by_runs`.
pub const RUN_PAGES: usize = 16;

/// Reorders `blocks`, `[page][G]` in the order in which pages are given up, into runs of
/// `RUN_PAGES` pages, each group by group.
///
/// A group's blocks were mostly handed out together and lie together in the engine's pool, which
/// walks the list: in whole pages it jumps with every block. A reuse that stops inside a run loses
/// up to `RUN_PAGES` pages where it had to lose one; the pages of other runs keep their order.
pub fn by_runs(blocks: &mut [i32], num_groups: usize) {
    let mut pages = Vec::with_capacity(RUN_PAGES * num_groups);
    for run in blocks.chunks_mut(RUN_PAGES * num_groups) {
        pages.clear();
        pages.extend_from_slice(run);
        let by_group = (0..num_groups).flat_map(|group| pages[group..].iter().step_by(num_groups));
        for (to, block) in run.iter_mut().zip(by_group) {
            *to = *block;
        }
    }
}

/// All residences, with the two ways to find one: by GPU block and by host block.
#[derive(Debug, Clone, Hash)]
pub struct Residences {
    num_groups: usize,
    blocks: Vec<i32>,
    entries: Vec<Option<Residence>>,
    vacant: Vec<u32>,
    of_block: Vec<u32>,
    of_host_block: Vec<u32>,
}

impl Residences {
    /// An empty table for pools of these sizes.
    #[must_use]
    pub fn new(num_groups: u32, gpu_blocks: u32, host_blocks: u32) -> Self {
        Self {
            num_groups: num_groups as usize,
            blocks: Vec::new(),
            entries: Vec::new(),
            vacant: Vec::new(),
            of_block: vec![u32::MAX; gpu_blocks as usize],
            of_host_block: vec![u32::MAX; host_blocks as usize],
        }
    }

    /// Residences alive.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    /// Entries of the table, vacant ones counted: at most as many as were ever alive together.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn num_slots(&self) -> usize {
        self.entries.len()
    }

    /// True if no residence is alive.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Alive residences.
    pub fn iter(&self) -> impl Iterator<Item = (ResidenceId, &Residence)> {
        (0_u32..).zip(&self.entries).filter_map(|(id, e)| Some((ResidenceId(id), e.as_ref()?)))
    }

    /// Makes `blocks` the residence of a page, held and read by `request`. It becomes findable by
    /// host block unless another residence of that host block is.
    pub fn insert(
        &mut self,
        blocks: &[i32],
        host_block: HostBlockId,
        page: PageIndex,
        request: RequestId,
    ) -> ResidenceId {
        debug_assert_eq!(blocks.len(), self.num_groups);
        let mut readers = SmallVec::new();
        readers.push(request);
        let entry = Residence { host_block, page, holders: 1, releasing: false, readers };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.entries[id as usize] = Some(entry);
                let at = id as usize * self.num_groups;
                self.blocks[at..at + self.num_groups].copy_from_slice(blocks);
                id
            }
            None => {
                // OK because there are fewer residences than GPU blocks, whose ids are i32.
                let id = self.entries.len() as u32;
                self.entries.push(Some(entry));
                self.blocks.extend_from_slice(blocks);
                id
            }
        };
        for &block in blocks {
            if let Some(slot) = self.of_block.get_mut(index_of(block)) {
                *slot = id;
            }
        }
        self.link(ResidenceId(id));
        ResidenceId(id)
    }

    /// The residence, if it is alive.
    #[must_use]
    pub fn get(&self, id: ResidenceId) -> Option<&Residence> {
        self.entries.get(id.index())?.as_ref()
    }

    /// The residence, if it is alive.
    pub fn get_mut(&mut self, id: ResidenceId) -> Option<&mut Residence> {
        self.entries.get_mut(id.index())?.as_mut()
    }

    /// Its blocks `[G]`; empty for `NONE`.
    #[must_use]
    pub fn blocks(&self, id: ResidenceId) -> &[i32] {
        if id.is_none() {
            return &[];
        }
        let at = id.index() * self.num_groups;
        self.blocks.get(at..at + self.num_groups).unwrap_or(&[])
    }

    /// The residence that a GPU block belongs to.
    #[must_use]
    pub fn of_block(&self, block: BlockId) -> ResidenceId {
        match self.of_block.get(index_of(block.0)) {
            Some(&id) => ResidenceId(id),
            None => ResidenceId::NONE,
        }
    }

    /// The readable GPU copy of a host block.
    #[must_use]
    pub fn of_host_block(&self, block: HostBlockId) -> ResidenceId {
        match self.of_host_block.get(index_of(block.0)) {
            Some(&id) => ResidenceId(id),
            None => ResidenceId::NONE,
        }
    }

    /// Removes a residence; its blocks and host block no longer lead to it.
    pub fn remove(&mut self, id: ResidenceId) -> Option<Residence> {
        let entry = self.entries.get_mut(id.index())?.take()?;
        let at = id.index() * self.num_groups;
        for &block in &self.blocks[at..at + self.num_groups] {
            if let Some(slot) = self.of_block.get_mut(index_of(block)) {
                if *slot == id.0 {
                    *slot = u32::MAX;
                }
            }
        }
        if let Some(slot) = self.of_host_block.get_mut(index_of(entry.host_block.0)) {
            if *slot == id.0 {
                *slot = u32::MAX;
            }
        }
        self.vacant.push(id.0);
        Some(entry)
    }

    /// The host block gets other contents: its residence cannot be found by it any more, and
    /// ends if nobody holds or reads it.
    pub fn forget_host_block(&mut self, block: HostBlockId) {
        let id = self.of_host_block(block);
        let Some(entry) = self.get(id) else { return };
        if entry.holders == 0 && entry.readers.is_empty() {
            self.remove(id);
        } else if let Some(slot) = self.of_host_block.get_mut(index_of(block.0)) {
            *slot = u32::MAX;
        }
    }

    /// Makes the residence impossible to find by its host block: its rows may differ.
    pub fn unlink(&mut self, id: ResidenceId) {
        if let Some(slot) = self.link_of(id) {
            if *slot == id.0 {
                *slot = u32::MAX;
            }
        }
    }

    /// Makes the residence findable by its host block, unless another one is.
    pub fn link(&mut self, id: ResidenceId) {
        if let Some(slot) = self.link_of(id) {
            if *slot == u32::MAX {
                *slot = id.0;
            }
        }
    }

    /// True if the residence is found by its host block.
    #[must_use]
    pub fn is_linked(&self, id: ResidenceId) -> bool {
        self.get(id).is_some_and(|entry| {
            !entry.host_block.is_null() && self.of_host_block(entry.host_block) == id
        })
    }

    fn link_of(&mut self, id: ResidenceId) -> Option<&mut u32> {
        let host = self.get(id)?.host_block;
        if host.is_null() {
            return None;
        }
        self.of_host_block.get_mut(index_of(host.0))
    }

    /// Takes `request` off the readers. The caller decides whether the residence stays.
    pub fn remove_reader(&mut self, id: ResidenceId, request: RequestId) {
        if let Some(entry) = self.get_mut(id) {
            if let Some(at) = entry.readers.iter().position(|reader| *reader == request) {
                entry.readers.swap_remove(at);
            }
        }
    }
}

fn index_of(block: i32) -> usize {
    // OK because negative ids are refused where they enter; usize::MAX is out of any table.
    usize::try_from(block).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bookkeeping_of_a_page_beyond_its_block_ids_fits_into_64_bytes() {
        // Residence entry, plus what a request keeps for each page: host block, residence id,
        // state and three bits.
        let per_page = size_of::<Option<Residence>>() + size_of::<u32>() + 1 + 1;
        assert!(per_page <= 64, "{per_page} bytes");
    }

    #[test]
    fn a_run_is_listed_group_by_group_and_runs_keep_their_order() {
        let num_pages = RUN_PAGES as i32 + 2;
        // Block 10 x page + group.
        let mut blocks: Vec<i32> =
            (0..num_pages).rev().flat_map(|page| [10 * page, 10 * page + 1]).collect();
        by_runs(&mut blocks, 2);
        let run = |pages: core::ops::Range<i32>| {
            let group = move |group| pages.clone().rev().map(move |page| 10 * page + group);
            group(0).chain(group(1))
        };
        let expected: Vec<i32> = run(2..num_pages).chain(run(0..2)).collect();
        assert_eq!(blocks, expected);
        by_runs(&mut [], 2);
    }

    #[test]
    fn a_recycled_host_block_ends_a_copy_that_nobody_reads() {
        let mut table = Residences::new(2, 10, 10);
        let id = table.insert(&[3, 4], HostBlockId(7), PageIndex(0), RequestId(1));
        assert_eq!(table.of_host_block(HostBlockId(7)), id);
        table.forget_host_block(HostBlockId(7));
        assert!(table.get(id).is_some(), "its holder still reads it");
        assert!(table.of_host_block(HostBlockId(7)).is_none());

        let other = table.insert(&[5, 6], HostBlockId(8), PageIndex(0), RequestId(1));
        table.remove_reader(other, RequestId(1));
        table.get_mut(other).unwrap().holders = 0;
        table.forget_host_block(HostBlockId(8));
        assert!(table.get(other).is_none());
        assert!(table.of_block(BlockId(5)).is_none());
    }
}
