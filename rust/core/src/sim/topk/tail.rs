// SPDX-License-Identifier: Apache-2.0
//! Owns the law of reuse depth: how a share of references beyond a depth becomes a draw.

use crate::error::Result;
use crate::sim::topk::params::in_range;

/// Depths, in multiples of k, at which a tail is given.
pub const TAIL_DEPTHS: [u32; 4] = [1, 2, 4, 8];

/// Share of a row's references that lie deeper than each of `TAIL_DEPTHS`: the miss fraction of
/// LRU with that many hot rows. Between two depths the share is a + b / depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReuseTail {
    /// Shares in parts per million, falling.
    pub beyond_ppm: [u32; 4],
}

impl ReuseTail {
    /// Published for GLM-5.1 at 1, 2 and 4 times k; continued to 8 times k at the same slope.
    pub const PUBLISHED: Self = Self { beyond_ppm: [300_000, 134_000, 67_000, 33_500] };

    /// The same figures and no guess beyond the deepest of them: what lies deeper than 4 times k is
    /// missed by deeper regions, too, as the planner counts it.
    pub const PUBLISHED_ALONE: Self = Self { beyond_ppm: [300_000, 134_000, 67_000, 67_000] };

    /// Checks that the shares fall and leave room to keep a part of the row.
    ///
    /// # Errors
    /// `Config` for a share that does not.
    pub fn validate(&self) -> Result<()> {
        let [k1, k2, k4, k8] = self.beyond_ppm;
        for (share, above) in [(k1, 900_000), (k2, k1), (k4, k2), (k8, k4)] {
            in_range("reuse_tail", share, 0, above, "shares fall with depth, from 900000 at most")?;
        }
        Ok(())
    }

    /// Share beyond the depth with this index.
    pub(super) fn share(&self, index: usize) -> f64 {
        self.beyond_ppm.get(index).map_or(0.0, |&ppm| f64::from(ppm) / 1e6)
    }

    /// Share of a row's references that lie deeper than `multiple` times k: what LRU with that
    /// many rows misses in the steady state. Below k it falls in a straight line from all, beyond
    /// the deepest one given it stays; a multiple that is no positive number counts as 0.
    #[must_use]
    pub fn share_beyond(&self, multiple: f64) -> f64 {
        let [nearest, .., deepest] = TAIL_DEPTHS.map(f64::from);
        if multiple >= deepest {
            return self.share(TAIL_DEPTHS.len() - 1);
        }
        if multiple >= nearest {
            let octave = TAIL_DEPTHS[1..].iter().take_while(|&&far| multiple >= f64::from(far));
            let Octave { a, b, .. } = self.octave(octave.count(), 1.0);
            return a + b / multiple;
        }
        1.0 - (1.0 - self.share(0)) * multiple.max(0.0) / nearest
    }

    /// The law between the depths with this index and the next, depths counted in k / `unit`.
    fn octave(&self, index: usize, unit: f64) -> Octave {
        let (upper, lower) = (self.share(index), self.share(index + 1));
        let (near, far) = (f64::from(TAIL_DEPTHS[index]), f64::from(TAIL_DEPTHS[index + 1]));
        // share = a + b / depth through both ends.
        let b = (upper - lower) / (1.0 / near - 1.0 / far);
        Octave { lower, a: lower - b / far, b: b * unit }
    }

    /// The law of depths beyond k, in entries.
    pub(super) fn sampler(&self, top_k: u32) -> TailSampler {
        let octaves = [0, 1, 2].map(|index| self.octave(index, f64::from(top_k)));
        TailSampler { beyond_k: self.share(0), octaves }
    }
}

/// Draws depths beyond the last row.
#[derive(Debug, Clone)]
pub(super) struct TailSampler {
    beyond_k: f64,
    octaves: [Octave; TAIL_DEPTHS.len() - 1],
}

/// The law between two depths: share of references beyond a depth = a + b / depth in entries.
#[derive(Debug, Clone)]
struct Octave {
    lower: f64,
    a: f64,
    b: f64,
}

impl TailSampler {
    /// The depth, at least k, that a uniform `unit` in [0, 1) stands for; `None` beyond the
    /// deepest one.
    pub(super) fn depth(&self, unit: f64) -> Option<usize> {
        let beyond = unit * self.beyond_k;
        let octave = self.octaves.iter().find(|octave| beyond >= octave.lower)?;
        // OK because lower <= beyond < the share at the near end: they differ, so b > 0, and
        // beyond - a >= lower - a > 0.
        Some((octave.b / (beyond - octave.a)) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_depths_follow_the_given_shares() {
        let tail = ReuseTail::PUBLISHED;
        let sampler = tail.sampler(1_000);
        let draws = 100_000;
        let mut deeper = [0_u32; 4];
        for draw in 0..draws {
            let depth = sampler.depth(f64::from(draw) / f64::from(draws));
            for (count, multiple) in deeper.iter_mut().zip(TAIL_DEPTHS) {
                *count += u32::from(depth.is_none_or(|depth| depth >= multiple as usize * 1_000));
            }
        }
        for (count, ppm) in deeper.iter().zip(tail.beyond_ppm) {
            let share = f64::from(*count) / f64::from(draws) * 0.3;
            assert!((share - f64::from(ppm) / 1e6).abs() < 1e-4, "{share} for {ppm} ppm");
        }
    }

    #[test]
    fn the_share_beyond_a_depth_is_the_given_one_and_falls_between() {
        let tail = ReuseTail::PUBLISHED;
        let given = [(0.0, 1.0), (1.0, 0.3), (2.0, 0.134), (4.0, 0.067), (8.0, 0.0335)];
        for (multiple, share) in given.into_iter().chain([(50.0, 0.0335), (f64::NAN, 1.0)]) {
            assert!((tail.share_beyond(multiple) - share).abs() < 1e-12, "{multiple}");
        }
        let shares: Vec<_> = (0..=90).map(|at| tail.share_beyond(f64::from(at) / 10.0)).collect();
        assert!(shares.windows(2).all(|pair| pair[0] >= pair[1]));
        let alone = ReuseTail::PUBLISHED_ALONE;
        alone.validate().unwrap();
        for (multiple, share) in [(1.0, 0.3), (4.0, 0.067), (6.0, 0.067), (9.0, 0.067)] {
            assert!((alone.share_beyond(multiple) - share).abs() < 1e-12, "{multiple}");
        }
        // a + b / depth through 30.0 % at k and 13.4 % at 2k, half way in 1 / depth.
        assert!((tail.share_beyond(4.0 / 3.0) - 0.217).abs() < 1e-12);
    }

    #[test]
    fn a_tail_without_an_octave_never_draws_from_it() {
        let tail = ReuseTail { beyond_ppm: [300_000, 100_000, 100_000, 0] };
        let sampler = tail.sampler(100);
        for draw in 0..1_000 {
            let depth = sampler.depth(f64::from(draw) / 1e3).unwrap();
            assert!((100..=200).contains(&depth) || (400..=800).contains(&depth), "{depth}");
        }
    }
}
