// SPDX-License-Identifier: Apache-2.0
//! Owns the worker side of the embedded engine: the bytes, the persistent tables that resolve
//! reads, and the order in which a step plan takes effect. It decides nothing about residency.
//!
//! The ranks share one data plane, because the rows of sparse-MLA layers are equal on all of
//! them, and acknowledge on their own. A page copy moves its bytes at the last moment that the
//! release point allows, so that a GPU block that was handed on too early shows as wrong bytes.
//! Every block that is handed out is overwritten first, so that old bytes never pass for new ones.

mod acks;
mod attend;
mod batch;
mod check;
mod fault;
mod mirror;
mod tables;

pub use acks::{Acks, MAX_COMPLETE_STEPS, MAX_ENQUEUE_STEPS};
pub use batch::{Batch, BatchItem};
pub use check::{Difference, Mismatch, Verdict};
pub use fault::Fault;

use smallvec::SmallVec;

use crate::config::ReleasePoint;
use crate::dataplane::{
    ByteStores, Counters, InvalidateScratch, MirrorMask, ResolveScratch, Resolved, invalidate,
};
use crate::error::{Error, Expected, ProtocolFault, Result};
use crate::geometry::Geometry;
use crate::ids::{BlockId, HostBlockId, PageIndex, RequestId, TransferId};
use crate::index_group::{IndexGroup, IndexGroupTopology};
use crate::sim::rng::{SplitMix64, derive};
use crate::sim::topk::TopkParams;
use crate::step::{StepPlan, TransferAck, TransferKind};

use acks::{AckQueue, InFlight, Stage};
use attend::Staging;
use fault::Planted;
use tables::Tables;

/// What blocks are overwritten with when they are handed out.
const POISON: u8 = 0xDB;

/// Settings of the worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Sizes of both pools.
    pub geometry: Geometry,
    /// Locality of the top-k streams.
    pub topk: TopkParams,
    /// Hot rows of one request in each index group.
    pub hot_rows: u32,
    /// Requests that can run at once.
    pub num_state_rows: usize,
    /// Pages of the longest request.
    pub max_pages: u32,
    /// Ranks that acknowledge restores.
    pub num_ranks: u32,
    /// Ranks that acknowledge spills.
    pub num_host_writers: u32,
    /// When GPU blocks of a copy may be handed on.
    pub release_point: ReleasePoint,
    /// True if each step's rows are mirrored to the host pool.
    pub mirrors: bool,
    /// Chance, in parts per million, that a page copy is reported failed.
    pub copy_failure_ppm: u32,
    /// Chance, in parts per million, that a token's row is not mirrored; half of the losses are
    /// reported, of the others only the mirror mask knows.
    pub mirror_loss_ppm: u32,
    /// Seed of delays, failures and top-k streams.
    pub seed: u64,
    /// What goes wrong on purpose.
    pub fault: Option<Fault>,
}

/// Bytes moved between GPU and host, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Rows mirrored after each step.
    pub mirrored: u64,
    /// Pages copied whole to the host.
    pub spilled: u64,
    /// Pages restored to the GPU.
    pub restored: u64,
    /// Misses copied to hot regions.
    pub missed: u64,
    /// Context rows staged for prefill.
    pub staged: u64,
}

impl Traffic {
    /// Bytes GPU to host.
    #[must_use]
    pub const fn to_host(&self) -> u64 {
        self.mirrored + self.spilled
    }

    /// Bytes host to GPU.
    #[must_use]
    pub const fn to_gpu(&self) -> u64 {
        self.restored + self.missed + self.staged
    }
}

/// Residency of the scheduled requests' context, as attention meets it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StatesSeen {
    /// Every page had a GPU block.
    pub full: bool,
    /// Some pages had a GPU block, some had not.
    pub mixed: bool,
    /// No page had a GPU block but those allocated for the step.
    pub none: bool,
}

/// The worker side of one engine.
#[derive(Debug)]
pub struct Worker {
    geometry: Geometry,
    groups: Vec<IndexGroup>,
    topk: TopkParams,
    release_point: ReleasePoint,
    mirrors: bool,
    num_ranks: u32,
    num_host_writers: u32,
    copy_failure_ppm: u32,
    mirror_loss_ppm: u32,
    seed: u64,
    gpu: Vec<u8>,
    host: Vec<u8>,
    tables: Tables,
    mask: MirrorMask,
    acks: AckQueue,
    rng: SplitMix64,
    fault: Planted,
    step: u64,
    mirror_lost: Vec<(RequestId, PageIndex)>,
    resolve_scratch: ResolveScratch,
    resolved: Resolved,
    invalidate_scratch: InvalidateScratch,
    staging: Staging,
    verdict: Verdict,
    traffic: Traffic,
    hot: Counters,
    states: StatesSeen,
}

impl Worker {
    /// A worker with empty tables and zeroed pools.
    ///
    /// # Errors
    /// `Config` for top-k parameters or a packing out of bounds, or for pools that this machine
    /// cannot provide.
    pub fn new(config: WorkerConfig) -> Result<Self> {
        let WorkerConfig { geometry, topk, .. } = config;
        topk.validate()?;
        let groups = IndexGroupTopology::new(&geometry, &[])?.groups().to_vec();
        let (rows, pages) = (config.num_state_rows, config.max_pages);
        Ok(Self {
            tables: Tables::new(&geometry, groups.len(), rows, pages, config.hot_rows),
            mask: MirrorMask::new(geometry.host_blocks(), geometry.block_size()),
            acks: AckQueue::new(derive(config.seed, 0)),
            rng: SplitMix64::new(derive(config.seed, 1)),
            gpu: zeroed("gpu_pool_mib", geometry.gpu_pool_bytes())?,
            host: zeroed("host_pool_mib", geometry.host_pool_bytes())?,
            staging: Staging::new(pages as usize * geometry.block_size() as usize),
            geometry,
            groups,
            topk,
            release_point: config.release_point,
            mirrors: config.mirrors,
            num_ranks: config.num_ranks,
            num_host_writers: config.num_host_writers,
            copy_failure_ppm: config.copy_failure_ppm,
            mirror_loss_ppm: config.mirror_loss_ppm,
            seed: derive(config.seed, 2),
            fault: Planted::new(config.fault),
            step: 0,
            mirror_lost: Vec::new(),
            resolve_scratch: ResolveScratch::default(),
            resolved: Resolved::default(),
            invalidate_scratch: InvalidateScratch::default(),
            verdict: Verdict::default(),
            traffic: Traffic::default(),
            hot: Counters::default(),
            states: StatesSeen::default(),
        })
    }

    /// What the comparison found so far.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Bytes moved so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Hits and misses of the hot regions so far.
    #[must_use]
    pub fn hot_counters(&self) -> Counters {
        self.hot
    }

    /// Residency states that scheduled requests were in so far.
    #[must_use]
    pub fn states(&self) -> StatesSeen {
        self.states
    }

    /// True if no transfer is on its way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.acks.is_empty()
    }

    /// Gives a request its state row; `key` seeds its top-k stream.
    ///
    /// # Errors
    /// `Config` for top-k parameters out of bounds; nothing has changed then.
    pub fn start(&mut self, request: RequestId, state_row: usize, key: u64) -> Result<()> {
        let seed = derive(self.seed, key);
        self.tables.start(request, state_row, self.topk, seed)
    }

    /// Takes its state row back.
    pub fn end(&mut self, request: RequestId) {
        self.tables.end(request);
    }

    /// Runs one step: what the plan wants before the forward pass, the pass, what comes after.
    ///
    /// # Errors
    /// `Protocol` if plan and batch name rows or blocks that do not exist: a bug in the engine.
    pub fn execute(&mut self, plan: &StepPlan, batch: &Batch) -> Result<()> {
        self.step = plan.step;
        self.recycle(plan, batch)?;
        self.update_tables(plan, batch)?;
        self.copy_before_forward(plan)?;
        self.observe(batch);
        self.write_rows(batch)?;
        self.attend(plan, batch)?;
        if self.mirrors {
            self.mirror(batch)?;
        }
        self.track_transfers(plan)
    }

    /// Collects what the ranks say at the end of the step, and moves the page copies whose last
    /// moment it is.
    ///
    /// # Errors
    /// `Protocol` for page copies of blocks that do not exist: a bug in the engine.
    pub fn take_acks(&mut self, acks: &mut Acks) -> Result<()> {
        acks.clear();
        acks.mirror_lost.append(&mut self.mirror_lost);
        for (stage, id) in self.acks.take_due(self.step) {
            let Some(transfer) = self.acks.get_mut(id) else { continue };
            let ack = TransferAck { transfer: TransferId(id), count: 1 };
            let (moves_at, last) = match stage {
                Stage::Enqueued => {
                    transfer.enqueued += 1;
                    acks.enqueued.push(ack);
                    (ReleasePoint::Enqueued, transfer.enqueued == transfer.required)
                }
                Stage::Completed => {
                    transfer.completed += 1;
                    let last = transfer.completed == transfer.required;
                    let list =
                        if last && transfer.fails { &mut acks.failed } else { &mut acks.completed };
                    list.push(ack);
                    (ReleasePoint::Completed, last)
                }
            };
            if last && transfer.kind == TransferKind::Spill && moves_at == self.release_point {
                // Rows of a copy that fails are not moved, unless somebody may read the host copy
                // before the failure is known: then only the report is bad, not the bytes.
                if !transfer.fails || moves_at == ReleasePoint::Enqueued {
                    let InFlight { host_block, num_rows, .. } = *transfer;
                    let mut stores =
                        ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host)?;
                    self.traffic.spilled +=
                        stores.spill_page(host_block, &transfer.blocks, num_rows)?;
                }
            }
            if last && stage == Stage::Completed {
                self.acks.remove(id);
            }
        }
        Ok(())
    }

    /// Blocks that were handed out lose their old bytes; nothing derived from recycled host
    /// blocks may be found again.
    fn recycle(&mut self, plan: &StepPlan, batch: &Batch) -> Result<()> {
        let block_bytes = usize::try_from(self.geometry.block_bytes()).unwrap_or(usize::MAX);
        for &block in &batch.fresh_gpu_blocks {
            let at = index(block) * block_bytes;
            let bytes = self.gpu.get_mut(at..at + block_bytes);
            bytes.ok_or(ProtocolFault::BadBlock { block: BlockId(block) })?.fill(POISON);
        }
        for &block in &plan.recycled_host_blocks {
            self.mask.clear(HostBlockId(block))?;
            for token in 0..self.geometry.block_size() {
                self.poison_host_row(HostBlockId(block), token);
            }
        }
        let waits = self.fault.waits(Fault::StaleHotSlots);
        if !waits {
            self.invalidate(&[], &plan.recycled_host_blocks);
        }
        Ok(())
    }

    fn poison_host_row(&mut self, block: HostBlockId, token: u32) {
        let row_bytes = self.geometry.row_bytes() as usize;
        for &layer in self.geometry.layers() {
            let at = offset(self.geometry.host_row_offset(layer, block, token));
            self.host[at..at + row_bytes].fill(POISON);
        }
    }

    fn invalidate(&mut self, rewritten_host_rows: &[i64], recycled_host_blocks: &[i32]) {
        if rewritten_host_rows.is_empty() && recycled_host_blocks.is_empty() {
            return;
        }
        invalidate(
            self.tables.active_hot_states(),
            rewritten_host_rows,
            recycled_host_blocks,
            self.geometry.block_size(),
            &mut self.invalidate_scratch,
        );
    }

    fn update_tables(&mut self, plan: &StepPlan, batch: &Batch) -> Result<()> {
        for &(state_row, page, block) in &batch.new_host_pages {
            self.tables.set_host_block(state_row, page, block);
        }
        for &request in &plan.hot_regions_returned {
            self.tables.clear_hot_region(request);
        }
        let per_request = self.tables.hot_region_blocks();
        let regions = plan.hot_regions.blocks.chunks_exact(per_request.max(1));
        for (&request, blocks) in plan.hot_regions.request.iter().zip(regions) {
            self.tables.set_hot_region(request, blocks);
            let stale = self.fault.waits(Fault::StaleHotSlots)
                && self.tables.names_own_host_rows(request, self.geometry.block_size());
            if !(stale && self.fault.strike(Fault::StaleHotSlots)) {
                self.tables.empty_row_maps(request);
            }
        }
        for &request in &plan.residency.cleared {
            self.tables.clear_residency(request);
        }
        let groups = self.geometry.num_kv_groups() as usize;
        let deltas = plan.residency.request.iter().zip(&plan.residency.page);
        for ((&request, &page), blocks) in deltas.zip(plan.residency.blocks.chunks_exact(groups)) {
            self.tables.set_residency(request, page, blocks)?;
        }
        Ok(())
    }

    fn copy_before_forward(&mut self, plan: &StepPlan) -> Result<()> {
        let groups = self.geometry.num_kv_groups() as usize;
        let list = &plan.transfers;
        let mut stores = ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host)?;
        for (n, blocks) in list.resident_blocks.chunks_exact(groups).enumerate() {
            let host_block = HostBlockId(list.host_block[n]);
            let rows = list.num_rows[n].unsigned_abs();
            match TransferKind::from_u8(list.kind[n]) {
                Some(TransferKind::Restore) => {
                    self.traffic.restored += stores.restore_page(host_block, blocks, rows)?;
                }
                Some(TransferKind::HostCopy) => {
                    let source = HostBlockId(list.source_host_block[n]);
                    stores.copy_host_page(source, host_block, rows)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn observe(&mut self, batch: &Batch) {
        for item in &batch.items {
            let resident = self.tables.num_resident(item.state_row);
            if resident == item.num_pages {
                self.states.full = true;
            } else if resident == item.num_pages - item.num_old_pages {
                self.states.none = true;
            } else {
                self.states.mixed = true;
            }
        }
    }

    /// The forward pass writes one row a token and layer, wherever the slot mapping says.
    fn write_rows(&mut self, batch: &Batch) -> Result<()> {
        let bs = i64::from(self.geometry.block_size());
        let tokens = batch.num_tokens();
        let layers = self.geometry.layers().to_vec();
        let mut stores = ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host)?;
        for item in &batch.items {
            for at in 0..item.num_scheduled {
                let token = item.first_token + at as usize;
                for (layer, place) in (0_u32..).zip(&layers) {
                    let row = batch.slot_mapping[place.kv_group as usize * tokens + token];
                    // OK because block ids are int32, and the rest is below the block size.
                    let (block, token) = ((row / bs) as i32, (row % bs) as u32);
                    let bytes = stores.gpu_row_mut(layer, BlockId(block), token)?;
                    item.row(item.num_computed + at, layer).write(bytes);
                }
            }
        }
        Ok(())
    }

    fn track_transfers(&mut self, plan: &StepPlan) -> Result<()> {
        let groups = self.geometry.num_kv_groups() as usize;
        let list = &plan.transfers;
        for (n, blocks) in list.resident_blocks.chunks_exact(groups).enumerate() {
            let Some(kind) = TransferKind::from_u8(list.kind[n]) else { continue };
            let host_block = HostBlockId(list.host_block[n]);
            let is_spill = matches!(kind, TransferKind::Spill | TransferKind::HostCopy);
            let required = match kind {
                TransferKind::Restore => self.num_ranks,
                _ => self.num_host_writers,
            };
            let known_bad = kind == TransferKind::Mirrored && !self.mask.is_full(host_block);
            let fails =
                known_bad || (is_spill && self.rng.below(1_000_000) < self.copy_failure_ppm);
            let transfer = InFlight {
                kind,
                host_block,
                blocks: SmallVec::from_slice(blocks),
                num_rows: list.num_rows[n].unsigned_abs(),
                required,
                enqueued: 0,
                completed: 0,
                fails,
            };
            self.acks.plan(self.step, TransferId(list.transfer_id[n]), transfer, known_bad);
        }
        Ok(())
    }
}

/// Zeroed memory that takes room only where it is used; the setting `name` is in MiB.
fn zeroed(name: &'static str, bytes: u64) -> Result<Vec<u8>> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    // An allocation that fails for good would end the process, so it is tried first.
    let fits = |len| Vec::<u8>::new().try_reserve_exact(len).is_ok();
    if fits(len) {
        return Ok(vec![0; len]);
    }
    let most = (1..usize::BITS).map(|halvings| len >> halvings).find(|&len| fits(len));
    Err(Error::Config {
        name,
        // OK because 2^64 bytes are 2^44 MiB.
        got: bytes.div_ceil(1 << 20) as i64,
        expected: Expected::AtMost((most.unwrap_or(0) >> 20) as i64),
        remedy: "use a pool that fits into this machine's memory",
    })
}

/// A block id as an index; negative ids are past the end of any pool.
fn index(block: i32) -> usize {
    usize::try_from(block).unwrap_or(usize::MAX / 2)
}

/// A byte offset as an index.
fn offset(bytes: u64) -> usize {
    // OK because the pools of the geometry are slices in memory.
    bytes as usize
}
