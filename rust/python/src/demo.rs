// SPDX-License-Identifier: Apache-2.0
//! Owns the Python class over the core's demonstration: settings in, reports out as dictionaries.

use hotpage_core::geometry::HostLayout;
use hotpage_core::sim::demo::{Demo, DemoConfig, PolicyReport};
use hotpage_core::sim::engine::{EngineReport, Refusals, ServingPolicy};
use hotpage_core::sim::worker::{StatesSeen, Traffic, Verdict};
use hotpage_core::sim::workload::{Conversation, Turn};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::raise;
use crate::settings::{
    HOST_COPIES, RELEASE_POINTS, Settings, choice, flag, items, number, positive, wide,
};

const HOST_LAYOUTS: [(&str, HostLayout); 2] =
    [("row_interleaved", HostLayout::RowInterleaved), ("layer_major", HostLayout::LayerMajor)];

/// One workload served under each policy from the same memory, every attended row compared.
#[pyclass(name = "Demo", module = "hotpage._core")]
pub(crate) struct PyDemo {
    core: Demo,
    policies: Vec<ServingPolicy>,
}

#[pymethods]
impl PyDemo {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let config = demo_config(settings)?;
        let policies = config.policies.clone();
        Ok(Self { core: Demo::new(config).map_err(raise)?, policies })
    }

    /// Runs up to `max_steps` steps without holding the interpreter; True when nothing is left.
    fn advance(&mut self, py: Python<'_>, max_steps: u32) -> PyResult<bool> {
        let core = &mut self.core;
        let progress = py.detach(|| core.advance(u64::from(max_steps))).map_err(raise)?;
        Ok(progress.finished)
    }

    /// Policy that runs; the last one at the end.
    #[getter]
    fn policy(&self) -> &'static str {
        let at = self.core.progress().policy_index;
        self.policies.get(at).or(self.policies.last()).map_or("", |policy| policy.name())
    }

    /// Steps of that policy so far.
    #[getter]
    fn step(&self) -> u64 {
        self.core.progress().step
    }

    /// Share of the work that is done, 0 to 1.
    #[getter]
    fn fraction(&self) -> f64 {
        self.core.progress().done
    }

    /// What the policies that have run, or are running, came to.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = self.core.report();
        let dict = PyDict::new(py);
        dict.set_item("rows_checked", report.rows_checked())?;
        dict.set_item("mismatches", report.mismatches())?;
        dict.set_item("states_seen", state_names(py, report.states_seen())?)?;
        let policies = PyDict::new(py);
        for policy in &report.policies {
            policies.set_item(policy.policy.name(), policy_dict(py, policy)?)?;
        }
        dict.set_item("policies", policies)?;
        Ok(dict)
    }
}

fn demo_config(arguments: Option<&Bound<'_, PyDict>>) -> PyResult<DemoConfig> {
    let mut settings = Settings::new(arguments)?;
    let mut config = DemoConfig::default();
    if let Some(value) = settings.optional("conversations") {
        config.workload = conversations(&value)?;
    }
    if let Some(value) = settings.optional("scale") {
        config.scale = positive("scale", &value)?;
    }
    for (name, field) in [
        ("num_conversations", &mut config.num_conversations),
        ("block_size", &mut config.block_size),
        ("row_bytes", &mut config.row_bytes),
        ("num_ranks", &mut config.num_ranks),
        ("num_draft_tokens", &mut config.num_draft_tokens),
        ("system_tokens", &mut config.system_tokens),
        ("stagger_steps", &mut config.stagger_steps),
        ("think_steps", &mut config.think_steps),
    ] {
        if let Some(value) = settings.optional(name) {
            *field = number(name, &value)?;
        }
    }
    for (name, field) in [
        ("top_k", &mut config.top_k),
        ("hot_rows", &mut config.hot_rows),
        ("chunk_tokens", &mut config.chunk_tokens),
    ] {
        if let Some(value) = settings.optional(name) {
            *field = Some(number(name, &value)?);
        }
    }
    for (name, field) in [
        ("gpu_pool_bytes", &mut config.gpu_pool_bytes),
        ("host_pool_bytes", &mut config.host_pool_bytes),
    ] {
        if let Some(value) = settings.optional(name) {
            *field = Some(wide(name, &value)?);
        }
    }
    if let Some(value) = settings.optional("seed") {
        config.seed = wide("seed", &value)?;
    }
    if let Some(value) = settings.optional("host_layout") {
        config.host_layout = choice("host_layout", &value, &HOST_LAYOUTS)?;
    }
    if let Some(value) = settings.optional("host_copy") {
        config.host_copy = choice("host_copy", &value, &HOST_COPIES)?;
    }
    if let Some(value) = settings.optional("release_point") {
        config.release_point = choice("release_point", &value, &RELEASE_POINTS)?;
    }
    if let Some(value) = settings.optional("plant_wrong_row") {
        config.plant_wrong_row = flag("plant_wrong_row", &value)?;
    }
    if let Some(value) = settings.optional("policies") {
        config.policies = policies(&value)?;
    }
    settings.finish()?;
    Ok(config)
}

/// Policies in the order in which they are shown, however they were named; each runs once.
fn policies(value: &Bound<'_, PyAny>) -> PyResult<Vec<ServingPolicy>> {
    let names = ServingPolicy::ALL.map(|policy| (policy.name(), policy));
    let mut chosen = Vec::new();
    for item in items("policies", value)? {
        chosen.push(choice("policies", &item, &names)?);
    }
    Ok(ServingPolicy::ALL.into_iter().filter(|policy| chosen.contains(policy)).collect())
}

/// `[[(prompt_tokens, output_tokens), ...], ...]`.
pub(crate) fn conversations(value: &Bound<'_, PyAny>) -> PyResult<Vec<Conversation>> {
    let mut conversations = Vec::new();
    for conversation in items("conversations", value)? {
        let mut turns = Vec::new();
        for turn in items("a conversation", &conversation)? {
            let numbers = items("a turn", &turn)?;
            let [prompt, output] = numbers.as_slice() else {
                return Err(crate::error::config(format!(
                    "a turn has {} numbers, expected 2; pass its prompt and output tokens",
                    numbers.len()
                )));
            };
            turns.push(Turn {
                prompt_tokens: number("prompt tokens of a turn", prompt)?,
                output_tokens: number("output tokens of a turn", output)?,
            });
        }
        conversations.push(Conversation { turns });
    }
    Ok(conversations)
}

fn policy_dict<'py>(py: Python<'py>, policy: &PolicyReport) -> PyResult<Bound<'py, PyDict>> {
    let PolicyReport { policy: _, gpu_blocks, host_blocks, engine: report } = policy;
    // Without `..`, so that a count that is left out does not compile.
    let EngineReport {
        steps,
        events,
        busy_steps,
        running_sum: _,
        running_max,
        arrived,
        finished,
        aborted,
        preemptions,
        lost_page_preemptions,
        prefilled_tokens,
        recomputed_tokens,
        decoded_tokens,
        rejected_rows,
        prefix_hit_tokens,
        bytes_to_host,
        bytes_to_gpu,
        traffic,
        hot: _,
        verdict: Verdict { rows_checked, mismatches, first_mismatch },
        states,
        refusals,
        leased_blocks,
        failed_copies,
    } = report;
    let dict = PyDict::new(py);
    dict.set_item("running_mean", report.running_mean())?;
    dict.set_item("running_max", running_max)?;
    dict.set_item("bytes_gpu_to_host", bytes_to_host)?;
    dict.set_item("bytes_host_to_gpu", bytes_to_gpu)?;
    dict.set_item("hot_hit_rate", report.hot_hit_rate())?;
    for (name, value) in [
        ("gpu_blocks", u64::from(*gpu_blocks)),
        ("host_blocks", u64::from(*host_blocks)),
        ("steps", *steps),
        ("events", *events),
        ("busy_steps", *busy_steps),
        ("arrived", *arrived),
        ("finished", *finished),
        ("aborted", *aborted),
        ("preemptions", *preemptions),
        ("lost_page_preemptions", *lost_page_preemptions),
        ("prefilled_tokens", *prefilled_tokens),
        ("recomputed_tokens", *recomputed_tokens),
        ("decoded_tokens", *decoded_tokens),
        ("rejected_rows", *rejected_rows),
        ("prefix_hit_tokens", *prefix_hit_tokens),
        ("failed_copies", *failed_copies),
        ("leaked_blocks", *leased_blocks),
        ("rows_checked", *rows_checked),
        ("mismatches", *mismatches),
    ] {
        dict.set_item(name, value)?;
    }
    dict.set_item("first_mismatch", first_mismatch.map(|mismatch| mismatch.to_string()))?;
    dict.set_item("states_seen", state_names(py, *states)?)?;
    let indexer = [bytes_to_host - traffic.to_host(), bytes_to_gpu - traffic.to_gpu()];
    dict.set_item("traffic_bytes", traffic_dict(py, *traffic, indexer)?)?;
    dict.set_item("refusals", refusals_dict(py, *refusals)?)?;
    Ok(dict)
}

fn state_names(py: Python<'_>, states: StatesSeen) -> PyResult<Bound<'_, PyList>> {
    let StatesSeen { full, mixed, none } = states;
    let named = [("full", full), ("mixed", mixed), ("none", none)];
    PyList::new(py, named.into_iter().filter_map(|(name, seen)| seen.then_some(name)))
}

/// Bytes by reason; those of indexer pages, to the host and back, are counted beside the rows.
fn traffic_dict(
    py: Python<'_>,
    traffic: Traffic,
    [indexer_to_host, indexer_to_gpu]: [u64; 2],
) -> PyResult<Bound<'_, PyDict>> {
    let Traffic { mirrored, spilled, restored, missed, staged } = traffic;
    let dict = PyDict::new(py);
    for (name, bytes) in [
        ("mirrored", mirrored),
        ("spilled", spilled),
        ("restored", restored),
        ("missed", missed),
        ("staged", staged),
        ("indexer_to_host", indexer_to_host),
        ("indexer_to_gpu", indexer_to_gpu),
    ] {
        dict.set_item(name, bytes)?;
    }
    Ok(dict)
}

pub(crate) fn refusals_dict(py: Python<'_>, refusals: Refusals) -> PyResult<Bound<'_, PyDict>> {
    let Refusals { gpu_short, gpu_reclaiming, host_short, hot_region, growth_waits } = refusals;
    let dict = PyDict::new(py);
    for (name, count) in [
        ("gpu_short", gpu_short),
        ("gpu_reclaiming", gpu_reclaiming),
        ("host_short", host_short),
        ("hot_region", hot_region),
        ("growth_waits", growth_waits),
    ] {
        dict.set_item(name, count)?;
    }
    Ok(dict)
}
