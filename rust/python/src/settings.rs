// SPDX-License-Identifier: Apache-2.0
//! Owns the reading of settings from keyword arguments; every refusal is a `ConfigError`.

use std::collections::BTreeMap;

use hotpage_core::config::{CoordinatorConfig, HostCopy, ReleasePoint};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::config;

/// Keyword arguments that nobody has read yet.
pub(crate) struct Settings<'py> {
    left: BTreeMap<String, Bound<'py, PyAny>>,
}

impl<'py> Settings<'py> {
    /// All keyword arguments of a call.
    pub(crate) fn new(arguments: Option<&Bound<'py, PyDict>>) -> PyResult<Self> {
        let mut left = BTreeMap::new();
        if let Some(arguments) = arguments {
            for (name, value) in arguments.iter() {
                left.insert(name.extract()?, value);
            }
        }
        Ok(Self { left })
    }

    /// The value of a setting that must be given.
    pub(crate) fn require(&mut self, name: &str) -> PyResult<Bound<'py, PyAny>> {
        self.left.remove(name).ok_or_else(|| config(format!("{name} is missing; give it a value")))
    }

    /// The value of a setting, unless it is absent or `None`.
    pub(crate) fn optional(&mut self, name: &str) -> Option<Bound<'py, PyAny>> {
        self.left.remove(name).filter(|value| !value.is_none())
    }

    /// A number that must be given.
    pub(crate) fn number(&mut self, name: &str) -> PyResult<u32> {
        number(name, &self.require(name)?)
    }

    /// A number of 64 bits that must be given.
    pub(crate) fn wide(&mut self, name: &str) -> PyResult<u64> {
        wide(name, &self.require(name)?)
    }

    /// Refuses whatever nobody has read.
    pub(crate) fn finish(self) -> PyResult<()> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(name) => Err(config(format!("{name} is no setting; remove it"))),
        }
    }
}

/// An unsigned 32-bit number.
pub(crate) fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u32> {
    value.extract().or_else(|_| Err(not_a_number(name, value, u64::from(u32::MAX))?))
}

/// An unsigned 64-bit number.
pub(crate) fn wide(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().or_else(|_| Err(not_a_number(name, value, u64::MAX)?))
}

/// A finite number above 0.
pub(crate) fn positive(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f64> {
    match value.extract::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => {
            let got = value.repr()?;
            Err(config(format!("{name} is {got}, expected a number above 0; pass one")))
        }
    }
}

/// A finite number that is 0 or more.
pub(crate) fn not_negative(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f64> {
    match value.extract::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => {
            let got = value.repr()?;
            Err(config(format!("{name} is {got}, expected a number of 0 or more; pass one")))
        }
    }
}

/// The items of a sequence.
pub(crate) fn items<'py>(
    name: &str,
    value: &Bound<'py, PyAny>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    match value.extract() {
        Ok(items) => Ok(items),
        Err(_) => {
            let kind = value.get_type().name()?;
            Err(config(format!("{name} is a {kind}, expected a list; pass one")))
        }
    }
}

fn not_a_number(name: &str, value: &Bound<'_, PyAny>, most: u64) -> PyResult<PyErr> {
    let got = value.repr()?;
    let (bound, remedy) = if value.lt(0).unwrap_or(false) {
        ("at least 0".to_owned(), "raise it")
    } else if value.gt(most).unwrap_or(false) {
        (format!("at most {most}"), "lower it")
    } else {
        ("an integer".to_owned(), "pass an int")
    };
    Ok(config(format!("{name} is {got}, expected {bound}; {remedy}")))
}

/// True or False.
pub(crate) fn flag(name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    match value.extract::<bool>() {
        Ok(flag) => Ok(flag),
        Err(_) => {
            let got = value.repr()?;
            Err(config(format!("{name} is {got}, expected True or False; pass a bool")))
        }
    }
}

/// One of a few names.
pub(crate) fn choice<T: Copy>(
    name: &str,
    value: &Bound<'_, PyAny>,
    choices: &[(&str, T)],
) -> PyResult<T> {
    let text: Option<String> = value.extract().ok();
    if let Some((_, found)) = choices.iter().find(|(key, _)| text.as_deref() == Some(key)) {
        return Ok(*found);
    }
    let names: Vec<_> = choices.iter().map(|(key, _)| format!("\"{key}\"")).collect();
    let got = value.repr()?;
    Err(config(format!("{name} is {got}, expected one of {}; choose one", names.join(", "))))
}

/// Host copy modes by name.
pub(crate) const HOST_COPIES: [(&str, HostCopy); 3] =
    [("none", HostCopy::None), ("mirrored", HostCopy::Mirrored), ("spilled", HostCopy::Spilled)];

/// Release points by name.
pub(crate) const RELEASE_POINTS: [(&str, ReleasePoint); 2] =
    [("enqueued", ReleasePoint::Enqueued), ("completed", ReleasePoint::Completed)];

/// The name of a host copy mode.
pub(crate) fn host_copy_name(value: HostCopy) -> &'static str {
    match value {
        HostCopy::None => "none",
        HostCopy::Mirrored => "mirrored",
        HostCopy::Spilled => "spilled",
    }
}

/// The name of a release point.
pub(crate) fn release_point_name(value: ReleasePoint) -> &'static str {
    match value {
        ReleasePoint::Enqueued => "enqueued",
        ReleasePoint::Completed => "completed",
    }
}

/// The Coordinator's settings, under the core's names.
pub(crate) fn coordinator_config(
    arguments: Option<&Bound<'_, PyDict>>,
) -> PyResult<CoordinatorConfig> {
    let mut settings = Settings::new(arguments)?;
    let transition_watermark = settings
        .optional("transition_watermark")
        .map(|value| number("transition_watermark", &value))
        .transpose()?;
    let transition = settings.require("transition")?;
    let transition = flag("transition", &transition)?;
    let built = CoordinatorConfig {
        block_size: settings.number("block_size")?,
        num_kv_groups: settings.number("num_kv_groups")?,
        gpu_blocks: settings.number("gpu_blocks")?,
        host_blocks: settings.number("host_blocks")?,
        other_blocks_per_page: settings.number("other_blocks_per_page")?,
        hot_rows: settings.number("hot_rows")?,
        top_k: settings.number("top_k")?,
        verification_rows: settings.number("verification_rows")?,
        num_ranks: settings.number("num_ranks")?,
        num_host_writers: settings.number("num_host_writers")?,
        host_copy: choice("host_copy", &settings.require("host_copy")?, &HOST_COPIES)?,
        release_point: choice(
            "release_point",
            &settings.require("release_point")?,
            &RELEASE_POINTS,
        )?,
        transition,
        transition_watermark,
        hot_return_steps: settings.number("hot_return_steps")?,
        admission_window_pages: settings.number("admission_window_pages")?,
        num_reprefillable_tokens: settings.number("num_reprefillable_tokens")?,
        max_model_len: settings.number("max_model_len")?,
    };
    settings.finish()?;
    Ok(built)
}
