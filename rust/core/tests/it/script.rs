// SPDX-License-Identifier: Apache-2.0
//! Owns the short forms in which scenarios are written: builders of events and a world that
//! panics with the broken rule.

use hotpage_core::config::CoordinatorConfig;
use hotpage_core::ids::{PageIndex, RequestId};
use hotpage_core::page::PageState;
use hotpage_core::step::{FreeReason, StepPlan, TransferKind};
use hotpage_core::testing::{Ack, Event, Item, PrefixCopies, World, small_config};

/// A world that fails the test on the first broken rule.
pub(crate) struct Script {
    pub(crate) world: World,
}

impl Script {
    pub(crate) fn new(config: CoordinatorConfig) -> Self {
        Self { world: World::new(config).unwrap() }
    }

    pub(crate) fn small() -> Self {
        Self::new(small_config())
    }

    /// An event that must be able to happen.
    pub(crate) fn then(&mut self, event: Event) -> &mut Self {
        let happened = self.world.apply(&event).unwrap_or_else(|v| panic!("{event:?}: {v}"));
        assert!(happened, "{event:?} cannot happen");
        self
    }

    pub(crate) fn admit(&mut self, pages: u8) -> &mut Self {
        self.then(Event::Admit { pages })
    }

    /// Reuses the longest published prefix that starts with page `pick` of the index.
    pub(crate) fn admit_prefix(&mut self, pick: u8, copies: PrefixCopies) -> &mut Self {
        self.then(Event::AdmitPrefix { pick, copies })
    }

    pub(crate) fn import(&mut self, tokens: u8, tail: bool) -> &mut Self {
        self.then(Event::AdmitImport { tokens, tail })
    }

    pub(crate) fn landed(&mut self, tokens: Option<u8>) -> &mut Self {
        self.then(Event::EndImport { pick: 0, tokens })
    }

    pub(crate) fn grow(&mut self, pick: u8) -> &mut Self {
        self.then(Event::Grow { pick })
    }

    pub(crate) fn hot(&mut self, pick: u8) -> &mut Self {
        self.then(Event::GrantHot { pick })
    }

    pub(crate) fn tenant(&mut self, blocks: u8) -> &mut Self {
        self.then(Event::Tenant { blocks })
    }

    pub(crate) fn free(&mut self, pick: u8, reason: FreeReason) -> &mut Self {
        self.then(Event::Free { pick, reason })
    }

    /// A step of `(pick, tokens)` without drafts.
    pub(crate) fn step(&mut self, items: &[(u8, u8)]) -> &mut Self {
        self.then(Event::Step { items: batch(items), fail_reads: false, lose_mirror: false })
    }

    /// A step whose restores and host copies go wrong.
    pub(crate) fn step_with_failing_reads(&mut self, items: &[(u8, u8)]) -> &mut Self {
        self.then(Event::Step { items: batch(items), fail_reads: true, lose_mirror: false })
    }

    /// A step whose first request is not mirrored.
    pub(crate) fn step_without_mirror(&mut self, items: &[(u8, u8)]) -> &mut Self {
        self.then(Event::Step { items: batch(items), fail_reads: false, lose_mirror: true })
    }

    /// Every rank enqueues and completes everything in flight.
    pub(crate) fn land_all(&mut self) -> &mut Self {
        self.world.drain_transfers().unwrap();
        self
    }

    /// Every rank says `ack` about the copy of this page.
    pub(crate) fn ack(&mut self, request: u32, page: u32, ack: Ack) -> &mut Self {
        let found =
            self.world.model.transfers.iter().find(|(_, t)| (t.request, t.page) == (request, page));
        let (&id, transfer) = found.unwrap_or_else(|| panic!("page {page} has no copy in flight"));
        for rank in 0..transfer.done.len() {
            self.world.acknowledge(id, rank, ack).unwrap_or_else(|v| panic!("{v}"));
        }
        self.world.model.compare(&self.world.coordinator, None).unwrap();
        self.world.check().unwrap();
        self
    }

    pub(crate) fn state(&self, request: u32, page: u32) -> PageState {
        let c = &self.world.coordinator;
        c.page_state(RequestId(request), PageIndex(page)).unwrap().unwrap()
    }

    pub(crate) fn states(&self, request: u32) -> Vec<PageState> {
        let n = self.world.coordinator.num_pages(RequestId(request)).unwrap();
        (0..n).map(|page| self.state(request, page)).collect()
    }

    pub(crate) fn has_hot(&self, request: u32) -> bool {
        self.world.coordinator.has_hot_region(RequestId(request)).unwrap()
    }

    /// `(request, leading pages)` that the last plan published.
    pub(crate) fn published(&self) -> Vec<(i32, i32)> {
        let list = &self.plan().publish;
        list.request.iter().copied().zip(list.num_pages.iter().copied()).collect()
    }

    /// Kinds of the copies in flight, oldest first.
    pub(crate) fn in_flight(&self) -> Vec<TransferKind> {
        self.world.model.transfers.values().map(|t| t.kind).collect()
    }

    pub(crate) fn plan(&self) -> &StepPlan {
        &self.world.plan
    }

    /// Ends everything and checks that nothing is leased.
    pub(crate) fn drain(&mut self) {
        self.world.drain().unwrap_or_else(|v| panic!("at the end: {v}"));
    }
}

fn batch(items: &[(u8, u8)]) -> Vec<Item> {
    items.iter().map(|&(pick, tokens)| Item { pick, tokens, drafts: 0, accepted: 0 }).collect()
}
