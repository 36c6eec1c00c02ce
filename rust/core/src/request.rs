// SPDX-License-Identifier: Apache-2.0
//! Owns what the Coordinator keeps for one admission: its pages and their states.

use fixedbitset::FixedBitSet;

use crate::config::TAIL_PAGES;
use crate::error::ProtocolFault;
use crate::hot::HotRegion;
use crate::ids::{HostBlockId, PageIndex, RequestId};
use crate::lease::Lease;
use crate::page::{PageEvent, PageState};
use crate::residency::ResidenceId;

const NUM_STATES: usize = PageState::Importing as usize + 1;

/// Where an admission is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Takes events.
    Live,
    /// Freed; transfers are still in flight.
    Draining {
        /// True if pages that become durable now are still to be published.
        publish: bool,
    },
}

/// One admission.
#[cfg_attr(any(test, feature = "testing"), derive(Clone))]
#[derive(Debug, Hash)]
pub struct RequestState {
    /// Life-cycle phase.
    pub phase: Phase,
    /// `[page]` host block, null without a host pool.
    pub host_blocks: Vec<i32>,
    /// `[page]` GPU blocks.
    pub residences: Vec<ResidenceId>,
    states: Vec<PageState>,
    counts: [u32; NUM_STATES],
    /// Pages whose host copy every writer has completed.
    pub durable: FixedBitSet,
    /// Leading durable pages.
    pub durable_prefix: u32,
    /// Leading pages that were published.
    pub published: u32,
    /// Leading pages whose copy was planned or is not needed.
    pub sealed: u32,
    /// Pages whose mirrored rows cannot be trusted: copied whole when they are sealed.
    pub needs_copy: FixedBitSet,
    /// Pages whose residency changed since the worker was last told.
    pub changed: Vec<u32>,
    changed_bits: FixedBitSet,
    /// True once the worker has a full residency row of this admission.
    pub announced: bool,
    /// Hot region.
    pub hot: HotRegion,
    /// Tokens written by the last planned step, drafts counted.
    pub expected_tokens: u32,
    /// First step of the present spell of full residency; 0 outside one.
    pub full_since: u64,
    /// Plans that asked for a hot region since the request was last scheduled.
    pub unanswered_plans: u8,
    /// Tokens of an import under way.
    pub import_tokens: Option<u32>,
    /// Transfers in flight.
    pub num_transfers: u32,
    /// First page that was in the tail when pages were last released.
    pub tail_seen: u32,
    /// Host leases of durable pages beyond a gap in the durable prefix: they are to be published
    /// when the gap closes, even if the request has ended by then.
    pub beyond_gap: Vec<(PageIndex, Lease)>,
    /// True while the request waits in the publication list.
    pub publish_queued: bool,
    /// Restores and host copies, planned or waiting for a plan, that have not completed: the
    /// request reads rows that nobody has vouched for.
    pub unconfirmed_reads: u32,
    /// True once a page was lost: rows computed since may have been computed from bad ones.
    pub tainted: bool,
}

impl RequestState {
    /// An admission without pages.
    #[must_use]
    pub fn new() -> Self {
        Self {
            phase: Phase::Live,
            host_blocks: Vec::new(),
            residences: Vec::new(),
            states: Vec::new(),
            counts: [0; NUM_STATES],
            durable: FixedBitSet::new(),
            durable_prefix: 0,
            published: 0,
            sealed: 0,
            needs_copy: FixedBitSet::new(),
            changed: Vec::new(),
            changed_bits: FixedBitSet::new(),
            announced: false,
            hot: HotRegion::None,
            expected_tokens: 0,
            full_since: 0,
            unanswered_plans: 0,
            import_tokens: None,
            num_transfers: 0,
            tail_seen: 0,
            beyond_gap: Vec::new(),
            publish_queued: false,
            unconfirmed_reads: 0,
            tainted: false,
        }
    }

    /// Pages of the block table.
    #[must_use]
    pub fn num_pages(&self) -> u32 {
        // OK because max_model_len bounds the table, and it is a u32.
        self.states.len() as u32
    }

    /// First page of the tail, which is never released.
    #[must_use]
    pub fn tail_start(&self) -> u32 {
        self.num_pages().saturating_sub(TAIL_PAGES)
    }

    /// State of a page.
    #[must_use]
    pub fn state(&self, page: PageIndex) -> Option<PageState> {
        self.states.get(page.index()).copied()
    }

    /// States of all pages.
    #[must_use]
    pub fn states(&self) -> &[PageState] {
        &self.states
    }

    /// Pages in `state`.
    #[must_use]
    pub fn count(&self, state: PageState) -> u32 {
        self.counts[state as usize]
    }

    /// True if attention finds every page in GPU blocks that the request holds.
    #[must_use]
    pub fn is_fully_resident(&self) -> bool {
        self.count(PageState::HostOnly) == 0
            && self.count(PageState::Unpinned) == 0
            && self.count(PageState::Importing) == 0
    }

    /// Pages outside the tail that a hot region would let the request give up, now or when their
    /// copies complete.
    #[must_use]
    pub fn num_releasable(&self) -> u32 {
        self.count_outside_tail(&[PageState::Clean, PageState::Enqueued, PageState::Spilling])
    }

    /// Pages outside the tail in one of `states`.
    #[must_use]
    pub fn count_outside_tail(&self, states: &[PageState]) -> u32 {
        let all: u32 = states.iter().map(|&state| self.count(state)).sum();
        let tail = (self.tail_start()..self.num_pages()).map(PageIndex);
        let in_tail = tail.filter(|&page| self.state(page).is_some_and(|s| states.contains(&s)));
        // OK because the tail has TAIL_PAGES pages at most.
        all - in_tail.count() as u32
    }

    /// Appends a page.
    pub fn push_page(&mut self, host_block: HostBlockId, residence: ResidenceId, state: PageState) {
        let page = self.num_pages();
        self.host_blocks.push(host_block.0);
        self.residences.push(residence);
        self.states.push(state);
        self.counts[state as usize] += 1;
        if !residence.is_none() {
            self.mark_changed(PageIndex(page));
        }
    }

    /// Drops the states of the pages from `num_pages` on.
    pub fn truncate_states(&mut self, num_pages: u32) {
        while self.num_pages() > num_pages {
            if let Some(state) = self.states.pop() {
                self.counts[state as usize] -= 1;
            }
        }
    }

    /// Puts an event to a page.
    ///
    /// # Errors
    /// `WrongPageState`, and nothing has changed.
    pub fn apply(
        &mut self,
        request: RequestId,
        page: PageIndex,
        event: PageEvent,
    ) -> Result<PageState, ProtocolFault> {
        let fault = ProtocolFault::WrongPageState { request, page };
        let Some(slot) = self.states.get_mut(page.index()) else { return Err(fault) };
        let Some(after) = slot.after(event) else { return Err(fault) };
        self.counts[*slot as usize] -= 1;
        self.counts[after as usize] += 1;
        *slot = after;
        Ok(after)
    }

    /// Notes that the worker's residency row must be updated at `page`.
    pub fn mark_changed(&mut self, page: PageIndex) {
        if !self.announced {
            return;
        }
        self.changed_bits.grow(page.index() + 1);
        if !self.changed_bits.put(page.index()) {
            self.changed.push(page.0);
        }
    }

    /// Forgets the noted changes, which have been packaged.
    pub fn clear_changed(&mut self) {
        for &page in &self.changed {
            self.changed_bits.set(page as usize, false);
        }
        self.changed.clear();
    }

    /// Sets or clears a page's durable bit and moves the durable prefix on.
    pub fn set_durable(&mut self, page: PageIndex, durable: bool) {
        self.durable.grow(self.states.len().max(page.index() + 1));
        self.durable.set(page.index(), durable);
        if durable {
            while self.durable.contains(self.durable_prefix as usize) {
                self.durable_prefix += 1;
            }
        } else {
            self.durable_prefix = self.durable_prefix.min(page.0);
        }
    }

    /// Takes the leases of pages below `prefix` from those beyond a gap.
    pub fn take_beyond_gap(&mut self, prefix: u32) -> Vec<Lease> {
        if self.beyond_gap.is_empty() {
            return Vec::new();
        }
        let leases = core::mem::take(&mut self.beyond_gap);
        let (ended, kept): (Vec<_>, Vec<_>) =
            leases.into_iter().partition(|(page, _)| page.0 < prefix);
        self.beyond_gap = kept;
        ended.into_iter().map(|(_, lease)| lease).collect()
    }

    /// True if every writer has completed the page's host copy.
    #[must_use]
    pub fn is_durable(&self, page: PageIndex) -> bool {
        self.durable.contains(page.index())
    }

    /// True if durable pages may be found by others: the request is not gone for good, and every
    /// row that its pages were computed from is known to be good.
    #[must_use]
    pub fn may_publish(&self) -> bool {
        self.phase != Phase::Draining { publish: false }
            && !self.tainted
            && self.unconfirmed_reads == 0
    }

    /// Sets the "copy whole" bit of a page; true if it was clear.
    pub fn set_needs_copy(&mut self, page: PageIndex) -> bool {
        self.needs_copy.grow(page.index() + 1);
        !self.needs_copy.put(page.index())
    }
}

impl Default for RequestState {
    fn default() -> Self {
        Self::new()
    }
}
