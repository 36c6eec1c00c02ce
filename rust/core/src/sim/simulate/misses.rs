// SPDX-License-Identifier: Apache-2.0
//! Owns the misses to expect of a request's hot region, by the published curve instead of streams.

use crate::sim::topk::ReuseTail;

/// What one request's hot region has seen of one index group's selections; all index groups of a
/// request are alike.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct HotRows {
    /// Distinct rows that it holds.
    filled: f64,
}

/// Sizes that decide about misses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MissModel {
    pub(super) tail: ReuseTail,
    /// Rows that the indexer selects for each decode row.
    pub(super) top_k: f64,
    /// Rows of a hot region in one layer.
    pub(super) hot_rows: f64,
}

impl MissModel {
    /// Expected misses of `rows` verification rows of a context of `context` tokens, of which
    /// `host_only` have no GPU block, in each index group; the region holds the rows afterwards.
    ///
    /// The indexer selects from the whole context alike, so the region sees the host-only share of
    /// each row, and its reach in such rows is what the curve's depth is. It never misses more
    /// than if it chose at random among the host-only rows, since what was used lately is used
    /// again sooner. A row that two verification rows select is copied once: the second one finds
    /// it at a depth below k.
    pub(super) fn misses(self, hot: &mut HotRows, rows: u32, context: u32, host_only: u32) -> f64 {
        if host_only == 0 || context == 0 {
            return 0.0;
        }
        let host_only = f64::from(host_only.min(context));
        let selected = self.top_k.min(f64::from(context)) * host_only / f64::from(context);
        let mut misses = 0.0;
        for _ in 0..rows {
            let curve = self.tail.share_beyond(hot.filled / selected);
            let at_random = (1.0 - hot.filled / host_only).max(0.0);
            let missed = selected * curve.min(at_random);
            hot.filled = (hot.filled + missed).min(self.hot_rows);
            misses += missed;
        }
        misses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(hot_rows: f64) -> MissModel {
        MissModel { tail: ReuseTail::PUBLISHED_ALONE, top_k: 2_048.0, hot_rows }
    }

    /// Misses a step once the region is full.
    fn steady(model: MissModel, rows: u32, context: u32, host_only: u32) -> f64 {
        let mut hot = HotRows::default();
        for _ in 0..1_000 {
            model.misses(&mut hot, rows, context, host_only);
        }
        model.misses(&mut hot, rows, context, host_only)
    }

    #[test]
    fn a_host_only_context_misses_the_published_shares() {
        for (hot_rows, share) in [(2_048.0, 0.300), (4_096.0, 0.134), (8_192.0, 0.067)] {
            let misses = steady(model(hot_rows), 1, 131_072, 131_072);
            assert!((misses / 2_048.0 - share).abs() < 1e-9, "{misses} of {hot_rows}");
            let four = steady(model(hot_rows), 4, 131_072, 131_072);
            assert!((four - 4.0 * misses).abs() < 1e-6, "references are counted for each row");
        }
    }

    #[test]
    fn an_empty_region_misses_all_of_the_first_row_and_then_fills() {
        let mut hot = HotRows::default();
        let model = model(4_096.0);
        let first = model.misses(&mut hot, 1, 100_000, 100_000);
        let second = model.misses(&mut hot, 1, 100_000, 100_000);
        assert_eq!(first, 2_048.0);
        assert!((second - 0.3 * 2_048.0).abs() < 1e-9, "{second}: what one row back holds");
        assert!(model.misses(&mut hot, 1, 100_000, 100_000) < second);
    }

    #[test]
    fn resident_pages_take_their_share_of_the_misses_away() {
        let all = steady(model(4_096.0), 1, 100_000, 100_000);
        let half = steady(model(4_096.0), 1, 100_000, 50_000);
        // Half of the references, and the region reaches twice as deep: 4 times k.
        assert!((half / (all / 2.0) - 0.067 / 0.134).abs() < 1e-9, "{half} against {all}");
        assert_eq!(steady(model(4_096.0), 1, 100_000, 0), 0.0);
    }

    #[test]
    fn a_context_that_fits_the_region_misses_each_row_once() {
        let mut hot = HotRows::default();
        let model = model(4_096.0);
        let sum: f64 = (0..2_000).map(|_| model.misses(&mut hot, 2, 3_000, 3_000)).sum();
        assert!((2_990.0..3_000.0 + 1e-6).contains(&sum), "{sum}");
    }
}
