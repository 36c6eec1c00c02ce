// SPDX-License-Identifier: Apache-2.0
//! Owns the one error of the planner: a sentence with the value, its bound and the remedy.

use std::fmt;

/// Largest size in GiB, a pebibyte: more than any machine has, and few enough bytes that no product
/// of the planner leaves 64 bits.
pub const MAX_SIZE: f64 = (1_u64 << 20) as f64;

/// Result with the planner's error.
pub type Result<T> = std::result::Result<T, PlanError>;

/// What kind of refusal it is; callers map the two to different exception classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A setting is out of its bounds whatever the machine is.
    Config,
    /// The setting is fine, the machine is too small for it.
    Capacity,
}

/// A refused input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanError {
    /// Kind of the refusal.
    pub kind: Kind,
    /// Name of the input.
    pub name: String,
    /// The value as given.
    pub got: String,
    /// The bound that it breaks.
    pub expected: String,
    /// What to change.
    pub remedy: String,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, got, expected, remedy, .. } = self;
        write!(f, "{name} is {got}, expected {expected}; {remedy}")
    }
}

impl std::error::Error for PlanError {}

/// A setting out of its bounds.
pub(crate) fn config(
    name: &str,
    got: impl fmt::Display,
    expected: impl fmt::Display,
    remedy: impl fmt::Display,
) -> PlanError {
    build(Kind::Config, name, got, expected, remedy)
}

/// A machine too small.
pub(crate) fn capacity(
    name: &str,
    got: impl fmt::Display,
    expected: impl fmt::Display,
    remedy: impl fmt::Display,
) -> PlanError {
    build(Kind::Capacity, name, got, expected, remedy)
}

#[cold]
fn build(
    kind: Kind,
    name: &str,
    got: impl fmt::Display,
    expected: impl fmt::Display,
    remedy: impl fmt::Display,
) -> PlanError {
    PlanError {
        kind,
        name: name.to_owned(),
        got: got.to_string(),
        expected: expected.to_string(),
        remedy: remedy.to_string(),
    }
}

/// Checks `low <= got <= high`.
pub(crate) fn within(name: &str, got: i64, low: i64, high: i64, remedy: &str) -> Result<u64> {
    if got < low {
        return Err(config(name, got, format!("at least {low}"), remedy));
    }
    if got > high {
        return Err(config(name, got, format!("at most {high}"), remedy));
    }
    // OK because every caller's lower bound is at least 0.
    Ok(got.unsigned_abs())
}

/// Checks that a size in GiB (or a rate in GB/s) is a number above `low`, or equal to it if
/// `low_allowed`, and at most [`MAX_SIZE`].
pub(crate) fn size(name: &str, got: f64, low: f64, low_allowed: bool, remedy: &str) -> Result<f64> {
    let above = got > low || (low_allowed && got >= low);
    if above && got <= MAX_SIZE {
        return Ok(got);
    }
    let bound = if above {
        format!("at most {MAX_SIZE}")
    } else if low_allowed {
        format!("at least {low}")
    } else {
        format!("above {low}")
    };
    // In plain digits a large number would fill the screen.
    let text = if got.abs() < 1e15 { got.to_string() } else { format!("{got:e}") };
    Err(config(name, text, bound, remedy))
}
