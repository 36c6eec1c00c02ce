// SPDX-License-Identifier: Apache-2.0
//! Owns the end of a request: what is unpinned, what is freed, what is still to be published.

use super::Coordinator;
use crate::error::{ProtocolFault, Result};
use crate::ids::{PageIndex, RequestId};
use crate::page::PageState;
use crate::request::Phase;
use crate::residency::by_runs;
use crate::step::{FreePlan, FreeReason};

impl Coordinator {
    /// A request leaves. `plan` says what to do with its GPU blocks; its host blocks are the
    /// engine's to free after `plan.publish_pages` pages were published. Blocks that belong to
    /// transfers in flight are leased beyond this call.
    ///
    /// Blocks are listed tail first, in the runs of `by_runs`, so that the start of a prefix stays
    /// readable longest.
    ///
    /// # Errors
    /// `UnknownRequest`; `WrongPageState` while an import writes the request's host blocks: end
    /// the import first. Nothing has changed then.
    pub fn on_freed(
        &mut self,
        request: RequestId,
        reason: FreeReason,
        plan: &mut FreePlan,
    ) -> Result<()> {
        self.check_running()?;
        let state = self.live(request)?;
        if state.import_tokens.is_some() {
            return Err(ProtocolFault::WrongPageState { request, page: PageIndex(0) }.into());
        }
        *plan = FreePlan::default();
        // Rows computed from unconfirmed reads are not waited for: the engine frees the host blocks
        // in front of them now.
        let publish = reason != FreeReason::Preempted && state.may_publish();
        if publish {
            plan.publish_pages = state.durable_prefix;
        }
        let mut fresh = 0;
        if let Some(state) = self.slot(request) {
            state.phase = Phase::Draining { publish };
            if publish {
                fresh = plan.publish_pages.saturating_sub(state.published);
                state.published = state.published.max(plan.publish_pages);
            }
        }
        self.stats.pages_published += u64::from(fresh);
        self.leave_pages(request, publish, plan);
        self.drop_queued(request);
        self.end_hot_region(request, &mut plan.free_gpu);
        let Some(state) = self.slot(request) else { return Ok(()) };
        let hosts = core::mem::take(&mut state.host_blocks);
        plan.retired = state.num_transfers == 0;
        // No gap closes any more without copies in flight, or for a request that publishes nothing.
        let closing = publish && !plan.retired;
        let ended = if closing { Vec::new() } else { state.take_beyond_gap(u32::MAX) };
        for block in hosts {
            self.remove_host_user(block);
        }
        for lease in ended {
            self.free_host_lease(lease);
        }
        self.lru.remove(request);
        self.num_live -= 1;
        match reason {
            FreeReason::Preempted => self.stats.preempted += 1,
            FreeReason::Finished | FreeReason::Aborted => self.stats.finished += 1,
        }
        if plan.retired {
            self.requests[request.index()] = None;
        }
        Ok(())
    }

    /// Stops for good: releases every lease that is left into `plan`. Later events are refused.
    /// Calling it again changes nothing.
    pub fn shutdown(&mut self, plan: &mut FreePlan, free_host: &mut Vec<i32>) {
        *plan = FreePlan::default();
        if self.shut_down {
            return;
        }
        self.shut_down = true;
        for transfer in self.transfers.drain() {
            if let Some(lease) = transfer.gpu_lease {
                lease.release(&mut plan.free_gpu);
            }
            if let Some(lease) = transfer.host_lease {
                lease.release(free_host);
            }
        }
        for mut state in self.requests.drain(..).flatten() {
            if let Some(lease) = state.hot.take() {
                lease.release(&mut plan.free_gpu);
            }
            for (_, lease) in core::mem::take(&mut state.beyond_gap) {
                lease.release(free_host);
            }
            if state.phase != Phase::Live {
                continue;
            }
            for (page_state, &id) in state.states().iter().zip(&state.residences) {
                // The last page of an import has blocks to be restored into.
                if page_state.holds_blocks() || *page_state == PageState::Importing {
                    plan.free_gpu.extend_from_slice(self.residences.blocks(id));
                }
            }
            free_host.extend(state.host_blocks.iter().copied().filter(|&block| block != 0));
        }
        let pending = core::mem::take(&mut self.pending);
        plan.free_gpu.extend(pending.free_gpu);
        plan.unpin_gpu.extend(pending.unpin_gpu);
        free_host.extend(pending.free_host);
        free_host.extend(pending.host_copies.iter().map(|(_, _, source)| source.0));
        self.num_live = 0;
        self.num_hot_wanted = 0;
    }

    fn leave_pages(&mut self, request: RequestId, publish: bool, plan: &mut FreePlan) {
        let Some(state) = self.slot(request) else { return };
        let published = state.published;
        let residences = core::mem::take(&mut state.residences);
        let states = state.states().to_vec();
        for (page, (&page_state, &id)) in states.iter().zip(&residences).enumerate().rev() {
            if id.is_none() {
                continue;
            }
            self.residences.remove_reader(id, request);
            // Others can find the copy by its host block if that is published or will be.
            // A transfer that may still land holds the blocks of a page that is spilling.
            let known = (page as u32) < published || (publish && page_state.is_host_readable());
            let findable = known && self.residences.is_linked(id);
            if page_state.holds_blocks() {
                let left = self.drop_holder(id);
                let read = self.residences.get(id).is_some_and(|r| !r.readers.is_empty());
                if left == 0 && (findable || read) {
                    plan.unpin_gpu.extend_from_slice(self.residences.blocks(id));
                } else {
                    plan.free_gpu.extend_from_slice(self.residences.blocks(id));
                }
                if left == 0 && !findable && !read {
                    self.residences.remove(id);
                }
            } else {
                let unused =
                    self.residences.get(id).is_some_and(|r| r.holders == 0 && r.readers.is_empty());
                if unused && !findable {
                    self.residences.remove(id);
                }
            }
        }
        let groups = self.config.num_kv_groups as usize;
        by_runs(&mut plan.unpin_gpu, groups);
        by_runs(&mut plan.free_gpu, groups);
    }

    /// Takes the request off the lists of work for the next plan. Most requests leave with nothing
    /// queued, so a list is looked through only if the request can be on it.
    fn drop_queued(&mut self, request: RequestId) {
        let Some(state) = self.slot(request) else { return };
        // Its entry stays in the list and is skipped, because this mark is gone.
        state.publish_queued = false;
        let reads = state.unconfirmed_reads > 0;
        let pending = &mut self.pending;
        // Failed copies are rare, so these lists are short. Adoptions and releases look at the
        // state that they find, so a stale entry is harmless.
        pending.replan.retain(|(r, _)| *r != request);
        // OK because request ids are below RequestId::LIMIT.
        pending.lost_pages.retain(|(r, _)| *r != request.0 as i32);
        if !reads {
            return;
        }
        pending.restores.retain(|(r, ..)| *r != request);
        let copies = core::mem::take(&mut pending.host_copies);
        for (owner, page, source) in copies {
            if owner == request {
                // The copy is not made; the hold on its source ends here.
                self.remove_host_user(source.0);
                self.pending.free_host.push(source.0);
            } else {
                self.pending.host_copies.push((owner, page, source));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Coordinator;
    use crate::config::{CoordinatorConfig, HostCopy, ReleasePoint};
    use crate::ids::{PageIndex, RequestId, TransferId};
    use crate::step::{
        Admitted, FreePlan, FreeReason, PagesAllocated, PoolLevels, Prefix, Scheduled, StepEvents,
        StepPlan, TransferAck,
    };

    const LEVELS: PoolLevels = PoolLevels { gpu_free: 40, host_free: 40 };

    fn spilled(core: &mut Coordinator, transfer: i64) {
        let ack = [TransferAck { transfer: TransferId(transfer), count: 1 }];
        core.on_worker_output(&ack, &ack, &[]).unwrap();
    }

    /// A request of three full pages, whose spills are transfers 1 to 3.
    fn three_pages() -> (Coordinator, StepPlan) {
        let mut core = Coordinator::new(CoordinatorConfig {
            block_size: 4,
            num_kv_groups: 1,
            gpu_blocks: 64,
            host_blocks: 64,
            other_blocks_per_page: 0,
            hot_rows: 8,
            top_k: 4,
            verification_rows: 1,
            num_ranks: 1,
            num_host_writers: 1,
            host_copy: HostCopy::Spilled,
            release_point: ReleasePoint::Completed,
            transition: true,
            transition_watermark: None,
            hot_return_steps: 4,
            admission_window_pages: 4,
            num_reprefillable_tokens: 0,
            max_model_len: 64,
        })
        .unwrap();
        let request = RequestId(0);
        let (host_blocks, resident_blocks) = (&[][..], &[][..]);
        let admitted = Admitted { request, prefix: Prefix::Host, host_blocks, resident_blocks };
        let pages = PagesAllocated {
            request,
            first_page: PageIndex(0),
            host_blocks: &[1, 2, 3],
            resident_blocks: &[1, 2, 3],
        };
        let events =
            StepEvents { admitted: &[admitted], allocated: &[pages], ..StepEvents::default() };
        let scheduled = Scheduled {
            request,
            num_computed_tokens: 0,
            num_scheduled_tokens: 12,
            num_draft_tokens: 0,
        };
        let mut plan = StepPlan::default();
        core.step(&events, &[scheduled], LEVELS, &mut plan).unwrap();
        assert_eq!(plan.transfers.transfer_id, [1, 2, 3]);
        (core, plan)
    }

    #[test]
    fn a_page_that_landed_before_the_end_is_published_when_the_gap_before_it_closes_later() {
        let (mut core, mut plan) = three_pages();
        spilled(&mut core, 2);
        let mut freed = FreePlan::default();
        core.on_freed(RequestId(0), FreeReason::Finished, &mut freed).unwrap();
        assert_eq!((freed.publish_pages, freed.retired), (0, false));
        core.build_step_plan(&[], LEVELS, &mut plan).unwrap();
        assert!(plan.free_host.is_empty(), "{:?}", plan.free_host);
        spilled(&mut core, 1);
        spilled(&mut core, 3);
        core.build_step_plan(&[], LEVELS, &mut plan).unwrap();
        assert_eq!(plan.publish.num_pages, [3]);
        plan.free_host.sort_unstable();
        assert_eq!((&plan.free_host[..], &plan.retired[..]), (&[1, 2, 3][..], &[0][..]));
    }

    #[test]
    fn pages_that_complete_out_of_order_after_the_end_are_published_together() {
        let (mut core, mut plan) = three_pages();
        let mut freed = FreePlan::default();
        core.on_freed(RequestId(0), FreeReason::Finished, &mut freed).unwrap();
        for transfer in [3, 2, 1] {
            spilled(&mut core, transfer);
        }
        core.build_step_plan(&[], LEVELS, &mut plan).unwrap();
        assert_eq!(plan.publish.num_pages, [3]);
    }
}
