// SPDX-License-Identifier: Apache-2.0
//! Owns the timing of the scalar data plane; prints microseconds and GB/s beside plain memcpy.
//! Run it with `cargo bench -p hotpage-benches --bench dataplane`.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Instant;

use hotpage_core::dataplane::{
    ByteStores, CopyList, HotState, ResolveInput, ResolveScratch, Resolved, resolve,
};
use hotpage_core::geometry::{Geometry, HostLayout, LayerPacking};
use hotpage_core::index_group::IndexGroupTopology;

const BLOCK_SIZE: usize = 64;
const CONTEXT: usize = 131_072;
const STEPS: usize = 200;
/// Misses of one copy list: 14% of a top-k of 2,048.
const MISSES: usize = 300;
/// Four layers of 656 bytes.
const MISS_BYTES: usize = 4 * 656;

fn splitmix(state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    usize::try_from((z ^ (z >> 31)) >> 1).unwrap()
}

/// Selections of which a fixed part is new in each step, so that the missed share is known.
fn selections(top_k: usize, fresh: usize, seed: u64) -> Vec<Vec<i32>> {
    let mut state = seed;
    let mut chosen = vec![false; CONTEXT];
    let mut draw = |chosen: &mut Vec<bool>| loop {
        let position = splitmix(&mut state) % CONTEXT;
        if !std::mem::replace(&mut chosen[position], true) {
            return i32::try_from(position).unwrap();
        }
    };
    let mut row: Vec<i32> = (0..top_k).map(|_| draw(&mut chosen)).collect();
    let mut steps = vec![row.clone()];
    for step in 0..STEPS {
        for i in 0..fresh {
            row[(step * fresh + i) % top_k] = draw(&mut chosen);
        }
        if (step + 2) * fresh + top_k > CONTEXT / 2 {
            chosen.fill(false);
            row.iter().for_each(|&position| chosen[usize::try_from(position).unwrap()] = true);
        }
        steps.push(row.clone());
    }
    steps
}

fn time_resolve(name: &str, top_k: usize, hot_rows: usize, fresh: usize, resident: i32) {
    let pages = CONTEXT / BLOCK_SIZE;
    let residency = vec![resident; pages];
    let host_blocks: Vec<i32> = (1..).take(pages).collect();
    let hot_blocks: Vec<i32> = (1..).take(hot_rows / BLOCK_SIZE).collect();
    let mut state = HotState::new(hot_rows);
    let (mut scratch, mut out) = (ResolveScratch::default(), Resolved::default());
    let (mut misses, mut times) = (0, Vec::with_capacity(STEPS));
    for (step, topk) in selections(top_k, fresh, 7).iter().enumerate() {
        let input = ResolveInput {
            logical_topk: topk,
            top_k,
            seq_len: &[i32::MAX],
            residency: &residency,
            host_blocks: &host_blocks,
            hot_blocks: &hot_blocks,
            block_size: 64,
            block_stride_rows: 64,
        };
        let start = Instant::now();
        resolve(black_box(&input), &mut state, &mut scratch, &mut out).unwrap();
        let time = start.elapsed();
        assert_eq!(out.valid_counts[0], i32::try_from(top_k).unwrap());
        if step > 20 {
            misses += out.counters.misses;
            times.push(time.as_secs_f64() * 1e6);
        }
    }
    times.sort_by(f64::total_cmp);
    let references = times.len() * top_k;
    println!(
        "resolve {name:<22} k {top_k} hot rows {hot_rows}: missed {:>5.1}%, p50 {:>6.1} us, p99 {:>6.1} us",
        misses as f64 * 100.0 / references as f64,
        times[times.len() / 2],
        times[times.len() * 99 / 100],
    );
}

/// Copies random misses of a four-layer group out of a pool larger than the caches.
fn time_copy(layout: HostLayout) {
    let packing = LayerPacking { kv_groups: vec![vec![4]] };
    let (hot_blocks, host_blocks) = (65, 2049);
    let geometry = Geometry::new(&packing, 64, 656, hot_blocks, host_blocks, layout).unwrap();
    let topology = IndexGroupTopology::new(&geometry, &[]).unwrap();
    let mut gpu = vec![1; usize::try_from(geometry.gpu_pool_bytes()).unwrap()];
    let mut host = vec![2; usize::try_from(geometry.host_pool_bytes()).unwrap()];
    let mut state = 3;
    let lists: Vec<CopyList> = (0..400)
        .map(|_| CopyList {
            host_row: (0..MISSES)
                .map(|_| i32::try_from(64 + splitmix(&mut state) % CONTEXT).unwrap())
                .collect(),
            hot_row: (64..).take(MISSES).collect(),
        })
        .collect();
    let mut stores = ByteStores::new(&geometry, &mut gpu, &mut host).unwrap();
    let mut times = Vec::new();
    for list in &lists {
        let start = Instant::now();
        stores.copy_rows(&topology.groups()[0], list, 64).unwrap();
        times.push(start.elapsed().as_secs_f64());
    }
    assert!(gpu[64 * 656 * 4..][..656].iter().all(|&byte| byte == 2));
    println!(
        "copy {layout:?}: {:.2} GB/s",
        MISSES as f64 * MISS_BYTES as f64 / median(&mut times) / 1e9
    );
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The roof of the row-interleaved copy: the same random rows, one memcpy for each miss.
fn time_random_memcpy() {
    let source = vec![3_u8; CONTEXT * MISS_BYTES];
    let mut target = vec![4_u8; MISSES * MISS_BYTES];
    let mut state = 3;
    let rows: Vec<usize> = (0..400 * MISSES).map(|_| splitmix(&mut state) % CONTEXT).collect();
    let mut times = Vec::new();
    for list in rows.chunks_exact(MISSES) {
        let start = Instant::now();
        for (&row, target) in list.iter().zip(target.chunks_exact_mut(MISS_BYTES)) {
            target.copy_from_slice(&source[row * MISS_BYTES..][..MISS_BYTES]);
        }
        black_box(&mut target);
        times.push(start.elapsed().as_secs_f64());
    }
    println!(
        "memcpy of random misses: {:.2} GB/s",
        MISSES as f64 * MISS_BYTES as f64 / median(&mut times) / 1e9
    );
}

fn time_memcpy() {
    let source = vec![3_u8; 256 << 20];
    let mut target = vec![4_u8; 256 << 20];
    let start = Instant::now();
    target.copy_from_slice(black_box(&source));
    let seconds = start.elapsed().as_secs_f64();
    println!("memcpy of 256 MiB: {:.2} GB/s", black_box(&target).len() as f64 / seconds / 1e9);
}

fn main() {
    time_resolve("14% missing", 2048, 4096, 287, 0);
    time_resolve("nothing missing", 2048, 4096, 0, 0);
    time_resolve("all resident", 2048, 4096, 287, 5);
    time_resolve("all missing", 2048, 4096, 2048, 0);
    time_memcpy();
    time_random_memcpy();
    time_copy(HostLayout::RowInterleaved);
    time_copy(HostLayout::LayerMajor);
}
