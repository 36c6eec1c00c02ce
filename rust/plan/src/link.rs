// SPDX-License-Identifier: Apache-2.0
//! Owns the time that a step's misses take on the host link.

/// Order of a page's rows in the host pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostLayout {
    /// The rows of an index group's layers lie side by side: one miss is one read.
    RowInterleaved,
    /// One region for each layer.
    LayerMajor,
}

/// Rate of a PCIe 5.0 x16 link in one direction, in GB/s: 32 GT/s on 16 lanes, 128b/130b coded.
pub const PCIE5_X16_GBPS: f64 = 32.0 * 16.0 / 8.0 * 128.0 / 130.0;

/// Measured on one H200 (PCIe 5.0 x16, memcpy 55.5 GB/s), random rows of 656 bytes out of a pool
/// of 20 GB and more, in GB/s: four layers of a group side by side; one layer, each block a
/// contiguous slice of the sorted list; four layers with a launch each.
const FOUR_INTERLEAVED_GBPS: f64 = 49.8;
const SINGLE_GBPS: f64 = 33.0;
const LAYER_MAJOR_GBPS: f64 = 21.0;

/// GB/s of row copies in an index group of `layers` layers over a link of `link_gbps`. Address
/// translation and not the wire is the limit, and how it scales with the wire is not known: links
/// other than the measured one are given the measured share of their rate.
#[must_use]
pub fn copy_gbps(link_gbps: f64, layout: HostLayout, layers: u64) -> f64 {
    let measured = match layout {
        HostLayout::LayerMajor => LAYER_MAJOR_GBPS,
        HostLayout::RowInterleaved if layers >= 4 => FOUR_INTERLEAVED_GBPS,
        // Two and three layers were not measured; the rate of one is a lower bound.
        HostLayout::RowInterleaved => SINGLE_GBPS,
    };
    measured / PCIE5_X16_GBPS * link_gbps
}

/// Missed references over top-k in the steady state of an LRU of hot rows, published for GLM-5.1
/// at k = 2,048: hot rows over top-k, and the fraction missed.
pub const PUBLISHED_MISSES: [(f64, f64); 3] = [(1.0, 0.300), (2.0, 0.134), (4.0, 0.067)];

/// Hit rate to expect of `hot_rows`: the published figures, between them a straight line in
/// logarithms, beyond them the last. Speculation changes nothing here: a step's verification rows
/// select mostly the same tokens, and references are counted for each of them.
#[must_use]
pub fn expected_hit_rate(hot_rows: u64, top_k: u64) -> f64 {
    let ratio = hot_rows as f64 / top_k as f64;
    let mut points = PUBLISHED_MISSES.windows(2);
    let missed = points
        .find_map(|pair| match pair {
            [(low, at_low), (high, at_high)] if ratio <= *high => {
                let share = ((ratio / low).ln() / (high / low).ln()).max(0.0);
                Some(at_low * (at_high / at_low).powf(share))
            }
            _ => None,
        })
        .unwrap_or(PUBLISHED_MISSES[PUBLISHED_MISSES.len() - 1].1);
    1.0 - missed
}

/// Milliseconds that one rank's link is busy in a decode step with `requests` requests that read
/// from host. `groups` holds the layers of each index group; every rank fetches every miss.
#[must_use]
pub fn step_ms(
    requests: f64,
    misses_per_request: f64,
    groups: &[Vec<u64>],
    row_bytes: u64,
    link_gbps: f64,
    layout: HostLayout,
) -> f64 {
    let seconds_per_miss = groups
        .iter()
        .flatten()
        .map(|&layers| (layers * row_bytes) as f64 / (copy_gbps(link_gbps, layout, layers) * 1e9))
        .sum::<f64>();
    requests * misses_per_request * seconds_per_miss * 1e3
}
