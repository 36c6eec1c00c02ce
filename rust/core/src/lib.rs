// SPDX-License-Identifier: Apache-2.0
//! Residency bookkeeping for sparse-attention KV caches.
//!
//! The crate decides which pages of which requests stay on the GPU; it moves no bytes and
//! allocates no blocks. Engines report events and carry out the [`step::StepPlan`] they get back.
//! Everything is `&mut self` and single-threaded, so there is nothing for loom to check.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod config;
pub mod coordinator;
pub mod dataplane;
pub mod error;
pub mod geometry;
pub mod hot;
pub mod ids;
pub mod index_group;
pub mod lease;
pub mod lru;
pub mod page;
pub mod pool;
pub mod replay;
pub mod request;
pub mod residency;
pub mod sim;
pub mod spill;
pub mod stats;
pub mod step;

pub use coordinator::Coordinator;
pub use error::{Error, Result};
