// SPDX-License-Identifier: Apache-2.0
//! Owns resolve for one request: logical top-k to physical rows, hot row LRU, copy list.

use super::hot_state::HotState;
use super::row_table::RowTable;
use super::{CopyList, Counters, check_len, row_id, wrong_len};
use crate::error::{ProtocolFault, Result};
use crate::ids::BlockId;

/// One request's verification rows of a step, and where its pages are, for one index group.
#[derive(Debug, Clone, Copy)]
pub struct ResolveInput<'a> {
    /// `[rows][k]` selected positions; -1 is nothing.
    pub logical_topk: &'a [i32],
    /// Positions that each row selects (k).
    pub top_k: usize,
    /// `[rows]` tokens whose rows exist for each verification row.
    pub seq_len: &'a [i32],
    /// `[pages]` GPU block of each page in the index group's KV cache group, 0 if host-only.
    pub residency: &'a [i32],
    /// `[pages]` host block of each page, 0 for none.
    pub host_blocks: &'a [i32],
    /// `[H / block_size]` GPU blocks of the hot region; any null block means "no hot region".
    pub hot_blocks: &'a [i32],
    /// Tokens per block.
    pub block_size: u32,
    /// Rows from one GPU block to the next in a layer's view of the pool.
    pub block_stride_rows: u32,
}

/// What a resolve returns. One request for `resolve`, a batch for `resolve_batch`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resolved {
    /// `[R][k]` physical rows: valid ones first, in the order of the row's top-k, then -1.
    pub physical_topk: Vec<i32>,
    /// `[R]` valid physical rows.
    pub valid_counts: Vec<i32>,
    /// Misses of all requests.
    pub copies: CopyList,
    /// `[requests]` where each request's misses start in `copies`.
    pub copy_first: Vec<u32>,
    /// `[requests]` misses of each request in `copies`, by ascending host row.
    pub copy_count: Vec<u32>,
    /// Counts of this call.
    pub counters: Counters,
}

impl Resolved {
    /// Every output of `rows` verification rows and `requests` requests, set to "nothing".
    pub(super) fn prepare(&mut self, rows: usize, top_k: usize, requests: usize) {
        self.physical_topk.clear();
        self.physical_topk.resize(rows * top_k, -1);
        self.valid_counts.clear();
        self.valid_counts.resize(rows, 0);
        self.copies.clear();
        self.copy_first.clear();
        self.copy_first.resize(requests, 0);
        self.copy_count.clear();
        self.copy_count.resize(requests, 0);
        self.counters = Counters::default();
    }
}

/// Memory that resolves reuse.
#[derive(Debug, Clone, Default)]
pub struct ResolveScratch {
    /// Distinct host rows of the request: the union.
    union: RowTable,
    /// `[rows][k]` where each position was found.
    places: Vec<Place>,
    /// `[union]` physical row of each union row, -1 until it has one.
    hot_row: Vec<i32>,
    /// Misses as (host row, union number).
    misses: Vec<(i32, u32)>,
    /// Hot slots that no row of this step reads, as (last used, hot slot).
    victims: Vec<(u64, u32)>,
    /// State rows that a request of the batch has taken.
    pub(super) seen_state_rows: Vec<bool>,
}

/// Where a selected position was found.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// Nowhere.
    Invalid,
    /// At this physical row.
    Resident(i32),
    /// In the host pool: the number of its host row in the union.
    Host(u32),
}

impl ResolveInput<'_> {
    /// Checks everything that depends on sizes, so that the resolve itself cannot fail half way.
    pub(super) fn check(&self, state: &HotState) -> Result<()> {
        let bs = self.block_size as usize;
        if bs == 0 {
            return Err(wrong_len("block_size", 0, 1));
        }
        if self.block_stride_rows < self.block_size {
            return Err(wrong_len("block_stride_rows", self.block_stride_rows as usize, bs));
        }
        check_len("logical_topk", self.logical_topk.len(), self.seq_len.len() * self.top_k)?;
        check_len("host_blocks", self.host_blocks.len(), self.residency.len())?;
        check_len("hot_blocks", self.hot_blocks.len() * bs, state.hot_rows())?;
        for &block in self.hot_blocks {
            let last = row_id(block, self.block_stride_rows, self.block_size - 1);
            if block != 0 && last < 0 {
                return Err(ProtocolFault::BadBlock { block: BlockId(block) }.into());
            }
        }
        Ok(())
    }

    fn has_hot_region(&self) -> bool {
        !self.hot_blocks.is_empty() && self.hot_blocks.iter().all(|&block| block != 0)
    }

    fn hot_row(&self, hot_slot: u32) -> i32 {
        let block = self.hot_blocks[(hot_slot / self.block_size) as usize];
        row_id(block, self.block_stride_rows, hot_slot % self.block_size)
    }

    /// Finds one position; a host row joins the union.
    #[inline]
    fn find(&self, position: i32, seq_len: i32, union: &mut RowTable) -> Place {
        if position < 0 || position >= seq_len {
            return Place::Invalid;
        }
        // OK because the position is not negative.
        let position = position as u32;
        let (page, offset) = ((position / self.block_size) as usize, position % self.block_size);
        let Some(&resident) = self.residency.get(page) else { return Place::Invalid };
        if resident != 0 {
            return match row_id(resident, self.block_stride_rows, offset) {
                -1 => Place::Invalid,
                row => Place::Resident(row),
            };
        }
        match row_id(self.host_blocks[page], self.block_size, offset) {
            -1 => Place::Invalid,
            row => Place::Host(union.insert(row)),
        }
    }
}

/// Resolves one request's verification rows in one index group and updates its hot state.
///
/// A request without a hot region leaves its state as it is: its whole union counts as missed and
/// as overflow. The table takes 32 KiB at k = 2,048; no allocation once `scratch` and `out` have grown.
///
/// # Errors
/// `Protocol` for arrays whose lengths disagree or a hot block that is no block; nothing changes.
pub fn resolve(
    input: &ResolveInput<'_>,
    state: &mut HotState,
    scratch: &mut ResolveScratch,
    out: &mut Resolved,
) -> Result<()> {
    input.check(state)?;
    out.prepare(input.seq_len.len(), input.top_k, 1);
    out.counters = resolve_request(
        input,
        state,
        scratch,
        &mut out.physical_topk,
        &mut out.valid_counts,
        &mut out.copies,
    );
    // OK because a request misses at most its hot rows.
    out.copy_count[0] = out.copies.len() as u32;
    Ok(())
}

/// The resolve proper, for input that `check` has passed. `physical_topk` and `valid_counts` hold
/// "nothing"; misses are appended to `copies`.
pub(super) fn resolve_request(
    input: &ResolveInput<'_>,
    state: &mut HotState,
    scratch: &mut ResolveScratch,
    physical_topk: &mut [i32],
    valid_counts: &mut [i32],
    copies: &mut CopyList,
) -> Counters {
    scratch.locate(input);
    let mut counters = Counters::default();
    let union = scratch.union.rows().len();
    if union != 0 {
        scratch.hot_row.clear();
        scratch.hot_row.resize(union, -1);
        if input.has_hot_region() {
            state.epoch += 1;
            let hits = scratch.refresh_hits(input, state);
            let assigned = scratch.assign_misses(input, state, copies);
            counters.hits = hits as u64;
            counters.overflow = (union - hits - assigned) as u64;
        } else {
            counters.overflow = union as u64;
        }
        counters.misses = union as u64 - counters.hits;
    }
    scratch.emit(input.top_k, physical_topk, valid_counts);
    counters
}

impl ResolveScratch {
    /// Step 1 and 2: a place for every selected position, and the union of the host rows.
    fn locate(&mut self, input: &ResolveInput<'_>) {
        let Self { union, places, .. } = self;
        union.clear_for(input.logical_topk.len());
        places.clear();
        if input.top_k == 0 {
            return;
        }
        for (topk, &seq_len) in input.logical_topk.chunks_exact(input.top_k).zip(input.seq_len) {
            places.extend(topk.iter().map(|&position| input.find(position, seq_len, union)));
        }
    }

    /// Step 3: union rows that a hot slot holds; their slots get this step's epoch, which also
    /// keeps them from being victims. Returns how many there are.
    fn refresh_hits(&mut self, input: &ResolveInput<'_>, state: &mut HotState) -> usize {
        let mut hits = 0;
        for (hot_slot, (&row, used)) in
            (0_u32..).zip(state.row_map.iter().zip(&mut state.last_used))
        {
            if row < 0 {
                continue;
            }
            if let Some(number) = self.union.get(row) {
                self.hot_row[number as usize] = input.hot_row(hot_slot);
                *used = state.epoch;
                hits += 1;
            }
        }
        hits
    }

    /// Step 4: misses by ascending host row take the oldest hot slots, ties by hot slot. Returns
    /// how many got one.
    fn assign_misses(
        &mut self,
        input: &ResolveInput<'_>,
        state: &mut HotState,
        copies: &mut CopyList,
    ) -> usize {
        let Self { union, hot_row, misses, victims, .. } = self;
        misses.clear();
        misses.extend(
            union
                .rows()
                .iter()
                .zip(0_u32..)
                .zip(hot_row.iter())
                .filter(|&(_, &hot_row)| hot_row < 0)
                .map(|((&row, number), _)| (row, number)),
        );
        if misses.is_empty() {
            return 0;
        }
        misses.sort_unstable();
        victims.clear();
        victims.extend(
            state
                .last_used
                .iter()
                .zip(0_u32..)
                .filter(|&(&used, _)| used != state.epoch)
                .map(|(&used, hot_slot)| (used, hot_slot)),
        );
        // Only as many of the oldest as there are misses have to be in order.
        if misses.len() < victims.len() {
            victims.select_nth_unstable(misses.len());
            victims.truncate(misses.len());
        }
        victims.sort_unstable();
        for (&(row, number), &(_, hot_slot)) in misses.iter().zip(victims.iter()) {
            let physical = input.hot_row(hot_slot);
            state.row_map[hot_slot as usize] = row;
            state.last_used[hot_slot as usize] = state.epoch;
            hot_row[number as usize] = physical;
            copies.push(row, physical);
        }
        misses.len().min(victims.len())
    }

    /// Step 6: valid physical rows first, in the order of the row's top-k.
    fn emit(&self, top_k: usize, physical_topk: &mut [i32], valid_counts: &mut [i32]) {
        if top_k == 0 {
            return;
        }
        for ((places, physical), count) in self
            .places
            .chunks_exact(top_k)
            .zip(physical_topk.chunks_exact_mut(top_k))
            .zip(valid_counts)
        {
            let mut valid = 0;
            for &place in places {
                let row = match place {
                    Place::Invalid => continue,
                    Place::Resident(row) => row,
                    Place::Host(number) => self.hot_row[number as usize],
                };
                if row >= 0 {
                    physical[valid] = row;
                    valid += 1;
                }
            }
            // OK because top-k is an int32 on the device.
            *count = valid as i32;
        }
    }
}
