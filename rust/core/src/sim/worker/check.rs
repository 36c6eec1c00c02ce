// SPDX-License-Identifier: Apache-2.0
//! Owns the verdict on attended rows: how many were compared, how many differed, the first one.

use core::fmt;

use crate::sim::content::RowContent;

/// What was wrong with an attended row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// The bytes are not the row's.
    Bytes,
    /// Resolve gave no physical row for a position that exists.
    Unresolved,
    /// The position has neither a GPU block nor a host block.
    Nowhere,
}

/// An attended row that was not what it had to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// Step of the engine.
    pub step: u64,
    /// Stream of the conversation.
    pub stream: u64,
    /// Position of the attended token.
    pub position: u32,
    /// Layer.
    pub layer: u32,
    /// What was wrong.
    pub difference: Difference,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, stream, position, layer, .. } = self;
        let what = match self.difference {
            Difference::Bytes => "has wrong bytes",
            Difference::Unresolved => "was not resolved",
            Difference::Nowhere => "is in neither pool",
        };
        write!(f, "step {step}: row {position} of stream {stream} in layer {layer} {what}")
    }
}

/// Counts of the comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Attended rows compared, one for each layer; missing ones counted.
    pub rows_checked: u64,
    /// Rows among them that were wrong or missing.
    pub mismatches: u64,
    /// The first of those.
    pub first_mismatch: Option<Mismatch>,
}

/// Where a compared row belongs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attended {
    pub(super) step: u64,
    pub(super) stream: u64,
    pub(super) position: u32,
    pub(super) layer: u32,
}

impl Verdict {
    /// Compares one row with its content.
    pub(super) fn compare(&mut self, at: Attended, content: RowContent, row: &[u8]) {
        self.rows_checked += 1;
        if !content.matches(row) {
            self.note(at, Difference::Bytes);
        }
    }

    /// Counts a row that could not be compared.
    pub(super) fn missing(&mut self, at: Attended, difference: Difference) {
        self.rows_checked += 1;
        self.note(at, difference);
    }

    fn note(&mut self, at: Attended, difference: Difference) {
        self.mismatches += 1;
        let Attended { step, stream, position, layer } = at;
        self.first_mismatch.get_or_insert(Mismatch { step, stream, position, layer, difference });
    }
}
