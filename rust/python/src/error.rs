// SPDX-License-Identifier: Apache-2.0
//! Owns the way from the core's errors to the exception classes of `hotpage.errors`.

use hotpage_core::Error;
use hotpage_core::error::Family;
use pyo3::prelude::*;

mod classes {
    pyo3::import_exception!(hotpage.errors, CapacityError);
    pyo3::import_exception!(hotpage.errors, ConfigError);
    pyo3::import_exception!(hotpage.errors, InvariantError);
    pyo3::import_exception!(hotpage.errors, ProtocolError);
}

/// The exception of a core error, its text unchanged.
pub(crate) fn raise(error: impl Into<Error>) -> PyErr {
    let error = error.into();
    family(error.family(), error.to_string())
}

/// A setting that did not get as far as the core.
pub(crate) fn config(text: String) -> PyErr {
    family(Family::Config, text)
}

/// A machine too small for a plan.
pub(crate) fn capacity(text: String) -> PyErr {
    family(Family::Capacity, text)
}

/// An argument that did not get as far as the core.
pub(crate) fn protocol(text: String) -> PyErr {
    family(Family::Protocol, text)
}

/// Exhaustive: a family without a class does not compile, and the core's own match gives every
/// variant a family.
fn family(family: Family, text: String) -> PyErr {
    match family {
        Family::Config => classes::ConfigError::new_err(text),
        Family::Capacity => classes::CapacityError::new_err(text),
        Family::Protocol => classes::ProtocolError::new_err(text),
        Family::Invariant => classes::InvariantError::new_err(text),
    }
}

/// One exception of each family by its name; tests read the mapping of those that no call can
/// provoke from it.
#[pyfunction]
pub(crate) fn _sample_errors(py: Python<'_>) -> Vec<(&'static str, Py<PyAny>)> {
    [
        ("config", Family::Config),
        ("capacity", Family::Capacity),
        ("protocol", Family::Protocol),
        ("invariant", Family::Invariant),
    ]
    .into_iter()
    .map(|(name, kind)| (name, family(kind, name.to_owned()).into_value(py).into_any()))
    .collect()
}
