// SPDX-License-Identifier: Apache-2.0
//! Owns replay plans: which batch rows verify which request, and what a rejection drops.

/// Verification rows of one step, in batch order, in the shape that a captured graph reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplayPlan {
    /// `[rows]` request of each verification row.
    pub row_request: Vec<i32>,
    /// `[rows]` token position that the row computes.
    pub row_position: Vec<i32>,
    /// `[rows]` 1 if the row is a draft whose KV row may be rejected.
    pub row_provisional: Vec<u8>,
    /// `[requests]` request of each run of rows.
    pub request: Vec<i32>,
    /// `[requests + 1]` first row of each request, then the number of rows.
    pub first_row: Vec<i32>,
    /// `[requests]` most distinct host rows that the request's rows can select together.
    pub union_bound: Vec<i32>,
    /// `[m]` requests whose last step ended in a rejection.
    pub dropped_request: Vec<i32>,
    /// `[m]` first position whose row was rejected.
    pub dropped_position: Vec<i32>,
    /// `[m]` rejected rows from there on.
    pub dropped_rows: Vec<i32>,
}

impl ReplayPlan {
    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        for list in [
            &mut self.row_request,
            &mut self.row_position,
            &mut self.request,
            &mut self.first_row,
            &mut self.union_bound,
            &mut self.dropped_request,
            &mut self.dropped_position,
            &mut self.dropped_rows,
        ] {
            list.clear();
        }
        self.row_provisional.clear();
    }
}
