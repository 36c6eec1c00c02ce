// SPDX-License-Identifier: Apache-2.0
//! Owns the pseudo-random numbers of the simulator: SplitMix64 (Steele, Lea and Flood, 2014).
//!
//! Streams need a *keyed* number as well, a pure function of (key, position, step), and the mixer
//! below is both that function and the generator's output stage. The sequence is part of every
//! recorded seed's meaning, so it is pinned by known answers.

/// Increment of the generator's Weyl sequence: 2^64 divided by the golden ratio, made odd.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Bijective mixer of 64 bits: equal inputs give equal outputs on every platform.
#[must_use]
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Key of a sub-stream, so that a seed's streams, groups and steps do not share numbers.
#[must_use]
pub const fn derive(key: u64, index: u64) -> u64 {
    mix(key ^ mix(index.wrapping_add(1).wrapping_mul(GOLDEN)))
}

/// SplitMix64: 64 bits of state, period 2^64.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// A generator whose sequence is a pure function of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// The next 32 bits.
    pub const fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// A number below `bound`; 0 if `bound` is 0. The bias is under bound / 2^32.
    pub const fn below(&mut self, bound: u32) -> u32 {
        ((self.next_u32() as u64 * bound as u64) >> 32) as u32
    }

    /// A number in [0, 1), a multiple of 2^-53 and hence exact on every platform.
    pub fn unit(&mut self) -> f64 {
        const SCALE: f64 = 1.0 / (1_u64 << 53) as f64;
        (self.next_u64() >> 11) as f64 * SCALE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_splitmix64() {
        let mut rng = SplitMix64::new(1_234_567);
        let got: Vec<u64> = (0..5).map(|_| rng.next_u64()).collect();
        let published = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(got, published);
    }

    #[test]
    fn bounded_numbers_cover_their_range_and_no_more() {
        let mut rng = SplitMix64::new(7);
        let mut counts = [0_u32; 10];
        for _ in 0..10_000 {
            counts[rng.below(10) as usize] += 1;
            let unit = rng.unit();
            assert!((0.0..1.0).contains(&unit));
        }
        assert!(counts.iter().all(|&count| (850..1150).contains(&count)), "{counts:?}");
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn derived_keys_differ_by_key_and_by_index() {
        let keys = [derive(1, 0), derive(1, 1), derive(2, 0), derive(2, 1), derive(0, 1)];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a != b));
        }
    }
}
