// SPDX-License-Identifier: Apache-2.0
//! Owns the planner's arithmetic: from a model's geometry and a machine to the number of requests
//! that run at each context length, and what limits it.
//!
//! It has no dependencies and does no I/O, so that the command line, the tests and a WebAssembly
//! page read the same numbers from the same code. Every size is in bytes and 64 bits wide.
//!
//! The packing of layers into groups, the bytes of a block and the steady-state concurrency are
//! those of vLLM 0.33; the tests marked `vllm` hold them to vLLM's own functions.

#![forbid(unsafe_code)]

pub mod capacity;
pub mod error;
pub mod link;
pub mod memory;
pub mod model;
pub mod packing;
pub mod plan;

pub use error::{PlanError, Result};
pub use model::Model;
pub use packing::Packing;
pub use plan::{plan, Inputs, Plan, Point};
