// SPDX-License-Identifier: Apache-2.0
//! Owns the worker side of a simulation: it moves nothing, acknowledges everything, and counts what
//! the step would have moved.
//!
//! Every rank says "enqueued" at the end of the step that plans a transfer and "completed" at the
//! end of the next one.

use fixedbitset::FixedBitSet;

use super::cost::StepLoad;
use super::misses::{HotRows, MissModel};
use crate::error::{ProtocolFault, Result};
use crate::ids::{RequestId, TransferId};
use crate::sim::engine::{Tally, WorkerSide};
use crate::sim::worker::{Acks, Batch, BatchItem};
use crate::step::{StepPlan, TransferAck, TransferKind};

/// Sizes that say how much a step moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sizes {
    pub(super) misses: MissModel,
    pub(super) block_size: u32,
    pub(super) top_k: u32,
    pub(super) num_ranks: u32,
    pub(super) num_host_writers: u32,
    /// True if each step's rows are mirrored to the host pool.
    pub(super) mirrors: bool,
    /// True if requests read through hot regions.
    pub(super) resolves: bool,
    /// Bytes of one token in all layers, the indexer's counted.
    pub(super) token_bytes: u64,
    /// Bytes of a whole page, the indexer's counted.
    pub(super) page_bytes: u64,
    /// Bytes of the indexer's rows of one page.
    pub(super) indexer_page_bytes: u64,
}

/// What a request has on the GPU.
#[derive(Debug, Clone, Default)]
struct Residency {
    /// `[pages]` true if the page has GPU blocks.
    resident: FixedBitSet,
    num_resident: u32,
    hot: HotRows,
    /// True until its first step has run.
    is_new: bool,
}

/// Rows that a request computed in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Computed {
    /// Whose they are: the stream's number.
    pub(super) stream: u64,
    /// Tokens of the request whose rows are valid after the step.
    pub(super) num_computed: u32,
}

/// The worker side.
#[derive(Debug)]
pub(super) struct Acknowledger {
    sizes: Sizes,
    /// `[ids seen]`.
    requests: Vec<Option<Residency>>,
    enqueued: Vec<TransferAck>,
    completed: Vec<TransferAck>,
    load: StepLoad,
    computed: Vec<Computed>,
}

impl Acknowledger {
    pub(super) fn new(sizes: Sizes) -> Self {
        Self {
            sizes,
            requests: Vec::new(),
            enqueued: Vec::new(),
            completed: Vec::new(),
            load: StepLoad::default(),
            computed: Vec::new(),
        }
    }

    /// What the last step had to do; the requests that run are not counted.
    pub(super) fn load(&self) -> StepLoad {
        self.load
    }

    /// Rows that the last step computed, by request.
    pub(super) fn computed(&self) -> &[Computed] {
        &self.computed
    }

    fn request_mut(&mut self, request: i32) -> Option<&mut Residency> {
        self.requests.get_mut(usize::try_from(request).ok()?)?.as_mut()
    }

    fn update_residency(&mut self, plan: &StepPlan) -> Result<()> {
        for &request in plan.hot_regions_returned.iter().chain(&plan.hot_regions.request) {
            if let Some(residency) = self.request_mut(request) {
                residency.hot = HotRows::default();
            }
        }
        for &request in &plan.residency.cleared {
            if let Some(residency) = self.request_mut(request) {
                residency.resident.clear();
                residency.num_resident = 0;
            }
        }
        let n = plan.residency.request.len();
        let groups = plan.residency.blocks.len() / n.max(1);
        let deltas = plan.residency.request.iter().zip(&plan.residency.page);
        for (at, (&request, &page)) in deltas.enumerate() {
            let resident = plan.residency.blocks.get(at * groups).is_some_and(|&block| block != 0);
            // OK because plans name no negative request.
            let unknown = ProtocolFault::UnknownRequest { request: RequestId(request as u32) };
            let residency = self.request_mut(request).ok_or(unknown)?;
            let page = page.unsigned_abs() as usize;
            residency.resident.grow(page + 1);
            let was = residency.resident.contains(page);
            residency.resident.set(page, resident);
            residency.num_resident += u32::from(resident && !was);
            residency.num_resident -= u32::from(was && !resident);
        }
        Ok(())
    }

    /// Copies of pages: acknowledged, and counted where they cross the link.
    fn track_transfers(&mut self, plan: &StepPlan) {
        let Sizes { num_ranks, num_host_writers, page_bytes, .. } = self.sizes;
        for (&id, &kind) in plan.transfers.transfer_id.iter().zip(&plan.transfers.kind) {
            let kind = TransferKind::from_u8(kind);
            let count = match kind {
                Some(TransferKind::Restore) => num_ranks,
                _ => num_host_writers,
            };
            match kind {
                Some(TransferKind::Restore) => self.load.restored_bytes += page_bytes,
                Some(TransferKind::Spill) => self.load.to_host_bytes += page_bytes,
                // The rows of a mirrored page crossed when they were written; a host copy stays
                // in host memory.
                _ => {}
            }
            self.enqueued.push(TransferAck { transfer: TransferId(id), count });
        }
    }

    fn run_item(&mut self, item: &BatchItem) {
        let Self { sizes, requests, load, .. } = self;
        let Some(residency) = requests.get_mut(item.request.index()).and_then(Option::as_mut)
        else {
            return;
        };
        let rows = item.num_scheduled;
        let context = item.num_computed + rows;
        let host_only_pages =
            if sizes.resolves { item.num_pages - residency.num_resident } else { 0 };
        let host_only = host_only_pages * sizes.block_size;
        load.tokens += rows;
        load.indexed_rows += u64::from(context);
        if core::mem::take(&mut residency.is_new) && sizes.resolves {
            // The indexer's rows of a prefix hit come back whole, before the first step.
            load.restored_bytes += u64::from(item.num_old_pages) * sizes.indexer_page_bytes;
        }
        if rows > item.num_drafts + 1 {
            load.staged_rows += u64::from(host_only);
            return;
        }
        load.attended_rows += u64::from(rows) * u64::from(sizes.top_k.min(context));
        load.verification_rows = load.verification_rows.max(rows);
        load.reads_host |= host_only > 0;
        load.misses += sizes.misses.misses(&mut residency.hot, rows, context, host_only);
    }
}

impl WorkerSide for Acknowledger {
    const WRITES_ROWS: bool = false;

    fn start(&mut self, request: RequestId, _state_row: usize, _key: u64) -> Result<()> {
        let at = request.index();
        if at >= self.requests.len() {
            self.requests.resize(at + 1, None);
        }
        self.requests[at] = Some(Residency { is_new: true, ..Residency::default() });
        Ok(())
    }

    fn end(&mut self, request: RequestId) {
        if let Some(ended) = self.requests.get_mut(request.index()) {
            *ended = None;
        }
    }

    fn execute(&mut self, plan: &StepPlan, batch: &Batch) -> Result<()> {
        self.load = StepLoad { resolves: self.sizes.resolves, ..StepLoad::default() };
        self.computed.clear();
        self.update_residency(plan)?;
        self.track_transfers(plan);
        for item in &batch.items {
            self.run_item(item);
            let kept = item.num_scheduled - item.num_drafts + item.num_accepted;
            self.computed.push(Computed {
                stream: item.content.number(),
                num_computed: item.num_computed + kept,
            });
        }
        if self.sizes.mirrors {
            self.load.to_host_bytes += u64::from(self.load.tokens) * self.sizes.token_bytes;
        }
        Ok(())
    }

    fn take_acks(&mut self, acks: &mut Acks) -> Result<()> {
        acks.clear();
        acks.completed.append(&mut self.completed);
        acks.enqueued.extend_from_slice(&self.enqueued);
        self.completed.append(&mut self.enqueued);
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.completed.is_empty()
    }

    fn tally(&self) -> Tally {
        Tally::default()
    }
}
