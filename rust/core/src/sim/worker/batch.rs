// SPDX-License-Identifier: Apache-2.0
//! Owns what the engine hands to the worker beside the step plan: tokens, slot mappings, tables.

use crate::ids::RequestId;
use crate::sim::content::{ContentStream, RowContent};

/// One request of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchItem {
    /// The request.
    pub request: RequestId,
    /// Its slot in the persistent tables.
    pub state_row: usize,
    /// Whose tokens it computes.
    pub content: ContentStream,
    /// Tokens computed before.
    pub num_computed: u32,
    /// Tokens computed now, drafts counted.
    pub num_scheduled: u32,
    /// Drafts among them, at the end.
    pub num_drafts: u32,
    /// Drafts that will turn out right.
    pub num_accepted: u32,
    /// Number of this step among the request's steps with drafts.
    pub attempt: u32,
    /// Pages of its block table.
    pub num_pages: u32,
    /// Pages that it had before this step's allocation.
    pub num_old_pages: u32,
    /// Index of its first token in the slot mappings.
    pub first_token: usize,
}

impl BatchItem {
    /// What the row at `position` holds once this step has written its rows.
    #[must_use]
    pub fn row(&self, position: u32, layer: u32) -> RowContent {
        let first_wrong =
            self.num_computed + self.num_scheduled - self.num_drafts + self.num_accepted;
        if position >= first_wrong && self.num_drafts > self.num_accepted {
            return self.content.rejected_row(position, layer, self.attempt);
        }
        self.content.row(position, layer)
    }
}

/// One step's batch. Rows count in blocks of the block size.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Requests in their order.
    pub items: Vec<BatchItem>,
    /// `[G][tokens]` resident row that each token writes.
    pub slot_mapping: Vec<i64>,
    /// `[tokens]` host row of each token, -1 without a host pool.
    pub host_row: Vec<i64>,
    /// GPU blocks handed out for this step, whatever for: their old bytes must not be read.
    pub fresh_gpu_blocks: Vec<i32>,
    /// `(state row, page, host block)` that joined a block table.
    pub new_host_pages: Vec<(usize, u32, i32)>,
}

impl Batch {
    /// Tokens of all requests.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.host_row.len()
    }

    /// Empties the lists and keeps their memory.
    pub fn clear(&mut self) {
        self.items.clear();
        self.slot_mapping.clear();
        self.host_row.clear();
        self.fresh_gpu_blocks.clear();
        self.new_host_pages.clear();
    }
}
