// SPDX-License-Identifier: Apache-2.0
//! Owns what a row's bytes must be: a pure function of whose token it is, its position and the
//! layer. It never looks at a pool, so it cannot be wrong in the same way as the data plane.

use crate::sim::rng::{derive, mix};

/// Owner of the tokens that all conversations share.
const SYSTEM: u64 = 0;

/// Increment between the words of a row: 2^64 divided by the golden ratio, made odd.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Bytes of a word; rows are whole words because their width is a multiple of 16 bytes.
const WORD_BYTES: usize = 8;

/// Whose tokens a conversation's positions hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentStream {
    id: u64,
    system_tokens: u32,
}

impl ContentStream {
    /// The stream of the conversation `number`, whose first `system_tokens` positions hold tokens
    /// that it shares with every other conversation.
    #[must_use]
    pub const fn new(number: u64, system_tokens: u32) -> Self {
        Self { id: number.wrapping_add(1), system_tokens }
    }

    /// Number that tells the stream from every other one.
    #[must_use]
    pub const fn id(self) -> u64 {
        self.id
    }

    /// The conversation's number.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.id.wrapping_sub(1)
    }

    /// The row that the true token at `position` has in `layer`.
    #[must_use]
    pub const fn row(self, position: u32, layer: u32) -> RowContent {
        RowContent(derive(self.token(position), layer as u64))
    }

    /// The row of a draft that was rejected: the token was another one. No two attempts share it.
    #[must_use]
    pub const fn rejected_row(self, position: u32, layer: u32, attempt: u32) -> RowContent {
        let wrong = derive(self.token(position), u64::MAX - attempt as u64);
        RowContent(derive(wrong, layer as u64))
    }

    /// Key of the page that follows the page with key `previous` (0 before the first): equal for
    /// two streams if and only if all tokens up to the page's end are, hash collisions aside.
    #[must_use]
    pub fn page_key(self, previous: u64, page: u32, block_size: u32) -> u64 {
        let first = page * block_size;
        (first..first + block_size)
            .fold(previous, |key, position| derive(key, self.token(position)))
            .max(1)
    }

    const fn token(self, position: u32) -> u64 {
        let owner = if position < self.system_tokens { SYSTEM } else { self.id };
        derive(owner, position as u64)
    }
}

/// The bytes of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowContent(u64);

impl RowContent {
    /// Writes the row over `row`, `[row_bytes]`.
    pub fn write(self, row: &mut [u8]) {
        let mut word = self.0;
        for bytes in row.chunks_exact_mut(WORD_BYTES) {
            word = word.wrapping_add(STRIDE);
            bytes.copy_from_slice(&mix(word).to_le_bytes());
        }
    }

    /// True if `row`, `[row_bytes]`, is this row to the last byte.
    #[must_use]
    pub fn matches(self, row: &[u8]) -> bool {
        let mut word = self.0;
        row.chunks_exact(WORD_BYTES).all(|bytes| {
            word = word.wrapping_add(STRIDE);
            bytes == mix(word).to_le_bytes()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn rows_differ_by_stream_position_layer_and_attempt() {
        let mut seen = HashSet::new();
        for number in 0..3 {
            let stream = ContentStream::new(number, 0);
            for position in 0..20 {
                for layer in 0..6 {
                    let mut row = [0; 32];
                    stream.row(position, layer).write(&mut row);
                    assert!(seen.insert(row));
                    for attempt in 1..3 {
                        stream.rejected_row(position, layer, attempt).write(&mut row);
                        assert!(seen.insert(row));
                    }
                }
            }
        }
    }

    #[test]
    fn one_flipped_bit_anywhere_in_a_row_is_noticed() {
        let content = ContentStream::new(3, 0).row(70, 2);
        let mut row = [0; 656];
        content.write(&mut row);
        assert!(content.matches(&row));
        for at in 0..row.len() {
            row[at] ^= 1;
            assert!(!content.matches(&row), "byte {at}");
            row[at] ^= 1;
        }
    }

    #[test]
    fn streams_share_page_keys_exactly_as_far_as_they_share_tokens() {
        let keys = |stream: ContentStream| {
            let mut key = 0;
            let chain = (0..4).map(|page| {
                key = stream.page_key(key, page, 16);
                key
            });
            chain.collect::<Vec<_>>()
        };
        // The third page has system and own tokens.
        let (a, b) = (keys(ContentStream::new(1, 40)), keys(ContentStream::new(2, 40)));
        assert_eq!(a[..2], b[..2]);
        assert!(a[2..].iter().zip(&b[2..]).all(|(a, b)| a != b));
        assert_ne!(keys(ContentStream::new(1, 32))[2], a[2]);
    }
}
