// SPDX-License-Identifier: Apache-2.0
//! Owns resolve for a padded batch, in the shape that a captured graph sees.

use super::hot_state::HotState;
use super::resolve::{ResolveInput, ResolveScratch, Resolved, resolve_request};
use super::{check_len, wrong_len};
use crate::error::{ProtocolFault, Result};
use crate::ids::RequestId;

/// Inputs of one index group's resolve: R verification rows, some of them padding.
#[derive(Debug, Clone, Copy)]
pub struct BatchInput<'a> {
    /// `[R][k]` selected positions; -1 is nothing.
    pub logical_topk: &'a [i32],
    /// Positions that each row selects (k).
    pub top_k: usize,
    /// `[R]` batch request of each row; rows of one request are contiguous; -1 is padding.
    pub row_request: &'a [i32],
    /// Rows from here on are padding, whatever `row_request` says.
    pub num_valid_rows: usize,
    /// `[R]` tokens whose rows exist for each verification row.
    pub seq_len: &'a [i32],
    /// `[requests]` state row of each request; -1 is a padding request.
    pub state_row: &'a [i32],
    /// `[state rows][pages]` GPU block of each page in the index group's KV cache group.
    pub residency: &'a [i32],
    /// `[requests][pages]` host block of each page.
    pub source_block_table: &'a [i32],
    /// Width of the two tables above.
    pub pages: usize,
    /// `[requests][H / block_size]` GPU blocks of each hot region.
    pub hot_block_table: &'a [i32],
    /// Tokens per block.
    pub block_size: u32,
    /// Rows from one GPU block to the next in a layer's view of the pool.
    pub block_stride_rows: u32,
}

/// Rows of one request in the batch.
struct RequestRows<'a> {
    request: usize,
    first_row: usize,
    state_row: usize,
    input: ResolveInput<'a>,
}

/// Resolves every request of the batch; `states` are the index group's, by state row. Padding
/// rows give -1 and count 0 and touch no state.
///
/// # Errors
/// `Protocol` for arrays whose lengths disagree, a state row without a state or with two requests,
/// a request whose rows are not contiguous, or a hot block that is no block; nothing changes.
pub fn resolve_batch(
    input: &BatchInput<'_>,
    states: &mut [HotState],
    scratch: &mut ResolveScratch,
    out: &mut Resolved,
) -> Result<()> {
    input.check(states, scratch)?;
    let (rows, top_k) = (input.row_request.len(), input.top_k);
    out.prepare(rows, top_k, input.state_row.len());
    for run in input.runs(states.len()) {
        let end = run.first_row + run.input.seq_len.len();
        let first_copy = out.copies.len();
        out.counters += resolve_request(
            &run.input,
            &mut states[run.state_row],
            scratch,
            &mut out.physical_topk[run.first_row * top_k..end * top_k],
            &mut out.valid_counts[run.first_row..end],
            &mut out.copies,
        );
        // OK because a batch misses fewer than 2^32 rows.
        out.copy_first[run.request] = first_copy as u32;
        out.copy_count[run.request] = (out.copies.len() - first_copy) as u32;
    }
    Ok(())
}

impl<'a> BatchInput<'a> {
    fn check(&self, states: &[HotState], scratch: &mut ResolveScratch) -> Result<()> {
        let (rows, requests) = (self.row_request.len(), self.state_row.len());
        check_len("logical_topk", self.logical_topk.len(), rows * self.top_k)?;
        check_len("seq_len", self.seq_len.len(), rows)?;
        if self.num_valid_rows > rows {
            return Err(wrong_len("num_valid_rows", self.num_valid_rows, rows));
        }
        check_len("residency", self.residency.len(), states.len() * self.pages)?;
        check_len("source_block_table", self.source_block_table.len(), requests * self.pages)?;
        let hot_blocks = self.hot_blocks_per_request();
        check_len("hot_block_table", self.hot_block_table.len(), requests * hot_blocks)?;
        for &state_row in self.state_row {
            if usize::try_from(state_row).is_ok_and(|row| row >= states.len()) {
                return Err(wrong_len("states", states.len(), state_row as usize + 1));
            }
        }
        // A request whose rows are not contiguous takes its state row twice.
        scratch.seen_state_rows.clear();
        scratch.seen_state_rows.resize(states.len(), false);
        for run in self.runs(states.len()) {
            if core::mem::replace(&mut scratch.seen_state_rows[run.state_row], true) {
                let request = RequestId(u32::try_from(run.request).unwrap_or(u32::MAX));
                return Err(ProtocolFault::DuplicateRequest { request }.into());
            }
            run.input.check(&states[run.state_row])?;
        }
        Ok(())
    }

    fn hot_blocks_per_request(&self) -> usize {
        self.hot_block_table.len() / self.state_row.len().max(1)
    }

    /// Runs of rows that belong to a real request, in row order.
    fn runs(&self, num_states: usize) -> impl Iterator<Item = RequestRows<'a>> {
        let this = *self;
        let mut next_row = 0;
        core::iter::from_fn(move || {
            let run =
                this.row_request[next_row..this.num_valid_rows].chunk_by(|a, b| a == b).next()?;
            let first_row = next_row;
            next_row += run.len();
            Some((run[0], first_row, next_row))
        })
        .filter_map(move |(request, first_row, end)| {
            let request = usize::try_from(request).ok()?;
            let state_row = usize::try_from(*this.state_row.get(request)?).ok()?;
            (state_row < num_states).then(|| this.rows_of(request, state_row, first_row, end))
        })
    }

    fn rows_of(
        &self,
        request: usize,
        state_row: usize,
        first_row: usize,
        end: usize,
    ) -> RequestRows<'a> {
        let (pages, hot_blocks) = (self.pages, self.hot_blocks_per_request());
        let input = ResolveInput {
            logical_topk: &self.logical_topk[first_row * self.top_k..end * self.top_k],
            top_k: self.top_k,
            seq_len: &self.seq_len[first_row..end],
            residency: &self.residency[state_row * pages..][..pages],
            host_blocks: &self.source_block_table[request * pages..][..pages],
            hot_blocks: &self.hot_block_table[request * hot_blocks..][..hot_blocks],
            block_size: self.block_size,
            block_stride_rows: self.block_stride_rows,
        };
        RequestRows { request, first_row, state_row, input }
    }
}
