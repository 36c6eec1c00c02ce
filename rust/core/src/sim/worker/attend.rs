// SPDX-License-Identifier: Apache-2.0
//! Owns attention's reads: resolve and copy for verification rows, staging for prefill, and the
//! comparison of every row that is read.

use super::check::{Attended, Difference};
use super::{Batch, BatchItem, Fault, Worker, offset};
use crate::dataplane::{BatchInput, ByteStores, resolve_batch};
use crate::error::{Error, Result};
use crate::ids::{BlockId, HostBlockId};
use crate::index_group::IndexGroup;
use crate::replay::ReplayPlan;
use crate::step::StepPlan;

/// Verification rows are padded to a multiple of this, as a captured graph pads them.
const PADDED_ROWS: usize = 8;

/// Reserved workspace for host rows that a prefill step reads.
#[derive(Debug)]
pub(super) struct Staging {
    /// `[positions]` number of the staging that last held the position.
    stamps: Vec<u64>,
    /// `[positions]` where in the workspace.
    places: Vec<u32>,
    stamp: u64,
    /// `[staged positions][layers of the index group][row_bytes]`.
    workspace: Vec<u8>,
    num_staged: u32,
}

impl Staging {
    pub(super) fn new(positions: usize) -> Self {
        Self {
            stamps: vec![0; positions],
            places: vec![0; positions],
            stamp: 0,
            workspace: Vec::new(),
            num_staged: 0,
        }
    }

    fn clear(&mut self) {
        self.stamp += 1;
        self.num_staged = 0;
        self.workspace.clear();
    }

    /// True if the position is new: the caller appends its rows.
    fn add(&mut self, position: u32) -> bool {
        let at = position as usize;
        if core::mem::replace(&mut self.stamps[at], self.stamp) == self.stamp {
            return false;
        }
        self.places[at] = self.num_staged;
        self.num_staged += 1;
        true
    }

    /// Row of a staged position in one layer of the index group.
    fn row(&self, position: u32, layer_in_group: u32, layers: u32, row_bytes: usize) -> &[u8] {
        let place = self.places[position as usize] as usize;
        let at = (place * layers as usize + layer_in_group as usize) * row_bytes;
        &self.workspace[at..at + row_bytes]
    }
}

impl Worker {
    pub(super) fn attend(&mut self, plan: &StepPlan, batch: &Batch) -> Result<()> {
        let replay = &plan.replay;
        if !replay.request.is_empty() {
            self.drop_rejected(replay, batch)?;
            self.decode(replay, batch)?;
        }
        for item in &batch.items {
            let request = item.request.0 as i32;
            if !replay.request.contains(&request) {
                self.prefill(item)?;
            }
        }
        Ok(())
    }

    /// Rows that were rejected are being written again: no hot slot may go on holding them, and
    /// they do not count as mirrored, because the mirror of their successors may get lost.
    fn drop_rejected(&mut self, replay: &ReplayPlan, batch: &Batch) -> Result<()> {
        let mut host_rows = Vec::new();
        let bs = self.geometry.block_size();
        let dropped = replay.dropped_position.iter().zip(&replay.dropped_rows);
        for (&request, (&position, &rows)) in replay.dropped_request.iter().zip(dropped) {
            let item = batch.items.iter().find(|item| item.request.0 as i32 == request);
            let Some(item) = item else { continue };
            // A drop names the positions that this step computes again, from its first token on.
            debug_assert_eq!(position.unsigned_abs(), item.num_computed);
            for position in position.unsigned_abs()..(position + rows).unsigned_abs() {
                let page = (position / bs) as usize;
                let at = item.state_row * self.tables.max_pages() + page;
                let block = self.tables.host_blocks.get(at).copied().unwrap_or(0);
                if block != 0 {
                    self.mask.unmark(HostBlockId(block), position % bs)?;
                    host_rows.push(i64::from(block) * i64::from(bs) + i64::from(position % bs));
                }
            }
        }
        self.invalidate(&host_rows, &[]);
        Ok(())
    }

    /// Verification rows: each index group resolves, copies its misses, and reads.
    fn decode(&mut self, replay: &ReplayPlan, batch: &Batch) -> Result<()> {
        let top_k = self.topk.top_k as usize;
        let num_rows = replay.row_request.len();
        let padded = num_rows.next_multiple_of(PADDED_ROWS);
        let mut rows = BatchRows::new(self.tables.num_state_rows(), padded);
        let mut selected = Vec::new();
        let mut scratch = Vec::new();
        for (n, &request) in replay.request.iter().enumerate() {
            let (first, end) = (replay.first_row[n] as usize, replay.first_row[n + 1] as usize);
            let item = batch.items.iter().find(|item| item.request.0 as i32 == request);
            let Some(item) = item else { continue };
            rows.add(item, &replay.row_position[first..end]);
            if let Some(indexer) = &mut self.tables.indexers[item.state_row] {
                // OK because a request has a handful of verification rows.
                let count = (end - first) as u32;
                indexer.stream.next_rows(item.num_computed + 1, count, &mut scratch);
                selected.extend_from_slice(&scratch);
            }
        }
        // Padding rows hold a position that exists, which resolve must not look at.
        selected.resize(padded * top_k, 0);
        rows.pad(padded);
        self.flip_newest_row(&rows, batch)?;
        let union_bound = replay.union_bound.iter().map(|&bound| bound.unsigned_abs()).sum();
        for group in self.groups.clone() {
            let mut logical = selected.clone();
            for run in &rows.runs {
                if let Some(indexer) = &self.tables.indexers[run.item.state_row] {
                    let step = &mut logical[run.first * top_k..run.end * top_k];
                    indexer.views[group.id as usize].apply(run.item.num_computed + 1, step);
                }
            }
            self.resolve_and_copy(&group, &rows, num_rows, &logical, union_bound)?;
            self.read_resolved(&group, &rows, &logical)?;
        }
        Ok(())
    }

    fn resolve_and_copy(
        &mut self,
        group: &IndexGroup,
        rows: &BatchRows,
        num_valid_rows: usize,
        logical: &[i32],
        union_bound: u32,
    ) -> Result<()> {
        let kv_group = group.kv_group as usize;
        let input = BatchInput {
            logical_topk: logical,
            top_k: self.topk.top_k as usize,
            row_request: &rows.row_request,
            num_valid_rows,
            seq_len: &rows.seq_len,
            state_row: &rows.state_row,
            residency: &self.tables.residency[kv_group],
            source_block_table: &self.tables.host_blocks,
            pages: self.tables.max_pages(),
            hot_block_table: &self.tables.hot_blocks_of[kv_group],
            block_size: self.geometry.block_size(),
            block_stride_rows: self.stride_rows(),
        };
        let states = &mut self.tables.hot_states[group.id as usize];
        resolve_batch(&input, states, &mut self.resolve_scratch, &mut self.resolved)?;
        let counters = self.resolved.counters;
        if counters.hits + counters.misses > u64::from(union_bound) {
            return Err(Error::Invariant {
                rule: 6,
                what: "distinct host rows of a step against the replay plan's bound",
                got: i64::try_from(counters.hits + counters.misses).unwrap_or(i64::MAX),
                expected: i64::from(union_bound),
            });
        }
        self.hot += counters;
        self.flip_missed_row(group);
        let stride = self.stride_rows();
        let mut stores = ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host)?;
        self.traffic.missed += stores.copy_rows(group, &self.resolved.copies, stride)?;
        Ok(())
    }

    fn read_resolved(
        &mut self,
        group: &IndexGroup,
        rows: &BatchRows,
        logical: &[i32],
    ) -> Result<()> {
        let top_k = self.topk.top_k as usize;
        let stride = self.stride_rows();
        let stores = ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host)?;
        for run in &rows.runs {
            for row in run.first..run.end {
                let positions = logical[row * top_k..(row + 1) * top_k].iter();
                let physical = &self.resolved.physical_topk[row * top_k..(row + 1) * top_k];
                let wanted = positions.filter(|&&position| position >= 0).count();
                // Physical rows are in the order of the positions, but only if none is missing.
                let complete = self.resolved.valid_counts[row].unsigned_abs() as usize == wanted;
                let positions = logical[row * top_k..(row + 1) * top_k].iter();
                let positions = positions.filter(|&&position| position >= 0);
                for (&position, &physical) in positions.zip(physical) {
                    let position = position.unsigned_abs();
                    for layer in group.layers() {
                        let (step, stream) = (self.step, run.item.content.id());
                        let at = Attended { step, stream, position, layer };
                        if complete && physical >= 0 {
                            let bytes = stores.physical_row(layer, physical, stride)?;
                            self.verdict.compare(at, run.item.row(position, layer), bytes);
                        } else {
                            self.verdict.missing(at, Difference::Unresolved);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// A prefill step stages the host rows that its tokens select and reads resident rows where
    /// they lie. The selection of its last token is compared.
    fn prefill(&mut self, item: &BatchItem) -> Result<()> {
        let top_k = self.topk.top_k as usize;
        let end = item.num_computed + item.num_scheduled;
        let reads_host = self.tables.num_resident(item.state_row) < item.num_pages;
        let num_rows = if reads_host { item.num_scheduled } else { 1 };
        let first_seq_len = end - num_rows + 1;
        let mut selected = Vec::new();
        if let Some(indexer) = &mut self.tables.indexers[item.state_row] {
            indexer.stream.next_rows(first_seq_len, num_rows, &mut selected);
        }
        for group in self.groups.clone() {
            let mut logical = selected.clone();
            if let Some(indexer) = &self.tables.indexers[item.state_row] {
                indexer.views[group.id as usize].apply(first_seq_len, &mut logical);
            }
            self.stage(item, &group, &logical);
            let last = logical.len().saturating_sub(top_k);
            for &position in logical[last..].iter().filter(|&&position| position >= 0) {
                self.read_staged(item, &group, position.unsigned_abs())?;
            }
        }
        Ok(())
    }

    fn stage(&mut self, item: &BatchItem, group: &IndexGroup, logical: &[i32]) {
        let row_bytes = self.geometry.row_bytes() as usize;
        self.staging.clear();
        for &position in logical.iter().filter(|&&position| position >= 0) {
            let position = position.unsigned_abs();
            let (resident, host) = self.places(item, group, position);
            let token = position % self.geometry.block_size();
            if !resident.is_null() || host.is_null() || !self.staging.add(position) {
                continue;
            }
            for layer in group.layers() {
                let place = self.geometry.layers()[layer as usize];
                let at = offset(self.geometry.host_row_offset(place, host, token));
                self.staging.workspace.extend_from_slice(&self.host[at..at + row_bytes]);
            }
        }
        self.traffic.staged += self.staging.workspace.len() as u64;
    }

    fn read_staged(&mut self, item: &BatchItem, group: &IndexGroup, position: u32) -> Result<()> {
        let (resident, host) = self.places(item, group, position);
        let token = position % self.geometry.block_size();
        let row_bytes = self.geometry.row_bytes() as usize;
        let stores = ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host)?;
        for (layer_in_group, layer) in (0_u32..).zip(group.layers()) {
            let (step, stream) = (self.step, item.content.id());
            let at = Attended { step, stream, position, layer };
            let bytes = if !resident.is_null() {
                stores.gpu_row(layer, resident, token)?
            } else if !host.is_null() {
                self.staging.row(position, layer_in_group, group.num_layers, row_bytes)
            } else {
                self.verdict.missing(at, Difference::Nowhere);
                continue;
            };
            self.verdict.compare(at, item.row(position, layer), bytes);
        }
        Ok(())
    }

    /// GPU block and host block of a position.
    fn places(&self, item: &BatchItem, group: &IndexGroup, at: u32) -> (BlockId, HostBlockId) {
        let page = (at / self.geometry.block_size()) as usize;
        let at = item.state_row * self.tables.max_pages() + page;
        let resident = self.tables.residency[group.kv_group as usize][at];
        (BlockId(resident), HostBlockId(self.tables.host_blocks[at]))
    }

    /// Rows from one GPU block to the next in a layer's view of the pool.
    fn stride_rows(&self) -> u32 {
        let rows = self.geometry.block_bytes() / u64::from(self.geometry.row_bytes());
        // OK because a block has at most 1,024 rows in each of a few layers.
        rows as u32
    }

    fn flip_newest_row(&mut self, rows: &BatchRows, batch: &Batch) -> Result<()> {
        let Some(run) = rows.runs.first() else { return Ok(()) };
        if !self.fault.strike(Fault::GpuRow) {
            return Ok(());
        }
        let bs = i64::from(self.geometry.block_size());
        let row = batch.slot_mapping[run.item.first_token];
        let mut stores = ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host)?;
        // OK because block ids are int32, and the rest is below the block size.
        let bytes = stores.gpu_row_mut(0, BlockId((row / bs) as i32), (row % bs) as u32)?;
        bytes[0] ^= 1;
        Ok(())
    }

    fn flip_missed_row(&mut self, group: &IndexGroup) {
        let Some(&row) = self.resolved.copies.host_row.first() else { return };
        if self.fault.strike(Fault::HostRow) {
            let bs = self.geometry.block_size();
            let place = self.geometry.layers()[group.leader() as usize];
            let row = row.unsigned_abs();
            // OK because a host row in a copy list is a block id times the block size and more.
            let block = HostBlockId((row / bs) as i32);
            let at = offset(self.geometry.host_row_offset(place, block, row % bs));
            self.host[at] ^= 1;
        }
    }
}

/// Verification rows of one request.
struct RowRun<'b> {
    item: &'b BatchItem,
    first: usize,
    end: usize,
}

/// The batch as a captured graph sees it. Batch requests are numbered by state row, so that the
/// persistent tables serve as the batch's tables.
struct BatchRows<'b> {
    runs: Vec<RowRun<'b>>,
    row_request: Vec<i32>,
    seq_len: Vec<i32>,
    state_row: Vec<i32>,
}

impl<'b> BatchRows<'b> {
    fn new(num_state_rows: usize, num_rows: usize) -> Self {
        Self {
            runs: Vec::new(),
            row_request: Vec::with_capacity(num_rows),
            seq_len: Vec::with_capacity(num_rows),
            state_row: vec![-1; num_state_rows],
        }
    }

    fn add(&mut self, item: &'b BatchItem, positions: &[i32]) {
        let first = self.row_request.len();
        // OK because there are fewer state rows than GPU blocks.
        let state_row = item.state_row as i32;
        self.state_row[item.state_row] = state_row;
        self.row_request.extend(positions.iter().map(|_| state_row));
        self.seq_len.extend(positions.iter().map(|&position| position + 1));
        self.runs.push(RowRun { item, first, end: self.row_request.len() });
    }

    fn pad(&mut self, num_rows: usize) {
        self.row_request.resize(num_rows, -1);
        self.seq_len.resize(num_rows, 0);
    }
}
