// SPDX-License-Identifier: Apache-2.0
//! Owns the checks of the streams: the published miss fractions, and what every row promises.

use std::collections::HashSet;

use super::*;
use crate::error::Error;
use crate::sim::policy::{Policy, Trace, replay};

/// Published missed references over k, in percent, for LRU with 1, 2 and 4 times k hot rows.
const PUBLISHED: [f64; 3] = [30.0, 13.4, 6.7];
/// Steps until LRU with 4k hot rows has forgotten that it started empty.
const WARM_UP: usize = 60;

fn trace(stream: &mut TopkStream, seq_len: u32, rows: u32, steps: usize) -> Trace {
    let mut trace = Trace::new();
    let mut out = Vec::new();
    let mut seq_len = seq_len;
    for _ in 0..steps {
        stream.next_rows(seq_len, rows, &mut out);
        trace.push(&out);
        seq_len += rows;
    }
    trace
}

fn miss_percent(trace: &Trace, policy: Policy, hot_rows: u32, from: usize) -> f64 {
    let counts = replay(trace, policy, hot_rows, from..trace.num_steps()).unwrap();
    assert!(counts.references > 0);
    100.0 * counts.miss_fraction()
}

fn lru_percent(trace: &Trace, top_k: u32) -> [f64; 3] {
    [1, 2, 4].map(|multiple| miss_percent(trace, Policy::Lru, multiple * top_k, WARM_UP))
}

fn assert_near(got: [f64; 3], want: [f64; 3], tolerance: f64, what: &str) {
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= tolerance, "{what}: {got:.2}% instead of {want}%");
    }
}

/// Checks one row against the contract and returns its positions.
fn check_row(params: &TopkParams, seq_len: u32, row: &[i32]) -> HashSet<u32> {
    assert_eq!(row.len(), params.top_k as usize);
    let valid = row.iter().take_while(|&&position| position >= 0).count();
    assert_eq!(valid, seq_len.min(params.top_k) as usize);
    assert!(row[valid..].iter().all(|&position| position == -1));
    let positions: HashSet<u32> = row[..valid].iter().map(|&p| p as u32).collect();
    assert_eq!(positions.len(), valid, "positions repeat at length {seq_len}");
    assert!(positions.iter().all(|&position| position < seq_len));
    let sinks = 0..params.sink_tokens.min(seq_len);
    let window = seq_len.saturating_sub(params.window_tokens)..seq_len;
    for position in sinks.chain(window) {
        assert!(positions.contains(&position), "{position} is missing at length {seq_len}");
    }
    positions
}

#[test]
fn default_streams_have_the_published_miss_fractions() {
    let params = TopkParams::for_top_k(2_048);
    let mut stream = TopkStream::new(params, 1).unwrap();
    let trace = trace(&mut stream, 131_072, 1, WARM_UP + 240);
    assert_near(lru_percent(&trace, 2_048), PUBLISHED, 1.5, "LRU");
}

#[test]
fn scaled_streams_keep_the_miss_fractions() {
    for top_k in [64, 128, 256, 512] {
        for seed in 0..3 {
            let params = TopkParams::for_top_k(top_k);
            let mut stream = TopkStream::for_group(params, seed, seed as u32).unwrap();
            let trace = trace(&mut stream, 64 * top_k, 1, WARM_UP + 200);
            assert_near(lru_percent(&trace, top_k), PUBLISHED, 1.2, &format!("k = {top_k}"));
        }
    }
}

#[test]
fn the_tail_is_the_miss_curve() {
    let reuse_tail = ReuseTail { beyond_ppm: [450_000, 250_000, 50_000, 20_000] };
    let params = TopkParams { reuse_tail, ..TopkParams::for_top_k(512) };
    let mut stream = TopkStream::new(params, 5).unwrap();
    let trace = trace(&mut stream, 32_768, 1, WARM_UP + 200);
    assert_near(lru_percent(&trace, 512), [45.0, 25.0, 5.0], 1.5, "LRU");
}

#[test]
fn the_core_tells_the_policies_apart() {
    let percent = |core_share_ppm, policy| {
        let params = TopkParams { core_share_ppm, ..TopkParams::for_top_k(512) };
        let mut stream = TopkStream::new(params, 2).unwrap();
        let trace = trace(&mut stream, 32_768, 1, WARM_UP + 240);
        miss_percent(&trace, policy, 1_024, WARM_UP)
    };
    let share = TopkParams::for_top_k(512).core_share_ppm;
    let lru = percent(share, Policy::Lru);
    let random = percent(share, Policy::Random { seed: 1 });
    let fifo = percent(share, Policy::Fifo);
    assert!(lru + 1.0 < random && random < fifo, "{lru:.2} {random:.2} {fifo:.2}");
    assert!(percent(0, Policy::Fifo) + 0.5 < fifo);
}

#[test]
fn four_verification_rows_miss_six_percent_of_their_references() {
    let params = TopkParams::for_top_k(2_048);
    let mut stream = TopkStream::new(params, 3).unwrap();
    let trace = trace(&mut stream, 131_072, 4, 80);
    let percent = miss_percent(&trace, Policy::Lru, 10_240, 20);
    assert!((percent - 6.0).abs() <= 2.0, "{percent:.2}%");
    let counts = replay(&trace, Policy::Lru, 10_240, 20..80).unwrap();
    assert!(counts.union * 2 < counts.references, "rows of a step should mostly agree");
}

#[test]
fn adjacent_rows_share_what_the_tail_keeps() {
    let params = TopkParams::for_top_k(512);
    let mut stream = TopkStream::new(params, 4).unwrap();
    let mut out = Vec::new();
    let (mut shared, mut pairs) = (0, 0);
    for step in 0..50 {
        stream.next_rows(32_768 + 4 * step, 4, &mut out);
        let rows: Vec<HashSet<i32>> =
            out.chunks(512).map(|r| r.iter().copied().collect()).collect();
        for pair in rows.windows(2) {
            shared += pair[0].intersection(&pair[1]).count();
            pairs += 1;
        }
    }
    let percent = 100.0 * shared as f64 / (512 * pairs) as f64;
    assert!((percent - 70.0).abs() < 1.5, "{percent:.2}%");
}

#[test]
fn rows_of_a_step_are_consecutive_rows() {
    let params = TopkParams::for_top_k(64);
    let mut together = TopkStream::for_group(params, 8, 2).unwrap();
    let mut apart = together.clone();
    let (mut step, mut row) = (Vec::new(), Vec::new());
    for seq_len in (60..500).step_by(3) {
        together.next_rows(seq_len, 3, &mut step);
        for (offset, expected) in step.chunks(64).enumerate() {
            apart.next(seq_len + offset as u32, &mut row);
            assert_eq!(row, expected);
        }
    }
}

#[test]
fn misses_are_stationary_from_the_first_rows_on() {
    let top_k = 512;
    let mut fractions = Vec::new();
    for seed in 0..6 {
        // A later turn starts again at a length that no round number favours.
        let mut stream = TopkStream::new(TopkParams::for_top_k(top_k), seed).unwrap();
        let trace = trace(&mut stream, 20_011, 1, 11);
        fractions.push(miss_percent(&trace, Policy::Lru, top_k, 1));
    }
    let mean = fractions.iter().sum::<f64>() / fractions.len() as f64;
    assert!((mean - PUBLISHED[0]).abs() < 1.5, "{fractions:?}");
}

#[test]
fn every_row_keeps_its_promises_whatever_the_lengths() {
    let mut rng = SplitMix64::new(11);
    for (seed, top_k) in [(0, 4), (1, 5), (2, 16), (3, 63), (4, 200)] {
        let mut params = TopkParams::for_top_k(top_k);
        if top_k >= 16 {
            (params.window_tokens, params.sink_tokens) = (top_k / 4, top_k / 4);
        }
        let mut stream = TopkStream::for_group(params, seed, 1).unwrap();
        let mut out = Vec::new();
        let mut seq_len = 1;
        for step in 0..600 {
            let rows = 1 + rng.below(4);
            stream.next_rows(seq_len, rows, &mut out);
            assert_eq!(out.len(), (rows * top_k) as usize);
            for (row, positions) in out.chunks(top_k as usize).enumerate() {
                check_row(&params, seq_len + row as u32, positions);
            }
            seq_len = match rng.below(12) {
                // A turn's prompt, a cut, a short context, and rejected or accepted drafts.
                0 => seq_len + rng.below(6 * top_k),
                1 => 1 + rng.below(seq_len),
                2 if step % 5 == 0 => 1 + rng.below(2 * top_k),
                _ => seq_len + rng.below(rows + 1),
            };
        }
    }
}

#[test]
fn the_history_is_bounded_and_tracked_exactly() {
    let params = TopkParams::for_top_k(64);
    let mut stream = TopkStream::new(params, 1).unwrap();
    let mut out = Vec::new();
    for seq_len in (65..600).chain([9_000, 9_001, 700, 699, 90_000, 90_001]) {
        stream.next(seq_len, &mut out);
        let listed: HashSet<u32> = stream.history.iter().map(|entry| entry & POSITION).collect();
        assert_eq!(listed.len(), stream.history.len());
        assert_eq!(listed, stream.tracked.iter().copied().collect());
        assert_eq!(listed.len() as u32, seq_len.min(8 * 64), "at length {seq_len}");
        assert!(stream.history.iter().all(|entry| entry & SELECTED == 0));
    }
}

#[test]
fn equal_seeds_repeat_and_others_do_not() {
    let params = TopkParams::for_top_k(128);
    let rows = |seed, group| {
        let mut stream = TopkStream::for_group(params, seed, group).unwrap();
        let mut out = Vec::new();
        let mut all = Vec::new();
        for seq_len in 8_192..8_222 {
            stream.next(seq_len, &mut out);
            all.extend_from_slice(&out);
        }
        all
    };
    assert_eq!(rows(1, 0), rows(1, 0));
    assert_ne!(rows(1, 0), rows(2, 0));
    assert_ne!(rows(1, 0), rows(1, 1));
}

#[test]
fn the_numbers_of_a_seed_never_change() {
    // A recorded seed must mean the same rows on every platform and in every release.
    let mut stream = TopkStream::for_group(TopkParams::for_top_k(64), 42, 3).unwrap();
    let mut out = Vec::new();
    let mut digest = 0;
    for seq_len in 4_000..4_100 {
        stream.next_rows(seq_len, 2, &mut out);
        digest = out.iter().fold(digest, |digest, &p| derive(digest, u64::from(p as u32)));
    }
    assert_eq!(digest, 15_420_073_708_436_929_488);
}

#[test]
fn groups_of_a_request_overlap_and_requests_hardly_do() {
    let params = TopkParams::for_top_k(512);
    let overlap = |(seed_a, group_a), (seed_b, group_b)| {
        let mut a = TopkStream::for_group(params, seed_a, group_a).unwrap();
        let mut b = TopkStream::for_group(params, seed_b, group_b).unwrap();
        let (mut row_a, mut row_b) = (Vec::new(), Vec::new());
        let mut shared = 0;
        for seq_len in 32_768..32_868 {
            a.next(seq_len, &mut row_a);
            b.next(seq_len, &mut row_b);
            let row_a: HashSet<i32> = row_a.iter().copied().collect();
            shared += row_b.iter().filter(|position| row_a.contains(position)).count();
        }
        shared as f64 / (100 * 512) as f64
    };
    let groups = overlap((1, 0), (1, 1));
    // Both groups see a position alike with 0.8 * 0.8.
    assert!((groups - 0.64).abs() < 0.06, "{groups:.3}");
    assert!(overlap((1, 0), (2, 0)) < 0.1);
}

#[test]
fn a_view_equals_the_groups_own_stream() {
    let params = TopkParams::for_top_k(64);
    let mut request = TopkStream::new(params, 6).unwrap();
    let mut group = TopkStream::for_group(params, 6, 4).unwrap();
    let view = GroupView::new(&params, 6, 4).unwrap();
    let (mut shared, mut own) = (Vec::new(), Vec::new());
    for seq_len in 1_000..1_050 {
        request.next_rows(seq_len, 2, &mut shared);
        group.next_rows(seq_len, 2, &mut own);
        assert_ne!(shared, own);
        view.apply(seq_len, &mut shared);
        assert_eq!(shared, own);
    }
}

#[test]
fn parameters_out_of_bounds_are_refused_by_name() {
    let good = TopkParams::for_top_k(64);
    let tail = |beyond_ppm| TopkParams { reuse_tail: ReuseTail { beyond_ppm }, ..good };
    let cases = [
        (TopkParams { top_k: 3, ..good }, "top_k"),
        (TopkParams { window_tokens: 0, ..good }, "window_tokens"),
        (TopkParams { window_tokens: 33, sink_tokens: 0, ..good }, "window_tokens"),
        (TopkParams { window_tokens: 30, sink_tokens: 3, ..good }, "sink_tokens"),
        (TopkParams { core_share_ppm: 500_001, ..good }, "core_share_ppm"),
        (TopkParams { core_presence_ppm: 1_000_001, ..good }, "core_presence_ppm"),
        (TopkParams { core_turnover_ppm: 1_000_001, ..good }, "core_turnover_ppm"),
        (TopkParams { group_private_ppm: 1_000_001, ..good }, "group_private_ppm"),
        (tail([950_000, 0, 0, 0]), "reuse_tail"),
        (tail([300_000, 134_000, 140_000, 0]), "reuse_tail"),
    ];
    good.validate().unwrap();
    for (params, expected) in cases {
        match TopkStream::new(params, 0).unwrap_err() {
            Error::Config { name, .. } => assert_eq!(name, expected),
            other => panic!("{other}"),
        }
    }
}
