// SPDX-License-Identifier: Apache-2.0
//! Owns the Python class over the core's request interner.

use hotpage_core::ids::RequestId;
use hotpage_core::interner::RequestInterner;
use pyo3::prelude::*;

use crate::buffer;
use crate::error::raise;

/// Dense ids for the strings that an engine calls its requests by.
#[pyclass(name = "RequestInterner", module = "hotpage._core")]
#[derive(Default)]
pub(crate) struct PyRequestInterner {
    core: RequestInterner,
}

#[pymethods]
impl PyRequestInterner {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Gives `name` an id that nothing else uses; `ProtocolError` if the name has one.
    fn bind(&mut self, name: &str) -> PyResult<u32> {
        self.core.bind(name).map(|request| request.0).map_err(raise)
    }

    /// The id that `name` is bound to.
    fn get(&self, name: &str) -> Option<u32> {
        self.core.get(name).map(|request| request.0)
    }

    /// The name behind an id that is bound or draining.
    fn name(&self, request: i64) -> Option<&str> {
        self.core.name(RequestId(u32::try_from(request).ok()?))
    }

    /// Takes `name` off its id and returns the id, which stays in use until it is retired.
    fn unbind(&mut self, name: &str) -> Option<u32> {
        self.core.unbind(name).map(|request| request.0)
    }

    /// Lets unbound ids (int32) be used again; `ProtocolError`, and no change, if one of them is
    /// bound or not in use.
    fn retire(&mut self, requests: &Bound<'_, PyAny>) -> PyResult<()> {
        self.core.retire(&buffer::requests(requests)?).map_err(raise)
    }

    /// Ids that are bound or draining.
    #[getter]
    fn num_in_use(&self) -> usize {
        self.core.num_in_use()
    }

    fn __len__(&self) -> usize {
        self.core.len()
    }

    fn __contains__(&self, name: &str) -> bool {
        self.core.get(name).is_some()
    }
}
