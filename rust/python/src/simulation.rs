// SPDX-License-Identifier: Apache-2.0
//! Owns the Python class over the core's simulation: settings in, one run's report out as a
//! dictionary.

use hotpage_core::geometry::LayerPacking;
use hotpage_core::sim::engine::ServingPolicy;
use hotpage_core::sim::simulate::{
    CostModel, GroupCost, Latency, Moved, PeerCost, Simulation, SimulationConfig, SimulationReport,
    StepTime, TokenCounts,
};
use hotpage_core::sim::topk::ReuseTail;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::demo::{conversations, refusals_dict};
use crate::error::{config, raise};
use crate::settings::{Settings, choice, items, not_negative, positive};

/// One policy serving one number of users on one replica.
#[pyclass(name = "Simulation", module = "hotpage._core")]
pub(crate) struct PySimulation {
    core: Simulation,
}

#[pymethods]
impl PySimulation {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        Ok(Self { core: Simulation::new(simulation_config(settings)?).map_err(raise)? })
    }

    /// Runs up to `max_steps` steps without holding the interpreter; True when nothing is left.
    fn advance(&mut self, py: Python<'_>, max_steps: u32) -> PyResult<bool> {
        let core = &mut self.core;
        py.detach(|| core.advance(u64::from(max_steps))).map_err(raise)
    }

    /// Share of the conversations that have ended, 0 to 1.
    #[getter]
    fn fraction(&self) -> f64 {
        self.core.fraction()
    }

    /// What the run has come to.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        report_dict(py, &self.core.report())
    }
}

fn simulation_config(arguments: Option<&Bound<'_, PyDict>>) -> PyResult<SimulationConfig> {
    let mut owned = Settings::new(arguments)?;
    let settings = &mut owned;
    let packing = settings.require("packing")?;
    let packing = LayerPacking {
        kv_groups: packing
            .extract()
            .map_err(|_| config("packing is no list of lists; pass one".to_owned()))?,
    };
    let row_bytes = settings.number("row_bytes")?;
    let policies = ServingPolicy::ALL.map(|policy| (policy.name(), policy));
    let built = SimulationConfig {
        policy: choice("policy", &settings.require("policy")?, &policies)?,
        block_size: settings.number("block_size")?,
        row_bytes,
        kv_bytes: settings.wide("kv_bytes")?,
        block_bytes: settings.wide("block_bytes")?,
        ordinary_block_bytes: settings.wide("ordinary_block_bytes")?,
        host_pool_bytes: settings.wide("host_pool_bytes")?,
        host_block_bytes: settings.wide("host_block_bytes")?,
        indexer_page_bytes: settings.wide("indexer_page_bytes")?,
        top_k: settings.number("top_k")?,
        hot_rows: settings.number("hot_rows")?,
        num_draft_tokens: settings.number("num_draft_tokens")?,
        acceptance_ppm: settings.number("acceptance_ppm")?,
        step_tokens: settings.number("step_tokens")?,
        in_flight_tokens: settings.number("in_flight_tokens")?,
        max_running: settings.number("max_running")?,
        max_model_len: settings.number("max_model_len")?,
        hot_return_steps: settings.number("hot_return_steps")?,
        reuse_tail: ReuseTail::PUBLISHED_ALONE,
        conversations: conversations(&settings.require("conversations")?)?,
        num_users: settings.number("num_users")?,
        num_conversations: settings.number("num_conversations")?,
        cost: cost_model(settings, &packing, row_bytes)?,
        seed: settings.wide("seed")?,
        packing,
    };
    owned.finish()?;
    Ok(built)
}

fn cost_model(
    settings: &mut Settings<'_>,
    packing: &LayerPacking,
    row_bytes: u32,
) -> PyResult<CostModel> {
    let rates = settings.require("copy_gbps")?;
    let rates = items("copy_gbps", &rates)?;
    let layers = packing.kv_groups.concat();
    if rates.len() != layers.len() {
        return Err(config(format!(
            "copy_gbps has {} rates, expected {}; pass one for each index group",
            rates.len(),
            layers.len()
        )));
    }
    let mut groups = Vec::new();
    for (&layers, rate) in layers.iter().zip(&rates) {
        groups.push(GroupCost { layers, copy_gbps: positive("copy_gbps", rate)? });
    }
    let mut rate = |name: &str| positive(name, &settings.require(name)?);
    let (weight_bytes, active_params) = (rate("weight_bytes")?, rate("active_params")?);
    let (active_bytes, expert_share) = (rate("active_bytes")?, rate("expert_share")?);
    let (hbm_gbps, compute_tflops) = (rate("hbm_gbps")?, rate("compute_tflops")?);
    let (stage_gbps, restore_gbps) = (rate("stage_gbps")?, rate("restore_gbps")?);
    let (mirror_gbps, indexer_row_bytes) = (rate("mirror_gbps")?, rate("indexer_row_bytes")?);
    let mut time = |name: &str| not_negative(name, &settings.require(name)?);
    let copy_us = time("copy_us")?;
    let (scheduler_us, overhead_us) = (time("scheduler_us")?, time("overhead_us")?);
    let (resolve_us, resident_resolve_us) =
        (pair(settings, "resolve_us")?, pair(settings, "resident_resolve_us")?);
    let peers = match settings.optional("peers") {
        None => None,
        Some(value) => {
            let [write_gbps, meet_us] = numbers("peers", &value)?;
            if write_gbps == 0.0 {
                return Err(config("the rate of peers is 0, expected more; pass GB/s".to_owned()));
            }
            Some(PeerCost { write_gbps, meet_us })
        }
    };
    Ok(CostModel {
        ranks: settings.number("ranks")?,
        weight_bytes,
        active_params,
        active_bytes,
        expert_share,
        expert_replicas: settings.number("expert_replicas")?.max(1),
        hbm_gbps,
        compute_tflops,
        row_bytes: f64::from(row_bytes),
        indexer_row_bytes,
        groups,
        resolve_us,
        resident_resolve_us,
        copy_us,
        peers,
        stage_gbps,
        restore_gbps,
        mirror_gbps,
        scheduler_us,
        overhead_us,
    })
}

fn pair(settings: &mut Settings<'_>, name: &str) -> PyResult<[f64; 2]> {
    numbers(name, &settings.require(name)?)
}

fn numbers(name: &str, value: &Bound<'_, PyAny>) -> PyResult<[f64; 2]> {
    let values = items(name, value)?;
    let [first, second] = values.as_slice() else {
        let got = values.len();
        return Err(config(format!("{name} has {got} numbers, expected 2; pass two")));
    };
    Ok([not_negative(name, first)?, not_negative(name, second)?])
}

fn report_dict<'py>(py: Python<'py>, report: &SimulationReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("policy", report.policy.name())?;
    dict.set_item("seconds", report.seconds)?;
    dict.set_item("running_mean", report.running_mean)?;
    dict.set_item("output_tokens_per_second", report.output_tokens_per_second())?;
    dict.set_item("tokens_per_second", report.tokens_per_second())?;
    dict.set_item("user_tokens_per_second", report.user_tokens_per_second)?;
    // Without `..`, so that a count that is left out does not compile.
    let SimulationReport {
        policy: _,
        seconds: _,
        running_mean: _,
        user_tokens_per_second: _,
        num_users,
        gpu_blocks,
        host_blocks,
        steps,
        conversations,
        turns,
        running_max,
        preemptions,
        tokens,
        moved,
        between_tokens,
        first_token,
        later_first_token,
        time,
        refusals,
        leased_blocks,
    } = *report;
    for (name, value) in [
        ("num_users", u64::from(num_users)),
        ("gpu_blocks", u64::from(gpu_blocks)),
        ("host_blocks", u64::from(host_blocks)),
        ("steps", steps),
        ("conversations", conversations),
        ("turns", turns),
        ("running_max", u64::from(running_max)),
        ("preemptions", preemptions),
        ("leaked_blocks", leased_blocks),
    ] {
        dict.set_item(name, value)?;
    }
    set_tokens(&dict, tokens)?;
    set_moved(&dict, moved)?;
    for (name, latency) in [
        ("between_tokens", between_tokens),
        ("first_token", first_token),
        ("later_first_token", later_first_token),
    ] {
        dict.set_item(name, latency.map(|latency| latency_dict(py, latency)).transpose()?)?;
    }
    dict.set_item("time", time_dict(py, &time)?)?;
    dict.set_item("refusals", refusals_dict(py, refusals)?)?;
    Ok(dict)
}

fn set_tokens(dict: &Bound<'_, PyDict>, tokens: TokenCounts) -> PyResult<()> {
    let TokenCounts {
        prefilled_tokens,
        recomputed_tokens,
        prefix_hit_tokens,
        prompt_tokens,
        output_tokens,
        rejected_rows,
    } = tokens;
    dict.set_item("prefilled_tokens", prefilled_tokens)?;
    dict.set_item("recomputed_tokens", recomputed_tokens)?;
    dict.set_item("prefix_hit_tokens", prefix_hit_tokens)?;
    dict.set_item("prompt_tokens", prompt_tokens)?;
    dict.set_item("output_tokens", output_tokens)?;
    dict.set_item("rejected_rows", rejected_rows)
}

fn set_moved(dict: &Bound<'_, PyDict>, moved: Moved) -> PyResult<()> {
    let Moved { to_host_bytes, missed_bytes, staged_bytes, restored_bytes, misses } = moved;
    dict.set_item("bytes_gpu_to_host", to_host_bytes)?;
    dict.set_item("missed_bytes", missed_bytes)?;
    dict.set_item("staged_bytes", staged_bytes)?;
    dict.set_item("restored_bytes", restored_bytes)?;
    dict.set_item("bytes_host_to_gpu", missed_bytes + staged_bytes + restored_bytes as f64)?;
    dict.set_item("misses", misses)
}

fn latency_dict(py: Python<'_>, Latency { p50, p90 }: Latency) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("p50", p50)?;
    dict.set_item("p90", p90)?;
    Ok(dict)
}

/// Seconds of all steps by what took them; `waiting` is what the GPU waited for links and the
/// scheduler.
fn time_dict<'py>(py: Python<'py>, time: &StepTime) -> PyResult<Bound<'py, PyDict>> {
    let StepTime { linear, kv, resolve, misses, staging, overhead, step } = *time;
    let dict = PyDict::new(py);
    for (name, seconds) in [
        ("linear", linear),
        ("kv", kv),
        ("resolve", resolve),
        ("misses", misses),
        ("staging", staging),
        ("overhead", overhead),
        ("waiting", step - time.gpu()),
        ("steps", step),
    ] {
        dict.set_item(name, seconds)?;
    }
    Ok(dict)
}
