// SPDX-License-Identifier: Apache-2.0
//! Owns the flat form in which plans leave for Python and for other processes: one `bytes` object
//! whose lists numpy reads in place.
//!
//! Little-endian. A 40-byte header (`tag`, `version`, `num_kv_groups`, `region_blocks`: u32;
//! `step`: u64; `number`, `flags`, `num_lists`, 0: u32), then the element count of each list
//! (u32), padded to 8 bytes, then the lists: int64 first, then int32, then uint8, so that every
//! list is aligned to its elements.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyType};

use crate::error::protocol;

const VERSION: u32 = 1;
const HEADER_BYTES: usize = 40;

/// Elements of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Element {
    Int64,
    Int32,
    Uint8,
}

impl Element {
    const fn bytes(self) -> usize {
        match self {
            Self::Int64 => 8,
            Self::Int32 => 4,
            Self::Uint8 => 1,
        }
    }

    const fn dtype(self) -> &'static str {
        match self {
            Self::Int64 => "<i8",
            Self::Int32 => "<i4",
            Self::Uint8 => "|u1",
        }
    }
}

/// Length of a list's second dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Row {
    /// The list has one dimension.
    Flat,
    /// `num_kv_groups`.
    Groups,
    /// `region_blocks`.
    Region,
    /// A fixed number.
    Of(usize),
}

/// A list by its name in Python.
#[derive(Debug)]
pub(crate) struct List {
    pub(crate) name: &'static str,
    pub(crate) element: Element,
    pub(crate) row: Row,
    /// Lists of one name here have the same number of rows.
    pub(crate) siblings: &'static str,
}

/// The lists of one kind of plan, by falling element size.
#[derive(Debug)]
pub(crate) struct Schema {
    pub(crate) tag: u32,
    pub(crate) what: &'static str,
    pub(crate) lists: &'static [List],
}

/// Scalars of a plan; each kind uses those that it needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) num_kv_groups: u32,
    pub(crate) region_blocks: u32,
    pub(crate) step: u64,
    pub(crate) number: u32,
    pub(crate) flags: u32,
}

/// The values of a list.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Values<'a> {
    Int64(&'a [i64]),
    Int32(&'a [i32]),
    Uint8(&'a [u8]),
}

impl Values<'_> {
    const fn len(&self) -> usize {
        match self {
            Self::Int64(list) => list.len(),
            Self::Int32(list) => list.len(),
            Self::Uint8(list) => list.len(),
        }
    }

    const fn element(&self) -> Element {
        match self {
            Self::Int64(_) => Element::Int64,
            Self::Int32(_) => Element::Int32,
            Self::Uint8(_) => Element::Uint8,
        }
    }

    fn write(&self, out: &mut [u8]) {
        match self {
            Self::Int64(list) => {
                for (to, value) in out.chunks_exact_mut(8).zip(*list) {
                    to.copy_from_slice(&value.to_le_bytes());
                }
            }
            Self::Int32(list) => {
                for (to, value) in out.chunks_exact_mut(4).zip(*list) {
                    to.copy_from_slice(&value.to_le_bytes());
                }
            }
            Self::Uint8(list) => out.copy_from_slice(list),
        }
    }
}

/// A plan in flat form. Immutable.
pub(crate) struct Blob {
    bytes: Py<PyBytes>,
    header: Header,
    /// Byte offset and element count of each list.
    places: Vec<(usize, usize)>,
    schema: &'static Schema,
}

fn data_start(num_lists: usize) -> usize {
    (HEADER_BYTES + 4 * num_lists).next_multiple_of(8)
}

impl Blob {
    /// Writes a plan; `values` are in the schema's order.
    pub(crate) fn encode(
        py: Python<'_>,
        schema: &'static Schema,
        header: Header,
        values: &[Values<'_>],
    ) -> PyResult<Self> {
        debug_assert_eq!(values.len(), schema.lists.len());
        let mut places = Vec::with_capacity(values.len());
        let mut end = data_start(values.len());
        for (list, data) in schema.lists.iter().zip(values) {
            debug_assert_eq!(list.element, data.element(), "{}", list.name);
            places.push((end, data.len()));
            end += data.len() * list.element.bytes();
        }
        let bytes = PyBytes::new_with(py, end, |out| {
            let Header { num_kv_groups, region_blocks, step, number, flags } = header;
            let mut head = Vec::with_capacity(HEADER_BYTES + 4 * values.len());
            for word in [schema.tag, VERSION, num_kv_groups, region_blocks] {
                head.extend_from_slice(&word.to_le_bytes());
            }
            head.extend_from_slice(&step.to_le_bytes());
            // OK because lists are bounded by the pools, whose ids are int32.
            for word in [number, flags, values.len() as u32, 0] {
                head.extend_from_slice(&word.to_le_bytes());
            }
            for data in values {
                head.extend_from_slice(&(data.len() as u32).to_le_bytes());
            }
            out[..head.len()].copy_from_slice(&head);
            for ((list, data), &(at, len)) in schema.lists.iter().zip(values).zip(&places) {
                data.write(&mut out[at..at + len * list.element.bytes()]);
            }
            Ok(())
        })?;
        Ok(Self { bytes: bytes.unbind(), header, places, schema })
    }

    /// Reads a plan that `encode` wrote, here or in another process.
    ///
    /// # Errors
    /// `ProtocolError` for anything else.
    pub(crate) fn decode(bytes: &Bound<'_, PyBytes>, schema: &'static Schema) -> PyResult<Self> {
        let data = bytes.as_bytes();
        let damaged = |why: &str| protocol(format!("these bytes are no {}: {why}", schema.what));
        let word = |at: usize| -> PyResult<u32> {
            let four = data.get(at..at + 4).ok_or_else(|| damaged("they end too early"))?;
            Ok(u32::from_le_bytes([four[0], four[1], four[2], four[3]]))
        };
        if word(0)? != schema.tag {
            return Err(damaged("they start with another tag"));
        }
        if word(4)? != VERSION {
            return Err(damaged("they are of another version of hotpage"));
        }
        let header = Header {
            num_kv_groups: word(8)?,
            region_blocks: word(12)?,
            step: u64::from(word(16)?) | u64::from(word(20)?) << 32,
            number: word(24)?,
            flags: word(28)?,
        };
        if word(32)? as usize != schema.lists.len() {
            return Err(damaged("they have another number of lists"));
        }
        let mut places = Vec::with_capacity(schema.lists.len());
        let mut end = data_start(schema.lists.len());
        for (at, list) in schema.lists.iter().enumerate() {
            let len = word(HEADER_BYTES + 4 * at)? as usize;
            let row = header.row_of(list.row);
            let rows = len.checked_div(row).unwrap_or(0);
            if rows * row != len {
                return Err(damaged("a list ends inside a row"));
            }
            let first = schema.lists[..at]
                .iter()
                .position(|other| !list.siblings.is_empty() && other.siblings == list.siblings);
            if first.is_some_and(|first| rows_of(&places, schema, &header, first) != rows) {
                return Err(damaged("parallel lists differ in length"));
            }
            places.push((end, len));
            end += len * list.element.bytes();
        }
        if end != data.len() {
            return Err(damaged("their length is not what their lists add up to"));
        }
        Ok(Self { bytes: bytes.clone().unbind(), header, places, schema })
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    pub(crate) fn bytes<'py>(&self, py: Python<'py>) -> &Bound<'py, PyBytes> {
        self.bytes.bind(py)
    }

    /// Names of all lists.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.schema.lists.iter().map(|list| list.name)
    }

    /// A read-only numpy array over the list's bytes, `None` if there is no list of that name.
    pub(crate) fn array<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        static NDARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let Some(at) = self.schema.lists.iter().position(|list| list.name == name) else {
            return Ok(None);
        };
        let list = &self.schema.lists[at];
        let (offset, len) = self.places[at];
        let ndarray = NDARRAY.import(py, "numpy", "ndarray")?;
        let array = match list.row {
            Row::Flat => ndarray.call1(((len,), list.element.dtype(), self.bytes(py), offset))?,
            row => {
                let row = self.header.row_of(row);
                let shape = (len.checked_div(row).unwrap_or(0), row);
                ndarray.call1((shape, list.element.dtype(), self.bytes(py), offset))?
            }
        };
        Ok(Some(array))
    }
}

fn rows_of(places: &[(usize, usize)], schema: &Schema, header: &Header, at: usize) -> usize {
    let len = places.get(at).map_or(0, |place| place.1);
    len.checked_div(header.row_of(schema.lists[at].row)).unwrap_or(0)
}

impl Header {
    fn row_of(&self, row: Row) -> usize {
        match row {
            Row::Flat => 1,
            Row::Groups => self.num_kv_groups as usize,
            Row::Region => self.region_blocks as usize,
            Row::Of(number) => number,
        }
    }
}
