// SPDX-License-Identifier: Apache-2.0
//! Owns the Python module `hotpage._core`; it contains no decision about paging.

use pyo3::prelude::*;

/// The Rust core of hotpage.
#[pymodule]
mod _core {
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
