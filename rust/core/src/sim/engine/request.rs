// SPDX-License-Identifier: Apache-2.0
//! Owns what the engine keeps of conversations and of their present request.

use crate::ids::RequestId;
use crate::sim::content::ContentStream;
use crate::sim::workload::Conversation;

/// Number of a conversation in the engine's table; used again after the conversation has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConversationId(pub usize);

/// One conversation that has not ended.
#[derive(Debug)]
pub(super) struct ConversationState {
    pub(super) content: ContentStream,
    pub(super) conversation: Conversation,
    /// Turn that is under way or comes next.
    pub(super) turn: usize,
    /// Tokens said before that turn, the system prefix counted.
    pub(super) num_said: u32,
    /// Keys of the leading pages, as far as they were needed.
    page_keys: Vec<u64>,
    /// Leading tokens whose rows were computed at some time.
    pub(super) num_ever_computed: u32,
    pub(super) request: Option<Request>,
}

impl ConversationState {
    pub(super) fn new(content: ContentStream, conversation: Conversation, system: u32) -> Self {
        Self {
            content,
            conversation,
            turn: 0,
            num_said: system,
            page_keys: Vec::new(),
            num_ever_computed: 0,
            request: None,
        }
    }

    /// Keys of the first `num_pages` pages.
    pub(super) fn page_keys(&mut self, num_pages: u32, block_size: u32) -> &[u64] {
        // OK because max_model_len bounds the pages, and it is a u32.
        for page in self.page_keys.len() as u32..num_pages {
            let previous = self.page_keys.last().copied().unwrap_or(0);
            self.page_keys.push(self.content.page_key(previous, page, block_size));
        }
        &self.page_keys[..num_pages as usize]
    }
}

/// The request of a turn, waiting or running.
#[derive(Debug)]
pub(super) struct Request {
    /// Tokens of the prompt, everything said before counted.
    pub(super) num_prompt: u32,
    /// Rows that the request computes in all: every token's but the last one's.
    pub(super) num_rows: u32,
    /// Tokens known: the prompt and what was generated.
    pub(super) num_known: u32,
    /// Tokens whose rows are valid.
    pub(super) num_computed: u32,
    /// Steps with drafts so far, over all admissions.
    pub(super) attempts: u32,
    /// Steps in a row that it could not grow.
    pub(super) waited: u32,
    pub(super) running: Option<Running>,
}

/// What an admitted request holds.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) id: RequestId,
    pub(super) state_row: usize,
    /// Pages of the block table.
    pub(super) num_pages: u32,
    /// `[pages]` host blocks; empty without a host pool.
    pub(super) host_blocks: Vec<i32>,
    /// `[pages][other blocks]` indexer blocks.
    pub(super) other_blocks: Vec<i32>,
    /// `[pages][G]` GPU blocks; kept without a host pool only, to publish them.
    pub(super) resident_blocks: Vec<i32>,
    /// Leading pages published in the GPU prefix index.
    pub(super) num_published: u32,
}

/// Tokens of a request's next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Work {
    /// Tokens, drafts counted.
    pub(super) tokens: u32,
    pub(super) drafts: u32,
}

impl Request {
    pub(super) fn new(num_prompt: u32, num_output: u32) -> Self {
        Self {
            num_prompt,
            num_rows: num_prompt + num_output - 1,
            num_known: num_prompt,
            num_computed: 0,
            attempts: 0,
            waited: 0,
            running: None,
        }
    }

    /// What the request computes next, within `budget` tokens.
    pub(super) fn work(&self, chunk_tokens: u32, num_drafts: u32, budget: u32) -> Work {
        let remaining = self.num_known - self.num_computed;
        if remaining > 1 || self.num_computed < self.num_prompt {
            return Work { tokens: remaining.min(chunk_tokens).min(budget), drafts: 0 };
        }
        if budget == 0 {
            return Work { tokens: 0, drafts: 0 };
        }
        let to_end = self.num_rows - self.num_computed;
        let drafts = num_drafts.min(to_end - 1).min(budget - 1);
        Work { tokens: 1 + drafts, drafts }
    }

    /// Counts rows that a step computed and kept; true if they were the last.
    pub(super) fn advance(&mut self, kept: u32) -> bool {
        self.num_computed += kept;
        if self.num_computed >= self.num_known {
            self.num_known = self.num_computed + 1;
        }
        self.num_computed >= self.num_rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_computes_all_rows_but_the_last_tokens_one() {
        let mut request = Request::new(10, 3);
        let mut rows = 0;
        loop {
            let work = request.work(4, 0, 100);
            rows += work.tokens;
            if request.advance(work.tokens) {
                break;
            }
        }
        assert_eq!(rows, 12);
        let one_token = Request::new(10, 1);
        assert_eq!(one_token.num_rows, 10);
    }

    #[test]
    fn drafts_stop_at_the_last_row_and_at_the_budget() {
        let mut request = Request::new(4, 4);
        assert_eq!(request.work(8, 3, 100), Work { tokens: 4, drafts: 0 });
        request.advance(4);
        assert_eq!(request.work(8, 3, 100), Work { tokens: 3, drafts: 2 });
        assert_eq!(request.work(8, 3, 2), Work { tokens: 2, drafts: 1 });
        assert_eq!(request.work(8, 3, 0), Work { tokens: 0, drafts: 0 });
        request.advance(2);
        assert_eq!(request.work(8, 3, 100), Work { tokens: 1, drafts: 0 });
        assert!(request.advance(1));
    }

    #[test]
    fn a_preempted_request_computes_its_answer_so_far_as_part_of_its_prompt() {
        let mut request = Request::new(4, 10);
        request.advance(4);
        request.advance(1);
        request.num_computed = 0;
        assert_eq!(request.work(100, 3, 100), Work { tokens: 6, drafts: 0 });
        request.advance(6);
        assert_eq!(request.num_known, 7);
    }
}
