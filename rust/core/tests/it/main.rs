// SPDX-License-Identifier: Apache-2.0
//! Owns the one integration-test binary of the core crate.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bytes;
mod exhaustive;
mod faults;
mod naive;
mod prefix;
mod pressure;
mod publication;
mod resolve_fuzz;
mod resolve_oracles;
mod rng;
mod script;
mod state_machine;
mod vectors;
