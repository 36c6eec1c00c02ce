// SPDX-License-Identifier: Apache-2.0
//! Owns the cases of `invalidate.json`.

use hotpage_core::dataplane::{
    HotState, InvalidateScratch, ResolveInput, ResolveScratch, Resolved, invalidate, resolve,
};
use serde_json::{Value, json};

use crate::rng::Rng;

/// A state that has resolved `positions`, one step each; page p is host block p + 1.
fn state(hot_rows: usize, block_size: u32, steps: &[Vec<i32>]) -> HotState {
    let mut state = HotState::new(hot_rows);
    let hot_blocks: Vec<i32> = (1..).take(hot_rows / block_size as usize).collect();
    let host_blocks: Vec<i32> = (1..=64).collect();
    for topk in steps {
        let input = ResolveInput {
            logical_topk: topk,
            top_k: topk.len(),
            seq_len: &[i32::MAX],
            residency: &[0; 64],
            host_blocks: &host_blocks,
            hot_blocks: &hot_blocks,
            block_size,
            block_stride_rows: block_size,
        };
        let (mut scratch, mut out) = (ResolveScratch::default(), Resolved::default());
        resolve(&input, &mut state, &mut scratch, &mut out).unwrap();
    }
    state
}

fn case(
    name: &str,
    block_size: u32,
    mut states: Vec<HotState>,
    rows: &[i64],
    blocks: &[i32],
) -> Value {
    let maps = |s: &[HotState]| s.iter().map(|s| s.row_map().to_vec()).collect::<Vec<_>>();
    let ages = |s: &[HotState]| s.iter().map(|s| s.last_used().to_vec()).collect::<Vec<_>>();
    let (row_map, last_used) = (maps(&states), ages(&states));
    let scratch = &mut InvalidateScratch::default();
    let freed = invalidate(states.iter_mut(), rows, blocks, block_size, scratch);
    json!({
        "name": name,
        "block_size": block_size,
        "row_map": row_map,
        "last_used": last_used,
        "rewritten_host_rows": rows,
        "recycled_host_blocks": blocks,
        "expect": { "freed": freed, "row_map": maps(&states), "last_used": ages(&states) },
    })
}

fn random(seed: u64, block_size: u32) -> Value {
    let mut rng = Rng::new(seed);
    let tokens = 64 * block_size as usize;
    let states = (0..3)
        .map(|_| {
            let steps: Vec<Vec<i32>> =
                (0..3).map(|_| (0..20).map(|_| rng.below(tokens) as i32).collect()).collect();
            state(64, block_size, &steps)
        })
        .collect::<Vec<_>>();
    let held: Vec<i32> =
        states.iter().flat_map(HotState::row_map).copied().filter(|&row| row >= 0).collect();
    let rows: Vec<i64> = (0..12)
        .map(|i| i64::from(if i % 3 == 0 { -1 } else { rng.pick(&held) + (i % 3) - 1 }))
        .collect();
    let blocks: Vec<i32> =
        (0..4).map(|i| if i == 0 { -1 } else { rng.pick(&held) / block_size as i32 }).collect();
    case(&format!("random: block size {block_size}"), block_size, states, &rows, &blocks)
}

pub(super) fn all() -> Vec<Value> {
    let two = || vec![state(4, 4, &[vec![0, 1, 4, 5]]), state(4, 4, &[vec![1, 8], vec![2]])];
    vec![
        case("nothing rewritten", 4, two(), &[-1, -1], &[]),
        case("one row in two states", 4, two(), &[5], &[]),
        case("a recycled block and its neighbours", 4, two(), &[], &[1]),
        case("a row and a block that overlap", 4, two(), &[4, 12], &[1, 1]),
        case("rows and blocks that nobody holds", 4, two(), &[100, 7, 13], &[9]),
        case("free hot slots are not row -1", 4, vec![HotState::new(8)], &[-1, 0], &[-1]),
        random(11, 1),
        random(12, 16),
        random(13, 64),
    ]
}
