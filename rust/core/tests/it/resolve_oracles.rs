// SPDX-License-Identifier: Apache-2.0
//! Owns the hand-made oracles of resolve: expected values are written out, not computed.

use hotpage_core::dataplane::{
    BatchInput, Counters, HotState, InvalidateScratch, ResolveInput, ResolveScratch, Resolved,
    invalidate, resolve, resolve_batch,
};
use hotpage_core::error::{Error, ProtocolFault};

/// One request of block size 4 whose page p is host block p + 1 (so position t is host row
/// t + 4) and whose hot region starts at GPU block 10 (so hot slot s is physical row s + 40).
struct Request {
    residency: Vec<i32>,
    host_blocks: Vec<i32>,
    hot_blocks: Vec<i32>,
    stride: u32,
    state: HotState,
    scratch: ResolveScratch,
    out: Resolved,
}

impl Request {
    fn with_hot_rows(hot_rows: usize) -> Self {
        assert_eq!(hot_rows % 4, 0);
        Self {
            residency: vec![0; 16],
            host_blocks: (1..17).collect(),
            hot_blocks: (10..).take(hot_rows / 4).collect(),
            stride: 4,
            state: HotState::new(hot_rows),
            scratch: ResolveScratch::default(),
            out: Resolved::default(),
        }
    }

    /// Resolves rows that may all read 64 tokens.
    fn step<const K: usize>(&mut self, rows: &[[i32; K]]) -> &Resolved {
        self.step_of(rows, &vec![64; rows.len()])
    }

    fn step_of<const K: usize>(&mut self, rows: &[[i32; K]], seq_len: &[i32]) -> &Resolved {
        let input = ResolveInput {
            logical_topk: rows.as_flattened(),
            top_k: K,
            seq_len,
            residency: &self.residency,
            host_blocks: &self.host_blocks,
            hot_blocks: &self.hot_blocks,
            block_size: 4,
            block_stride_rows: self.stride,
        };
        self.out.physical_topk.fill(123_456);
        resolve(&input, &mut self.state, &mut self.scratch, &mut self.out).unwrap();
        self.state.check_invariants().unwrap();
        &self.out
    }
}

fn counters(hits: u64, misses: u64, overflow: u64) -> Counters {
    Counters { hits, misses, overflow }
}

#[test]
fn duplicates_in_a_row_share_one_hot_slot_and_one_copy() {
    let mut r = Request::with_hot_rows(8);
    let out = r.step(&[[9, 2, 9, 9]]);
    assert_eq!(out.physical_topk, [41, 40, 41, 41]);
    assert_eq!((out.valid_counts[0], &out.copies.host_row), (4, &vec![6, 13]));
    assert_eq!((out.counters, &out.copies.hot_row), (counters(0, 2, 0), &vec![40, 41]));
}

#[test]
fn holes_in_the_middle_are_squeezed_out_and_the_order_is_kept() {
    let mut r = Request::with_hot_rows(8);
    r.residency[2] = 3;
    let out = r.step(&[[5, -1, 9, -1, 1, -1]]);
    // Position 9 is token 1 of resident block 3; 5 and 1 are host rows 9 and 5.
    assert_eq!(out.physical_topk, [41, 13, 40, -1, -1, -1]);
    assert_eq!(out.valid_counts, [3]);
}

#[test]
fn all_resident_changes_no_state_and_bumps_no_epoch() {
    let mut r = Request::with_hot_rows(8);
    r.step(&[[1, 2]]);
    let before = r.state.clone();
    r.residency.fill(7);
    assert_eq!(r.step(&[[1, 63]]).physical_topk, [29, 31]);
    assert_eq!((&r.state, r.out.counters), (&before, counters(0, 0, 0)));
    assert!(r.out.copies.is_empty());
}

#[test]
fn all_hit_copies_nothing_and_refreshes_every_age() {
    let mut r = Request::with_hot_rows(4);
    r.step(&[[8, 6, 4, 2]]);
    let out = r.step(&[[2, 4, 6, 8]]);
    assert_eq!(out.physical_topk, [40, 41, 42, 43]);
    assert_eq!((out.counters, out.copies.len()), (counters(4, 0, 0), 0));
    assert_eq!(r.state.last_used(), [2; 4]);
}

#[test]
fn all_miss_replaces_everything() {
    let mut r = Request::with_hot_rows(4);
    r.step(&[[0, 1, 2, 3]]);
    let out = r.step(&[[7, 6, 5, 4]]);
    assert_eq!(out.physical_topk, [43, 42, 41, 40]);
    assert_eq!(out.copies.host_row, [8, 9, 10, 11]);
    assert_eq!((out.counters, r.state.row_map()), (counters(0, 4, 0), &[8, 9, 10, 11][..]));
}

#[test]
fn the_result_depends_on_the_set_not_on_the_order_of_the_selection() {
    let (mut a, mut b) = (Request::with_hot_rows(8), Request::with_hot_rows(8));
    a.step(&[[30, 20, 10, 0], [1, 0, 11, 31]]);
    b.step(&[[31, 11, 1, 0], [0, 10, 30, 20]]);
    assert_eq!((&a.state, &a.out.copies), (&b.state, &b.out.copies));
}

#[test]
fn a_union_that_fills_the_region_exactly_fits_whatever_was_there() {
    let mut r = Request::with_hot_rows(12);
    r.step(&[[50, 51, 52, 53], [54, 55, 56, 57], [58, 59, 60, 61]]);
    // Eleven distinct rows of sixteen selections, each copied once.
    let rows = [[1, 2, 3, 4], [3, 4, 5, 6], [1, 7, 8, 9], [2, 5, 10, 11]];
    let out = r.step(&rows);
    assert_eq!(out.copies.host_row, (5..=15).collect::<Vec<_>>());
    assert_eq!(out.copies.hot_row, (40..=50).collect::<Vec<_>>());
    assert_eq!((out.counters, &out.valid_counts), (counters(0, 11, 0), &vec![4; 4]));
    // Twelve of twelve: one hit, eleven misses.
    r.step(&[[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 1]]);
    assert_eq!(r.out.counters, counters(1, 11, 0));
    assert!(r.out.valid_counts.iter().all(|&n| n == 4));
}

#[test]
fn one_row_too_many_is_unresolved_and_counted_and_no_read_row_is_evicted() {
    let mut r = Request::with_hot_rows(4);
    r.step(&[[2, 9, 0, 1]]);
    // Rows 2 and 9 are hits; misses 3, 30, 40 compete for two victims: the largest loses.
    let out = r.step(&[[2, 3, 40], [9, 30, 40]]);
    assert_eq!(out.physical_topk, [42, 40, -1, 43, 41, -1]);
    assert_eq!((out.counters, &out.valid_counts), (counters(2, 3, 1), &vec![2, 2]));
    assert_eq!(out.copies.host_row, [7, 34]);
    assert_eq!(r.state.row_map(), [7, 34, 6, 13]);
}

#[test]
fn victims_are_the_oldest_and_ties_go_to_the_lower_hot_slot() {
    let mut r = Request::with_hot_rows(8);
    r.step(&[[0, 1, 2, 3]]); // hot slots 0..4, age 1
    r.step(&[[10, 11, 12, 13]]); // hot slots 4..8, age 2
    r.step(&[[1, 3, 11, -1]]); // hot slots 1, 3 and 5, age 3
    let out = r.step(&[[20, 21, 22, 23]]);
    // Age 1: hot slots 0 and 2. Age 2: hot slots 4, 6 and 7, of which the lower two go.
    assert_eq!(out.copies.hot_row, [40, 42, 44, 46]);
    assert_eq!(r.state.last_used(), [4, 3, 4, 3, 4, 3, 4, 2]);
}

#[test]
fn a_freed_hot_slot_is_the_first_victim() {
    let mut r = Request::with_hot_rows(4);
    r.step(&[[0, 1, 2, 3]]);
    // Position 2 is host row 6; host block 1 also holds rows 4, 5 and 7.
    let scratch = &mut InvalidateScratch::default();
    assert_eq!(invalidate([&mut r.state], &[6], &[], 4, scratch), 1);
    assert_eq!(r.step(&[[9]]).copies.hot_row, [42]);
}

#[test]
fn a_recycled_host_block_is_copied_again_and_never_hit() {
    let mut r = Request::with_hot_rows(8);
    r.step(&[[0, 1, 5]]);
    let scratch = &mut InvalidateScratch::default();
    assert_eq!(invalidate([&mut r.state], &[], &[1], 4, scratch), 2);
    // Page 9 gets host block 1 now, so positions 36 and 37 name the rows that 0 and 1 had.
    (r.host_blocks[0], r.host_blocks[9]) = (0, 1);
    let out = r.step(&[[36, 37, 5]]);
    assert_eq!((out.counters, &out.copies.host_row), (counters(1, 2, 0), &vec![4, 5]));
}

#[test]
fn a_rejected_draft_position_finds_the_row_written_after_it() {
    // Drafts at positions 5..9, one accepted: 6..9 are rewritten in place by the next step.
    let mut r = Request::with_hot_rows(8);
    r.step_of(&[[5, 6], [6, 7], [7, 8]], &[9, 9, 9]);
    let rewritten: Vec<i64> = (6..9).map(|position| position + 4).collect();
    let scratch = &mut InvalidateScratch::default();
    assert_eq!(invalidate([&mut r.state], &rewritten, &[], 4, scratch), 3);
    let out = r.step_of(&[[5, 7]], &[9]);
    assert_eq!((out.counters, &out.copies.host_row), (counters(1, 1, 0), &vec![11]));
}

#[test]
fn verification_rows_find_current_rows_that_exist_only_in_resident_pages() {
    // The pages that this step writes are resident; each row sees itself and those before it.
    let mut r = Request::with_hot_rows(8);
    (r.residency[14], r.residency[15]) = (5, 6);
    r.host_blocks[15] = 0;
    let out = r.step_of(&[[60, 61], [61, 62], [62, 63], [63, 60]], &[61, 62, 63, 64]);
    assert_eq!(out.physical_topk, [24, -1, 25, -1, 26, -1, 27, 24]);
    assert_eq!(out.valid_counts, [1, 1, 1, 2]);
}

#[test]
fn ids_outside_the_request_are_invalid_and_short_rows_end_in_minus_one() {
    let mut r = Request::with_hot_rows(8);
    let rows = [[10, 11, i32::MAX, -2, 9, i32::MIN, 64, 65]];
    let out = r.step_of(&rows, &[10]);
    assert_eq!(out.physical_topk, [40, -1, -1, -1, -1, -1, -1, -1]);
    assert_eq!((out.counters, out.valid_counts[0]), (counters(0, 1, 0), 1));
    // A length past the block table: page 16 does not exist.
    let out = r.step_of(&rows, &[i32::MAX]);
    assert_eq!((&out.copies.host_row, out.valid_counts[0]), (&vec![14, 15], 3));
    assert_eq!(r.step_of(&rows, &[0]).valid_counts, [0]);
    assert_eq!(r.step_of(&rows, &[-5]).valid_counts, [0]);
}

#[test]
fn five_tokens_of_a_wide_selection_leave_all_others_at_minus_one() {
    let mut r = Request::with_hot_rows(8);
    let mut row = [-1; 2051];
    for (position, id) in (0..5).zip(&mut row) {
        *id = position;
    }
    let out = r.step_of(&[row], &[5]);
    assert_eq!(out.physical_topk[..5], [40, 41, 42, 43, 44]);
    assert!(out.physical_topk[5..].iter().all(|&p| p == -1));
}

#[test]
fn a_page_without_any_copy_is_invalid_and_block_0_is_never_named() {
    let mut r = Request::with_hot_rows(8);
    r.host_blocks[1] = 0;
    let out = r.step(&[[4, 5, 6, 7, 3]]);
    assert_eq!(out.physical_topk, [40, -1, -1, -1, -1]);
    assert_eq!((out.counters, &out.copies.host_row), (counters(0, 1, 0), &vec![7]));
}

#[test]
fn without_a_hot_region_misses_are_invalid_and_nothing_changes() {
    let mut r = Request::with_hot_rows(8);
    r.step(&[[0, 1]]);
    r.residency[5] = 2;
    for hot_blocks in [[0, 0], [10, 0], [0, 11]] {
        let before = r.state.clone();
        r.hot_blocks = hot_blocks.to_vec();
        let out = r.step(&[[0, 20, 30, 30]]);
        assert_eq!((&out.physical_topk, out.valid_counts[0]), (&vec![8, -1, -1, -1], 1));
        assert_eq!((out.counters, out.copies.len()), (counters(0, 2, 2), 0));
        assert_eq!(r.state, before);
    }
}

#[test]
fn a_strided_view_multiplies_gpu_blocks_by_its_stride_and_host_blocks_by_the_block_size() {
    let mut r = Request::with_hot_rows(8);
    r.stride = 16;
    r.residency[3] = 3;
    let out = r.step(&[[13, 7, 6, 5, 4, 3]]);
    assert_eq!(out.physical_topk, [49, 176, 163, 162, 161, 160]);
    assert_eq!(out.copies.host_row, [7, 8, 9, 10, 11]);
}

#[test]
fn rows_past_int32_are_invalid_instead_of_wrapping() {
    let mut r = Request::with_hot_rows(8);
    r.residency[0] = i32::MAX / 4 + 1;
    r.residency[1] = i32::MAX / 4;
    (r.host_blocks[2], r.host_blocks[3]) = (i32::MAX / 4 + 1, i32::MAX / 4);
    let out = r.step(&[[0, 7, 8, 15]]);
    assert_eq!(out.physical_topk, [i32::MAX, 40, -1, -1]);
    assert_eq!(out.copies.host_row, [i32::MAX]);
}

#[test]
fn the_lru_stays_a_permutation_at_every_region_size() {
    for blocks in [16, 32, 64, 128, 160, 256] {
        let hot_rows = blocks * 4;
        let mut r = Request::with_hot_rows(hot_rows);
        let pages = 2 * blocks + 1;
        r.residency = vec![0; pages];
        r.host_blocks = (1..).take(pages).collect();
        for step in 0..8 {
            let first = step * 37 % (hot_rows + 4);
            let ids: Vec<i32> = (first..first + hot_rows).map(|id| id as i32).collect();
            for chunk in ids.chunks_exact(64) {
                let rows: [[i32; 64]; 1] = [chunk.try_into().unwrap()];
                r.step_of(&rows, &[i32::MAX]);
                assert_eq!(r.out.counters.overflow, 0);
            }
        }
        let mut held: Vec<i32> = r.state.row_map().to_vec();
        held.sort_unstable();
        held.dedup();
        assert_eq!(held.len(), hot_rows, "each hot slot holds a row of its own");
    }
}

/// Two requests of block size 4, one page each, in state rows 1 and 0.
fn batch<'a>(topk: &'a [i32], row_request: &'a [i32], seq_len: &'a [i32]) -> BatchInput<'a> {
    BatchInput {
        logical_topk: topk,
        top_k: 2,
        row_request,
        num_valid_rows: row_request.len(),
        seq_len,
        state_row: &[1, 0],
        residency: &[0, 0],
        source_block_table: &[3, 4],
        pages: 1,
        hot_block_table: &[8, 9],
        block_size: 4,
        block_stride_rows: 4,
    }
}

#[test]
fn padding_rows_leave_request_0_and_every_output_of_theirs_at_nothing() {
    let topk = [0, 1, 1, 2, 3, 3, 2, 2, 3, 0, 1, 1, 3, 2, 0, 0];
    // Five real rows, three of padding that name request 0 as a captured graph does.
    let mut input = batch(&topk, &[0, 0, 0, 1, 1, 0, 0, 0], &[4; 8]);
    input.num_valid_rows = 5;
    let mut states = vec![HotState::new(4); 2];
    let mut out = Resolved::default();
    resolve_batch(&input, &mut states, &mut ResolveScratch::default(), &mut out).unwrap();
    assert_eq!(out.physical_topk[10..], [-1; 6]);
    assert_eq!(out.valid_counts, [2, 2, 2, 2, 2, 0, 0, 0]);
    assert_eq!(out.counters, counters(0, 4 + 3, 0));
    assert_eq!((states[1].epoch(), states[0].epoch()), (1, 1));
    assert_eq!(
        (states[1].row_map(), states[0].row_map()),
        (&[12, 13, 14, 15][..], &[16, 18, 19, -1][..])
    );
    assert_eq!((&out.copy_first, &out.copy_count), (&vec![0, 4], &vec![4, 3]));
    assert_eq!(out.copies.hot_row, [32, 33, 34, 35, 36, 37, 38]);
}

#[test]
fn a_batch_that_drains_to_padding_alone_ends_and_changes_nothing() {
    let mut states = vec![HotState::new(4); 2];
    let (mut scratch, mut out) = (ResolveScratch::default(), Resolved::default());
    let topk = [1; 16];
    let input = batch(&topk, &[0, 0, 0, 0, 1, 1, 1, 1], &[4; 8]);
    resolve_batch(&input, &mut states, &mut scratch, &mut out).unwrap();
    let before = states.clone();
    for (row_request, num_valid_rows) in [(vec![1; 4], 0), (vec![-1; 4], 4), (vec![7; 4], 4)] {
        let mut input = batch(&topk[..8], &row_request, &[4; 4]);
        input.num_valid_rows = num_valid_rows;
        resolve_batch(&input, &mut states, &mut scratch, &mut out).unwrap();
        assert_eq!((&out.physical_topk, &out.valid_counts), (&vec![-1; 8], &vec![0; 4]));
        assert_eq!((out.counters, &states), (counters(0, 0, 0), &before));
    }
    let input = BatchInput { state_row: &[-1, -1], ..batch(&topk, &[0; 8], &[4; 8]) };
    resolve_batch(&input, &mut states, &mut scratch, &mut out).unwrap();
    assert_eq!((out.valid_counts.as_slice(), &states), (&[0; 8][..], &before));
}

#[test]
fn a_faulty_batch_is_refused_and_changes_nothing() {
    let topk = [0, 1, 2, 3, 0, 1];
    let good = batch(&topk, &[0, 1, 1], &[4; 3]);
    let faults = [
        BatchInput { logical_topk: &topk[..4], ..good },
        BatchInput { seq_len: &[4; 2], ..good },
        BatchInput { num_valid_rows: 4, ..good },
        BatchInput { state_row: &[0, 2], ..good },
        BatchInput { residency: &[0], ..good },
        BatchInput { source_block_table: &[3], ..good },
        BatchInput { hot_block_table: &[8, 9, 10, 11], ..good },
        BatchInput { hot_block_table: &[8, -9], ..good },
        BatchInput { hot_block_table: &[8, i32::MAX], ..good },
        BatchInput { block_size: 0, ..good },
        BatchInput { block_stride_rows: 3, ..good },
        BatchInput { row_request: &[0, 1, 0], ..good },
    ];
    let mut states = vec![HotState::new(4); 2];
    let (mut scratch, mut out) = (ResolveScratch::default(), Resolved::default());
    for fault in faults {
        let result = resolve_batch(&fault, &mut states, &mut scratch, &mut out);
        assert!(matches!(result, Err(Error::Protocol(_))), "{fault:?} gave {result:?}");
        assert_eq!(states, vec![HotState::new(4); 2]);
    }
    let split = BatchInput { row_request: &[0, 1, 0], ..good };
    let shared = BatchInput { state_row: &[1, 1], ..good };
    for fault in [split, shared] {
        let result = resolve_batch(&fault, &mut states, &mut scratch, &mut out);
        assert!(matches!(result, Err(Error::Protocol(ProtocolFault::DuplicateRequest { .. }))));
    }
    resolve_batch(&good, &mut states, &mut scratch, &mut out).unwrap();
}
