// SPDX-License-Identifier: Apache-2.0
//! Owns what becomes of blocks and requests between steps: plans carried out on the pools,
//! publications, reuse notices, the end of requests and of turns.

use super::{ConversationId, Engine, ServingPolicy, WorkerSide};
use crate::error::Result;
use crate::ids::{PageIndex, RequestId};
use crate::sim::worker::Acks;
use crate::step::{FreeReason, StepPlan, TransferKind};

/// What is kept of a freed request until its last transfer has ended.
#[derive(Debug)]
pub(super) struct Draining {
    page_keys: Vec<u64>,
    host_blocks: Vec<i32>,
    /// Leading pages published so far. The request holds their blocks no more, so that they may
    /// have other contents by now.
    num_published: u32,
}

impl<W: WorkerSide> Engine<W> {
    /// Cancels a conversation, whatever its state; later turns do not come.
    ///
    /// # Errors
    /// `Protocol` for a bug in the engine.
    pub fn abort(&mut self, id: ConversationId) -> Result<()> {
        let Some(state) = self.conversations.get(id.0).and_then(Option::as_ref) else {
            return Ok(());
        };
        self.report.aborted += u64::from(state.request.is_some());
        self.release(id, FreeReason::Aborted)?;
        self.waiting.retain(|waiting| *waiting != id);
        for arriving in self.arrivals.values_mut() {
            arriving.retain(|waiting| *waiting != id);
        }
        self.forget(id);
        Ok(())
    }

    /// Conversation of a live request.
    pub(super) fn owner(&self, request: i32) -> Option<ConversationId> {
        let at = usize::try_from(request).ok()?;
        self.owners.get(at).copied().flatten()
    }

    /// Takes GPU blocks from the pool and tells whoever could find their contents.
    pub(super) fn allocate_gpu(&mut self, count: usize, out: &mut Vec<i32>) -> Result<bool> {
        if !self.gpu.allocate(count, out) {
            return Ok(false);
        }
        self.batch.fresh_gpu_blocks.extend_from_slice(out);
        self.notices.clear();
        self.gpu.take_notices(&mut self.notices);
        if self.config.policy == ServingPolicy::Preempt {
            for &block in &self.notices {
                self.prefix.on_reused(block);
            }
        }
        self.report.events += self.notices.len() as u64;
        self.coordinator.on_blocks_reused(&self.notices)?;
        Ok(true)
    }

    /// Takes host blocks from the pool; pages that lose theirs leave the prefix index.
    pub(super) fn allocate_host(&mut self, count: usize, out: &mut Vec<i32>) -> Result<bool> {
        if !self.host.allocate(count, out) {
            return Ok(false);
        }
        self.notices.clear();
        self.host.take_notices(&mut self.notices);
        for &block in &self.notices {
            self.prefix.on_reused(block);
        }
        Ok(true)
    }

    /// Applies the plan to the pools, in the order of its fields.
    pub(super) fn carry_out_plan(&mut self) -> Result<()> {
        let plan = core::mem::take(&mut self.plan);
        let result = self.apply(&plan);
        self.plan = plan;
        result
    }

    fn apply(&mut self, plan: &StepPlan) -> Result<()> {
        self.gpu.touch(&plan.touch_gpu)?;
        self.host.touch(&plan.touch_host)?;
        for (&request, &num_pages) in plan.publish.request.iter().zip(&plan.publish.num_pages) {
            // OK because the Coordinator publishes no negative number of pages.
            self.publish(request, num_pages.unsigned_abs())?;
        }
        self.gpu.unpin(&plan.unpin_gpu)?;
        self.gpu.free(&plan.free_gpu)?;
        self.host.free(&plan.free_host)?;
        let is_copy = |&&kind: &&u8| {
            matches!(
                TransferKind::from_u8(kind),
                Some(TransferKind::Spill | TransferKind::Mirrored)
            )
        };
        let copies = plan.transfers.kind.iter().filter(is_copy).count() as u64;
        self.report.bytes_to_host += copies * self.indexer_page_bytes();
        for &request in &plan.retired {
            self.draining.remove(&request.unsigned_abs());
            self.ids.give_back(request.unsigned_abs());
        }
        Ok(())
    }

    /// Publishes the leading pages of a request, live or draining, that are not published.
    fn publish(&mut self, request: i32, num_pages: u32) -> Result<()> {
        let block_size = self.config.block_size;
        let Self { owners, conversations, draining, prefix, host, .. } = self;
        let owner = usize::try_from(request).ok().and_then(|at| owners.get(at).copied().flatten());
        let live = owner.and_then(|id| conversations.get_mut(id.0)?.as_mut());
        let (keys, blocks, first) = match (live, draining.get_mut(&request.unsigned_abs())) {
            (Some(state), _) => {
                let keys = state.page_keys(num_pages, block_size).to_vec();
                let running = state.request.as_ref().and_then(|r| r.running.as_ref());
                (keys, running.map_or(&[][..], |run| &run.host_blocks), 0)
            }
            (None, Some(draining)) => {
                let first = draining.num_published;
                draining.num_published = first.max(num_pages);
                (draining.page_keys.clone(), &draining.host_blocks[..], first as usize)
            }
            (None, None) => return Ok(()),
        };
        let pages = keys.iter().zip(blocks).take(num_pages as usize).skip(first);
        for (&key, &block) in pages {
            if prefix.insert(key, &[block]) {
                host.watch(block)?;
            }
        }
        Ok(())
    }

    /// Frees an admitted request and carries out what the Coordinator says about its blocks;
    /// false if it was not admitted.
    pub(super) fn release(&mut self, id: ConversationId, reason: FreeReason) -> Result<bool> {
        let Some(request) = self.request(id).and_then(|r| r.running.as_ref()).map(|run| run.id)
        else {
            return Ok(false);
        };
        self.report.events += 1;
        self.coordinator.on_freed(request, reason, &mut self.free_plan)?;
        let plan = core::mem::take(&mut self.free_plan);
        self.publish(request.0 as i32, plan.publish_pages)?;
        self.gpu.unpin(&plan.unpin_gpu)?;
        self.gpu.free(&plan.free_gpu)?;
        self.worker.end(request);
        self.owners[request.index()] = None;
        self.running.retain(|running| *running != id);
        let block_size = self.config.block_size;
        let Some(state) = self.state_mut(id) else { return Ok(true) };
        let Some(mut run) = state.request.as_mut().and_then(|r| r.running.take()) else {
            return Ok(true);
        };
        if !plan.retired {
            // OK because max_model_len bounds the pages, and it is a u32.
            let page_keys = state.page_keys(run.host_blocks.len() as u32, block_size).to_vec();
            let host_blocks = run.host_blocks.clone();
            let num_published = plan.publish_pages;
            self.draining.insert(request.0, Draining { page_keys, host_blocks, num_published });
        } else {
            self.ids.give_back(request.0);
        }
        // Tail first, so that the start of a prefix is found longest.
        run.host_blocks.reverse();
        self.host.free(&run.host_blocks)?;
        run.other_blocks.reverse();
        self.gpu.free(&run.other_blocks)?;
        self.state_rows.insert(run.state_row);
        self.free_plan = plan;
        Ok(true)
    }

    /// Where each token of the batch writes, in both pools.
    pub(super) fn map_slots(&mut self) -> Result<()> {
        let (bs, groups) = (self.config.block_size, self.config.packing.kv_groups.len());
        let tokens: usize = self.batch.items.iter().map(|item| item.num_scheduled as usize).sum();
        self.batch.slot_mapping.clear();
        self.batch.slot_mapping.resize(groups * tokens, -1);
        self.batch.host_row.clear();
        self.batch.host_row.resize(tokens, -1);
        let mut first_token = 0;
        let Self { batch, owners, conversations, coordinator, .. } = self;
        for item in &mut batch.items {
            item.first_token = first_token;
            first_token += item.num_scheduled as usize;
            let owner = owners.get(item.request.index()).copied().flatten();
            let state = owner.and_then(|id| conversations.get(id.0)?.as_ref());
            let running = state.and_then(|s| s.request.as_ref()).and_then(|r| r.running.as_ref());
            let hosts = running.map_or(&[][..], |run| &run.host_blocks);
            for at in 0..item.num_scheduled {
                let position = item.num_computed + at;
                let (page, offset) = (PageIndex(position / bs), i64::from(position % bs));
                let token = item.first_token + at as usize;
                let blocks = coordinator.resident_blocks(item.request, page)?;
                for (group, &block) in blocks.iter().enumerate() {
                    let row = i64::from(block) * i64::from(bs) + offset;
                    batch.slot_mapping[group * tokens + token] = row;
                }
                if let Some(&block) = hosts.get(page.index()) {
                    batch.host_row[token] = i64::from(block) * i64::from(bs) + offset;
                }
            }
        }
        Ok(())
    }

    /// Passes on what the ranks said at the end of the step.
    pub(super) fn report_acks(&mut self) -> Result<()> {
        self.worker.take_acks(&mut self.acks)?;
        for &(request, page) in &self.acks.mirror_lost {
            self.coordinator.on_mirror_lost(request, page)?;
        }
        let Acks { mirror_lost, enqueued, completed, failed } = &self.acks;
        let lists = [enqueued.len(), completed.len(), failed.len(), mirror_lost.len()];
        self.report.events += lists.iter().sum::<usize>() as u64;
        self.coordinator.on_worker_output(enqueued, completed, failed)
    }

    /// Counts the step's rows, ends turns, and takes requests back whose pages were lost.
    pub(super) fn finish_step(&mut self) -> Result<()> {
        for at in 0..self.batch.items.len() {
            let item = self.batch.items[at];
            let Some(id) = self.owner(item.request.0 as i32) else { continue };
            let kept = item.num_scheduled - item.num_drafts + item.num_accepted;
            let is_last = self.count_rows(id, item.num_drafts, kept);
            if !self.config.policy.has_host_pool() {
                self.publish_resident(id)?;
            }
            if is_last {
                self.end_turn(id)?;
            }
        }
        for at in 0..self.plan.lost_pages.len() {
            let (request, _) = self.plan.lost_pages[at];
            // A request that has just ended needs the page no more, and its id is not in use.
            if let Some(id) = self.owner(request) {
                self.report.lost_page_preemptions += 1;
                self.preempt(id)?;
            }
        }
        Ok(())
    }

    fn count_rows(&mut self, id: ConversationId, drafts: u32, kept: u32) -> bool {
        let step = self.step;
        let Some(state) = self.conversations.get_mut(id.0).and_then(Option::as_mut) else {
            return false;
        };
        let Some(request) = state.request.as_mut() else { return false };
        let was_prefill = request.num_computed < request.num_prompt
            || request.num_known - request.num_computed > 1;
        let before = request.num_computed;
        let is_last = request.advance(kept);
        let after = request.num_computed;
        let repeated = after.min(state.num_ever_computed).saturating_sub(before);
        if after > state.num_ever_computed {
            state.num_ever_computed = after;
            self.last_progress = step;
        }
        let report = &mut self.report;
        report.recomputed_tokens += u64::from(repeated);
        if was_prefill {
            report.prefilled_tokens += u64::from(kept);
        } else {
            report.decoded_tokens += u64::from(kept);
            report.rejected_rows += u64::from(drafts + 1 - kept);
        }
        is_last
    }

    /// Without a host pool, full pages can be found by others as soon as they are computed.
    fn publish_resident(&mut self, id: ConversationId) -> Result<()> {
        let block_size = self.config.block_size;
        let (groups, other, _) = self.blocks_per_page();
        let Self { conversations, prefix, gpu, .. } = self;
        let Some(state) = conversations.get_mut(id.0).and_then(Option::as_mut) else {
            return Ok(());
        };
        let Some(request) = state.request.as_ref() else { return Ok(()) };
        let full = request.num_computed / block_size;
        let Some(run) = request.running.as_ref() else { return Ok(()) };
        let mut page_blocks = Vec::new();
        for page in run.num_published as usize..full as usize {
            let resident = &run.resident_blocks[page * groups..(page + 1) * groups];
            let others = &run.other_blocks[page * other..(page + 1) * other];
            page_blocks.push([resident, others].concat());
        }
        let first = run.num_published as usize;
        let keys = &state.page_keys(full, block_size)[first..];
        for (&key, blocks) in keys.iter().zip(&page_blocks) {
            if prefix.insert(key, blocks) {
                for &block in blocks {
                    gpu.watch(block)?;
                }
            }
        }
        if let Some(run) = state.request.as_mut().and_then(|r| r.running.as_mut()) {
            run.num_published = full;
        }
        Ok(())
    }

    /// The last token was generated: the next turn comes after the user has thought.
    fn end_turn(&mut self, id: ConversationId) -> Result<()> {
        self.release(id, FreeReason::Finished)?;
        self.report.finished += 1;
        let arrival = self.step + 1 + u64::from(self.config.think_steps);
        let Some(state) = self.state_mut(id) else { return Ok(()) };
        state.request = None;
        if let Some(turn) = state.conversation.turns.get(state.turn) {
            state.num_said += turn.prompt_tokens + turn.output_tokens;
        }
        state.turn += 1;
        if state.turn < state.conversation.turns.len() {
            self.arrivals.entry(arrival).or_default().push(id);
        } else {
            self.forget(id);
        }
        Ok(())
    }

    fn forget(&mut self, id: ConversationId) {
        if self.conversations.get_mut(id.0).and_then(Option::take).is_some() {
            self.vacant.push(id);
        }
    }

    /// Id of an admitted conversation's request.
    #[must_use]
    pub fn request_id(&self, id: ConversationId) -> Option<RequestId> {
        Some(self.request(id)?.running.as_ref()?.id)
    }
}
