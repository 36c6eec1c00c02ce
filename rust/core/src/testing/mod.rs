// SPDX-License-Identifier: Apache-2.0
//! Owns the proof tools: toy pools and workers, a naive reference model, and the life-cycle rules
//! as executable checks. Compiled for tests and under the `testing` feature only.

pub mod events;
pub mod invariants;
pub mod model;
pub mod toy;
pub mod world;

mod acks;
mod compare;
mod engine;
mod forward;

use core::fmt;

pub use events::{Ack, Event, Item, PrefixCopies};
pub use world::World;

use crate::config::{CoordinatorConfig, HostCopy, ReleasePoint};

/// A broken rule, in words for the reader of a failing test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Number of the rule in the design's life-cycle section; 0 for the event protocol.
    pub rule: u8,
    /// What was found.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {}: {}", self.rule, self.what)
    }
}

impl std::error::Error for Violation {}

/// Result of a check.
pub type Check<T = ()> = Result<T, Violation>;

/// Fails with the text of `what` unless `holds`.
///
/// # Errors
/// The violation.
pub fn ensure(rule: u8, holds: bool, what: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(Violation { rule, what: what() }) }
}

/// An id or a page as plans write it.
pub(crate) fn signed(id: u32) -> i32 {
    // OK because ids and pages of a toy world are small.
    id as i32
}

/// Settings of a world that fits into a reader's head: blocks of two tokens, one KV cache group,
/// two ranks that both write the host pool, a hot region of one block.
#[must_use]
pub fn small_config() -> CoordinatorConfig {
    CoordinatorConfig {
        block_size: 2,
        num_kv_groups: 1,
        gpu_blocks: 12,
        host_blocks: 16,
        other_blocks_per_page: 0,
        hot_rows: 2,
        top_k: 1,
        verification_rows: 2,
        num_ranks: 2,
        num_host_writers: 2,
        host_copy: HostCopy::Spilled,
        release_point: ReleasePoint::Completed,
        transition: true,
        transition_watermark: Some(2),
        hot_return_steps: 2,
        admission_window_pages: 4,
        num_reprefillable_tokens: 0,
        max_model_len: 12,
    }
}
