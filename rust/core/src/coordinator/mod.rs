// SPDX-License-Identifier: Apache-2.0
//! Owns every change of a page's state: the Coordinator absorbs events and builds step plans.
//! It allocates no blocks; engines allocate, report, and carry out what the plans say.
//!
//! Order of calls in one step: `on_freed`, `on_blocks_reused`, `on_admitted`,
//! `on_blocks_allocated`, `on_hot_region_allocated` as they happen while the engine schedules;
//! then `build_step_plan` once; after the forward pass the acknowledgements.
//! `on_blocks_reused` must come before the event that reports the block's next owner, and before
//! `on_freed` of a request that was reading it.

mod admission;
mod check;
mod digest;
mod due;
mod events;
mod free;
#[cfg(any(test, feature = "testing"))]
mod inspect;
mod plan;
mod transfers;

#[cfg(any(test, feature = "testing"))]
pub(crate) use inspect::Inspection;

use fixedbitset::FixedBitSet;

use crate::config::CoordinatorConfig;
use crate::error::{ProtocolFault, Result};
use crate::ids::{HostBlockId, PageIndex, RequestId};
use crate::lru::RequestLru;
use crate::page::PageState;
use crate::request::{Phase, RequestState};
use crate::residency::{ResidenceId, Residences};
use crate::spill::Transfers;
use crate::stats::Stats;
use crate::step::PoolLevels;

/// Request ids are dense: an admission may leave at most this many unused below its id, so a wild
/// id is a fault and no table of its size.
pub const MAX_REQUEST_ID_GAP: u32 = 1 << 16;

/// Releases and reports that wait for the next plan.
#[cfg_attr(any(test, feature = "testing"), derive(Clone))]
#[derive(Debug, Default, Hash)]
struct Pending {
    unpin_gpu: Vec<i32>,
    free_gpu: Vec<i32>,
    free_host: Vec<i32>,
    /// Residences with blocks in the lists of GPU blocks above.
    releasing: Vec<ResidenceId>,
    recycled_host_blocks: Vec<i32>,
    /// Requests with durable pages that are not published.
    publish: Vec<RequestId>,
    /// Requests whose host prefix may have readable GPU copies.
    adopt: Vec<RequestId>,
    /// `(request, page, rows)` to restore into the page's GPU blocks.
    restores: Vec<(RequestId, PageIndex, u32)>,
    /// `(request, page, source)` host blocks to copy.
    host_copies: Vec<(RequestId, PageIndex, HostBlockId)>,
    /// Pages whose copy failed and must be made again.
    replan: Vec<(RequestId, PageIndex)>,
    /// Requests that got a hot region: their clean pages can go.
    release: Vec<RequestId>,
    lost_pages: Vec<(i32, i32)>,
    retired: Vec<RequestId>,
}

/// The one owner of page states, leases and transfers. See the module's text for the call order.
#[cfg_attr(any(test, feature = "testing"), derive(Clone))]
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    residences: Residences,
    transfers: Transfers,
    requests: Vec<Option<Box<RequestState>>>,
    num_live: u32,
    lru: RequestLru,
    /// Live or draining users of each host block.
    host_users: Vec<u32>,
    pending: Pending,
    step: u64,
    /// What carrying out the next plan adds to the pool's free blocks: those whose last hold it
    /// ends, less those on which it takes a first one.
    released_gpu: i64,
    /// Blocks of hot regions: they belong to no residence, and are as little free.
    hot_blocks: FixedBitSet,
    /// Hot regions asked for in the last plan.
    num_hot_wanted: u32,
    /// Stamps that find duplicates inside one batch.
    request_stamps: Vec<u64>,
    block_stamps: Vec<u64>,
    host_stamps: Vec<u64>,
    stamp: u64,
    stats: Stats,
    shut_down: bool,
}

impl Coordinator {
    /// A Coordinator without requests.
    ///
    /// # Errors
    /// `Config` or `Capacity` as `CoordinatorConfig::validate` says.
    pub fn new(config: CoordinatorConfig) -> Result<Self> {
        config.validate()?;
        Self::with_engine_pools(config)
    }

    /// A Coordinator without requests, for an engine that has checked its pools by rules of its own.
    ///
    /// # Errors
    /// `Config` as `CoordinatorConfig::validate_settings` says.
    pub fn with_engine_pools(config: CoordinatorConfig) -> Result<Self> {
        config.validate_settings()?;
        Ok(Self {
            residences: Residences::new(
                config.num_kv_groups,
                config.gpu_blocks,
                config.host_blocks,
            ),
            transfers: Transfers::default(),
            requests: Vec::new(),
            num_live: 0,
            lru: RequestLru::default(),
            host_users: vec![0; config.host_blocks as usize],
            pending: Pending::default(),
            step: 0,
            released_gpu: 0,
            hot_blocks: FixedBitSet::with_capacity(config.gpu_blocks as usize),
            num_hot_wanted: 0,
            request_stamps: Vec::new(),
            block_stamps: vec![0; config.gpu_blocks as usize],
            host_stamps: vec![0; config.host_blocks as usize],
            stamp: 0,
            stats: Stats::default(),
            shut_down: false,
            config,
        })
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &CoordinatorConfig {
        &self.config
    }

    /// Counters since construction.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Requests admitted and not freed.
    #[must_use]
    pub fn num_live(&self) -> u32 {
        self.num_live
    }

    /// Transfers that some rank has not completed.
    #[must_use]
    pub fn num_transfers(&self) -> usize {
        self.transfers.len()
    }

    /// True while the engine must keep stepping, with empty steps if need be, so that transfers
    /// drain and what waits for a plan is carried out.
    #[must_use]
    pub fn has_pending_work(&self) -> bool {
        let p = &self.pending;
        !self.transfers.is_empty()
            || [&p.unpin_gpu, &p.free_gpu, &p.free_host].iter().any(|list| !list.is_empty())
            || !p.publish.is_empty()
            || !p.retired.is_empty()
            || !p.restores.is_empty()
            || !p.host_copies.is_empty()
            || !p.replan.is_empty()
            || !p.lost_pages.is_empty()
    }

    /// True if GPU blocks will become free without a preemption: copies are under way, or a
    /// request was asked to take a hot region that the pool can still give. An engine whose
    /// running request cannot grow waits instead of preempting.
    #[must_use]
    pub fn has_pending_reclamation(&self, levels: PoolLevels) -> bool {
        let releases = !self.pending.unpin_gpu.is_empty() || !self.pending.free_gpu.is_empty();
        let wanted = self.num_hot_wanted > 0 && levels.gpu_free >= self.config.hot_region_blocks();
        releases || wanted || self.transfers.holds_gpu_blocks()
    }

    /// Pages of a live request.
    ///
    /// # Errors
    /// `UnknownRequest`.
    pub fn num_pages(&self, request: RequestId) -> Result<u32> {
        Ok(self.live(request)?.num_pages())
    }

    /// State of a page of a live request, `None` past its end.
    ///
    /// # Errors
    /// `UnknownRequest`.
    pub fn page_state(&self, request: RequestId, page: PageIndex) -> Result<Option<PageState>> {
        Ok(self.live(request)?.state(page))
    }

    /// States of all pages of a live request.
    ///
    /// # Errors
    /// `UnknownRequest`.
    pub fn page_states(&self, request: RequestId) -> Result<&[PageState]> {
        Ok(self.live(request)?.states())
    }

    /// Pages of a live request in `state`.
    ///
    /// # Errors
    /// `UnknownRequest`.
    pub fn num_pages_in(&self, request: RequestId, state: PageState) -> Result<u32> {
        Ok(self.live(request)?.count(state))
    }

    /// Leading pages of a live request whose host copy is complete.
    ///
    /// # Errors
    /// `UnknownRequest`.
    pub fn durable_prefix(&self, request: RequestId) -> Result<u32> {
        Ok(self.live(request)?.durable_prefix)
    }

    /// True if every writer has completed the host copy of a page of a live request.
    ///
    /// # Errors
    /// `UnknownRequest`.
    pub fn is_durable(&self, request: RequestId, page: PageIndex) -> Result<bool> {
        Ok(self.live(request)?.is_durable(page))
    }

    /// GPU blocks of a page of a live request, `[G]`; empty where only the host copy is valid.
    ///
    /// # Errors
    /// `UnknownRequest`.
    pub fn resident_blocks(&self, request: RequestId, page: PageIndex) -> Result<&[i32]> {
        let state = self.live(request)?;
        let id = state.residences.get(page.index()).copied();
        Ok(id.map_or(&[], |id| self.residences.blocks(id)))
    }

    /// True if the live request holds its hot region.
    ///
    /// # Errors
    /// `UnknownRequest`.
    pub fn has_hot_region(&self, request: RequestId) -> Result<bool> {
        Ok(self.live(request)?.hot.is_held())
    }

    /// GPU blocks `[G]` that hold the rows of a published host block now; an engine that admits a
    /// request with dense residency touches them instead of restoring the page.
    #[must_use]
    pub fn readable_copy(&self, block: HostBlockId) -> Option<&[i32]> {
        let id = self.residences.of_host_block(block);
        if id.is_none() { None } else { Some(self.residences.blocks(id)) }
    }

    fn live(&self, request: RequestId) -> Result<&RequestState, ProtocolFault> {
        match self.requests.get(request.index()) {
            Some(Some(state)) if state.phase == Phase::Live => Ok(state),
            _ => Err(ProtocolFault::UnknownRequest { request }),
        }
    }

    fn slot(&mut self, request: RequestId) -> Option<&mut RequestState> {
        slot_of(&mut self.requests, request)
    }

    fn check_running(&self) -> Result<(), ProtocolFault> {
        if self.shut_down { Err(ProtocolFault::ShutDown) } else { Ok(()) }
    }

    /// A stamp that no request and no block carries yet.
    fn next_stamp(&mut self) -> u64 {
        self.stamp += 1;
        self.stamp
    }

    fn stamp_request(&mut self, request: RequestId, stamp: u64) -> Result<(), ProtocolFault> {
        let bound = self.requests.len() + MAX_REQUEST_ID_GAP as usize;
        let bound = bound.min(RequestId::LIMIT as usize);
        if request.index() >= bound {
            // OK because the bound is at most RequestId::LIMIT.
            let (got, max) = (i64::from(request.0), bound as i64 - 1);
            return Err(ProtocolFault::OutOfRange { what: "request id", got, min: 0, max });
        }
        if request.index() >= self.request_stamps.len() {
            self.request_stamps.resize(request.index() + 1, 0);
        }
        match self.request_stamps.get_mut(request.index()) {
            Some(slot) if *slot != stamp => {
                *slot = stamp;
                Ok(())
            }
            _ => Err(ProtocolFault::DuplicateRequest { request }),
        }
    }

    /// GPU blocks that the pool can hand out once the next plan is carried out.
    fn available(&self, levels: PoolLevels) -> u32 {
        let available = i64::from(levels.gpu_free) + self.released_gpu;
        // OK because it is a number of blocks of the pool.
        available.max(0) as u32
    }

    fn queue_publication(&mut self, request: RequestId) {
        let Some(state) = self.slot(request) else { return };
        if state.may_publish() && !state.publish_queued && state.durable_prefix > state.published {
            state.publish_queued = true;
            self.pending.publish.push(request);
        }
    }

    /// Takes the request's hot region from it and appends its blocks to `freed`. True if it had
    /// one.
    fn end_hot_region(&mut self, request: RequestId, freed: &mut Vec<i32>) -> bool {
        let Some(lease) = self.slot(request).and_then(|state| state.hot.take()) else {
            return false;
        };
        for &block in lease.blocks() {
            self.hot_blocks.set(block as usize, false);
        }
        lease.release(freed);
        true
    }

    fn add_host_user(&mut self, block: i32) {
        if let Some(users) = host_users_of(&mut self.host_users, block) {
            *users += 1;
        }
    }

    fn remove_host_user(&mut self, block: i32) {
        if let Some(users) = host_users_of(&mut self.host_users, block) {
            debug_assert!(*users > 0);
            *users = users.saturating_sub(1);
        }
    }
}

/// The admission with this id, live or draining. For callers that need the Coordinator's other
/// fields beside it.
fn slot_of(
    requests: &mut [Option<Box<RequestState>>],
    request: RequestId,
) -> Option<&mut RequestState> {
    requests.get_mut(request.index())?.as_deref_mut()
}

fn host_users_of(users: &mut [u32], block: i32) -> Option<&mut u32> {
    if block == HostBlockId::NULL.0 {
        return None;
    }
    users.get_mut(usize::try_from(block).ok()?)
}
