// SPDX-License-Identifier: Apache-2.0
//! Owns the one integration-test binary of the core crate.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bytes;
mod naive;
mod resolve_fuzz;
mod resolve_oracles;
mod rng;
mod vectors;
