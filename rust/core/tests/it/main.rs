// SPDX-License-Identifier: Apache-2.0
//! Owns nothing: one binary for all integration tests, so that the crate is linked once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod exhaustive;
mod faults;
mod prefix;
mod pressure;
mod publication;
mod script;
mod state_machine;
