// SPDX-License-Identifier: Apache-2.0
//! Owns replay plans: which batch rows verify which request, and what a rejection drops.

use crate::ids::RequestId;

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

    /// Adds the `rows` verification rows of a request, the first one at `position`; all but the
    /// first are drafts.
    ///
    /// The union of q rows has at most q x top-k host rows, and no more than there are tokens.
    pub(crate) fn push(&mut self, request: RequestId, position: u32, rows: u32, top_k: u32) {
        // OK because ids and positions are bounded by i32 block counts and model lengths.
        let request = request.0 as i32;
        if self.first_row.is_empty() {
            self.first_row.push(0);
        }
        for row in 0..rows {
            self.row_request.push(request);
            self.row_position.push((position + row) as i32);
            self.row_provisional.push(u8::from(row > 0));
        }
        let bound = rows.saturating_mul(top_k).min(position + rows);
        self.request.push(request);
        self.union_bound.push(bound as i32);
        self.first_row.push(self.row_request.len() as i32);
    }

    /// Notes that rows from `position` on, written by the last step, were rejected: whatever was
    /// derived from them must not be found again.
    pub(crate) fn push_rejection(&mut self, request: RequestId, position: u32, rows: u32) {
        self.dropped_request.push(request.0 as i32);
        self.dropped_position.push(position as i32);
        self.dropped_rows.push(rows as i32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_union_is_bounded_by_the_selections_and_by_the_tokens_that_the_last_row_sees() {
        let mut plan = ReplayPlan::default();
        plan.push(RequestId(7), 2, 2, 8);
        plan.push(RequestId(3), 100, 2, 8);
        assert_eq!((&plan.request[..], &plan.union_bound[..]), (&[7, 3][..], &[4, 16][..]));
        assert_eq!(plan.row_request, [7, 7, 3, 3]);
        assert_eq!(plan.row_position, [2, 3, 100, 101]);
        assert_eq!(plan.row_provisional, [0, 1, 0, 1]);
        assert_eq!(plan.first_row, [0, 2, 4]);
    }
}
