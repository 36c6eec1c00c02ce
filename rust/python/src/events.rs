// SPDX-License-Identifier: Apache-2.0
//! Owns the way from flat arrays to the core's batched events.

use hotpage_core::error::ProtocolFault;
use hotpage_core::ids::{PageIndex, RequestId, TransferId};
use hotpage_core::step::{
    Admitted, HotRegionAllocated, PagesAllocated, Prefix, Scheduled, TransferAck,
};
use pyo3::prelude::*;

use crate::buffer::{self, length};
use crate::error::raise;

/// Numbers of `Prefix` in an array of prefix kinds.
pub(crate) const PREFIX_KINDS: [(&str, u8); 3] =
    [("PREFIX_HOST", 0), ("PREFIX_GPU", 1), ("PREFIX_IMPORT", 2)];

/// `(requests, prefix_kind, prefix_tokens, page_offsets, host_blocks, resident_blocks)`.
pub(crate) type AdmittedArrays<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
);

/// `(requests, first_page, page_offsets, host_blocks, resident_blocks)`.
pub(crate) type AllocatedArrays<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// `(requests, blocks)`.
pub(crate) type HotRegionArrays<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// `(requests, num_computed_tokens, num_scheduled_tokens, num_draft_tokens)`.
pub(crate) type ScheduledArrays<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// `(transfer_ids int64, counts int32)`.
pub(crate) type AckArrays<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Pages of a ragged batch: run `i` has the pages `offsets[i]..offsets[i + 1]`.
struct RaggedPages {
    offsets: Vec<usize>,
    host_blocks: Vec<i32>,
    resident_blocks: Vec<i32>,
    num_groups: usize,
}

impl RaggedPages {
    fn read(
        runs: usize,
        offsets: &Bound<'_, PyAny>,
        host_blocks: &Bound<'_, PyAny>,
        resident_blocks: &Bound<'_, PyAny>,
        num_groups: usize,
    ) -> PyResult<Self> {
        let offsets = buffer::offsets("page_offsets", offsets, runs)?;
        let host_blocks = buffer::int32("host_blocks", host_blocks, None)?;
        let resident_blocks = buffer::int32("resident_blocks", resident_blocks, Some(num_groups))?;
        let pages = offsets.last().copied().unwrap_or(0);
        if !host_blocks.is_empty() {
            length("host_blocks", host_blocks.len(), pages)?;
        }
        if !resident_blocks.is_empty() {
            length("resident_blocks", resident_blocks.len(), pages.saturating_mul(num_groups))?;
        }
        Ok(Self { offsets, host_blocks, resident_blocks, num_groups })
    }

    /// Host blocks and GPU blocks of each run; an array that was passed empty is empty for all.
    fn runs(&self) -> impl Iterator<Item = (&[i32], &[i32])> {
        let groups = self.num_groups;
        self.offsets.windows(2).map(move |ends| {
            let (start, end) = (ends[0], ends[1]);
            // OK because `read` checked every length that is not 0.
            let host = self.host_blocks.get(start..end).unwrap_or(&[]);
            let resident = self.resident_blocks.get(start * groups..end * groups).unwrap_or(&[]);
            (host, resident)
        })
    }
}

/// Admissions, owning their arrays.
pub(crate) struct AdmittedBatch {
    requests: Vec<RequestId>,
    prefixes: Vec<Prefix>,
    pages: RaggedPages,
}

impl AdmittedBatch {
    pub(crate) fn read(arrays: &AdmittedArrays<'_>, num_groups: usize) -> PyResult<Self> {
        let (requests, kinds, tokens, offsets, host, resident) = arrays;
        let requests = buffer::requests(requests)?;
        let kinds = buffer::uint8("prefix_kind", kinds)?;
        let tokens = buffer::counts("prefix_tokens", tokens)?;
        length("prefix_kind", kinds.len(), requests.len())?;
        length("prefix_tokens", tokens.len(), requests.len())?;
        let prefixes = kinds.iter().zip(tokens).map(|(&kind, num_tokens)| match kind {
            0 => Ok(Prefix::Host),
            1 => Ok(Prefix::Gpu),
            2 => Ok(Prefix::Import { num_tokens }),
            _ => {
                let got = i64::from(kind);
                Err(raise(ProtocolFault::OutOfRange { what: "prefix_kind", got, min: 0, max: 2 }))
            }
        });
        let prefixes = prefixes.collect::<PyResult<_>>()?;
        let pages = RaggedPages::read(requests.len(), offsets, host, resident, num_groups)?;
        Ok(Self { requests, prefixes, pages })
    }

    pub(crate) fn events(&self) -> Vec<Admitted<'_>> {
        let prefixes = self.requests.iter().zip(&self.prefixes);
        prefixes
            .zip(self.pages.runs())
            .map(|((&request, &prefix), (host_blocks, resident_blocks))| Admitted {
                request,
                prefix,
                host_blocks,
                resident_blocks,
            })
            .collect()
    }
}

/// Allocated pages, owning their arrays.
pub(crate) struct AllocatedBatch {
    requests: Vec<RequestId>,
    first_page: Vec<u32>,
    pages: RaggedPages,
}

impl AllocatedBatch {
    pub(crate) fn read(arrays: &AllocatedArrays<'_>, num_groups: usize) -> PyResult<Self> {
        let (requests, first_page, offsets, host, resident) = arrays;
        let requests = buffer::requests(requests)?;
        let first_page = buffer::counts("first_page", first_page)?;
        length("first_page", first_page.len(), requests.len())?;
        let pages = RaggedPages::read(requests.len(), offsets, host, resident, num_groups)?;
        if pages.resident_blocks.is_empty() {
            // Pages that are to be written have GPU blocks, always.
            length("resident_blocks", 0, pages.offsets.last().copied().unwrap_or(0))?;
        }
        Ok(Self { requests, first_page, pages })
    }

    pub(crate) fn events(&self) -> Vec<PagesAllocated<'_>> {
        let starts = self.requests.iter().zip(&self.first_page);
        starts
            .zip(self.pages.runs())
            .map(|((&request, &first_page), (host_blocks, resident_blocks))| PagesAllocated {
                request,
                first_page: PageIndex(first_page),
                host_blocks,
                resident_blocks,
            })
            .collect()
    }
}

/// Hot regions, owning their arrays.
pub(crate) struct HotRegionBatch {
    requests: Vec<RequestId>,
    blocks: Vec<i32>,
    region_blocks: usize,
}

impl HotRegionBatch {
    pub(crate) fn read(arrays: &HotRegionArrays<'_>, region_blocks: usize) -> PyResult<Self> {
        let requests = buffer::requests(&arrays.0)?;
        let blocks = buffer::int32("hot region blocks", &arrays.1, Some(region_blocks))?;
        length("hot region blocks", blocks.len(), requests.len().saturating_mul(region_blocks))?;
        Ok(Self { requests, blocks, region_blocks })
    }

    pub(crate) fn events(&self) -> Vec<HotRegionAllocated<'_>> {
        // A region without blocks belongs to a configuration that refuses the event.
        let regions = self.blocks.chunks_exact(self.region_blocks.max(1));
        let regions = regions.chain(std::iter::repeat(&[][..]));
        self.requests
            .iter()
            .zip(regions)
            .map(|(&request, blocks)| HotRegionAllocated { request, blocks })
            .collect()
    }
}

/// The batch of the coming forward pass.
pub(crate) fn scheduled(arrays: &ScheduledArrays<'_>) -> PyResult<Vec<Scheduled>> {
    let requests = buffer::requests(&arrays.0)?;
    let computed = buffer::counts("num_computed_tokens", &arrays.1)?;
    let scheduled = buffer::counts("num_scheduled_tokens", &arrays.2)?;
    let drafts = buffer::counts("num_draft_tokens", &arrays.3)?;
    length("num_computed_tokens", computed.len(), requests.len())?;
    length("num_scheduled_tokens", scheduled.len(), requests.len())?;
    length("num_draft_tokens", drafts.len(), requests.len())?;
    let numbers = computed.into_iter().zip(scheduled).zip(drafts);
    let items =
        requests.into_iter().zip(numbers).map(|(request, ((start, tokens), drafts))| Scheduled {
            request,
            num_computed_tokens: start,
            num_scheduled_tokens: tokens,
            num_draft_tokens: drafts,
        });
    Ok(items.collect())
}

/// Acknowledgements; absent arrays are none.
pub(crate) fn acks(arrays: Option<&AckArrays<'_>>) -> PyResult<Vec<TransferAck>> {
    let Some((transfers, counts)) = arrays else { return Ok(Vec::new()) };
    let transfers = buffer::int64("transfer_ids", transfers)?;
    let counts = buffer::counts("acknowledgement counts", counts)?;
    length("acknowledgement counts", counts.len(), transfers.len())?;
    let pairs = transfers.into_iter().zip(counts);
    Ok(pairs.map(|(id, count)| TransferAck { transfer: TransferId(id), count }).collect())
}
