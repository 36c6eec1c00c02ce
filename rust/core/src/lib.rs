// SPDX-License-Identifier: Apache-2.0
//! Residency bookkeeping for sparse-attention KV caches.
//!
//! The Coordinator decides which pages of which requests stay on the GPU; it moves no bytes and
//! allocates no blocks. Engines report events and carry out the [`step::StepPlan`] they get back.
//! `dataplane` is the scalar reference of what the kernels do with bytes, and `sim` an engine on
//! top of both; nothing else in the crate uses them.
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
pub mod interner;
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
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use coordinator::Coordinator;
pub use error::{Error, Result};
