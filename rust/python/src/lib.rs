// SPDX-License-Identifier: Apache-2.0
//! Owns the Python module `hotpage._core`; it contains no decision about paging.

#![deny(unsafe_code, unsafe_op_in_unsafe_fn)]

mod blob;
mod buffer;
mod coordinator;
mod demo;
mod error;
mod events;
mod interner;
mod plan;
mod planner;
mod settings;
mod simulation;

use pyo3::prelude::*;

/// The Rust core of hotpage.
#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::coordinator::{PyAdmissionCost, PyCoordinator};
    #[pymodule_export]
    use super::demo::PyDemo;
    #[pymodule_export]
    use super::error::_sample_errors;
    #[pymodule_export]
    use super::interner::PyRequestInterner;
    #[pymodule_export]
    use super::plan::{PyFreePlan, PyRefusal, PyStepPlan};
    #[pymodule_export]
    use super::planner::{copy_gbps, layers_with_indexer, pack_layers, plan_capacity};
    #[pymodule_export]
    use super::simulation::PySimulation;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        for (name, number) in hotpage_core::page::STATE_NUMBERS {
            module.add(format!("PAGE_{}", name.to_uppercase()).as_str(), number)?;
        }
        for (name, number) in hotpage_core::spill::KIND_NUMBERS {
            module.add(format!("TRANSFER_{}", name.to_uppercase()).as_str(), number)?;
        }
        for (name, kind) in events::PREFIX_KINDS {
            module.add(name, kind)?;
        }
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
