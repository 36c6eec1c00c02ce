// SPDX-License-Identifier: Apache-2.0
//! Owns the scalar reference of the data plane: what the kernels must do, on byte slices.
//! Decides nothing about residency, and nothing else in the crate uses it.
//!
//! Ids follow the device contract: tables hold `i32`, block 0 is the null block, -1 means
//! "nothing". A *host row* is `host block x block size + token`. A *physical row* is
//! `GPU block x block_stride_rows + token`, in rows of one layer's view of the pool; the stride is
//! the block size where a view is dense and more where it steps over other layers' pages.
//! A physical or host row that does not fit `i32` is invalid (-1), never wrapped.

mod batch;
mod hot_state;
mod invalidate;
mod mirror;
mod resolve;
mod row_table;
mod stores;

pub use batch::{BatchInput, resolve_batch};
pub use hot_state::HotState;
pub use invalidate::{InvalidateScratch, invalidate};
pub use mirror::{MirrorMask, MirrorReport, MirrorTokens};
pub use resolve::{ResolveInput, ResolveScratch, Resolved, resolve};
pub use stores::ByteStores;

use crate::error::{Error, ProtocolFault, Result};

/// Misses to copy, each request's by ascending host row: two arrays of one length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopyList {
    /// `[n]` host row to read.
    pub host_row: Vec<i32>,
    /// `[n]` physical row to write.
    pub hot_row: Vec<i32>,
}

impl CopyList {
    /// Misses in the list.
    #[must_use]
    pub fn len(&self) -> usize {
        self.host_row.len()
    }

    /// True without misses.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.host_row.is_empty()
    }

    /// Empties the list and keeps its memory.
    pub fn clear(&mut self) {
        self.host_row.clear();
        self.hot_row.clear();
    }

    fn push(&mut self, host_row: i32, hot_row: i32) {
        self.host_row.push(host_row);
        self.hot_row.push(hot_row);
    }
}

/// What resolves counted, each distinct host row once per request and step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Union rows found in a hot slot.
    pub hits: u64,
    /// Union rows not found, those counted in `overflow` included.
    pub misses: u64,
    /// Misses without a victim or without a hot region. The host proves at construction that
    /// there are none, so any is a bug of the host.
    pub overflow: u64,
}

impl core::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.overflow += other.overflow;
    }
}

/// Id of the row `offset` of `block`, or -1 for the null block and for ids that do not fit.
fn row_id(block: i32, rows_per_block: u32, offset: u32) -> i32 {
    if block <= 0 {
        return -1;
    }
    let row = i64::from(block) * i64::from(rows_per_block) + i64::from(offset);
    i32::try_from(row).unwrap_or(-1)
}

fn check_len(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(wrong_len(what, got, expected)) }
}

#[cold]
fn wrong_len(what: &'static str, got: usize, expected: usize) -> Error {
    ProtocolFault::WrongLength { what, got, expected }.into()
}
