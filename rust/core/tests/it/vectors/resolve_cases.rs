// SPDX-License-Identifier: Apache-2.0
//! Owns the cases of `resolve.json`.

use hotpage_core::dataplane::{
    BatchInput, HotState, InvalidateScratch, ResolveScratch, Resolved, invalidate, resolve_batch,
};
use serde_json::{Value, json};

use super::table;
use crate::rng::Rng;

/// Sizes of one case; its state starts empty and is carried from step to step.
#[derive(Clone, Copy)]
struct Sizes {
    block_size: usize,
    stride: usize,
    top_k: usize,
    hot_rows: usize,
    pages: usize,
    state_rows: usize,
}

#[derive(Clone, Default)]
struct Step {
    reset_state_rows: Vec<i32>,
    rewritten: Vec<i64>,
    recycled: Vec<i32>,
    row_request: Vec<i32>,
    num_valid_rows: usize,
    seq_len: Vec<i32>,
    state_row: Vec<i32>,
    topk: Vec<i32>,
    residency: Vec<i32>,
    source: Vec<i32>,
    hot: Vec<i32>,
}

fn run(name: &str, sizes: Sizes, steps: &[Step]) -> Value {
    let mut states = vec![HotState::new(sizes.hot_rows); sizes.state_rows];
    let (mut scratch, mut out) = (ResolveScratch::default(), Resolved::default());
    let steps: Vec<Value> = steps
        .iter()
        .map(|step| {
            for &row in &step.reset_state_rows {
                states[usize::try_from(row).unwrap()].reset();
            }
            let bs = sizes.block_size as u32;
            let dropped = &mut InvalidateScratch::default();
            let freed = invalidate(states.iter_mut(), &step.rewritten, &step.recycled, bs, dropped);
            resolve_batch(&input(sizes, step), &mut states, &mut scratch, &mut out).unwrap();
            step_json(sizes, step, &states, &out, freed)
        })
        .collect();
    json!({
        "name": name,
        "block_size": sizes.block_size,
        "block_stride_rows": sizes.stride,
        "top_k": sizes.top_k,
        "hot_rows": sizes.hot_rows,
        "pages": sizes.pages,
        "state_rows": sizes.state_rows,
        "steps": steps,
    })
}

fn input(sizes: Sizes, step: &Step) -> BatchInput<'_> {
    BatchInput {
        logical_topk: &step.topk,
        top_k: sizes.top_k,
        row_request: &step.row_request,
        num_valid_rows: step.num_valid_rows,
        seq_len: &step.seq_len,
        state_row: &step.state_row,
        residency: &step.residency,
        source_block_table: &step.source,
        pages: sizes.pages,
        hot_block_table: &step.hot,
        block_size: sizes.block_size as u32,
        block_stride_rows: sizes.stride as u32,
    }
}

fn step_json(sizes: Sizes, step: &Step, states: &[HotState], out: &Resolved, freed: u64) -> Value {
    let of_request = |rows: &[i32]| -> Vec<Vec<i32>> {
        let runs = out.copy_first.iter().zip(&out.copy_count);
        runs.map(|(&first, &n)| rows[first as usize..][..n as usize].to_vec()).collect()
    };
    let row_maps: Vec<&[i32]> = states.iter().map(HotState::row_map).collect();
    let ages: Vec<&[u64]> = states.iter().map(HotState::last_used).collect();
    json!({
        "reset_state_rows": step.reset_state_rows,
        "rewritten_host_rows": step.rewritten,
        "recycled_host_blocks": step.recycled,
        "row_request": step.row_request,
        "num_valid_rows": step.num_valid_rows,
        "seq_len": step.seq_len,
        "state_row": step.state_row,
        "logical_topk": table(&step.topk, sizes.top_k),
        "residency": table(&step.residency, sizes.pages),
        "source_block_table": table(&step.source, sizes.pages),
        "hot_block_table": table(&step.hot, sizes.hot_rows / sizes.block_size),
        "expect": {
            "invalidated": freed,
            "physical_topk": table(&out.physical_topk, sizes.top_k),
            "valid_counts": out.valid_counts,
            "copy_count": out.copy_count,
            "copy_host_row": of_request(&out.copies.host_row),
            "copy_hot_row": of_request(&out.copies.hot_row),
            "hits": out.counters.hits,
            "misses": out.counters.misses,
            "overflow": out.counters.overflow,
            "row_map": row_maps,
            "last_used": ages,
            "epoch": states.iter().map(HotState::epoch).collect::<Vec<_>>(),
        },
    })
}

/// Hand-made cases use one request of 16 pages of 4 tokens: page p is host block p + 1, the hot
/// region starts at GPU block 10.
fn small(hot_rows: usize, top_k: usize) -> Sizes {
    Sizes { block_size: 4, stride: 4, top_k, hot_rows, pages: 16, state_rows: 1 }
}

fn single(sizes: Sizes, rows: &[&[i32]]) -> Step {
    Step {
        row_request: vec![0; rows.len()],
        num_valid_rows: rows.len(),
        seq_len: vec![64; rows.len()],
        state_row: vec![0],
        topk: rows.concat(),
        residency: vec![0; 16],
        source: (1..17).collect(),
        hot: (10..).take(sizes.hot_rows / 4).collect(),
        ..Step::default()
    }
}

fn steps_of(name: &str, hot_rows: usize, steps: &[&[&[i32]]]) -> Value {
    let sizes = small(hot_rows, steps[0][0].len());
    let steps: Vec<Step> = steps.iter().map(|rows| single(sizes, rows)).collect();
    run(name, sizes, &steps)
}

/// As `steps_of`, with the last step changed by `change`.
fn changed(name: &str, hot_rows: usize, steps: &[&[&[i32]]], change: fn(&mut Step)) -> Value {
    let sizes = small(hot_rows, steps[0][0].len());
    let mut steps: Vec<Step> = steps.iter().map(|rows| single(sizes, rows)).collect();
    change(steps.last_mut().unwrap());
    run(name, sizes, &steps)
}

fn lru_cases() -> Vec<Value> {
    let mtp: [&[i32]; 4] = [&[1, 2, 3, 4], &[3, 4, 5, 6], &[1, 7, 8, 9], &[2, 5, 10, 11]];
    vec![
        steps_of("duplicates in a row", 8, &[&[&[9, 2, 9, 9]], &[&[2, 2, 9, 30]]]),
        steps_of("-1 in the middle of a row", 8, &[&[&[5, -1, 9, -1, 1, -1]]]),
        steps_of("all hit", 4, &[&[&[8, 6, 4, 2]], &[&[2, 4, 6, 8]]]),
        steps_of("all miss", 4, &[&[&[0, 1, 2, 3]], &[&[7, 6, 5, 4]]]),
        steps_of("union of 11 over four rows in 12 hot rows", 12, &[&mtp, &mtp]),
        steps_of(
            "union exactly full",
            8,
            &[&[&[40, 41, 42, 43], &[44, 45, 46, 47]], &[&[1, 2, 3, 4], &[5, 6, 7, 40]]],
        ),
        steps_of(
            "union one too many",
            4,
            &[&[&[2, 9, 0], &[1, 1, 1]], &[&[2, 3, 40], &[9, 30, 40]]],
        ),
        steps_of(
            "lru ties go to the lower hot slot",
            8,
            &[&[&[0, 1, 2, 3]], &[&[10, 11, 12, 13]], &[&[1, 3, 11, -1]], &[&[20, 21, 22, 23]]],
        ),
        steps_of(
            "a row order that differs gives the same slots",
            8,
            &[&[&[30, 20, 10, 0], &[0, 31, 11, 1]]],
        ),
        steps_of("the same rows in another order", 8, &[&[&[1, 11, 31, 0], &[0, 10, 20, 30]]]),
    ]
}

fn contract_cases() -> Vec<Value> {
    let out_of_range: &[i32] = &[10, 11, i32::MAX, -2, 9, i32::MIN, 64, 65];
    vec![
        changed("all resident", 8, &[&[&[1, 2]], &[&[1, 63]]], |step| step.residency.fill(7)),
        changed("recycled host block", 8, &[&[&[0, 1, 5]], &[&[36, 37, 5]]], |step| {
            step.recycled = vec![1];
            (step.source[0], step.source[9]) = (0, 1);
        }),
        changed("rejected drafts are read again", 8, &[&[&[5, 6, 7]], &[&[5, 7, 8]]], |step| {
            step.rewritten = vec![-1, 10, 11, 12];
        }),
        changed("ids beyond the length", 8, &[&[out_of_range, out_of_range]], |step| {
            step.seq_len = vec![10, i32::MAX];
        }),
        changed("a length of zero and a negative one", 8, &[&[&[0, 1], &[0, 1]]], |step| {
            step.seq_len = vec![0, -1];
        }),
        changed("null blocks are never read", 8, &[&[&[4, 5, 6, 7, 3]]], |step| step.source[1] = 0),
        changed("no hot region", 8, &[&[&[0, 1, 20]], &[&[0, 20, 30]]], |step| {
            step.residency[5] = 2;
            step.hot[1] = 0;
        }),
        changed("a state row starts empty again", 8, &[&[&[0, 1, 20]], &[&[0, 20, 30]]], |step| {
            step.reset_state_rows = vec![0];
        }),
        changed(
            "verification rows see only what is written",
            8,
            &[&[&[60, 61], &[61, 62]]],
            |step| {
                (step.residency[15], step.source[15]) = (6, 0);
                step.seq_len = vec![61, 62];
            },
        ),
        strided(),
        wide(),
        padded_graph_rows(),
    ]
}

fn strided() -> Value {
    let sizes = Sizes { stride: 16, ..small(8, 6) };
    let mut step = single(sizes, &[&[13, 7, 6, 5, 4, 3]]);
    step.residency[3] = 3;
    run("a view that steps over other layers' pages", sizes, &[step])
}

fn wide() -> Value {
    let sizes = small(8, 2051);
    let mut row = vec![-1; 2051];
    (0..5).for_each(|i| row[i] = i as i32);
    row[2050] = 5;
    let mut step = single(sizes, &[&row]);
    step.seq_len = vec![5];
    run("five tokens of a selection 2,051 wide", sizes, &[step])
}

/// A batch of two requests that shrinks to padding alone, then grows again.
fn padded_graph_rows() -> Value {
    let sizes = Sizes { state_rows: 3, pages: 1, ..small(4, 2) };
    let full = Step {
        row_request: vec![0, 0, 0, 1, 1, 0, 0, 0],
        num_valid_rows: 5,
        seq_len: vec![4; 8],
        state_row: vec![2, 0],
        topk: vec![0, 1, 1, 2, 3, 3, 2, 2, 3, 0, 1, 1, 3, 2, 0, 0],
        residency: vec![0; 3],
        source: vec![3, 4],
        hot: vec![8, 9],
        ..Step::default()
    };
    let drained = Step { num_valid_rows: 0, ..full.clone() };
    let padding_request = Step { state_row: vec![-1, 0], ..full.clone() };
    let minus_one = Step { row_request: vec![0, -1, -1, 1, 1, -1, -1, -1], ..full.clone() };
    run("padded graph rows", sizes, &[full.clone(), drained, padding_request, minus_one, full])
}

/// Requests that come and go over tables that change, with a working set that drifts.
fn random(seed: u64, sizes: Sizes, rows: usize, num_steps: usize) -> Value {
    let mut rng = Rng::new(seed);
    let tokens = sizes.pages * sizes.block_size;
    let hot_blocks = sizes.hot_rows / sizes.block_size;
    let mut residency: Vec<i32> = (0..sizes.state_rows * sizes.pages)
        .map(|_| if rng.chance(25) { 1 + rng.below(400) as i32 } else { 0 })
        .collect();
    let mut favourites: Vec<i32> = (0..sizes.top_k).map(|_| rng.below(tokens) as i32).collect();
    let steps: Vec<Step> = (0..num_steps)
        .map(|step| {
            let changed = rng.below(residency.len());
            residency[changed] = if rng.chance(60) { 0 } else { 1 + rng.below(400) as i32 };
            for _ in 0..1 + sizes.top_k / 4 {
                let at = rng.below(favourites.len());
                favourites[at] = rng.below(tokens) as i32;
            }
            let requests = 1 + rng.below(sizes.state_rows);
            let mut s = Step { residency: residency.clone(), ..Step::default() };
            for request in 0..requests {
                let state_row = (request + step / 2) % sizes.state_rows;
                s.state_row.push(state_row as i32);
                // Host blocks of a state row in a shuffled but fixed order.
                let base = state_row * sizes.pages;
                s.source.extend((0..sizes.pages).map(|p| {
                    if (p + state_row) % 13 == 12 {
                        0
                    } else {
                        (base + p * 7 % sizes.pages) as i32 + 1
                    }
                }));
                s.hot.extend((0..hot_blocks).map(|b| (500 + state_row * hot_blocks + b) as i32));
                for _ in 0..1 + rng.below(rows) {
                    s.row_request.push(request as i32);
                    s.seq_len.push((tokens - rng.below(1 + tokens / 8)) as i32);
                }
            }
            s.num_valid_rows = s.row_request.len();
            for _ in 0..rng.below(3) {
                s.row_request.push(0);
                s.seq_len.push(tokens as i32);
            }
            for _ in 0..s.row_request.len() * sizes.top_k {
                let drawn = rng.below(tokens + 2) as i32 - 1;
                s.topk.push(if rng.chance(80) { rng.pick(&favourites) } else { drawn });
            }
            if step % 3 == 2 {
                s.recycled = vec![1 + rng.below(sizes.state_rows * sizes.pages) as i32];
                let last = (sizes.state_rows * sizes.pages + 1) * sizes.block_size;
                s.rewritten = (0..3).map(|_| rng.below(last) as i64).collect();
            }
            s
        })
        .collect();
    let Sizes { block_size, top_k, hot_rows, .. } = sizes;
    run(&format!("random: block size {block_size}, k {top_k}, {hot_rows} hot rows"), sizes, &steps)
}

pub(super) fn all() -> Vec<Value> {
    let sizes = |block_size, stride, top_k, hot_rows, pages, state_rows| Sizes {
        block_size,
        stride,
        top_k,
        hot_rows,
        pages,
        state_rows,
    };
    let mut cases = lru_cases();
    cases.extend(contract_cases());
    cases.extend([
        random(1, sizes(1, 3, 5, 15, 40, 2), 3, 8),
        random(2, sizes(16, 16, 16, 64, 12, 3), 4, 8),
        random(3, sizes(16, 64, 33, 144, 20, 2), 4, 5),
        random(4, sizes(64, 64, 64, 128, 8, 2), 2, 6),
        random(5, sizes(64, 256, 96, 384, 24, 2), 4, 3),
        random(6, sizes(128, 128, 128, 256, 6, 1), 2, 5),
        // More rows than the region holds: the surplus is dropped and counted.
        random(7, sizes(8, 8, 12, 16, 10, 2), 4, 6),
    ]);
    cases
}
