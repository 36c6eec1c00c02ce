// SPDX-License-Identifier: Apache-2.0
//! Owns the Python class over the core's Coordinator: arrays in, flat plans out.
//!
//! Every method costs microseconds, so none releases the interpreter.

use hotpage_core::Coordinator;
use hotpage_core::error::ProtocolFault;
use hotpage_core::ids::{HostBlockId, PageIndex, RequestId};
use hotpage_core::stats::Stats;
use hotpage_core::step::{
    Admission, AdmissionQuery, FreePlan, FreeReason, ImportOutcome, PoolLevels, StepEvents,
    StepPlan,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::buffer::{self, count};
use crate::error::{protocol, raise};
use crate::events::{
    self, AckArrays, AdmittedArrays, AdmittedBatch, AllocatedArrays, AllocatedBatch,
    HotRegionArrays, HotRegionBatch, ScheduledArrays,
};
use crate::plan::{PyFreePlan, PyRefusal, PyStepPlan};
use crate::settings::{coordinator_config, host_copy_name, release_point_name};

/// What admitting a request takes from the pools.
#[pyclass(name = "AdmissionCost", module = "hotpage._core", frozen, get_all)]
pub(crate) struct PyAdmissionCost {
    /// GPU blocks, hot region counted.
    gpu_blocks: u32,
    /// New host blocks.
    host_blocks: u32,
    /// True if a hot region must be allocated with the admission.
    hot_region: bool,
}

#[pymethods]
impl PyAdmissionCost {
    fn __repr__(&self) -> String {
        let Self { gpu_blocks, host_blocks, hot_region } = self;
        let hot_region = if *hot_region { "True" } else { "False" };
        format!(
            "AdmissionCost(gpu_blocks={gpu_blocks}, host_blocks={host_blocks}, \
             hot_region={hot_region})"
        )
    }
}

/// The one owner of page states, leases and transfers.
#[pyclass(name = "Coordinator", module = "hotpage._core")]
pub(crate) struct PyCoordinator {
    core: Coordinator,
    /// Kept for its memory.
    plan: StepPlan,
    free_plan: FreePlan,
}

fn request_id(request: i64) -> PyResult<RequestId> {
    count("request id", request).map(RequestId)
}

fn page_index(page: i64) -> PyResult<PageIndex> {
    count("page", page).map(PageIndex)
}

fn levels(gpu_free: i64, host_free: i64) -> PyResult<PoolLevels> {
    Ok(PoolLevels {
        gpu_free: count("gpu_free", gpu_free)?,
        host_free: count("host_free", host_free)?,
    })
}

impl PyCoordinator {
    fn num_groups(&self) -> usize {
        self.core.config().num_kv_groups as usize
    }

    fn region_blocks(&self) -> usize {
        self.core.config().hot_region_blocks() as usize
    }

    fn encode(&self, py: Python<'_>) -> PyResult<PyStepPlan> {
        let config = self.core.config();
        PyStepPlan::encode(py, &self.plan, config.num_kv_groups, config.hot_region_blocks())
    }
}

#[pymethods]
impl PyCoordinator {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let core = Coordinator::new(coordinator_config(settings)?).map_err(raise)?;
        Ok(Self { core, plan: StepPlan::default(), free_plan: FreePlan::default() })
    }

    /// Absorbs the events of one scheduling step and builds its plan.
    #[pyo3(signature = (
        *, gpu_free, host_free, scheduled=None, reused_blocks=None, admitted=None, allocated=None,
        hot_regions=None
    ))]
    #[allow(clippy::too_many_arguments)] // Keyword-only: one crossing carries the whole step.
    fn step(
        &mut self,
        py: Python<'_>,
        gpu_free: i64,
        host_free: i64,
        scheduled: Option<ScheduledArrays<'_>>,
        reused_blocks: Option<Bound<'_, PyAny>>,
        admitted: Option<AdmittedArrays<'_>>,
        allocated: Option<AllocatedArrays<'_>>,
        hot_regions: Option<HotRegionArrays<'_>>,
    ) -> PyResult<PyStepPlan> {
        // All arrays are read before the first event is absorbed.
        let groups = self.num_groups();
        let levels = levels(gpu_free, host_free)?;
        let scheduled = scheduled.as_ref().map(events::scheduled).transpose()?.unwrap_or_default();
        let reused = match &reused_blocks {
            Some(array) => buffer::int32("reused_blocks", array, None)?,
            None => Vec::new(),
        };
        let admitted =
            admitted.as_ref().map(|arrays| AdmittedBatch::read(arrays, groups)).transpose()?;
        let allocated =
            allocated.as_ref().map(|arrays| AllocatedBatch::read(arrays, groups)).transpose()?;
        let region = self.region_blocks();
        let hot =
            hot_regions.as_ref().map(|arrays| HotRegionBatch::read(arrays, region)).transpose()?;
        let events = StepEvents {
            reused_blocks: &reused,
            admitted: &admitted.as_ref().map_or_else(Vec::new, AdmittedBatch::events),
            allocated: &allocated.as_ref().map_or_else(Vec::new, AllocatedBatch::events),
            hot_regions: &hot.as_ref().map_or_else(Vec::new, HotRegionBatch::events),
        };
        self.core.step(&events, &scheduled, levels, &mut self.plan).map_err(raise)?;
        self.encode(py)
    }

    /// Absorbs all that the workers report after a step; all or nothing.
    #[pyo3(signature = (enqueued=None, completed=None, failed=None))]
    fn on_worker_output(
        &mut self,
        enqueued: Option<AckArrays<'_>>,
        completed: Option<AckArrays<'_>>,
        failed: Option<AckArrays<'_>>,
    ) -> PyResult<()> {
        let enqueued = events::acks(enqueued.as_ref())?;
        let completed = events::acks(completed.as_ref())?;
        let failed = events::acks(failed.as_ref())?;
        self.core.on_worker_output(&enqueued, &completed, &failed).map_err(raise)
    }

    /// Requests got their first pages.
    #[allow(clippy::too_many_arguments)] // Flat arrays of one batch, as in `step`.
    fn on_admitted(
        &mut self,
        requests: Bound<'_, PyAny>,
        prefix_kind: Bound<'_, PyAny>,
        prefix_tokens: Bound<'_, PyAny>,
        page_offsets: Bound<'_, PyAny>,
        host_blocks: Bound<'_, PyAny>,
        resident_blocks: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let arrays =
            (requests, prefix_kind, prefix_tokens, page_offsets, host_blocks, resident_blocks);
        let batch = AdmittedBatch::read(&arrays, self.num_groups())?;
        self.core.on_admitted(&batch.events()).map_err(raise)
    }

    /// Requests got further pages.
    fn on_blocks_allocated(
        &mut self,
        requests: Bound<'_, PyAny>,
        first_page: Bound<'_, PyAny>,
        page_offsets: Bound<'_, PyAny>,
        host_blocks: Bound<'_, PyAny>,
        resident_blocks: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let arrays = (requests, first_page, page_offsets, host_blocks, resident_blocks);
        let batch = AllocatedBatch::read(&arrays, self.num_groups())?;
        self.core.on_blocks_allocated(&batch.events()).map_err(raise)
    }

    /// The pool handed out blocks that were unpinned.
    fn on_blocks_reused(&mut self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = buffer::int32("blocks", blocks, None)?;
        self.core.on_blocks_reused(&blocks).map_err(raise)
    }

    /// A request got its hot region.
    fn on_hot_region_allocated(&mut self, request: i64, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = buffer::int32("blocks", blocks, None)?;
        self.core.on_hot_region_allocated(request_id(request)?, &blocks).map_err(raise)
    }

    /// An import ended; returns the pages that the block table keeps. `None` tokens: it failed.
    #[pyo3(signature = (request, num_tokens))]
    fn on_import_finished(&mut self, request: i64, num_tokens: Option<i64>) -> PyResult<u32> {
        let outcome = match num_tokens {
            Some(tokens) => ImportOutcome::Landed { num_tokens: count("num_tokens", tokens)? },
            None => ImportOutcome::Failed,
        };
        self.core.on_import_finished(request_id(request)?, outcome).map_err(raise)
    }

    /// The engine replaced the host block of a shared page by a fresh one.
    #[pyo3(signature = (request, page, host_block, resident_blocks=None))]
    fn on_host_block_redirected(
        &mut self,
        request: i64,
        page: i64,
        host_block: i64,
        resident_blocks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let blocks = resident_blocks
            .map(|array| buffer::int32("resident_blocks", array, None))
            .transpose()?;
        let (request, page) = (request_id(request)?, page_index(page)?);
        let host_block = host_block_id(host_block)?;
        self.core
            .on_host_block_redirected(request, page, host_block, blocks.as_deref())
            .map_err(raise)
    }

    /// A row of the page never reached the host pool by mirroring.
    fn on_mirror_lost(&mut self, request: i64, page: i64) -> PyResult<()> {
        self.core.on_mirror_lost(request_id(request)?, page_index(page)?).map_err(raise)
    }

    /// The engine emptied its prefix index.
    fn on_prefix_cache_reset(&mut self) -> PyResult<()> {
        self.core.on_prefix_cache_reset().map_err(raise)
    }

    /// Ranks have put transfers in stream order.
    fn on_transfers_enqueued(
        &mut self,
        transfer_ids: Bound<'_, PyAny>,
        counts: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let acks = events::acks(Some(&(transfer_ids, counts)))?;
        self.core.on_transfers_enqueued(&acks).map_err(raise)
    }

    /// Ranks have finished transfers.
    fn on_transfers_completed(
        &mut self,
        transfer_ids: Bound<'_, PyAny>,
        counts: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let acks = events::acks(Some(&(transfer_ids, counts)))?;
        self.core.on_transfers_completed(&acks).map_err(raise)
    }

    /// Ranks have finished transfers whose bytes cannot be trusted.
    fn on_transfers_failed(
        &mut self,
        transfer_ids: Bound<'_, PyAny>,
        counts: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let acks = events::acks(Some(&(transfer_ids, counts)))?;
        self.core.on_transfers_failed(&acks).map_err(raise)
    }

    /// A request leaves: "finished", "preempted" or "aborted".
    fn on_freed(&mut self, py: Python<'_>, request: i64, reason: &str) -> PyResult<PyFreePlan> {
        let reason = match reason {
            "finished" => FreeReason::Finished,
            "preempted" => FreeReason::Preempted,
            "aborted" => FreeReason::Aborted,
            other => {
                return Err(protocol(format!(
                    "reason is {other:?}, expected \"finished\", \"preempted\" or \"aborted\""
                )));
            }
        };
        self.core.on_freed(request_id(request)?, reason, &mut self.free_plan).map_err(raise)?;
        PyFreePlan::encode(py, &self.free_plan, &[])
    }

    /// Stops for good and releases every lease that is left.
    fn shutdown(&mut self, py: Python<'_>) -> PyResult<PyFreePlan> {
        let mut free_host = Vec::new();
        self.core.shutdown(&mut self.free_plan, &mut free_host);
        PyFreePlan::encode(py, &self.free_plan, &free_host)
    }

    /// Says whether a request fits: its cost, or why not.
    #[pyo3(signature = (*, num_tokens, host_prefix_pages, gpu_prefix_pages, gpu_free, host_free))]
    fn try_admit(
        &self,
        py: Python<'_>,
        num_tokens: i64,
        host_prefix_pages: i64,
        gpu_prefix_pages: i64,
        gpu_free: i64,
        host_free: i64,
    ) -> PyResult<Py<PyAny>> {
        let query = AdmissionQuery {
            num_tokens: count("num_tokens", num_tokens)?,
            host_prefix_pages: count("host_prefix_pages", host_prefix_pages)?,
            gpu_prefix_pages: count("gpu_prefix_pages", gpu_prefix_pages)?,
        };
        match self.core.try_admit(query, levels(gpu_free, host_free)?) {
            Admission::Fits(cost) => {
                let (gpu_blocks, host_blocks) = (cost.gpu_blocks, cost.host_blocks);
                let cost = PyAdmissionCost { gpu_blocks, host_blocks, hot_region: cost.hot_region };
                Ok(Py::new(py, cost)?.into_any())
            }
            Admission::Refused(refusal) => Ok(Py::new(py, PyRefusal(refusal))?.into_any()),
        }
    }

    /// The settings by name.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let config = self.core.config();
        let dict = PyDict::new(py);
        for (name, value) in [
            ("block_size", config.block_size),
            ("num_kv_groups", config.num_kv_groups),
            ("gpu_blocks", config.gpu_blocks),
            ("host_blocks", config.host_blocks),
            ("other_blocks_per_page", config.other_blocks_per_page),
            ("hot_rows", config.hot_rows),
            ("top_k", config.top_k),
            ("verification_rows", config.verification_rows),
            ("num_ranks", config.num_ranks),
            ("num_host_writers", config.num_host_writers),
            ("hot_return_steps", config.hot_return_steps),
            ("admission_window_pages", config.admission_window_pages),
            ("num_reprefillable_tokens", config.num_reprefillable_tokens),
            ("max_model_len", config.max_model_len),
        ] {
            dict.set_item(name, value)?;
        }
        dict.set_item("host_copy", host_copy_name(config.host_copy))?;
        dict.set_item("release_point", release_point_name(config.release_point))?;
        dict.set_item("transition", config.transition)?;
        dict.set_item("transition_watermark", config.transition_watermark)?;
        Ok(dict)
    }

    /// Blocks of one hot region over all hot groups.
    #[getter]
    fn hot_region_blocks(&self) -> u32 {
        self.core.config().hot_region_blocks()
    }

    /// Free GPU blocks under which requests give up residency.
    #[getter]
    fn watermark(&self) -> u32 {
        self.core.config().watermark()
    }

    /// Requests admitted and not freed.
    #[getter]
    fn num_live(&self) -> u32 {
        self.core.num_live()
    }

    /// Transfers that some rank has not completed.
    #[getter]
    fn num_transfers(&self) -> usize {
        self.core.num_transfers()
    }

    /// True while the engine must keep stepping so that transfers drain.
    fn has_pending_work(&self) -> bool {
        self.core.has_pending_work()
    }

    /// True if GPU blocks will become free without a preemption.
    fn has_pending_reclamation(&self, gpu_free: i64, host_free: i64) -> PyResult<bool> {
        Ok(self.core.has_pending_reclamation(levels(gpu_free, host_free)?))
    }

    /// Pages of a live request.
    fn num_pages(&self, request: i64) -> PyResult<u32> {
        self.core.num_pages(request_id(request)?).map_err(raise)
    }

    /// State numbers of the pages of a live request, one byte a page.
    fn page_states<'py>(&self, py: Python<'py>, request: i64) -> PyResult<Bound<'py, PyBytes>> {
        let states = self.core.page_states(request_id(request)?).map_err(raise)?;
        let states: Vec<u8> = states.iter().map(|state| *state as u8).collect();
        Ok(PyBytes::new(py, &states))
    }

    /// GPU blocks of a page of a live request; empty where only the host copy is valid.
    fn resident_blocks(&self, request: i64, page: i64) -> PyResult<Vec<i32>> {
        let blocks = self.core.resident_blocks(request_id(request)?, page_index(page)?);
        Ok(blocks.map_err(raise)?.to_vec())
    }

    /// Leading pages of a live request whose host copy is complete.
    fn durable_prefix(&self, request: i64) -> PyResult<u32> {
        self.core.durable_prefix(request_id(request)?).map_err(raise)
    }

    /// True if the live request holds its hot region.
    fn has_hot_region(&self, request: i64) -> PyResult<bool> {
        self.core.has_hot_region(request_id(request)?).map_err(raise)
    }

    /// For each host block the GPU blocks that hold its rows now, or `None`.
    fn readable_copies(&self, host_blocks: &Bound<'_, PyAny>) -> PyResult<Vec<Option<Vec<i32>>>> {
        let blocks = buffer::int32("host_blocks", host_blocks, None)?;
        let copies = blocks.into_iter().map(|block| {
            let copy = self.core.readable_copy(HostBlockId(block));
            copy.map(<[i32]>::to_vec)
        });
        Ok(copies.collect())
    }

    /// Counters since construction.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_dict(py, self.core.stats())
    }

    /// A number that changes with everything the Coordinator decides by; slow, for tests.
    fn state_digest(&self) -> u64 {
        self.core.state_digest()
    }
}

fn host_block_id(block: i64) -> PyResult<HostBlockId> {
    match i32::try_from(block) {
        Ok(block) => Ok(HostBlockId(block)),
        Err(_) => {
            let (what, max) = ("host_block", i64::from(i32::MAX));
            Err(raise(ProtocolFault::OutOfRange { what, got: block, min: 0, max }))
        }
    }
}

/// Counters by name. Without `..`, so that a counter that is left out does not compile.
fn stats_dict(py: Python<'_>, stats: Stats) -> PyResult<Bound<'_, PyDict>> {
    let Stats {
        admitted,
        finished,
        preempted,
        spills_planned,
        spills_completed,
        spills_failed,
        restores_planned,
        pages_released,
        pages_lost,
        pages_adopted,
        pages_repinned,
        hot_regions_granted,
        hot_regions_returned,
        pages_published,
        rows_rejected,
    } = stats;
    let dict = PyDict::new(py);
    for (name, value) in [
        ("admitted", admitted),
        ("finished", finished),
        ("preempted", preempted),
        ("spills_planned", spills_planned),
        ("spills_completed", spills_completed),
        ("spills_failed", spills_failed),
        ("restores_planned", restores_planned),
        ("pages_released", pages_released),
        ("pages_lost", pages_lost),
        ("pages_adopted", pages_adopted),
        ("pages_repinned", pages_repinned),
        ("hot_regions_granted", hot_regions_granted),
        ("hot_regions_returned", hot_regions_returned),
        ("pages_published", pages_published),
        ("rows_rejected", rows_rejected),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
