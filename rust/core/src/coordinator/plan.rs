// SPDX-License-Identifier: Apache-2.0
//! Owns the per-step decisions: what is copied, who gives up residency, who gets it back.

use super::{Coordinator, slot_of};
use crate::config::{HostCopy, ReleasePoint};
use crate::error::{Pool, ProtocolFault, Result};
use crate::ids::{HostBlockId, PageIndex, RequestId};
use crate::page::{PageEvent, PageState};
use crate::request::Phase;
use crate::residency::by_runs;
use crate::step::{PoolLevels, Refusal, Scheduled, StepEvents, StepPlan};

/// Plans that ask a request for a hot region in vain before it is left out. An engine that waits
/// for transfers schedules nobody for a few steps.
const MAX_UNANSWERED_PLANS: u8 = 8;

impl Coordinator {
    /// Builds the plan of the coming forward pass into `plan`, whose memory is used again.
    ///
    /// `scheduled` is the batch in its order; `levels` are the pools after this step's
    /// allocations. Cost: O(scheduled requests) plus what changed since the last plan.
    ///
    /// # Errors
    /// Protocol faults for unknown or repeated requests, tokens past the allocated pages, writes
    /// to pages that are not writable, and host-only pages without a hot region; nothing has
    /// changed then and `plan` is empty.
    pub fn build_step_plan(
        &mut self,
        scheduled: &[Scheduled],
        levels: PoolLevels,
        plan: &mut StepPlan,
    ) -> Result<()> {
        self.build_plan(scheduled, &[], levels, plan)
    }

    fn build_plan(
        &mut self,
        scheduled: &[Scheduled],
        known_tokens: &[u32],
        levels: PoolLevels,
        plan: &mut StepPlan,
    ) -> Result<()> {
        plan.clear();
        self.check_running()?;
        if !known_tokens.is_empty() && known_tokens.len() != scheduled.len() {
            let (what, got, expected) = ("known tokens", known_tokens.len(), scheduled.len());
            return Err(ProtocolFault::WrongLength { what, got, expected }.into());
        }
        self.check_scheduled(scheduled)?;
        self.step += 1;
        plan.step = self.step;
        plan.recycled_host_blocks.append(&mut self.pending.recycled_host_blocks);
        self.adopt_copies();
        self.plan_queued_transfers(plan);
        let reserve = self.config.watermark().saturating_mul(2);
        let room = self.available(levels).saturating_sub(reserve);
        let mut room = if self.config.transition { room } else { 0 };
        self.release_granted();
        for (at, item) in scheduled.iter().enumerate() {
            let known = known_tokens.get(at).copied().unwrap_or(u32::MAX);
            self.advance(item, known, plan);
            room = self.regain_residency(item.request, room, plan);
            self.package_residency(item.request, plan);
            // One confirmed token and its drafts are verification rows; the tokens of a prefill
            // chunk read staged pages and have no rows here.
            if item.num_scheduled_tokens == item.num_draft_tokens + 1 {
                let rows = item.num_scheduled_tokens;
                plan.replay.push(item.request, item.num_computed_tokens, rows, self.config.top_k);
            }
        }
        self.relieve_pressure(levels, plan);
        self.flush(plan);
        Ok(())
    }

    /// Absorbs the events of one scheduling step in their order (reused blocks, admissions,
    /// allocations, hot regions), then builds the plan of the coming forward pass.
    ///
    /// # Errors
    /// As the events and `build_step_plan`. Each event is all or nothing by itself: those before
    /// the failing one stay absorbed, `plan` is empty.
    pub fn step(
        &mut self,
        events: &StepEvents<'_>,
        scheduled: &[Scheduled],
        levels: PoolLevels,
        plan: &mut StepPlan,
    ) -> Result<()> {
        plan.clear();
        self.on_blocks_reused(events.reused_blocks)?;
        self.on_admitted(events.admitted)?;
        self.on_blocks_allocated(events.allocated)?;
        for region in events.hot_regions {
            self.on_hot_region_allocated(region.request, region.blocks)?;
        }
        self.build_plan(scheduled, events.known_tokens, levels, plan)
    }

    fn check_scheduled(&mut self, scheduled: &[Scheduled]) -> Result<()> {
        let stamp = self.next_stamp();
        let block_size = self.config.block_size;
        for item in scheduled {
            let request = item.request;
            self.live(request)?;
            self.stamp_request(request, stamp)?;
            let state = self.live(request)?;
            let start = item.num_computed_tokens;
            let tokens = u64::from(start) + u64::from(item.num_scheduled_tokens);
            let capacity = u64::from(state.num_pages()) * u64::from(block_size);
            if tokens > capacity || item.num_draft_tokens > item.num_scheduled_tokens {
                return Err(ProtocolFault::ScheduledPastPages { request, tokens, capacity }.into());
            }
            if item.num_draft_tokens >= self.config.verification_rows {
                // More rows than the hot region was sized for could evict each other's rows.
                let (what, got) = ("num_draft_tokens", i64::from(item.num_draft_tokens));
                let max = i64::from(self.config.verification_rows) - 1;
                return Err(ProtocolFault::OutOfRange { what, got, min: 0, max }.into());
            }
            if state.import_tokens.is_some() {
                return Err(ProtocolFault::WrongPageState { request, page: PageIndex(0) }.into());
            }
            // OK because tokens is at most capacity, which the page count bounds.
            let end = tokens.div_ceil(u64::from(block_size)) as u32;
            for page in (start / block_size..end).map(PageIndex) {
                if state.state(page) != Some(PageState::Dirty) {
                    return Err(ProtocolFault::WrongPageState { request, page }.into());
                }
            }
            let reads_host =
                state.count(PageState::HostOnly) + state.count(PageState::Unpinned) > 0;
            if reads_host && !state.hot.is_held() {
                return Err(ProtocolFault::HotRegionMissing { request }.into());
            }
        }
        Ok(())
    }

    /// Shares readable GPU copies with requests that were admitted onto a host prefix. Such a
    /// request reads through its hot region anyway, so it takes no lease: the copies stay
    /// unpinned, and whoever is admitted next may have the blocks.
    fn adopt_copies(&mut self) {
        for request in core::mem::take(&mut self.pending.adopt) {
            let Some(state) = slot_of(&mut self.requests, request) else {
                continue;
            };
            if state.phase != Phase::Live {
                continue;
            }
            for page in (0..state.num_pages()).map(PageIndex) {
                if state.state(page) != Some(PageState::HostOnly) {
                    continue;
                }
                let host = HostBlockId(state.host_blocks[page.index()]);
                let id = self.residences.of_host_block(host);
                let Some(residence) = self.residences.get_mut(id) else { continue };
                // Losing a block reports the residence's position to all readers.
                if residence.page != page {
                    continue;
                }
                if state.apply(request, page, PageEvent::Adopted).is_ok() {
                    residence.readers.push(request);
                    state.residences[page.index()] = id;
                    state.mark_changed(page);
                    self.stats.pages_adopted += 1;
                }
            }
        }
    }

    /// Host copies come first: a restore may read what they write.
    pub(super) fn plan_queued_transfers(&mut self, plan: &mut StepPlan) {
        for (request, page, source) in core::mem::take(&mut self.pending.host_copies) {
            self.plan_host_copy(request, page, source, plan);
        }
        for (request, page, rows) in core::mem::take(&mut self.pending.restores) {
            self.plan_restore(request, page, rows, plan);
        }
        for (request, page) in core::mem::take(&mut self.pending.replan) {
            self.plan_spill(request, page, false, plan);
        }
    }

    /// Requests with a fresh hot region give up all pages that may go.
    pub(super) fn release_granted(&mut self) {
        for request in core::mem::take(&mut self.pending.release) {
            self.release_all(request);
        }
    }

    /// Releases every page that may go, tail first in the runs of `by_runs`: the first block given
    /// up is the first to be reused, and the start of a prefix serves most.
    fn release_all(&mut self, request: RequestId) {
        let Ok(state) = self.live(request) else { return };
        let from = self.pending.unpin_gpu.len();
        for page in (0..state.tail_start()).rev().map(PageIndex) {
            self.try_release(request, page);
        }
        let released = self.pending.unpin_gpu.get_mut(from..).unwrap_or_default();
        by_runs(released, self.config.num_kv_groups as usize);
    }

    /// Seals pages that this step fills, releases pages that left the tail, notes rejections.
    ///
    /// A rejected draft's row has been written again when its page is copied. OK because only pages
    /// below `confirmed` are sealed, and a position x below it has a certain token (x is under
    /// `known_tokens`) that a pass planned up to now computes as other than a draft (x is under
    /// `written` less the drafts). If a pass wrote a draft at x that was rejected, the token at x
    /// was sampled from that pass's result, so the certain one is the input of a later pass; passes
    /// run in their order, and none writes a draft at x once the token is certain. The copy comes
    /// after this pass if it writes the page, and otherwise after the pass before. A worker that
    /// marks rows as mirrored unmarks those that a pass is about to write, so that a mark never
    /// stands for a row that was rejected.
    fn advance(&mut self, item: &Scheduled, known_tokens: u32, plan: &mut StepPlan) {
        let request = item.request;
        self.lru.touch(request);
        let block_size = self.config.block_size;
        let written = item.num_computed_tokens + item.num_scheduled_tokens;
        let confirmed = (written - item.num_draft_tokens)
            .min(known_tokens)
            .saturating_sub(self.config.num_reprefillable_tokens);
        let Some(state) = self.slot(request) else { return };
        state.unanswered_plans = 0;
        let rejected = state.expected_tokens.saturating_sub(item.num_computed_tokens);
        if rejected > 0 {
            plan.replay.push_rejection(request, item.num_computed_tokens, rejected);
        }
        state.expected_tokens = written;
        let (sealed, target) = (state.sealed, confirmed / block_size);
        state.sealed = sealed.max(target);
        let (tail_seen, tail_start) = (state.tail_seen, state.tail_start());
        state.tail_seen = tail_start;
        self.stats.rows_rejected += u64::from(rejected);
        if self.config.host_copy != HostCopy::None {
            for page in (sealed..target).map(PageIndex) {
                let after_forward = (page.0 + 1) * block_size > item.num_computed_tokens;
                self.plan_spill(request, page, after_forward, plan);
            }
        }
        for page in (tail_seen..tail_start).map(PageIndex) {
            self.try_release(request, page);
        }
    }

    /// Pins the pages of a request again when there is ample room, and gives its hot region back
    /// once it has been fully resident for a while. Returns the room that is left.
    fn regain_residency(&mut self, request: RequestId, room: u32, plan: &mut StepPlan) -> u32 {
        let groups = self.config.num_kv_groups;
        let step = self.step;
        let Some(state) = slot_of(&mut self.requests, request) else {
            return room;
        };
        if !state.hot.is_held() {
            return room;
        }
        if state.is_fully_resident() {
            if room == 0 {
                state.full_since = 0;
            } else if state.full_since == 0 {
                state.full_since = step;
            } else if step - state.full_since >= u64::from(self.config.hot_return_steps) {
                state.full_since = 0;
                self.released_gpu += i64::from(self.config.hot_region_blocks());
                self.end_hot_region(request, &mut plan.free_gpu);
                plan.hot_regions_returned.push(request.0 as i32);
                self.stats.hot_regions_returned += 1;
            }
            return room;
        }
        state.full_since = 0;
        let unpinned = state.count(PageState::Unpinned);
        let cost = unpinned.saturating_mul(groups);
        // A page whose copy is not complete may still turn out lost; it is pinned only after.
        if unpinned == 0 || state.count(PageState::HostOnly) > 0 || cost >= room {
            return room;
        }
        for page in (0..state.num_pages()).map(PageIndex) {
            if state.state(page) != Some(PageState::Unpinned) || !state.is_durable(page) {
                continue;
            }
            let id = state.residences[page.index()];
            if state.apply(request, page, PageEvent::Repinned).is_ok() {
                plan.touch_gpu.extend_from_slice(self.residences.blocks(id));
                if let Some(residence) = self.residences.get_mut(id) {
                    if residence.holders == 0 {
                        self.released_gpu -= i64::from(groups);
                    }
                    residence.holders += 1;
                }
                self.stats.pages_repinned += 1;
            }
        }
        room - cost
    }

    /// The worker's residency row: all resident pages once, then changes only.
    pub(super) fn package_residency(&mut self, request: RequestId, plan: &mut StepPlan) {
        let Some(state) = slot_of(&mut self.requests, request) else {
            return;
        };
        let groups = self.config.num_kv_groups as usize;
        // OK because ids and pages are bounded by i32 block counts.
        let id = request.0 as i32;
        let list = &mut plan.residency;
        if !state.announced {
            state.announced = true;
            list.cleared.push(id);
            for (page, &residence) in state.residences.iter().enumerate() {
                if !residence.is_none() {
                    list.request.push(id);
                    list.page.push(page as i32);
                    list.blocks.extend_from_slice(self.residences.blocks(residence));
                }
            }
        } else {
            for &page in &state.changed {
                list.request.push(id);
                list.page.push(page as i32);
                let residence = state.residences[page as usize];
                if residence.is_none() {
                    list.blocks.extend(core::iter::repeat_n(0, groups));
                } else {
                    list.blocks.extend_from_slice(self.residences.blocks(residence));
                }
            }
            state.clear_changed();
        }
        if state.hot.announce() {
            plan.hot_regions.request.push(id);
            plan.hot_regions.blocks.extend_from_slice(state.hot.blocks());
        }
        let reads_host = state.count(PageState::HostOnly) > 0;
        plan.all_context_resident &= !reads_host;
    }

    /// Under pressure, least recently scheduled requests give up residency first: those with a
    /// hot region release the pages that they kept while there was room, others are asked to take
    /// a hot region, if that frees more blocks than it costs. One that is not scheduled takes none:
    /// it may be paused, or have finished and wait for a sibling that sends its pages. Such a
    /// request must not stand for the others for ever.
    fn relieve_pressure(&mut self, levels: PoolLevels, plan: &mut StepPlan) {
        self.num_hot_wanted = 0;
        let available = self.available(levels);
        let watermark = self.config.watermark();
        if !self.config.transition || available >= watermark {
            return;
        }
        let mut deficit = i64::from(watermark - available);
        let mut budget = available;
        let region = self.config.hot_region_blocks();
        let groups = self.config.num_kv_groups;
        let mut next = self.lru.oldest();
        while let Some(request) = next.filter(|_| deficit > 0) {
            next = self.lru.newer_than(request);
            let Ok(state) = self.live(request) else { continue };
            if state.hot.is_held() {
                deficit -= self.release_kept(request);
                continue;
            }
            let gain = state.num_releasable().saturating_mul(groups);
            if gain <= region {
                continue;
            }
            if budget < region {
                let free = available;
                let reclaiming = !self.transfers.is_empty();
                let refusal = Refusal::Short { pool: Pool::Gpu, need: region, free, reclaiming };
                plan.refusals.push((request.0 as i32, refusal));
                continue;
            }
            if let Some(state) = self.slot(request) {
                if state.unanswered_plans == MAX_UNANSWERED_PLANS {
                    continue;
                }
                state.unanswered_plans += 1;
            }
            budget -= region;
            deficit -= i64::from(gain) - i64::from(region);
            plan.hot_regions_wanted.push(request.0 as i32);
            self.num_hot_wanted += 1;
        }
    }

    /// Ends a spell of full residency and releases what the request may give up. Returns the
    /// blocks that lost their last hold.
    fn release_kept(&mut self, request: RequestId) -> i64 {
        let before = self.released_gpu;
        let at_enqueued = self.config.release_point == ReleasePoint::Enqueued;
        let Some(state) = self.slot(request) else { return 0 };
        // Only what can go now: a look at every page is too much for one that is still copied.
        let kept = match at_enqueued {
            true => state.count_outside_tail(&[PageState::Clean, PageState::Enqueued]),
            false => state.count_outside_tail(&[PageState::Clean]),
        };
        if kept > 0 {
            state.full_since = 0;
            self.release_all(request);
        }
        self.released_gpu - before
    }

    pub(super) fn flush(&mut self, plan: &mut StepPlan) {
        for request in core::mem::take(&mut self.pending.publish) {
            let Some(state) = self.slot(request) else { continue };
            let queued = core::mem::take(&mut state.publish_queued);
            if !queued || !state.may_publish() {
                // Queued again when its reads are confirmed.
                continue;
            }
            let (from, to) = (state.published, state.durable_prefix);
            if to > from {
                state.published = to;
                plan.publish.request.push(request.0 as i32);
                plan.publish.num_pages.push(to as i32);
                self.stats.pages_published += u64::from(to - from);
            }
        }
        plan.unpin_gpu.append(&mut self.pending.unpin_gpu);
        plan.free_gpu.append(&mut self.pending.free_gpu);
        plan.free_host.append(&mut self.pending.free_host);
        plan.lost_pages.append(&mut self.pending.lost_pages);
        for request in core::mem::take(&mut self.pending.retired) {
            plan.retired.push(request.0 as i32);
            self.requests[request.index()] = None;
        }
        for id in self.pending.releasing.drain(..) {
            if let Some(residence) = self.residences.get_mut(id) {
                residence.releasing = false;
            }
        }
        self.released_gpu = 0;
    }
}
