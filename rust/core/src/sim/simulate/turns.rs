// SPDX-License-Identifier: Apache-2.0
//! Owns when each turn arrives, is first answered and ends, from the rows that steps compute.
//!
//! A request computes the rows of all tokens but the last one, and the step that computes the row
//! of the last known token generates the next ones. So tokens are counted where they first appear,
//! and not again when a preempted request computes them once more.

use std::collections::HashMap;

use super::worker::Computed;
use crate::error::{Error, Result};
use crate::sim::workload::Conversation;

/// One conversation under way.
#[derive(Debug, Clone, Copy)]
struct Speaker {
    /// Index of the turn that is under way.
    turn: usize,
    /// Tokens said before that turn's answer, its prompt counted.
    num_prompt: u32,
    /// Tokens of its answer so far.
    num_answered: u32,
    /// Tokens of its whole answer.
    num_output: u32,
    /// Seconds: when the turn arrived, and when its last token so far came.
    arrived: f64,
    last_token: f64,
    first_token: f64,
}

/// Times of turns and tokens, in seconds since the start.
#[derive(Debug, Default)]
pub(super) struct Turns {
    speakers: HashMap<u64, Speaker>,
    /// Turns answered.
    pub(super) num_answered: u64,
    /// Conversations whose last turn was answered.
    pub(super) num_conversations: u64,
    /// New prompt tokens and answer tokens of the turns answered.
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u64,
    /// When the last turn was answered.
    pub(super) last_answer: f64,
    /// Seconds from arrival to first token: of first turns, and of later ones.
    pub(super) first_token: Vec<f64>,
    pub(super) later_first_token: Vec<f64>,
    /// Seconds between tokens. Tokens of one step come together and share the time since the last.
    pub(super) between_tokens: Vec<f64>,
    /// Seconds and tokens of answers after their first token.
    pub(super) answering: f64,
    pub(super) tokens_after_first: u64,
}

impl Turns {
    /// A conversation begins: its first turn arrives at `now`.
    pub(super) fn begin(&mut self, number: u64, conversation: &Conversation, now: f64) {
        let mut speaker = Speaker {
            turn: 0,
            num_prompt: 0,
            num_answered: 0,
            num_output: 0,
            arrived: now,
            last_token: now,
            first_token: now,
        };
        speaker.ask(conversation);
        self.speakers.insert(number, speaker);
    }

    /// A step that ended at `now` has computed rows of a conversation.
    ///
    /// # Errors
    /// `Invariant` if a request that has ended computes, or an answer gets longer than it is: a
    /// bug in the engine.
    pub(super) fn on_computed(
        &mut self,
        computed: Computed,
        conversation: &Conversation,
        now: f64,
    ) -> Result<()> {
        let Some(mut speaker) = self.speakers.get(&computed.stream).copied() else {
            let what = "rows of a conversation that has ended";
            return Err(Error::Invariant { rule: 8, what, got: 1, expected: 0 });
        };
        let known = speaker.num_prompt + speaker.num_answered;
        if computed.num_computed < known {
            return Ok(());
        }
        let new_tokens = computed.num_computed + 1 - known;
        self.count_tokens(&mut speaker, new_tokens, now)?;
        if speaker.num_answered < speaker.num_output {
            self.speakers.insert(computed.stream, speaker);
            return Ok(());
        }
        self.end_turn(&speaker, conversation, now);
        speaker.turn += 1;
        if speaker.turn < conversation.turns.len() {
            speaker.num_prompt += speaker.num_output;
            speaker.arrived = now;
            speaker.ask(conversation);
            self.speakers.insert(computed.stream, speaker);
        } else {
            self.num_conversations += 1;
            self.speakers.remove(&computed.stream);
        }
        Ok(())
    }

    fn count_tokens(&mut self, speaker: &mut Speaker, new_tokens: u32, now: f64) -> Result<()> {
        let mut later = new_tokens;
        if speaker.num_answered == 0 {
            let waits =
                if speaker.turn == 0 { &mut self.first_token } else { &mut self.later_first_token };
            waits.push(now - speaker.arrived);
            (speaker.first_token, speaker.last_token) = (now, now);
            later -= 1;
        }
        let each = (now - speaker.last_token) / f64::from(later.max(1));
        self.between_tokens.extend(core::iter::repeat_n(each, later as usize));
        speaker.last_token = now;
        speaker.num_answered += new_tokens;
        if speaker.num_answered > speaker.num_output {
            let what = "tokens of an answer";
            let (got, expected) = (speaker.num_answered.into(), speaker.num_output.into());
            return Err(Error::Invariant { rule: 8, what, got, expected });
        }
        Ok(())
    }

    fn end_turn(&mut self, speaker: &Speaker, conversation: &Conversation, now: f64) {
        self.num_answered += 1;
        self.output_tokens += u64::from(speaker.num_answered);
        let turn = conversation.turns.get(speaker.turn);
        self.prompt_tokens += turn.map_or(0, |turn| u64::from(turn.prompt_tokens));
        self.last_answer = now;
        self.answering += now - speaker.first_token;
        self.tokens_after_first += u64::from(speaker.num_answered - 1);
    }
}

impl Speaker {
    /// Begins the turn under way.
    fn ask(&mut self, conversation: &Conversation) {
        if let Some(turn) = conversation.turns.get(self.turn) {
            self.num_prompt += turn.prompt_tokens;
            self.num_output = turn.output_tokens;
            self.num_answered = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::workload::Turn;

    fn turn(prompt_tokens: u32, output_tokens: u32) -> Turn {
        Turn { prompt_tokens, output_tokens }
    }

    fn computed(num_computed: u32) -> Computed {
        Computed { stream: 3, num_computed }
    }

    #[test]
    fn tokens_come_when_the_last_known_row_is_computed_and_are_counted_once() {
        let talk = Conversation { turns: vec![turn(10, 4), turn(2, 1)] };
        let mut turns = Turns::default();
        turns.begin(3, &talk, 1.0);
        // Two chunks of the prompt, a decode step, the same again after a preemption, two drafts.
        for (rows, now) in [(6, 2.0), (10, 3.0), (11, 3.5), (7, 4.0), (12, 5.0)] {
            turns.on_computed(computed(rows), &talk, now).unwrap();
        }
        assert_eq!((turns.num_answered, turns.output_tokens), (0, 0));
        turns.on_computed(computed(13), &talk, 6.0).unwrap();
        assert_eq!((turns.num_answered, turns.prompt_tokens, turns.output_tokens), (1, 10, 4));
        assert_eq!(turns.first_token, [2.0]);
        assert_eq!(turns.between_tokens, [0.5, 1.5, 1.0]);
        // The second turn computes the last answer's last token with its own prompt.
        turns.on_computed(computed(16), &talk, 6.5).unwrap();
        assert_eq!((turns.num_answered, turns.num_conversations), (2, 1));
        assert_eq!((&turns.later_first_token[..], turns.last_answer), (&[0.5][..], 6.5));
        assert_eq!((turns.answering, turns.tokens_after_first), (3.0, 3));
        assert!(turns.on_computed(computed(17), &talk, 7.0).is_err());
    }

    #[test]
    fn tokens_of_one_step_share_its_time() {
        let talk = Conversation { turns: vec![turn(1, 4)] };
        let mut turns = Turns::default();
        turns.begin(3, &talk, 0.0);
        turns.on_computed(computed(1), &talk, 1.0).unwrap();
        turns.on_computed(computed(4), &talk, 4.0).unwrap();
        assert_eq!(turns.between_tokens, [1.0; 3]);
        assert!(turns.speakers.is_empty());
    }

    #[test]
    fn an_answer_that_gets_too_long_is_a_bug() {
        let talk = Conversation { turns: vec![turn(5, 2)] };
        let mut turns = Turns::default();
        turns.begin(3, &talk, 0.0);
        assert!(turns.on_computed(computed(7), &talk, 1.0).is_err());
    }
}
