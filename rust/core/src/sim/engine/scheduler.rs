// SPDX-License-Identifier: Apache-2.0
//! Owns who computes how many tokens: continuous batching, growth, preemption.

use super::{ConversationId, Engine, WorkerSide};
use crate::error::Result;
use crate::ids::PageIndex;
use crate::sim::rng::{SplitMix64, derive};
use crate::sim::worker::{BatchItem, MAX_COMPLETE_STEPS, MAX_ENQUEUE_STEPS};
use crate::step::{FreeReason, PagesAllocated, Scheduled};

use super::request::Work;

/// Steps in a row that a request waits for blocks that are about to become free. A hot region
/// that was asked for is granted one step later, and copies end this many steps after their plan.
const MAX_WAIT_STEPS: u32 = 2 * (1 + MAX_ENQUEUE_STEPS + MAX_COMPLETE_STEPS);

/// What came of a request's wish for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Growth {
    Done,
    /// Blocks are about to become free: sit this step out.
    Wait,
    /// Only a preemption can help.
    Short,
}

impl<W: WorkerSide> Engine<W> {
    /// Requests that were asked to take a hot region get it, if the pool has one.
    pub(super) fn grant_hot_regions(&mut self) -> Result<()> {
        let wanted = core::mem::take(&mut self.plan.hot_regions_wanted);
        let size = self.coordinator.config().hot_region_blocks() as usize;
        for &request in &wanted {
            let Some(id) = self.owner(request) else { continue };
            let Some(run) = self.request(id).and_then(|r| r.running.as_ref()) else { continue };
            let request = run.id;
            if self.coordinator.has_hot_region(request)? {
                continue;
            }
            let mut blocks = Vec::new();
            if !self.allocate_gpu(size, &mut blocks)? {
                self.report.refusals.hot_region += 1;
                break;
            }
            self.report.events += 1;
            self.coordinator.on_hot_region_allocated(request, &blocks)?;
        }
        self.plan.hot_regions_wanted = wanted;
        Ok(())
    }

    /// Running requests first, in the order of admission. One that cannot grow waits, or the
    /// request admitted last is preempted.
    pub(super) fn schedule_running(&mut self) -> Result<()> {
        let mut at = 0;
        while self.budget > 0 {
            let Some(&id) = self.running.get(at) else { break };
            let Some(work) = self.next_work(id) else { break };
            let num_old_pages = self.num_pages(id);
            match self.grow(id, work)? {
                Growth::Done => {
                    self.schedule(id, work, num_old_pages);
                    at += 1;
                }
                Growth::Wait => {
                    self.report.refusals.growth_waits += 1;
                    at += 1;
                }
                Growth::Short => {
                    self.preempted = true;
                    // OK because the request itself is in the list, so there is a last one.
                    let Some(&last) = self.running.last() else { break };
                    self.preempt(last)?;
                }
            }
        }
        Ok(())
    }

    /// Takes a running request's blocks away; it is admitted again before any other.
    ///
    /// # Errors
    /// `Protocol` for a bug in the engine.
    pub fn preempt(&mut self, id: ConversationId) -> Result<()> {
        if self.release(id, FreeReason::Preempted)? {
            if let Some(request) = self.request_mut(id) {
                request.num_computed = 0;
                request.waited = 0;
            }
            self.report.preemptions += 1;
            self.waiting.push_front(id);
        }
        Ok(())
    }

    /// Adds an admitted request with the blocks for `work` to the batch; `num_old_pages` is what
    /// its block table held before the step.
    pub(super) fn schedule(&mut self, id: ConversationId, work: Work, num_old_pages: u32) {
        let num_accepted = self.num_accepted(id, work);
        // OK because the budget only falls by what is scheduled.
        let first_token = (self.config.step_tokens - self.budget) as usize;
        let Some(state) = self.state_mut(id) else { return };
        let content = state.content;
        let Some(request) = state.request.as_mut() else { return };
        let Some(run) = request.running.as_ref() else { return };
        request.attempts += u32::from(work.drafts > 0);
        request.waited = 0;
        let (num_computed, attempt) = (request.num_computed, request.attempts);
        let (request, state_row, num_pages) = (run.id, run.state_row, run.num_pages);
        self.batch.items.push(BatchItem {
            request,
            state_row,
            content,
            num_computed,
            num_scheduled: work.tokens,
            num_drafts: work.drafts,
            num_accepted,
            attempt,
            num_pages,
            num_old_pages,
            first_token,
        });
        self.scheduled.push(Scheduled {
            request,
            num_computed_tokens: num_computed,
            num_scheduled_tokens: work.tokens,
            num_draft_tokens: work.drafts,
        });
        self.budget -= work.tokens;
    }

    /// Drafts of a step that will turn out right: the same for the same stream and position,
    /// whatever the policy.
    fn num_accepted(&self, id: ConversationId, work: Work) -> u32 {
        let Some(state) = self.conversations.get(id.0).and_then(Option::as_ref) else { return 0 };
        let position = state.request.as_ref().map_or(0, |request| request.num_computed);
        let key = derive(derive(self.config.seed, state.content.id()), u64::from(position));
        let mut rng = SplitMix64::new(key);
        let right =
            (0..work.drafts).take_while(|_| rng.below(1_000_000) < self.config.acceptance_ppm);
        // OK because the count is at most the number of drafts.
        right.count() as u32
    }

    fn num_pages(&self, id: ConversationId) -> u32 {
        let running = self.request(id).and_then(|request| request.running.as_ref());
        running.map_or(0, |run| run.num_pages)
    }

    fn next_work(&self, id: ConversationId) -> Option<Work> {
        let request = self.request(id)?;
        Some(request.work(self.config.chunk_tokens, self.config.num_draft_tokens, self.budget))
    }

    /// Gets the pages for `work`, all or none.
    fn grow(&mut self, id: ConversationId, work: Work) -> Result<Growth> {
        let Some(request) = self.request(id) else { return Ok(Growth::Short) };
        let Some(run) = request.running.as_ref() else { return Ok(Growth::Short) };
        let needed = (request.num_computed + work.tokens).div_ceil(self.config.block_size);
        let new_pages = needed.saturating_sub(run.num_pages);
        if new_pages == 0 || self.append_pages(id, new_pages)? {
            return Ok(Growth::Done);
        }
        let waits = self.request(id).is_some_and(|request| request.waited < MAX_WAIT_STEPS);
        if waits && self.coordinator.has_pending_reclamation(self.levels()) {
            if let Some(request) = self.request_mut(id) {
                request.waited += 1;
            }
            return Ok(Growth::Wait);
        }
        Ok(Growth::Short)
    }

    /// Appends pages to a running request, or changes nothing and returns false.
    fn append_pages(&mut self, id: ConversationId, new_pages: u32) -> Result<bool> {
        let (groups, other, host) = self.blocks_per_page();
        let pages = new_pages as usize;
        if pages * host > self.host.num_available() as usize {
            return Ok(false);
        }
        let mut blocks = Vec::new();
        if !self.allocate_gpu(pages * (groups + other), &mut blocks)? {
            return Ok(false);
        }
        let mut host_blocks = Vec::new();
        if !self.allocate_host(pages * host, &mut host_blocks)? {
            self.gpu.free(&blocks)?;
            return Ok(false);
        }
        let (resident, others) = blocks.split_at(pages * groups);
        self.add_pages(id, new_pages, &host_blocks, resident, others)?;
        Ok(true)
    }

    /// Reports new pages to the Coordinator and enters them in the request's tables.
    pub(super) fn add_pages(
        &mut self,
        id: ConversationId,
        new_pages: u32,
        host_blocks: &[i32],
        resident_blocks: &[i32],
        other_blocks: &[i32],
    ) -> Result<()> {
        let keeps_resident = !self.config.policy.has_host_pool();
        let Some(state) = self.conversations.get_mut(id.0).and_then(Option::as_mut) else {
            return Ok(());
        };
        let Some(run) = state.request.as_mut().and_then(|r| r.running.as_mut()) else {
            return Ok(());
        };
        let first_page = PageIndex(run.num_pages);
        let pages = PagesAllocated { request: run.id, first_page, host_blocks, resident_blocks };
        self.report.events += u64::from(new_pages);
        self.coordinator.on_blocks_allocated(&[pages])?;
        for (page, &block) in (run.num_pages..).zip(host_blocks) {
            self.batch.new_host_pages.push((run.state_row, page, block));
        }
        run.num_pages += new_pages;
        run.host_blocks.extend_from_slice(host_blocks);
        run.other_blocks.extend_from_slice(other_blocks);
        if keeps_resident {
            run.resident_blocks.extend_from_slice(resident_blocks);
        }
        Ok(())
    }

    /// GPU blocks of KV cache groups and of the indexer, and host blocks, of one page.
    pub(super) fn blocks_per_page(&self) -> (usize, usize, usize) {
        let groups = self.config.packing.kv_groups.len();
        let host = usize::from(self.config.policy.has_host_pool());
        (groups, self.config.other_blocks_per_page as usize, host)
    }
}
