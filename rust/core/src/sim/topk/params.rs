// SPDX-License-Identifier: Apache-2.0
//! Owns the settings of a top-k stream and their bounds.

use crate::error::{Error, Expected, Result};
use crate::sim::topk::{HISTORY_DEPTH, POSITION, ReuseTail};

const MILLION: u32 = 1_000_000;

/// Settings of a stream. Shares are parts per million, so that they are exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopkParams {
    /// Positions of one row (k).
    pub top_k: u32,
    /// First positions of the sequence that every row selects.
    pub sink_tokens: u32,
    /// Newest positions that every row selects.
    pub window_tokens: u32,
    /// Share of k that the core holds on average.
    pub core_share_ppm: u32,
    /// Chance that a core position of the last row is selected again.
    pub core_presence_ppm: u32,
    /// Chance per row that a core position of the last row becomes an ordinary one.
    pub core_turnover_ppm: u32,
    /// How deep references reach.
    pub reuse_tail: ReuseTail,
    /// Share of a sequence that one index group sees in an order of its own; two groups agree on
    /// about the square of the rest.
    pub group_private_ppm: u32,
}

impl TopkParams {
    /// The published locality (see the module) for rows of `top_k` positions. The window and the
    /// sinks shrink with `top_k` from their sizes at 2,048: 16 and 4.
    #[must_use]
    pub fn for_top_k(top_k: u32) -> Self {
        Self {
            top_k,
            sink_tokens: (top_k / 512).max(1),
            window_tokens: (top_k / 128).max(1),
            core_share_ppm: 400_000,
            core_presence_ppm: 700_000,
            core_turnover_ppm: 5_000,
            reuse_tail: ReuseTail::PUBLISHED,
            group_private_ppm: 200_000,
        }
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// `Config` for a value out of bounds.
    pub fn validate(&self) -> Result<()> {
        in_range("top_k", self.top_k, 4, POSITION / HISTORY_DEPTH, "use 64 to 8192")?;
        in_range("window_tokens", self.window_tokens, 1, self.top_k, "the newest token counts")?;
        // Sinks and window together leave half of a row to the other parts.
        let half = self.top_k / 2 - self.window_tokens.min(self.top_k / 2);
        in_range("sink_tokens", self.sink_tokens, 0, half, "lower sink_tokens or window_tokens")?;
        in_range("window_tokens", self.window_tokens, 1, self.top_k / 2, "half a row at most")?;
        in_range("core_share_ppm", self.core_share_ppm, 0, MILLION / 2, "half a row at most")?;
        in_range("core_turnover_ppm", self.core_turnover_ppm, 0, MILLION, "it is a chance")?;
        in_range("core_presence_ppm", self.core_presence_ppm, 0, MILLION, "it is a chance")?;
        in_range("group_private_ppm", self.group_private_ppm, 0, MILLION, "it is a share")?;
        self.reuse_tail.validate()
    }
}

pub(super) fn in_range(
    name: &'static str,
    got: u32,
    least: u32,
    most: u32,
    remedy: &'static str,
) -> Result<()> {
    let expected = if got < least {
        Expected::AtLeast(i64::from(least))
    } else if got > most {
        Expected::AtMost(i64::from(most))
    } else {
        return Ok(());
    };
    Err(Error::Config { name, got: i64::from(got), expected, remedy })
}
