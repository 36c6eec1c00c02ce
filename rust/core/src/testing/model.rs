// SPDX-License-Identifier: Apache-2.0
//! Owns the naive reference: maps of pages and copies, acknowledgements kept rank by rank, every
//! answer recomputed from scratch. It predicts page states, leases, copies, publications and what
//! is lost. Choices that are policy (who gives up a page, who gets it back, which readable copy
//! is shared) it takes from the Coordinator and checks for legality.

use std::collections::{BTreeMap, BTreeSet};

use super::{Check, ensure, signed};
use crate::config::{CoordinatorConfig, HostCopy, ReleasePoint, TAIL_PAGES};
use crate::page::PageState;
use crate::step::{FreePlan, FreeReason, Scheduled, StepPlan, TransferKind};

/// One page of one request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelPage {
    /// Predicted state.
    pub state: PageState,
    /// Host block.
    pub host: i32,
    /// GPU blocks `[G]`, empty where there are none.
    pub blocks: Vec<i32>,
    /// True once every writer has said that every row is in the host block.
    pub landed: bool,
    /// True if mirrored rows cannot be trusted.
    pub needs_copy: bool,
}

/// One request, or what is left of it while its copies are in flight.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct ModelRequest {
    /// Block table.
    pub pages: Vec<ModelPage>,
    /// Blocks of the hot region.
    pub hot: Vec<i32>,
    /// Leading pages whose copy was planned or is not needed.
    pub sealed: u32,
    /// Leading pages that were published.
    pub published: u32,
    /// Pages whose copy failed and is to be made again.
    pub replan: BTreeSet<u32>,
    /// `(page, rows)` to restore in the next plan.
    pub restores: BTreeSet<(u32, u32)>,
    /// `(page, source)` host blocks to copy in the next plan.
    pub host_copies: BTreeSet<(u32, i32)>,
    /// Pages to report as lost in the next plan.
    pub lost: BTreeSet<u32>,
    /// True once a page was lost: what was computed since cannot be trusted.
    pub tainted: bool,
    /// Freed, and whether later pages may still be published.
    pub draining: Option<bool>,
    /// Host blocks kept for landed pages beyond a gap, by page.
    pub beyond_gap: BTreeMap<u32, Vec<i32>>,
}

impl ModelRequest {
    /// Leading landed pages.
    #[must_use]
    pub fn landed_prefix(&self) -> u32 {
        let n = self.pages.iter().take_while(|page| page.landed).count();
        u32::try_from(n).unwrap_or(u32::MAX)
    }

    /// First page of the tail.
    #[must_use]
    pub fn tail_start(&self) -> u32 {
        u32::try_from(self.pages.len()).unwrap_or(u32::MAX).saturating_sub(TAIL_PAGES)
    }
}

/// One copy, with each rank's acknowledgements.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelTransfer {
    /// What it does.
    pub kind: TransferKind,
    /// Its request.
    pub request: u32,
    /// Its page.
    pub page: u32,
    /// Host block of the page.
    pub host: i32,
    /// Source of a host copy, else the null block.
    pub source: i32,
    /// GPU blocks `[G]`; empty for a host copy.
    pub blocks: Vec<i32>,
    /// Rows that matter.
    pub rows: u32,
    /// `[rank]` has enqueued it.
    pub enqueued: Vec<bool>,
    /// `[rank]` is done with it.
    pub done: Vec<bool>,
    /// `[rank]` has failed or is going to.
    pub doomed: Vec<bool>,
    /// Some rank has said that it failed, or its rows are known not to be there.
    pub failed: bool,
    /// True while it holds its GPU blocks.
    pub holds_gpu: bool,
}

/// The whole reference.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Model {
    /// Requests by id, draining ones too.
    pub requests: BTreeMap<u32, ModelRequest>,
    /// Copies in flight by id.
    pub transfers: BTreeMap<i64, ModelTransfer>,
}

impl Model {
    /// A request got its first pages: `(state, host block, GPU blocks)` of each.
    pub fn admitted(&mut self, id: u32, pages: Vec<(PageState, i32, Vec<i32>)>) {
        let mut request = ModelRequest::default();
        for (state, host, blocks) in pages {
            let landed = matches!(state, PageState::HostOnly | PageState::Clean);
            request.pages.push(ModelPage { state, host, blocks, landed, needs_copy: false });
        }
        request.published = request.landed_prefix();
        request.sealed = request.published;
        self.requests.insert(id, request);
    }

    /// A request got another page.
    pub fn grown(&mut self, id: u32, host: i32, blocks: Vec<i32>) {
        let state = PageState::Dirty;
        let page = ModelPage { state, host, blocks, landed: false, needs_copy: false };
        self.requests.entry(id).or_default().pages.push(page);
    }

    /// The pool handed out watched blocks.
    ///
    /// # Errors
    /// Rule 2 if a request still holds one of them.
    pub fn reused(&mut self, blocks: &[i32]) -> Check {
        for (id, request) in self.requests.iter_mut().filter(|(_, r)| r.draining.is_none()) {
            for (at, page) in request.pages.iter_mut().enumerate() {
                if !page.blocks.iter().any(|block| blocks.contains(block)) {
                    continue;
                }
                ensure(2, page.state == PageState::Unpinned, || {
                    format!("request {id} page {at} was {:?} when a block was reused", page.state)
                })?;
                page.state = PageState::HostOnly;
                page.blocks.clear();
            }
        }
        Ok(())
    }

    /// An import ended with `landed` good tokens and `kept` pages.
    pub fn imported(&mut self, id: u32, landed: u32, kept: u32, block_size: u32) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.pages.truncate(kept as usize);
        request.sealed = kept;
        for (at, page) in (0_u32..).zip(&mut request.pages) {
            page.landed = (at + 1) * block_size <= landed;
            page.state = PageState::HostOnly;
            if !page.blocks.is_empty() {
                page.state = PageState::Dirty;
                page.landed = false;
                page.needs_copy = true;
                request.sealed = at;
                request.restores.insert((at, landed - at * block_size));
            }
        }
    }

    /// A page got a host block of its own, and GPU blocks to be written if there are any.
    pub fn redirected(&mut self, id: u32, at: u32, host: i32, blocks: &[i32], block_size: u32) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.published = request.published.min(at);
        let Some(page) = request.pages.get_mut(at as usize) else { return };
        let source = core::mem::replace(&mut page.host, host);
        page.landed = false;
        request.host_copies.insert((at, source));
        if !blocks.is_empty() {
            page.state = PageState::Dirty;
            page.blocks = blocks.to_vec();
            page.needs_copy = true;
            request.sealed = request.sealed.min(at);
            request.restores.insert((at, block_size));
        }
    }

    /// Rows of a page were not mirrored.
    pub fn mirror_lost(&mut self, id: u32, at: u32) {
        if let Some(page) =
            self.requests.get_mut(&id).and_then(|request| request.pages.get_mut(at as usize))
        {
            page.needs_copy = true;
        }
        let same = |t: &&mut ModelTransfer| {
            t.kind == TransferKind::Mirrored && (t.request, t.page) == (id, at)
        };
        if let Some(transfer) = self.transfers.values_mut().find(same) {
            transfer.failed = true;
            self.doubted(id, at);
        }
    }

    /// A copy in flight is known to be bad: the page's GPU copy is the only good one.
    fn doubted(&mut self, id: u32, at: u32) {
        if let Some(page) = self.live_page(id, at) {
            if page.state == PageState::Enqueued {
                page.state = PageState::Spilling;
            }
        }
    }

    /// A rank has put a copy in stream order.
    pub fn enqueued(&mut self, id: i64, rank: usize, config: &CoordinatorConfig) {
        let Some(transfer) = self.transfers.get_mut(&id) else { return };
        transfer.enqueued[rank] = true;
        let is_spill = matches!(transfer.kind, TransferKind::Spill | TransferKind::Mirrored);
        let ordered = transfer.enqueued.iter().all(|&done| done);
        if !ordered || transfer.failed || !is_spill {
            return;
        }
        if config.release_point == ReleasePoint::Enqueued {
            transfer.holds_gpu = false;
        }
        let (request, at) = (transfer.request, transfer.page);
        if let Some(page) = self.live_page(request, at) {
            if page.state == PageState::Spilling {
                page.state = PageState::Enqueued;
            }
        }
    }

    /// A rank is done with a copy.
    pub fn completed(&mut self, id: i64, rank: usize, failed: bool) {
        let Some(transfer) = self.transfers.get_mut(&id) else { return };
        transfer.done[rank] = true;
        transfer.failed |= failed;
        if !transfer.done.iter().all(|&done| done) {
            let (request, page) = (transfer.request, transfer.page);
            if transfer.failed
                && matches!(transfer.kind, TransferKind::Spill | TransferKind::Mirrored)
            {
                self.doubted(request, page);
            }
            return;
        }
        let Some(transfer) = self.transfers.remove(&id) else { return };
        self.ended(&transfer);
        let Some(request) = self.requests.get_mut(&transfer.request) else { return };
        let landed = request.pages.get(transfer.page as usize).is_some_and(|page| page.landed);
        if request.draining != Some(false) && landed {
            let kept = [transfer.host, transfer.source].into_iter().filter(|&block| block != 0);
            request.beyond_gap.entry(transfer.page).or_default().extend(kept);
        }
        let left = self.transfers.values().any(|other| other.request == transfer.request);
        let waits = left || request.draining.is_none();
        let prefix = request.landed_prefix();
        request.beyond_gap.retain(|&page, _| waits && page >= prefix);
    }

    fn ended(&mut self, transfer: &ModelTransfer) {
        let Some(request) = self.requests.get_mut(&transfer.request) else { return };
        let live = request.draining.is_none();
        let at = transfer.page;
        let Some(page) = request.pages.get_mut(at as usize) else { return };
        let is_spill = matches!(transfer.kind, TransferKind::Spill | TransferKind::Mirrored);
        if !transfer.failed {
            if is_spill {
                page.landed = true;
                if live && matches!(page.state, PageState::Spilling | PageState::Enqueued) {
                    page.state = PageState::Clean;
                }
            }
            if transfer.kind == TransferKind::HostCopy && page.state == PageState::HostOnly {
                page.landed = true;
            }
            return;
        }
        let still_dirty = matches!(page.state, PageState::Spilling | PageState::Enqueued);
        if is_spill {
            page.needs_copy = true;
        }
        if live && is_spill && still_dirty {
            page.state = PageState::Dirty;
            request.replan.insert(at);
        } else if live {
            request.lost.insert(at);
            request.tainted = true;
        } else if !is_spill {
            request.tainted = true;
        }
    }

    fn live_page(&mut self, id: u32, at: u32) -> Option<&mut ModelPage> {
        let request = self.requests.get_mut(&id)?;
        if request.draining.is_some() {
            return None;
        }
        request.pages.get_mut(at as usize)
    }

    /// True while rows that the request reads come from copies nobody has vouched for.
    #[must_use]
    pub fn reads_unconfirmed(&self, id: u32) -> bool {
        let is_read = |kind| matches!(kind, TransferKind::Restore | TransferKind::HostCopy);
        self.transfers.values().any(|t| t.request == id && is_read(t.kind))
            || self
                .requests
                .get(&id)
                .is_some_and(|r| !r.restores.is_empty() || !r.host_copies.is_empty())
    }

    /// Leading pages that must be published by now.
    #[must_use]
    pub fn publishable(&self, id: u32) -> u32 {
        let Some(request) = self.requests.get(&id) else { return 0 };
        let barred =
            request.tainted || request.draining == Some(false) || self.reads_unconfirmed(id);
        if barred { request.published } else { request.published.max(request.landed_prefix()) }
    }

    /// A request left. Returns the pages that were to be published.
    ///
    /// # Errors
    /// Rule 3 if the plan publishes another number of pages.
    pub fn freed(&mut self, id: u32, reason: FreeReason, plan: &FreePlan) -> Check<u32> {
        let barred = self.reads_unconfirmed(id)
            || self.requests.get(&id).is_some_and(|request| request.tainted);
        let expected = self.publishable(id);
        let publish = reason != FreeReason::Preempted && !barred;
        let Some(request) = self.requests.get_mut(&id) else { return Ok(0) };
        if publish {
            ensure(3, plan.publish_pages == expected, || {
                format!("freed {id}: publishes {}, expected {expected}", plan.publish_pages)
            })?;
        } else {
            ensure(3, plan.publish_pages <= request.published, || {
                format!("freed {id}: publishes {} though barred", plan.publish_pages)
            })?;
        }
        request.published = request.published.max(plan.publish_pages);
        request.draining = Some(publish);
        request.hot.clear();
        request.restores.clear();
        request.host_copies.clear();
        request.replan.clear();
        request.lost.clear();
        let left = self.transfers.values().any(|transfer| transfer.request == id);
        if !publish || !left {
            request.beyond_gap.clear();
        }
        ensure(8, plan.retired != left, || format!("freed {id}: retired is {}", plan.retired))?;
        if !left {
            self.requests.remove(&id);
        }
        Ok(expected)
    }

    /// A plan was built for `scheduled`: its copies are taken over and compared with those that
    /// are due.
    ///
    /// # Errors
    /// Rules 2, 3 and 8, and the protocol for copies of unknown pages.
    pub fn planned(
        &mut self,
        scheduled: &[Scheduled],
        plan: &StepPlan,
        config: &CoordinatorConfig,
    ) -> Check {
        let mut due = self.due(scheduled, config);
        let groups = config.num_kv_groups as usize;
        for (at, &id) in plan.transfers.transfer_id.iter().enumerate() {
            let list = &plan.transfers;
            let kind = TransferKind::from_u8(list.kind[at]);
            let blocks = &list.resident_blocks[at * groups..(at + 1) * groups];
            let (host, source) = (list.host_block[at], list.source_host_block[at]);
            let rows = u32::try_from(list.num_rows[at]).unwrap_or(0);
            let found = due.iter().position(|d| {
                Some(d.kind) == kind
                    && (d.host, d.source, d.rows) == (host, source, rows)
                    && (d.blocks.is_empty() || d.blocks == blocks)
            });
            ensure(2, found.is_some(), || {
                format!("transfer {id} of host block {host} ({kind:?}) is not due")
            })?;
            let Some(found) = found else { continue };
            let transfer = due.swap_remove(found);
            if matches!(transfer.kind, TransferKind::Spill | TransferKind::Mirrored) {
                if let Some(page) = self.live_page(transfer.request, transfer.page) {
                    page.state = PageState::Spilling;
                }
            }
            self.transfers.insert(id, transfer);
        }
        ensure(2, due.is_empty(), || format!("copies are due that the plan lacks: {due:?}"))?;
        for request in self.requests.values_mut() {
            request.restores.clear();
            request.host_copies.clear();
            request.replan.clear();
        }
        self.check_lost(plan)?;
        self.check_publications(plan)?;
        self.check_retired(plan)?;
        for &id in &plan.hot_regions_returned {
            let Some(request) = self.requests.get_mut(&id.unsigned_abs()) else { continue };
            let host = |page: &ModelPage| !page.state.holds_blocks();
            let whole = !request.pages.iter().any(host);
            ensure(5, whole, || {
                format!("request {id} gave its hot region back and reads from the host")
            })?;
            request.hot.clear();
        }
        Ok(())
    }

    fn due(&mut self, scheduled: &[Scheduled], config: &CoordinatorConfig) -> Vec<ModelTransfer> {
        let (writers, ranks) = (config.num_host_writers as usize, config.num_ranks as usize);
        let mut due = Vec::new();
        for (&id, request) in &mut self.requests {
            for &(page, source) in &request.host_copies {
                let host = request.pages[page as usize].host;
                let kind = TransferKind::HostCopy;
                due.push(copy(kind, id, page, host, source, &[], config.block_size, writers));
            }
            for &(at, rows) in &request.restores {
                let page = &request.pages[at as usize];
                let kind = TransferKind::Restore;
                due.push(copy(kind, id, at, page.host, 0, &page.blocks, rows, ranks));
            }
            let mut spills: BTreeSet<u32> = request.replan.clone();
            if let Some(item) = scheduled.iter().find(|item| item.request.0 == id) {
                let rows = item.num_computed_tokens + item.num_scheduled_tokens;
                let confirmed =
                    (rows - item.num_draft_tokens).saturating_sub(config.num_reprefillable_tokens);
                spills.extend(request.sealed..confirmed / config.block_size);
                request.sealed = request.sealed.max(confirmed / config.block_size);
            }
            for at in spills {
                let page = &request.pages[at as usize];
                if page.state != PageState::Dirty || config.host_copy == HostCopy::None {
                    continue;
                }
                let mirrored = config.host_copy == HostCopy::Mirrored && !page.needs_copy;
                let kind = if mirrored { TransferKind::Mirrored } else { TransferKind::Spill };
                let rows = config.block_size;
                due.push(copy(kind, id, at, page.host, 0, &page.blocks, rows, writers));
            }
        }
        due
    }

    fn check_lost(&mut self, plan: &StepPlan) -> Check {
        let mut expected = BTreeSet::new();
        for (&id, request) in &mut self.requests {
            for page in core::mem::take(&mut request.lost) {
                expected.insert((signed(id), signed(page)));
            }
        }
        let got: BTreeSet<(i32, i32)> = plan.lost_pages.iter().copied().collect();
        ensure(3, got == expected, || format!("lost pages {got:?}, expected {expected:?}"))
    }

    fn check_publications(&mut self, plan: &StepPlan) -> Check {
        let ids: Vec<u32> = self.requests.keys().copied().collect();
        for id in ids {
            let expected = self.publishable(id);
            let at = plan.publish.request.iter().position(|&request| request == signed(id));
            let got = at.map(|at| plan.publish.num_pages[at].unsigned_abs());
            let Some(request) = self.requests.get_mut(&id) else { continue };
            let wanted = (expected > request.published).then_some(expected);
            ensure(3, got == wanted, || {
                format!("request {id} publishes {got:?} pages, expected {wanted:?}")
            })?;
            request.published = expected;
        }
        Ok(())
    }

    fn check_retired(&mut self, plan: &StepPlan) -> Check {
        let got: BTreeSet<u32> = plan.retired.iter().map(|id| id.unsigned_abs()).collect();
        let busy: BTreeSet<u32> = self.transfers.values().map(|t| t.request).collect();
        let done = |(id, request): &(&u32, &ModelRequest)| {
            request.draining.is_some() && !busy.contains(id)
        };
        let expected: BTreeSet<u32> =
            self.requests.iter().filter(done).map(|(&id, _)| id).collect();
        ensure(8, got == expected && got.len() == plan.retired.len(), || {
            format!("retired {:?}, expected {expected:?}", plan.retired)
        })?;
        self.requests.retain(|id, _| !got.contains(id));
        Ok(())
    }
}

#[allow(clippy::too_many_arguments)] // A row of a table, written out once.
fn copy(
    kind: TransferKind,
    request: u32,
    page: u32,
    host: i32,
    source: i32,
    blocks: &[i32],
    rows: u32,
    ranks: usize,
) -> ModelTransfer {
    ModelTransfer {
        kind,
        request,
        page,
        host,
        source,
        blocks: blocks.to_vec(),
        rows,
        enqueued: vec![false; ranks],
        done: vec![false; ranks],
        doomed: vec![false; ranks],
        failed: false,
        holds_gpu: kind != TransferKind::HostCopy,
    }
}
