// SPDX-License-Identifier: Apache-2.0
//! Owns the persistent device tables of the embedded worker, by state row: residency, host
//! blocks, hot regions, row maps, and the top-k stream of the request that sits there.

use crate::dataplane::HotState;
use crate::error::{ProtocolFault, Result};
use crate::geometry::Geometry;
use crate::ids::{PageIndex, RequestId};
use crate::sim::topk::{GroupView, TopkParams, TopkStream};

const NO_STATE_ROW: usize = usize::MAX;

/// The indexer of one request: one stream, seen by each index group in its own way.
#[derive(Debug)]
pub(super) struct Indexer {
    pub(super) stream: TopkStream,
    pub(super) views: Vec<GroupView>,
}

/// Tables with one row for each request that can run.
#[derive(Debug)]
pub(super) struct Tables {
    max_pages: usize,
    hot_blocks: usize,
    /// `[ids seen]` state row of each running request.
    state_rows: Vec<usize>,
    /// `[state rows]` request that sits there.
    pub(super) indexers: Vec<Option<Indexer>>,
    /// `[G][state rows][pages]` GPU block of each page.
    pub(super) residency: Vec<Vec<i32>>,
    /// `[state rows]` pages with a GPU block.
    num_resident: Vec<u32>,
    /// `[state rows][pages]` host block of each page.
    pub(super) host_blocks: Vec<i32>,
    /// `[G][state rows][blocks]` hot regions.
    pub(super) hot_blocks_of: Vec<Vec<i32>>,
    /// `[index groups][state rows]` row maps.
    pub(super) hot_states: Vec<Vec<HotState>>,
}

impl Tables {
    pub(super) fn new(
        geometry: &Geometry,
        index_groups: usize,
        state_rows: usize,
        max_pages: u32,
        hot_rows: u32,
    ) -> Self {
        let groups = geometry.num_kv_groups() as usize;
        let (max_pages, hot_rows) = (max_pages as usize, hot_rows as usize);
        let hot_blocks = hot_rows.div_ceil(geometry.block_size() as usize);
        Self {
            max_pages,
            hot_blocks,
            state_rows: Vec::new(),
            indexers: (0..state_rows).map(|_| None).collect(),
            residency: vec![vec![0; state_rows * max_pages]; groups],
            num_resident: vec![0; state_rows],
            host_blocks: vec![0; state_rows * max_pages],
            hot_blocks_of: vec![vec![0; state_rows * hot_blocks]; groups],
            hot_states: vec![vec![HotState::new(hot_rows); state_rows]; index_groups],
        }
    }

    pub(super) fn num_state_rows(&self) -> usize {
        self.indexers.len()
    }

    pub(super) fn max_pages(&self) -> usize {
        self.max_pages
    }

    /// Blocks of one hot region over all KV cache groups.
    pub(super) fn hot_region_blocks(&self) -> usize {
        self.hot_blocks * self.hot_blocks_of.len()
    }

    pub(super) fn start(
        &mut self,
        request: RequestId,
        state_row: usize,
        topk: TopkParams,
        seed: u64,
    ) -> Result<()> {
        let stream = TopkStream::new(topk, seed)?;
        let groups = 0..u32::try_from(self.hot_states.len()).unwrap_or(u32::MAX);
        let views =
            groups.map(|group| GroupView::new(&topk, seed, group)).collect::<Result<_>>()?;
        if request.index() >= self.state_rows.len() {
            self.state_rows.resize(request.index() + 1, NO_STATE_ROW);
        }
        self.state_rows[request.index()] = state_row;
        self.indexers[state_row] = Some(Indexer { stream, views });
        // The state row's residency is zeroed by the plan, its row maps when a hot region comes.
        let pages = state_row * self.max_pages..(state_row + 1) * self.max_pages;
        self.host_blocks[pages].fill(0);
        Ok(())
    }

    pub(super) fn end(&mut self, request: RequestId) {
        let Some(state_row) = self.state_row_of(request.0 as i32) else { return };
        self.clear_hot_region(request.0 as i32);
        self.indexers[state_row] = None;
        self.state_rows[request.index()] = NO_STATE_ROW;
    }

    /// State row of a running request.
    pub(super) fn state_row_of(&self, request: i32) -> Option<usize> {
        let at = usize::try_from(request).ok()?;
        self.state_rows.get(at).copied().filter(|&row| row != NO_STATE_ROW)
    }

    pub(super) fn set_host_block(&mut self, state_row: usize, page: u32, block: i32) {
        self.host_blocks[state_row * self.max_pages + page as usize] = block;
    }

    pub(super) fn clear_residency(&mut self, request: i32) {
        let Some(state_row) = self.state_row_of(request) else { return };
        for table in &mut self.residency {
            table[state_row * self.max_pages..(state_row + 1) * self.max_pages].fill(0);
        }
        self.num_resident[state_row] = 0;
    }

    pub(super) fn set_residency(&mut self, request: i32, page: i32, blocks: &[i32]) -> Result<()> {
        // OK because ids and pages come from a plan, which names none that is negative.
        let (id, page) = (RequestId(request as u32), PageIndex(page as u32));
        let fault = ProtocolFault::UnknownRequest { request: id };
        let state_row = self.state_row_of(request).ok_or(fault)?;
        if page.index() >= self.max_pages {
            return Err(ProtocolFault::WrongPageState { request: id, page }.into());
        }
        let at = state_row * self.max_pages + page.index();
        let was = self.residency[0][at] != 0;
        for (table, &block) in self.residency.iter_mut().zip(blocks) {
            table[at] = block;
        }
        match (was, blocks[0] != 0) {
            (false, true) => self.num_resident[state_row] += 1,
            (true, false) => self.num_resident[state_row] -= 1,
            _ => {}
        }
        Ok(())
    }

    /// Pages of a state row with a GPU block.
    pub(super) fn num_resident(&self, state_row: usize) -> u32 {
        self.num_resident[state_row]
    }

    pub(super) fn set_hot_region(&mut self, request: i32, blocks: &[i32]) {
        let Some(state_row) = self.state_row_of(request) else { return };
        let per_group = blocks.chunks_exact(self.hot_blocks.max(1));
        for (table, blocks) in self.hot_blocks_of.iter_mut().zip(per_group) {
            table[state_row * self.hot_blocks..][..self.hot_blocks].copy_from_slice(blocks);
        }
    }

    pub(super) fn clear_hot_region(&mut self, request: i32) {
        let Some(state_row) = self.state_row_of(request) else { return };
        for table in &mut self.hot_blocks_of {
            table[state_row * self.hot_blocks..][..self.hot_blocks].fill(0);
        }
    }

    /// A hot region starts with nothing in it.
    pub(super) fn empty_row_maps(&mut self, request: i32) {
        let Some(state_row) = self.state_row_of(request) else { return };
        for states in &mut self.hot_states {
            states[state_row].reset();
        }
    }

    /// True if a row map of the state row names a host row of the request that sits there now.
    pub(super) fn names_own_host_rows(&self, request: i32, block_size: u32) -> bool {
        let Some(state_row) = self.state_row_of(request) else { return false };
        let own = &self.host_blocks[state_row * self.max_pages..][..self.max_pages];
        let bs = i32::try_from(block_size).unwrap_or(i32::MAX);
        let mut rows = self.hot_states.iter().flat_map(|states| states[state_row].row_map());
        rows.any(|&row| row >= bs && own.contains(&(row / bs)))
    }

    /// Row maps of the state rows that read through a hot region.
    pub(super) fn active_hot_states(&mut self) -> impl Iterator<Item = &mut HotState> {
        let Self { hot_states, hot_blocks_of, hot_blocks, .. } = self;
        let (per_request, first) = (*hot_blocks, hot_blocks_of.first());
        hot_states.iter_mut().flat_map(move |states| {
            states.iter_mut().enumerate().filter_map(move |(state_row, state)| {
                let block = first?.get(state_row * per_request)?;
                (*block != 0).then_some(state)
            })
        })
    }
}
