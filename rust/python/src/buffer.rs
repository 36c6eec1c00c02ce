// SPDX-License-Identifier: Apache-2.0
//! Owns the reading of arrays that Python passes in: element type, contiguity, dimension, signs.
//!
//! Arrays are copied, which for the few kilobytes of a step costs less than a microsecond and
//! leaves nothing that another thread could write to while the core reads.

use std::ffi::CStr;

use hotpage_core::error::ProtocolFault;
use hotpage_core::ids::RequestId;
use pyo3::buffer::{Element, ElementType, PyUntypedBuffer};
use pyo3::prelude::*;

use crate::error::{protocol, raise};

/// A C-contiguous int32 array with one dimension, or with two where `rows_of` gives the length of
/// a row; flattened.
pub(crate) fn int32(
    what: &str,
    array: &Bound<'_, PyAny>,
    rows_of: Option<usize>,
) -> PyResult<Vec<i32>> {
    read(what, array, "int32", rows_of)
}

/// A contiguous one-dimensional uint8 array.
pub(crate) fn uint8(what: &str, array: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    read(what, array, "uint8", None)
}

/// A contiguous one-dimensional int64 array.
pub(crate) fn int64(what: &str, array: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    read(what, array, "int64", None)
}

/// An int32 array of numbers that cannot be negative.
pub(crate) fn counts(what: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    int32(what, array, None)?.into_iter().map(|value| count(what, i64::from(value))).collect()
}

/// An int32 array of request ids.
pub(crate) fn requests(array: &Bound<'_, PyAny>) -> PyResult<Vec<RequestId>> {
    Ok(counts("request id", array)?.into_iter().map(RequestId).collect())
}

/// A number of an event; numbers are int32 or non-negative everywhere in the event API.
pub(crate) fn count(what: &'static str, got: i64) -> PyResult<u32> {
    let max = i64::from(i32::MAX);
    match u32::try_from(got) {
        Ok(value) if got <= max => Ok(value),
        _ => Err(raise(ProtocolFault::OutOfRange { what, got, min: 0, max })),
    }
}

/// Checks the length of an array against its siblings.
pub(crate) fn length(what: &'static str, got: usize, expected: usize) -> PyResult<()> {
    if got == expected {
        return Ok(());
    }
    Err(raise(ProtocolFault::WrongLength { what, got, expected }))
}

/// `[n + 1]` offsets of `n` runs: from 0 upwards, never down.
pub(crate) fn offsets(
    what: &'static str,
    array: &Bound<'_, PyAny>,
    runs: usize,
) -> PyResult<Vec<usize>> {
    let values = int32(what, array, None)?;
    length(what, values.len(), runs + 1)?;
    let mut last = 0;
    for (at, &value) in values.iter().enumerate() {
        let max = if at == 0 { 0 } else { i32::MAX };
        if value < last || value > max {
            let (got, min, max) = (i64::from(value), i64::from(last), i64::from(max));
            return Err(raise(ProtocolFault::OutOfRange { what, got, min, max }));
        }
        last = value;
    }
    // OK because no value is negative.
    Ok(values.into_iter().map(|value| value as usize).collect())
}

fn read<T: Element>(
    what: &str,
    array: &Bound<'_, PyAny>,
    dtype: &str,
    rows_of: Option<usize>,
) -> PyResult<Vec<T>> {
    let Ok(buffer) = PyUntypedBuffer::get(array) else {
        let kind = array.get_type().name()?;
        return Err(protocol(format!("{what} is a {kind}, expected an array of {dtype}")));
    };
    // NOTE: PyO3 0.30 takes the mark of big-endian elements for that of the host's order.
    let foreign = matches!(buffer.format().to_bytes(), [b'>' | b'!', ..]);
    if foreign && cfg!(target_endian = "little") {
        return Err(protocol(format!("{what} holds big-endian elements, expected {dtype}")));
    }
    let Ok(typed) = buffer.as_typed::<T>() else {
        let got = type_name(buffer.format());
        return Err(protocol(format!("{what} holds {got}, expected {dtype}")));
    };
    let shape = typed.shape();
    let fits = match (shape, rows_of) {
        ([_], _) => true,
        ([_, row], Some(expected)) => *row == expected,
        _ => false,
    };
    if !fits {
        let expected = match rows_of {
            Some(row) => format!("[n] or [n, {row}]"),
            None => "[n]".to_owned(),
        };
        return Err(protocol(format!("{what} has shape {shape:?}, expected {expected}")));
    }
    if !typed.is_c_contiguous() {
        return Err(protocol(format!("{what} is not contiguous; pass a copy")));
    }
    typed.to_vec(array.py())
}

fn type_name(format: &CStr) -> String {
    match ElementType::from_format(format) {
        ElementType::SignedInteger { bytes } => format!("int{}", bytes * 8),
        ElementType::UnsignedInteger { bytes } => format!("uint{}", bytes * 8),
        ElementType::Float { bytes } => format!("float{}", bytes * 8),
        ElementType::Bool => "bool".to_owned(),
        ElementType::Unknown => format!("elements of format {:?}", format.to_string_lossy()),
    }
}
