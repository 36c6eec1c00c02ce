// SPDX-License-Identifier: Apache-2.0
//! Owns the differential fuzz of batched resolve against the naive model, state carried.

use hotpage_core::dataplane::{
    BatchInput, HotState, InvalidateScratch, ResolveScratch, Resolved, invalidate, resolve_batch,
};

use crate::naive::{NaiveInput, NaiveState, naive_resolve};
use crate::rng::Rng;

/// Sizes and tables of one run; tables change a little each step.
struct World {
    block_size: usize,
    stride: usize,
    top_k: usize,
    pages: usize,
    hot_blocks: usize,
    state_rows: usize,
    residency: Vec<i32>,
    /// `[state rows][pages]`: a request keeps its host blocks while it lives.
    host_blocks: Vec<i32>,
    hot_table: Vec<i32>,
}

impl World {
    fn new(rng: &mut Rng) -> Self {
        let block_size = rng.pick(&[1, 2, 4, 16, 64, 128]);
        let top_k = 1 + rng.below(24);
        let hot_blocks = 1 + rng.below(1 + 96 / block_size);
        let pages = 1 + rng.below(1 + 200 / block_size);
        let state_rows = 1 + rng.below(4);
        let stride = block_size * rng.pick(&[1, 1, 4, 21]);
        let mut world = Self {
            block_size,
            stride,
            top_k,
            pages,
            hot_blocks,
            state_rows,
            residency: vec![0; state_rows * pages],
            host_blocks: vec![0; state_rows * pages],
            hot_table: Vec::new(),
        };
        for at in 0..world.residency.len() {
            world.change_page(at, rng);
        }
        world.hot_table = (0..state_rows * hot_blocks).map(|b| 5000 + b as i32).collect();
        world
    }

    fn change_page(&mut self, at: usize, rng: &mut Rng) {
        self.residency[at] = if rng.chance(40) { 1 + rng.below(4000) as i32 } else { 0 };
        // Prefix sharing: two requests may hold one host block.
        self.host_blocks[at] = if rng.chance(90) { 1 + rng.below(300) as i32 } else { 0 };
        // A request never holds one host block twice.
        let first = at / self.pages * self.pages;
        if (first..first + self.pages)
            .any(|other| other != at && self.host_blocks[other] == self.host_blocks[at])
        {
            self.host_blocks[at] = 0;
        }
    }

    fn position(&self, hot: &[i32], rng: &mut Rng) -> i32 {
        let tokens = self.pages * self.block_size;
        match rng.below(20) {
            0 => rng.pick(&[-1, -2, i32::MIN, i32::MAX, tokens as i32, tokens as i32 + 1]),
            1..=11 if !hot.is_empty() => hot[rng.below(hot.len())],
            _ => rng.below(tokens) as i32,
        }
    }
}

/// One step's batch: which requests run, with how many rows, and what they select.
#[derive(Default)]
struct Batch {
    topk: Vec<i32>,
    row_request: Vec<i32>,
    seq_len: Vec<i32>,
    state_row: Vec<i32>,
    host_table: Vec<i32>,
    hot_table: Vec<i32>,
    valid_rows: usize,
}

fn make_batch(world: &World, favourites: &[Vec<i32>], rng: &mut Rng) -> Batch {
    let mut batch = Batch::default();
    let mut order: Vec<usize> = (0..world.state_rows).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, rng.below(i + 1));
    }
    order.truncate(1 + rng.below(world.state_rows));
    for state_row in order {
        let request = batch.state_row.len() as i32;
        let padding = rng.chance(10);
        batch.state_row.push(if padding { -1 } else { state_row as i32 });
        let (pages, hot) = (world.pages, world.hot_blocks);
        batch.host_table.extend(&world.host_blocks[state_row * pages..][..pages]);
        let first_hot = batch.hot_table.len();
        batch.hot_table.extend(&world.hot_table[state_row * hot..][..hot]);
        if rng.chance(5) {
            batch.hot_table[first_hot + rng.below(hot)] = 0;
        }
        for _ in 0..rng.below(5) {
            batch.row_request.push(request);
            let tokens = world.pages * world.block_size;
            batch.seq_len.push(rng.pick(&[0, tokens / 2, tokens, tokens + 7]) as i32);
            for _ in 0..world.top_k {
                batch.topk.push(world.position(&favourites[state_row], rng));
            }
        }
        if rng.chance(20) {
            batch.row_request.push(-1);
            batch.seq_len.push(100);
            batch.topk.extend((0..world.top_k).map(|_| rng.below(50) as i32));
        }
    }
    batch.valid_rows = batch.row_request.len();
    for _ in 0..rng.below(4) {
        // Captured graphs leave request 0 in their padding rows.
        batch.row_request.push(0);
        batch.seq_len.push(i32::MAX);
        batch.topk.extend((0..world.top_k).map(|_| rng.below(50) as i32));
    }
    batch
}

#[test]
fn thousands_of_random_steps_equal_the_naive_model_with_state_carried() {
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(&mut rng);
        let hot_rows = world.hot_blocks * world.block_size;
        let mut states = vec![HotState::new(hot_rows); world.state_rows];
        let mut naive = vec![NaiveState::new(hot_rows); world.state_rows];
        let (mut scratch, mut out) = (ResolveScratch::default(), Resolved::default());
        for step in 0..12 {
            let favourites: Vec<Vec<i32>> = (0..world.state_rows)
                .map(|_| (0..10).map(|_| world.position(&[], &mut rng)).collect())
                .collect();
            let batch = make_batch(&world, &favourites, &mut rng);
            let input = input_of(&world, &batch);
            // Whatever was there before must be overwritten.
            out.physical_topk.fill(123_456);
            out.valid_counts.fill(123_456);
            resolve_batch(&input, &mut states, &mut scratch, &mut out).unwrap();
            compare(&world, &batch, &mut naive, &out, &format!("seed {seed} step {step}"));
            for (ours, theirs) in states.iter().zip(&naive) {
                ours.check_invariants().unwrap();
                let slots: Vec<i64> = theirs.slots.iter().map(|s| s.holds.unwrap_or(-1)).collect();
                let used: Vec<u64> = theirs.slots.iter().map(|s| s.last_used).collect();
                assert_eq!(widen(ours.row_map()), slots, "seed {seed} step {step} row map");
                assert_eq!(ours.last_used(), used, "seed {seed} step {step} last used");
                assert_eq!(ours.epoch(), theirs.epoch, "seed {seed} step {step} epoch");
            }
            between_steps(&mut world, &mut states, &mut naive, &mut rng);
        }
    }
}

fn input_of<'a>(world: &'a World, batch: &'a Batch) -> BatchInput<'a> {
    BatchInput {
        logical_topk: &batch.topk,
        top_k: world.top_k,
        row_request: &batch.row_request,
        num_valid_rows: batch.valid_rows,
        seq_len: &batch.seq_len,
        state_row: &batch.state_row,
        residency: &world.residency,
        source_block_table: &batch.host_table,
        pages: world.pages,
        hot_block_table: &batch.hot_table,
        block_size: world.block_size as u32,
        block_stride_rows: world.stride as u32,
    }
}

/// Pages move, host blocks are recycled, rows are rewritten, requests leave.
fn between_steps(
    world: &mut World,
    states: &mut [HotState],
    naive: &mut [NaiveState],
    rng: &mut Rng,
) {
    for _ in 0..rng.below(3) {
        let at = rng.below(world.residency.len());
        world.change_page(at, rng);
    }
    let recycled: Vec<i32> = (0..rng.below(3)).map(|_| rng.below(300) as i32).collect();
    let rewritten: Vec<i64> =
        (0..rng.below(6)).map(|_| rng.below(300 * world.block_size) as i64 - 1).collect();
    let scratch = &mut InvalidateScratch::default();
    let freed =
        invalidate(states.iter_mut(), &rewritten, &recycled, world.block_size as u32, scratch);
    let mut expected = 0;
    for slot in naive.iter_mut().flat_map(|state| &mut state.slots) {
        let Some(row) = slot.holds else { continue };
        let block = row / world.block_size as i64;
        if rewritten.contains(&row) || recycled.iter().any(|&b| i64::from(b) == block) {
            (slot.holds, slot.last_used) = (None, 0);
            expected += 1;
        }
    }
    assert_eq!(freed, expected);
    if rng.chance(10) {
        let state_row = rng.below(world.state_rows);
        states[state_row].reset();
        naive[state_row] = NaiveState::new(naive[state_row].slots.len());
    }
}

fn compare(world: &World, batch: &Batch, naive: &mut [NaiveState], out: &Resolved, what: &str) {
    let (k, pages, hot) = (world.top_k, world.pages, world.hot_blocks);
    let mut counts = (0, 0, 0);
    let mut seen_rows = vec![false; batch.row_request.len()];
    for (request, &state_row) in batch.state_row.iter().enumerate() {
        let rows: Vec<usize> = (0..batch.valid_rows)
            .filter(|&row| batch.row_request[row] == request as i32 && state_row >= 0)
            .collect();
        let copies = out.copy_first[request] as usize..;
        let copies: Vec<(i64, i64)> = out.copies.host_row[copies.clone()]
            .iter()
            .zip(&out.copies.hot_row[copies])
            .take(out.copy_count[request] as usize)
            .map(|(&host, &hot)| (i64::from(host), i64::from(hot)))
            .collect();
        let Ok(state_row) = usize::try_from(state_row) else {
            assert_eq!(copies, [], "{what} request {request} is padding");
            continue;
        };
        let input = NaiveInput {
            rows: rows
                .iter()
                .map(|&row| (widen(&batch.topk[row * k..][..k]), i64::from(batch.seq_len[row])))
                .collect(),
            resident: widen(&world.residency[state_row * pages..][..pages]),
            host: widen(&batch.host_table[request * pages..][..pages]),
            hot: widen(&batch.hot_table[request * hot..][..hot]),
            block_size: world.block_size as i64,
            stride: world.stride as i64,
        };
        let expected = naive_resolve(&input, &mut naive[state_row]);
        assert_eq!(copies, expected.copies, "{what} request {request} copies");
        for (i, &row) in rows.iter().enumerate() {
            let physical = widen(&out.physical_topk[row * k..][..k]);
            assert_eq!(physical, expected.physical[i], "{what} row {row} physical top-k");
            assert_eq!(out.valid_counts[row] as usize, expected.valid[i], "{what} row {row} count");
            seen_rows[row] = true;
        }
        counts.0 += expected.hits;
        counts.1 += expected.misses;
        counts.2 += expected.overflow;
    }
    for row in (0..seen_rows.len()).filter(|&row| !seen_rows[row]) {
        assert!(out.physical_topk[row * k..][..k].iter().all(|&p| p == -1), "{what} padding {row}");
        assert_eq!(out.valid_counts[row], 0, "{what} padding row {row} count");
    }
    let ours = (out.counters.hits, out.counters.misses, out.counters.overflow);
    assert_eq!(ours, counts, "{what} counters");
    assert_eq!(
        out.copy_count.iter().sum::<u32>() as usize,
        out.copies.len(),
        "{what} the copy list has no other misses"
    );
}

fn widen(ids: &[i32]) -> Vec<i64> {
    ids.iter().copied().map(i64::from).collect()
}
