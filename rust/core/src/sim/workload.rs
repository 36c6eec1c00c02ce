// SPDX-License-Identifier: Apache-2.0
//! Owns the shape of the load: conversations of turns, and how a scale changes them.

use crate::error::{Error, Expected, Result};
use crate::sim::topk::MAX_POSITIONS;

/// Turns of the default conversation.
pub const DEFAULT_TURNS: u32 = 13;
/// Its tokens: new in the first prompt, new in each later prompt, generated in each turn.
const FIRST_PROMPT_TOKENS: u32 = 74_160;
const LATER_PROMPT_TOKENS: u32 = 753;
const OUTPUT_TOKENS: u32 = 220;

/// One request of a conversation: everything said so far, new prompt tokens, then the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Tokens that the prompt adds to what was said before; at least 1.
    pub prompt_tokens: u32,
    /// Tokens generated; at least 1.
    pub output_tokens: u32,
}

/// Turns that follow each other, each one's prompt starting with everything before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Conversation {
    /// The turns, in order.
    pub turns: Vec<Turn>,
}

impl Conversation {
    /// The default conversation with every token count multiplied by `scale`, at least 1 each.
    #[must_use]
    pub fn multi_turn(scale: f64) -> Self {
        let scaled = |tokens| scale_tokens(tokens, scale);
        let turn = |turn| Turn {
            prompt_tokens: scaled(if turn == 0 {
                FIRST_PROMPT_TOKENS
            } else {
                LATER_PROMPT_TOKENS
            }),
            output_tokens: scaled(OUTPUT_TOKENS),
        };
        Self { turns: (0..DEFAULT_TURNS).map(turn).collect() }
    }

    /// Tokens of the whole conversation after `system_tokens`; `u64` because it is a sum.
    #[must_use]
    pub fn num_tokens(&self, system_tokens: u32) -> u64 {
        let turns = self.turns.iter();
        let sum: u64 = turns.map(|t| u64::from(t.prompt_tokens) + u64::from(t.output_tokens)).sum();
        sum + u64::from(system_tokens)
    }

    /// Checks every turn and the sum.
    ///
    /// # Errors
    /// `Config` for no turns, an empty turn, or more tokens than a position can count.
    pub fn validate(&self, system_tokens: u32) -> Result<()> {
        at_least_one("turns of a conversation", self.turns.len() as u64)?;
        for turn in &self.turns {
            at_least_one("prompt tokens of a turn", u64::from(turn.prompt_tokens))?;
            at_least_one("output tokens of a turn", u64::from(turn.output_tokens))?;
        }
        let tokens = self.num_tokens(system_tokens);
        if tokens > u64::from(MAX_POSITIONS) {
            return Err(Error::Config {
                name: "tokens of a conversation",
                got: i64::try_from(tokens).unwrap_or(i64::MAX),
                expected: Expected::AtMost(i64::from(MAX_POSITIONS)),
                remedy: "shorten the conversation or lower the scale",
            });
        }
        Ok(())
    }
}

/// `tokens` times `scale`, rounded, at least 1; a scale that is no positive number gives 1.
#[must_use]
pub fn scale_tokens(tokens: u32, scale: f64) -> u32 {
    // Saturates at both ends, and turns NaN into 0.
    ((f64::from(tokens) * scale).round() as u32).max(1)
}

fn at_least_one(name: &'static str, got: u64) -> Result<()> {
    if got >= 1 {
        return Ok(());
    }
    let remedy = "give every conversation a turn, and every turn a prompt and an answer";
    Err(Error::Config { name, got: 0, expected: Expected::AtLeast(1), remedy })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_conversation_has_the_published_shape() {
        let turns = Conversation::multi_turn(1.0).turns;
        assert_eq!(turns.len(), 13);
        assert_eq!(turns[0], Turn { prompt_tokens: 74_160, output_tokens: 220 });
        assert!(turns[1..].iter().all(|t| (t.prompt_tokens, t.output_tokens) == (753, 220)));
        let scaled = Conversation::multi_turn(1.0 / 16.0);
        assert_eq!(scaled.turns[0], Turn { prompt_tokens: 4_635, output_tokens: 14 });
        assert_eq!(scaled.turns[5], Turn { prompt_tokens: 47, output_tokens: 14 });
        assert_eq!(scaled.num_tokens(100), 100 + 4_635 + 12 * 47 + 13 * 14);
    }

    #[test]
    fn every_turn_keeps_a_token_at_any_scale() {
        for scale in [1e-9, 0.0, -1.0, f64::NAN] {
            let tiny = Conversation::multi_turn(scale);
            assert!(tiny.turns.iter().all(|t| (t.prompt_tokens, t.output_tokens) == (1, 1)));
            tiny.validate(0).unwrap();
        }
        assert!(Conversation::multi_turn(f64::INFINITY).validate(0).is_err());
    }

    #[test]
    fn empty_conversations_and_turns_are_refused() {
        assert!(Conversation::default().validate(0).is_err());
        let turn = Turn { prompt_tokens: 3, output_tokens: 0 };
        let error = Conversation { turns: vec![turn] }.validate(0).unwrap_err();
        assert!(error.to_string().starts_with("output tokens of a turn is 0, expected at least 1"));
    }
}
