// SPDX-License-Identifier: Apache-2.0
//! Owns the embedded engine, which plays vLLM's part around the Coordinator with real bytes, and
//! the synthetic load for it, the simulator and the benches. Nothing in the core uses it.

pub mod content;
pub mod demo;
pub mod engine;
pub mod policy;
pub mod prefix;
pub mod rng;
pub mod simulate;
pub mod soak;
pub mod topk;
pub mod worker;
pub mod workload;
