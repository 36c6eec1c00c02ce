// SPDX-License-Identifier: Apache-2.0
//! Owns how index groups of one request differ: each permutes a part of the positions.

use crate::error::Result;
use crate::sim::rng::{derive, mix};
use crate::sim::topk::{TopkParams, chance};

/// Positions trade places within aligned chunks of this many.
const CHUNK: u32 = 64;

/// One index group's view of a request's stream: an involution of the positions. A chunk that is
/// private to the group has its positions exchanged in pairs; the others are seen as they are.
/// Chunks with sinks or window positions are never private, so a row keeps both. A chunk turns
/// private when the window has left it; its hot rows then count as missed once, a few per chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupView {
    key: u64,
    private: u32,
    top_k: usize,
    first: u32,
    window: u32,
}

impl GroupView {
    /// The view of one group; `seed` is the request's.
    ///
    /// # Errors
    /// `Config` for a parameter out of bounds.
    pub fn new(params: &TopkParams, seed: u64, group: u32) -> Result<Self> {
        params.validate()?;
        Ok(Self {
            key: derive(seed, u64::from(group) + 1),
            private: chance(f64::from(params.group_private_ppm) / 1e6),
            top_k: params.top_k as usize,
            first: params.sink_tokens.div_ceil(CHUNK) * CHUNK,
            window: params.window_tokens,
        })
    }

    /// Turns a step of the request's stream, `[rows][k]` with the given `seq_len`, into the group's
    /// in place. Padding stays.
    pub fn apply(&self, seq_len: u32, step: &mut [i32]) {
        for (row, positions) in step.chunks_mut(self.top_k).enumerate() {
            let visible = seq_len.saturating_add(row as u32);
            let stable = visible.saturating_sub(self.window) / CHUNK * CHUNK;
            for position in positions {
                if let Ok(seen) = u32::try_from(*position) {
                    if (self.first..stable).contains(&seen) {
                        *position = self.exchange(seen) as i32;
                    }
                }
            }
        }
    }

    fn exchange(&self, position: u32) -> u32 {
        let noise = mix(self.key ^ u64::from(position / CHUNK));
        if (noise >> 32) as u32 >= self.private {
            return position;
        }
        // Flipping bits inside the chunk is its own inverse; at least one bit flips.
        position ^ (1 + noise as u32 % (CHUNK - 1))
    }
}
