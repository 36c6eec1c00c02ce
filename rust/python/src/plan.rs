// SPDX-License-Identifier: Apache-2.0
//! Owns `StepPlan` and `FreePlan` as Python sees them: immutable, flat, cheap to pickle.

use hotpage_core::error::Pool;
use hotpage_core::replay::ReplayPlan;
use hotpage_core::step::{self, HotRegions, Publications, Refusal, ResidencyDeltas, TransferList};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::blob::{Blob, Element, Header, List, Row, Schema, Values};

const fn list(name: &'static str, element: Element, row: Row, siblings: &'static str) -> List {
    List { name, element, row, siblings }
}

const fn flat(name: &'static str, siblings: &'static str) -> List {
    list(name, Element::Int32, Row::Flat, siblings)
}

const fn blocks(name: &'static str, row: Row, siblings: &'static str) -> List {
    list(name, Element::Int32, row, siblings)
}

const fn bytes(name: &'static str, siblings: &'static str) -> List {
    list(name, Element::Uint8, Row::Flat, siblings)
}

static STEP_PLAN: Schema = Schema {
    tag: u32::from_le_bytes(*b"HPsp"),
    what: "step plan",
    lists: &[
        list("transfer_id", Element::Int64, Row::Flat, "transfer"),
        flat("touch_gpu", ""),
        flat("touch_host", ""),
        flat("publish_request", "publish"),
        flat("publish_num_pages", "publish"),
        flat("unpin_gpu", ""),
        flat("free_gpu", ""),
        flat("free_host", ""),
        flat("hot_regions_wanted", ""),
        flat("hot_regions_returned", ""),
        flat("hot_region_request", "hot region"),
        blocks("hot_region_blocks", Row::Region, "hot region"),
        flat("recycled_host_blocks", ""),
        flat("transfer_host_block", "transfer"),
        flat("transfer_source_host_block", "transfer"),
        flat("transfer_num_rows", "transfer"),
        blocks("transfer_resident_blocks", Row::Groups, "transfer"),
        flat("residency_cleared", ""),
        flat("residency_request", "residency"),
        flat("residency_page", "residency"),
        blocks("residency_blocks", Row::Groups, "residency"),
        flat("replay_row_request", "row"),
        flat("replay_row_position", "row"),
        flat("replay_request", "replay"),
        flat("replay_first_row", ""),
        flat("replay_union_bound", "replay"),
        flat("replay_dropped_request", "dropped"),
        flat("replay_dropped_position", "dropped"),
        flat("replay_dropped_rows", "dropped"),
        blocks("lost_pages", Row::Of(2), ""),
        blocks(REFUSALS, Row::Of(REFUSAL_WORDS), ""),
        flat("retired", ""),
        bytes("transfer_kind", "transfer"),
        bytes("transfer_after_forward", "transfer"),
        bytes("replay_row_provisional", "row"),
    ],
};

static FREE_PLAN: Schema = Schema {
    tag: u32::from_le_bytes(*b"HPfp"),
    what: "free plan",
    lists: &[flat("unpin_gpu", ""), flat("free_gpu", ""), flat("free_host", "")],
};

const REFUSALS: &str = "refusal_words";
const REFUSAL_WORDS: usize = 4;
const NEVER_FITS: i32 = 1;
const HOST: i32 = 2;
const RECLAIMING: i32 = 4;
const ALL_CONTEXT_RESIDENT: u32 = 1;
const RETIRED: u32 = 1;

/// Why a request was not admitted or could not get a hot region.
#[pyclass(name = "Refusal", module = "hotpage._core", frozen, eq)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct PyRefusal(pub(crate) Refusal);

#[pymethods]
impl PyRefusal {
    /// True if the request can never fit.
    #[getter]
    fn never_fits(&self) -> bool {
        matches!(self.0, Refusal::NeverFits { .. })
    }

    /// "gpu" or "host".
    #[getter]
    fn pool(&self) -> &'static str {
        let (Refusal::Short { pool, .. } | Refusal::NeverFits { pool, .. }) = self.0;
        match pool {
            Pool::Gpu => "gpu",
            Pool::Host => "host",
        }
    }

    /// Blocks needed.
    #[getter]
    fn need(&self) -> u32 {
        let (Refusal::Short { need, .. } | Refusal::NeverFits { need, .. }) = self.0;
        need
    }

    /// Blocks free now; blocks of the whole pool where the request never fits.
    #[getter]
    fn have(&self) -> u32 {
        match self.0 {
            Refusal::Short { free, .. } => free,
            Refusal::NeverFits { total, .. } => total,
        }
    }

    /// True if transfers under way will free some blocks: wait, do not preempt.
    #[getter]
    fn reclaiming(&self) -> bool {
        matches!(self.0, Refusal::Short { reclaiming: true, .. })
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Refusal({:?})", self.0.to_string())
    }
}

fn refusal_words(request: i32, refusal: Refusal) -> [i32; REFUSAL_WORDS] {
    let (pool, need, have, flags) = match refusal {
        Refusal::Short { pool, need, free, reclaiming } => {
            (pool, need, free, if reclaiming { RECLAIMING } else { 0 })
        }
        Refusal::NeverFits { pool, need, total } => (pool, need, total, NEVER_FITS),
    };
    let host = if pool == Pool::Host { HOST } else { 0 };
    // OK because the words carry the bits, and `refusal_of` takes them back as u32.
    [request, flags | host, need as i32, have as i32]
}

fn refusal_of(code: i32, need: i32, have: i32) -> Refusal {
    let pool = if code & HOST == 0 { Pool::Gpu } else { Pool::Host };
    let (need, have) = (need as u32, have as u32);
    if code & NEVER_FITS == 0 {
        Refusal::Short { pool, need, free: have, reclaiming: code & RECLAIMING != 0 }
    } else {
        Refusal::NeverFits { pool, need, total: have }
    }
}

/// What the engine and the workers must do for one step; apply in the order of `step.rs`.
#[pyclass(name = "StepPlan", module = "hotpage._core", frozen)]
pub(crate) struct PyStepPlan {
    blob: Blob,
}

impl PyStepPlan {
    /// Writes a plan of a Coordinator with `num_kv_groups` groups and `region_blocks` blocks in a
    /// hot region.
    pub(crate) fn encode(
        py: Python<'_>,
        plan: &step::StepPlan,
        num_kv_groups: u32,
        region_blocks: u32,
    ) -> PyResult<Self> {
        // Without `..`, so that a field of the core that is not written does not compile.
        let step::StepPlan {
            step,
            touch_gpu,
            touch_host,
            publish: Publications { request: publish_request, num_pages: publish_num_pages },
            unpin_gpu,
            free_gpu,
            free_host,
            hot_regions_wanted,
            hot_regions_returned,
            hot_regions: HotRegions { request: hot_request, blocks: hot_blocks },
            recycled_host_blocks,
            transfers,
            residency,
            all_context_resident,
            replay,
            lost_pages,
            refusals,
            retired,
        } = plan;
        let TransferList {
            transfer_id,
            kind,
            after_forward,
            host_block,
            source_host_block,
            num_rows,
            resident_blocks,
        } = transfers;
        let ResidencyDeltas { cleared, request, page, blocks } = residency;
        let ReplayPlan {
            row_request,
            row_position,
            row_provisional,
            request: replay_request,
            first_row,
            union_bound,
            dropped_request,
            dropped_position,
            dropped_rows,
        } = replay;
        let lost: Vec<i32> = lost_pages.iter().flat_map(|&(r, p)| [r, p]).collect();
        let refused: Vec<i32> =
            refusals.iter().flat_map(|&(r, why)| refusal_words(r, why)).collect();
        let ids = Values::Int32;
        let values = [
            Values::Int64(transfer_id),
            ids(touch_gpu),
            ids(touch_host),
            ids(publish_request),
            ids(publish_num_pages),
            ids(unpin_gpu),
            ids(free_gpu),
            ids(free_host),
            ids(hot_regions_wanted),
            ids(hot_regions_returned),
            ids(hot_request),
            ids(hot_blocks),
            ids(recycled_host_blocks),
            ids(host_block),
            ids(source_host_block),
            ids(num_rows),
            ids(resident_blocks),
            ids(cleared),
            ids(request),
            ids(page),
            ids(blocks),
            ids(row_request),
            ids(row_position),
            ids(replay_request),
            ids(first_row),
            ids(union_bound),
            ids(dropped_request),
            ids(dropped_position),
            ids(dropped_rows),
            ids(&lost),
            ids(&refused),
            ids(retired),
            Values::Uint8(kind),
            Values::Uint8(after_forward),
            Values::Uint8(row_provisional),
        ];
        let header = Header {
            num_kv_groups,
            region_blocks,
            step: *step,
            number: 0,
            flags: if *all_context_resident { ALL_CONTEXT_RESIDENT } else { 0 },
        };
        Ok(Self { blob: Blob::encode(py, &STEP_PLAN, header, &values)? })
    }
}

#[pymethods]
impl PyStepPlan {
    /// Number of the step, from 1.
    #[getter]
    fn step(&self) -> u64 {
        self.blob.header().step
    }

    /// KV cache groups (G).
    #[getter]
    fn num_kv_groups(&self) -> u32 {
        self.blob.header().num_kv_groups
    }

    /// True if no scheduled request reads a host-only page.
    #[getter]
    fn all_context_resident(&self) -> bool {
        self.blob.header().flags & ALL_CONTEXT_RESIDENT != 0
    }

    /// Requests that were refused a hot region, and why.
    #[getter]
    fn refusals(&self, py: Python<'_>) -> PyResult<Vec<(i32, PyRefusal)>> {
        let Some(words) = self.blob.array(py, REFUSALS)? else { return Ok(Vec::new()) };
        let words: Vec<[i32; REFUSAL_WORDS]> = words.call_method0("tolist")?.extract()?;
        Ok(words
            .into_iter()
            .map(|[request, code, need, have]| (request, PyRefusal(refusal_of(code, need, have))))
            .collect())
    }

    /// The plan as one `bytes` object, without a copy.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        self.blob.bytes(py).clone()
    }

    /// The plan that `to_bytes` wrote.
    #[staticmethod]
    fn from_bytes(data: &Bound<'_, PyBytes>) -> PyResult<Self> {
        Ok(Self { blob: Blob::decode(data, &STEP_PLAN)? })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let from_bytes = py.get_type::<Self>().getattr("from_bytes")?;
        Ok((from_bytes, (self.to_bytes(py),)))
    }

    /// Lists are read-only numpy arrays over the plan's bytes.
    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        list_attribute(&self.blob, py, name, "StepPlan")
    }

    fn __dir__(slf: &Bound<'_, Self>) -> PyResult<Vec<String>> {
        names(slf.as_any(), &slf.get().blob)
    }

    fn __eq__(&self, py: Python<'_>, other: &Self) -> bool {
        self.blob.bytes(py).as_bytes() == other.blob.bytes(py).as_bytes()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<StepPlan step={} bytes={}>", self.step(), self.blob.bytes(py).as_bytes().len())
    }
}

/// What the engine must do with the blocks of a request that leaves.
#[pyclass(name = "FreePlan", module = "hotpage._core", frozen)]
pub(crate) struct PyFreePlan {
    blob: Blob,
}

impl PyFreePlan {
    /// Writes a plan; `free_host` is empty but at shutdown.
    pub(crate) fn encode(
        py: Python<'_>,
        plan: &step::FreePlan,
        free_host: &[i32],
    ) -> PyResult<Self> {
        let step::FreePlan { publish_pages, unpin_gpu, free_gpu, retired } = plan;
        let values = [unpin_gpu, free_gpu, free_host].map(Values::Int32);
        let header = Header {
            number: *publish_pages,
            flags: if *retired { RETIRED } else { 0 },
            ..Header::default()
        };
        Ok(Self { blob: Blob::encode(py, &FREE_PLAN, header, &values)? })
    }
}

#[pymethods]
impl PyFreePlan {
    /// Leading pages to publish before the request's host blocks are freed.
    #[getter]
    fn publish_pages(&self) -> u32 {
        self.blob.header().number
    }

    /// True if the id may be used again at once; else wait for `StepPlan.retired`.
    #[getter]
    fn retired(&self) -> bool {
        self.blob.header().flags & RETIRED != 0
    }

    /// The plan as one `bytes` object, without a copy.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        self.blob.bytes(py).clone()
    }

    /// The plan that `to_bytes` wrote.
    #[staticmethod]
    fn from_bytes(data: &Bound<'_, PyBytes>) -> PyResult<Self> {
        Ok(Self { blob: Blob::decode(data, &FREE_PLAN)? })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let from_bytes = py.get_type::<Self>().getattr("from_bytes")?;
        Ok((from_bytes, (self.to_bytes(py),)))
    }

    /// Lists are read-only numpy arrays over the plan's bytes.
    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        list_attribute(&self.blob, py, name, "FreePlan")
    }

    fn __dir__(slf: &Bound<'_, Self>) -> PyResult<Vec<String>> {
        names(slf.as_any(), &slf.get().blob)
    }

    fn __eq__(&self, py: Python<'_>, other: &Self) -> bool {
        self.blob.bytes(py).as_bytes() == other.blob.bytes(py).as_bytes()
    }

    fn __repr__(&self) -> String {
        format!("<FreePlan publish_pages={} retired={}>", self.publish_pages(), self.retired())
    }
}

type Reduced<'py> = (Bound<'py, PyAny>, (Bound<'py, PyBytes>,));

fn list_attribute<'py>(
    blob: &Blob,
    py: Python<'py>,
    name: &str,
    class: &str,
) -> PyResult<Bound<'py, PyAny>> {
    blob.array(py, name)?.ok_or_else(|| {
        PyAttributeError::new_err(format!("'{class}' object has no attribute '{name}'"))
    })
}

fn names(object: &Bound<'_, PyAny>, blob: &Blob) -> PyResult<Vec<String>> {
    let mut names: Vec<String> = object.get_type().dir()?.extract()?;
    names.extend(blob.names().filter(|name| *name != REFUSALS).map(str::to_owned));
    Ok(names)
}
