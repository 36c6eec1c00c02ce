// SPDX-License-Identifier: Apache-2.0
//! Owns the way of the capacity planner between Python and `hotpage-plan`: keyword arguments in,
//! plain dictionaries out. It computes nothing.

use hotpage_plan::error::Kind;
use hotpage_plan::link::{self, HostLayout};
use hotpage_plan::memory::GpuMemory;
use hotpage_plan::model::{self, Model, RequestGroup};
use hotpage_plan::plan::{Bind, Inputs, Plan, Point};
use hotpage_plan::{Packing, PlanError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::{capacity, config};
use crate::settings::{Settings, choice};

const LAYOUTS: [(&str, HostLayout); 2] =
    [("row_interleaved", HostLayout::RowInterleaved), ("layer_major", HostLayout::LayerMajor)];

fn raise(error: PlanError) -> PyErr {
    match error.kind {
        Kind::Config => config(error.to_string()),
        Kind::Capacity => capacity(error.to_string()),
    }
}

/// A value of the named type, or the sentence that says what was given instead.
fn read<T>(settings: &mut Settings<'_>, name: &str, kind: &str) -> PyResult<T>
where
    T: for<'a, 'py> FromPyObject<'a, 'py>,
{
    let value = settings.require(name)?;
    convert(name, &value, kind)
}

fn read_optional<T>(settings: &mut Settings<'_>, name: &str, kind: &str) -> PyResult<Option<T>>
where
    T: for<'a, 'py> FromPyObject<'a, 'py>,
{
    settings.optional(name).map(|value| convert(name, &value, kind)).transpose()
}

fn convert<T>(name: &str, value: &Bound<'_, PyAny>, kind: &str) -> PyResult<T>
where
    T: for<'a, 'py> FromPyObject<'a, 'py>,
{
    let got = value.repr()?;
    value
        .extract()
        .map_err(|_| config(format!("{name} is {got}, expected {kind}; pass a value of that type")))
}

const COUNT: &str = "a count of 0 to 2^64-1";
const INT: &str = "an integer of 64 bits";
const NUMBER: &str = "a number";

fn read_model(settings: &mut Settings<'_>) -> PyResult<Model> {
    let groups: Vec<(u64, u64)> = read(settings, "request_groups", "(page bytes, blocks) pairs")?;
    Ok(Model {
        leaders: read(settings, "leaders", "a list of booleans")?,
        draft_layers: read(settings, "draft_layers", COUNT)?,
        row_bytes: read(settings, "row_bytes", COUNT)?,
        block_align_bytes: read(settings, "block_align_bytes", COUNT)?,
        indexer_row_bytes: read(settings, "indexer_row_bytes", COUNT)?,
        tokens_per_indexer_row: read(settings, "tokens_per_indexer_row", COUNT)?,
        top_k: read(settings, "top_k", COUNT)?,
        max_positions: read(settings, "max_positions", COUNT)?,
        attention_heads: read_optional(settings, "attention_heads", COUNT)?,
        request_groups: groups
            .into_iter()
            .map(|(page_bytes, blocks_per_request)| RequestGroup { page_bytes, blocks_per_request })
            .collect(),
    })
}

fn read_memory(settings: &mut Settings<'_>) -> PyResult<GpuMemory> {
    Ok(GpuMemory {
        hbm_gib: read_optional(settings, "hbm_gib", NUMBER)?.unwrap_or(0.0),
        utilization: read(settings, "gpu_memory_utilization", NUMBER)?,
        weights_gib: read_optional(settings, "weights_gib", NUMBER)?.unwrap_or(0.0),
        runtime_gib: read(settings, "runtime_gib", NUMBER)?,
        kv_gib: read_optional(settings, "kv_gib", NUMBER)?,
    })
}

fn read_inputs(arguments: Option<&Bound<'_, PyDict>>) -> PyResult<Inputs> {
    let mut owned = Settings::new(arguments)?;
    let settings = &mut owned;
    let layout = settings.require("layout")?;
    let inputs = Inputs {
        model: read_model(settings)?,
        memory: read_memory(settings)?,
        gpus: read_optional(settings, "gpus", INT)?,
        tp: read(settings, "tp", INT)?,
        dp: read(settings, "dp", INT)?,
        block_size: read(settings, "block_size", INT)?,
        hot_rows: read_optional(settings, "hot_rows", INT)?,
        mtp: read(settings, "mtp", INT)?,
        host_pool_gib: read_optional(settings, "host_pool_gib", NUMBER)?,
        offload_gib: read_optional(settings, "offload_gib", NUMBER)?,
        registration_gib: read(settings, "registration_gib", NUMBER)?,
        contexts: read(settings, "contexts", "a list of integers")?,
        output: read(settings, "output", INT)?,
        max_model_len: read_optional(settings, "max_model_len", INT)?,
        batched_tokens: read(settings, "batched_tokens", INT)?,
        max_num_seqs: read(settings, "max_num_seqs", INT)?,
        hit_rate: read_optional(settings, "hit_rate", NUMBER)?,
        link_gbps: read_optional(settings, "link_gbps", NUMBER)?,
        layout: choice("layout", &layout, &LAYOUTS)?,
    };
    owned.finish()?;
    Ok(inputs)
}

fn bind_name(bind: Bind) -> &'static str {
    match bind {
        Bind::GpuKv => "gpu:kv",
        Bind::GpuIndexer => "gpu:indexer",
        Bind::GpuHot => "gpu:hot",
        Bind::GpuAdmission => "gpu:admission",
        Bind::HostPool => "host_pool",
        Bind::MaxNumSeqs => "max_num_seqs",
    }
}

fn packing_dict<'py>(py: Python<'py>, packing: &Packing) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("block_size", packing.block_size)?;
    dict.set_item("groups", packing.groups.clone())?;
    dict.set_item("num_groups", packing.num_groups())?;
    dict.set_item("num_kv_cache_groups", packing.num_kv_cache_groups())?;
    dict.set_item("num_layers", packing.num_layers())?;
    dict.set_item("num_leaders", packing.num_leaders())?;
    dict.set_item("hot_rows", packing.hot_rows)?;
    dict.set_item("hot_blocks_per_group", packing.hot_blocks_per_group())?;
    dict.set_item("hot_blocks_per_request", packing.hot_blocks())?;
    dict.set_item("layer_page_bytes", packing.layer_page_bytes)?;
    dict.set_item("indexer_page_bytes", packing.indexer_page_bytes)?;
    dict.set_item("block_bytes", packing.block_bytes)?;
    dict.set_item("ordinary_block_bytes", packing.ordinary_block_bytes)?;
    dict.set_item("host_page_bytes", packing.host_page_bytes)?;
    dict.set_item("host_block_stride_shared", packing.host_block_stride(true))?;
    let offsets = (0..packing.groups.len()).map(|group| packing.layer_offsets(group));
    dict.set_item("layer_offsets", offsets.collect::<Vec<_>>())?;
    Ok(dict)
}

fn point_dict<'py>(py: Python<'py>, point: &Point) -> PyResult<Bound<'py, PyDict>> {
    let binds = PyDict::new(py);
    binds.set_item("ordinary", bind_name(point.ordinary_bind))?;
    binds.set_item("hotpage", bind_name(point.hotpage_bind))?;
    binds.set_item("offload", bind_name(point.ordinary_bind))?;
    let bytes = PyDict::new(py);
    bytes.set_item("ordinary", point.bytes.ordinary)?;
    bytes.set_item("hotpage", point.bytes.hotpage)?;
    bytes.set_item("indexer", point.bytes.indexer)?;
    bytes.set_item("hot", point.bytes.hot)?;
    bytes.set_item("tail", point.bytes.tail)?;
    bytes.set_item("padding", point.bytes.padding)?;
    bytes.set_item("host", point.bytes.host)?;
    let dict = PyDict::new(py);
    dict.set_item("context", point.context)?;
    dict.set_item("ordinary", point.ordinary)?;
    dict.set_item("hotpage", point.hotpage)?;
    dict.set_item("offload", point.offload)?;
    dict.set_item("binds", binds)?;
    dict.set_item("bytes_per_request", bytes)?;
    dict.set_item("min_host_pool_gib", point.min_host_pool_gib)?;
    dict.set_item("pcie_ms_per_step", point.pcie_ms_per_step)?;
    dict.set_item("offload_kept", point.offload_kept)?;
    dict.set_item("resident", point.resident)?;
    dict.set_item("steady_state", point.steady_state)?;
    dict.set_item("kv_bytes", point.kv_bytes)?;
    Ok(dict)
}

fn plan_dict<'py>(py: Python<'py>, plan: &Plan) -> PyResult<Bound<'py, PyDict>> {
    let points = PyList::empty(py);
    for point in &plan.points {
        points.append(point_dict(py, point)?)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("packing", packing_dict(py, &plan.packing)?)?;
    dict.set_item("hit_rate", plan.hit_rate)?;
    dict.set_item("host_physical_gib", plan.host_physical_gib)?;
    dict.set_item("host_blocks", plan.host_blocks)?;
    dict.set_item("host_registrations", plan.host_registrations)?;
    dict.set_item("points", points)?;
    dict.set_item("crossover_context", plan.crossover_context)?;
    Ok(dict)
}

/// The plan for keyword arguments under the names of `hotpage_plan::Inputs`, its model and its
/// memory: see the stub.
#[pyfunction]
#[pyo3(signature = (**arguments))]
pub(crate) fn plan_capacity<'py>(
    py: Python<'py>,
    arguments: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let plan = hotpage_plan::plan(&read_inputs(arguments)?).map_err(raise)?;
    plan_dict(py, &plan)
}

/// The packing alone, for the model's keyword arguments and `block_size`, `hot_rows`, `mtp`.
#[pyfunction]
#[pyo3(signature = (**arguments))]
pub(crate) fn pack_layers<'py>(
    py: Python<'py>,
    arguments: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut settings = Settings::new(arguments)?;
    let model = read_model(&mut settings)?;
    let block_size = read(&mut settings, "block_size", INT)?;
    let hot_rows = read_optional(&mut settings, "hot_rows", INT)?;
    let mtp = read(&mut settings, "mtp", INT)?;
    settings.finish()?;
    packing_dict(py, &Packing::new(&model, block_size, hot_rows, mtp).map_err(raise)?)
}

/// Which of `layers` layers have an indexer of their own, from a configuration's fields.
#[pyfunction]
#[pyo3(signature = (layers, frequency, offset, pattern=None))]
pub(crate) fn layers_with_indexer(
    layers: u64,
    frequency: u64,
    offset: u64,
    pattern: Option<&str>,
) -> PyResult<Vec<bool>> {
    model::leaders(layers, frequency, offset, pattern).map_err(raise)
}

/// GB/s of row copies in an index group of `layers` layers over a host link of `link_gbps`.
#[pyfunction]
pub(crate) fn copy_gbps(link_gbps: f64, layout: &Bound<'_, PyAny>, layers: u64) -> PyResult<f64> {
    Ok(link::copy_gbps(link_gbps, choice("layout", layout, &LAYOUTS)?, layers))
}
