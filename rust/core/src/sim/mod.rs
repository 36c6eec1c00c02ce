// SPDX-License-Identifier: Apache-2.0
//! Owns synthetic load for the embedded engine, the simulator and the benches. Nothing in the core
//! uses it.

pub mod policy;
pub mod rng;
pub mod topk;
