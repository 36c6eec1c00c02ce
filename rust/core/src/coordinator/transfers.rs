// SPDX-License-Identifier: Apache-2.0
//! Owns acknowledgements: what a page becomes when its copy is enqueued, completed or failed.

use super::Coordinator;
use crate::config::{HostCopy, ReleasePoint};
use crate::error::Result;
use crate::ids::{HostBlockId, PageIndex, RequestId, TransferId};
use crate::lease::Lease;
use crate::page::{PageEvent, PageState};
use crate::request::Phase;
use crate::residency::ResidenceId;
use crate::spill::{AckKind, Transfer};
use crate::step::{StepPlan, TransferAck, TransferKind};

impl Coordinator {
    /// Ranks have put transfers in stream order.
    ///
    /// # Errors
    /// Protocol faults for unknown transfers and too many acknowledgements; nothing has changed
    /// then.
    pub fn on_transfers_enqueued(&mut self, acks: &[TransferAck]) -> Result<()> {
        self.check_running()?;
        self.transfers.acknowledge(AckKind::Enqueued, acks)?;
        for ack in acks {
            self.after_enqueue(ack.transfer);
        }
        Ok(())
    }

    /// Ranks have finished transfers.
    ///
    /// # Errors
    /// Protocol faults for unknown transfers, too many acknowledgements, and completions that
    /// come before the rank's enqueue; nothing has changed then.
    pub fn on_transfers_completed(&mut self, acks: &[TransferAck]) -> Result<()> {
        self.finish_transfers(AckKind::Completed, acks)
    }

    /// Ranks have finished transfers whose bytes cannot be trusted. A failure counts as that
    /// rank's completion; the transfer as a whole has failed when all ranks are done with it.
    ///
    /// # Errors
    /// As `on_transfers_completed`.
    pub fn on_transfers_failed(&mut self, acks: &[TransferAck]) -> Result<()> {
        self.finish_transfers(AckKind::Failed, acks)
    }

    /// All that the workers report after a step, in one batch: enqueued, then completed, then
    /// failed.
    ///
    /// # Errors
    /// As the three events; nothing of any of them has changed then.
    pub fn on_worker_output(
        &mut self,
        enqueued: &[TransferAck],
        completed: &[TransferAck],
        failed: &[TransferAck],
    ) -> Result<()> {
        self.check_running()?;
        self.transfers.acknowledge(AckKind::Enqueued, enqueued)?;
        if let Err(error) = self.transfers.acknowledge(AckKind::Completed, completed) {
            self.transfers.take_back_all(AckKind::Enqueued, enqueued);
            return Err(error);
        }
        if let Err(error) = self.transfers.acknowledge(AckKind::Failed, failed) {
            self.transfers.take_back_all(AckKind::Completed, completed);
            self.transfers.take_back_all(AckKind::Enqueued, enqueued);
            return Err(error);
        }
        for ack in enqueued {
            self.after_enqueue(ack.transfer);
        }
        self.end_transfers(completed);
        self.end_transfers(failed);
        Ok(())
    }

    fn finish_transfers(&mut self, kind: AckKind, acks: &[TransferAck]) -> Result<()> {
        self.check_running()?;
        self.transfers.acknowledge(kind, acks)?;
        self.end_transfers(acks);
        Ok(())
    }

    /// Ends those of the transfers that every rank is done with. The page of another one that has
    /// failed on some rank is kept from being given up until it ends.
    fn end_transfers(&mut self, acks: &[TransferAck]) {
        for ack in acks {
            if let Some(transfer) = self.transfers.take_completed(ack.transfer) {
                self.after_completion(transfer);
            } else if let Some(transfer) = self.transfers.get(ack.transfer) {
                let (request, page, failed) = (transfer.request, transfer.page, transfer.failed);
                if failed && transfer.kind.is_to_host() {
                    self.doubt_spill(request, page);
                }
            }
        }
    }

    /// The page's copy in flight is known to be bad: if its blocks are still held they stay so.
    pub(super) fn doubt_spill(&mut self, request: RequestId, page: PageIndex) {
        if self.live(request).is_err() {
            return;
        }
        if let Some(state) = self.slot(request) {
            // Refused, and nothing to do, in every other state than Enqueued.
            let _ = state.apply(request, page, PageEvent::SpillDoubted);
        }
    }

    fn after_enqueue(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.get(id) else { return };
        let is_spill = transfer.kind.is_to_host();
        // A copy that is known to be bad leaves the GPU copy the only one. A restore keeps its
        // blocks until it has completed, when it is known whether others may read them.
        if transfer.enqueued < transfer.required || transfer.failed || !is_spill {
            return;
        }
        let (request, page, residence) = (transfer.request, transfer.page, transfer.residence);
        if self.live(request).is_ok() {
            if let Some(state) = self.slot(request) {
                if state.state(page) == Some(PageState::Spilling) {
                    // OK because the table allows this event in that state.
                    let _ = state.apply(request, page, PageEvent::SpillEnqueued);
                }
            }
        }
        if self.config.release_point == ReleasePoint::Enqueued {
            if let Some(lease) = self.transfers.take_gpu_lease(id) {
                self.end_gpu_lease(lease, residence, request);
            }
            self.try_release(request, page);
        }
    }

    fn after_completion(&mut self, mut transfer: Transfer) {
        let Transfer { request, page, residence, .. } = transfer;
        // A residence must be findable before its last hold ends, and a page can only be given up
        // after its copy's hold has ended.
        let is_spill = transfer.kind.is_to_host();
        if !is_spill {
            self.after_read(&transfer);
        }
        if let Some(lease) = transfer.gpu_lease.take() {
            self.end_gpu_lease(lease, residence, request);
        }
        if is_spill {
            self.after_spill(&transfer);
        }
        self.queue_publication(request);
        if let Some(state) = self.slot(request) {
            state.num_transfers -= 1;
        }
        if let Some(lease) = transfer.host_lease.take() {
            self.end_host_lease(lease, request, page);
        }
        self.end_drain(request);
    }

    /// A restore or a host copy has ended: its request reads rows that are good from now on, or
    /// has read bad ones.
    fn after_read(&mut self, transfer: &Transfer) {
        let Transfer { kind, request, page, residence, failed, .. } = *transfer;
        let Some(state) = self.slot(request) else { return };
        state.unconfirmed_reads = state.unconfirmed_reads.saturating_sub(1);
        if failed {
            self.report_lost(request, page);
        } else if kind == TransferKind::Restore {
            // OK because the transfer's lease has kept the residence alive.
            self.residences.link(residence);
        } else if state.state(page) == Some(PageState::HostOnly) {
            state.set_durable(page, true);
        }
    }

    fn after_spill(&mut self, transfer: &Transfer) {
        let Transfer { request, page, failed, .. } = *transfer;
        if failed {
            self.stats.spills_failed += 1;
        } else {
            self.stats.spills_completed += 1;
        }
        let live = self.live(request).is_ok();
        let Some(state) = self.slot(request) else { return };
        if !failed {
            if live {
                let _ = state.apply(request, page, PageEvent::SpillCompleted);
            }
            state.set_durable(page, true);
            self.try_release(request, page);
        } else if live {
            state.set_needs_copy(page);
            if state.apply(request, page, PageEvent::SpillFailed).is_ok() {
                self.pending.replan.push((request, page));
            } else {
                // The blocks were given up when the copy was in stream order, and it went wrong.
                self.report_lost(request, page);
            }
        }
    }

    fn report_lost(&mut self, request: RequestId, page: PageIndex) {
        if self.live(request).is_err() {
            return;
        }
        // OK because ids are below RequestId::LIMIT, and pages are bounded by i32 block counts.
        self.pending.lost_pages.push((request.0 as i32, page.0 as i32));
        if let Some(state) = self.slot(request) {
            state.tainted = true;
        }
    }

    /// Gives up the page's GPU blocks if it may: whole hot region held, outside the tail, host
    /// copy far enough.
    pub(super) fn try_release(&mut self, request: RequestId, page: PageIndex) {
        if !self.config.transition || self.live(request).is_err() {
            return;
        }
        let at_enqueued = self.config.release_point == ReleasePoint::Enqueued;
        let Some(state) = self.slot(request) else { return };
        // A spell of full residency ends under pressure only; see `relieve_pressure`.
        if !state.hot.is_held() || page.0 >= state.tail_start() || state.full_since != 0 {
            return;
        }
        let releasable = match state.state(page) {
            Some(PageState::Clean) => true,
            Some(PageState::Enqueued) => at_enqueued,
            _ => false,
        };
        if !releasable || state.apply(request, page, PageEvent::Unpinned).is_err() {
            return;
        }
        let id = state.residences[page.index()];
        self.stats.pages_released += 1;
        self.pending.unpin_gpu.extend_from_slice(self.residences.blocks(id));
        self.drop_holder_later(id);
    }

    /// Counts one hold less, which the next plan ends; returns the holds that are left.
    fn drop_holder_later(&mut self, id: ResidenceId) -> u32 {
        if let Some(residence) = self.residences.get_mut(id) {
            if !residence.releasing {
                residence.releasing = true;
                self.pending.releasing.push(id);
            }
        }
        self.drop_holder(id)
    }

    /// Counts one hold less; returns the holds that are left.
    pub(super) fn drop_holder(&mut self, id: ResidenceId) -> u32 {
        let groups = self.config.num_kv_groups;
        let Some(residence) = self.residences.get_mut(id) else { return 0 };
        debug_assert!(residence.holders > 0);
        residence.holders = residence.holders.saturating_sub(1);
        if residence.holders == 0 && residence.releasing {
            self.released_gpu += i64::from(groups);
        }
        residence.holders
    }

    fn end_gpu_lease(&mut self, lease: Lease, id: ResidenceId, request: RequestId) {
        if self.drop_holder_later(id) > 0 {
            lease.release(&mut self.pending.free_gpu);
            return;
        }
        // Nobody holds the blocks any more. They stay readable, and watched, while some request
        // reads them or a later one may find them by their host block.
        let wanted = self.requests.get(request.index()).is_some_and(|slot| {
            slot.as_ref().is_some_and(|s| s.phase != Phase::Draining { publish: false })
        });
        let read = self.residences.get(id).is_some_and(|r| !r.readers.is_empty());
        if read || wanted {
            lease.release(&mut self.pending.unpin_gpu);
        } else {
            self.residences.remove(id);
            lease.release(&mut self.pending.free_gpu);
        }
    }

    fn end_host_lease(&mut self, lease: Lease, request: RequestId, page: PageIndex) {
        if let Some(state) = self.slot(request) {
            let publishes = state.phase != Phase::Draining { publish: false };
            if publishes && state.is_durable(page) && page.0 >= state.durable_prefix {
                // Freed now, the block would be lost if the request ended before the gap in front
                // of the page has closed.
                state.beyond_gap.push((page, lease));
                return;
            }
        }
        self.free_host_lease(lease);
    }

    pub(super) fn free_host_lease(&mut self, lease: Lease) {
        for &block in lease.blocks() {
            self.remove_host_user(block);
        }
        lease.release(&mut self.pending.free_host);
    }

    /// Frees the host leases of pages in front of which the gap has closed, and retires a freed
    /// request after its last transfer.
    fn end_drain(&mut self, request: RequestId) {
        let Some(state) = self.slot(request) else { return };
        let done = state.phase != Phase::Live && state.num_transfers == 0;
        let prefix = state.durable_prefix;
        let ended = state.take_beyond_gap(if done { u32::MAX } else { prefix });
        for lease in ended {
            self.free_host_lease(lease);
        }
        if done {
            self.pending.retired.push(request);
        }
    }

    /// Plans the copy of a sealed page to the host.
    pub(super) fn plan_spill(
        &mut self,
        request: RequestId,
        page: PageIndex,
        after_forward: bool,
        plan: &mut StepPlan,
    ) {
        let mirrored = self.config.host_copy == HostCopy::Mirrored;
        let Some(state) = self.slot(request) else { return };
        if state.state(page) != Some(PageState::Dirty) {
            return;
        }
        let kind = if mirrored && !state.needs_copy.contains(page.index()) {
            TransferKind::Mirrored
        } else {
            TransferKind::Spill
        };
        let _ = state.apply(request, page, PageEvent::SpillPlanned);
        self.stats.spills_planned += 1;
        let required = self.config.num_host_writers;
        let rows = self.config.block_size;
        self.plan_transfer(kind, request, page, required, rows, after_forward, None, plan);
    }

    /// Plans the copy of a page's rows from the host into the blocks that it holds.
    pub(super) fn plan_restore(
        &mut self,
        request: RequestId,
        page: PageIndex,
        rows: u32,
        plan: &mut StepPlan,
    ) {
        self.stats.restores_planned += 1;
        let required = self.config.num_ranks;
        self.plan_transfer(TransferKind::Restore, request, page, required, rows, false, None, plan);
    }

    /// Plans the copy of a shared host page for a request that will write it. The engine's hold
    /// on the source passes to the transfer.
    pub(super) fn plan_host_copy(
        &mut self,
        request: RequestId,
        page: PageIndex,
        source: HostBlockId,
        plan: &mut StepPlan,
    ) {
        let required = self.config.num_host_writers;
        let rows = self.config.block_size;
        let kind = TransferKind::HostCopy;
        self.plan_transfer(kind, request, page, required, rows, false, Some(source), plan);
    }

    #[allow(clippy::too_many_arguments)] // One caller per kind, each named above.
    fn plan_transfer(
        &mut self,
        kind: TransferKind,
        request: RequestId,
        page: PageIndex,
        required: u32,
        rows: u32,
        after_forward: bool,
        source: Option<HostBlockId>,
        plan: &mut StepPlan,
    ) {
        let Some(state) = self.slot(request) else { return };
        state.num_transfers += 1;
        let host = state.host_blocks[page.index()];
        let residence = match source {
            Some(_) => ResidenceId::NONE,
            None => state.residences[page.index()],
        };
        let groups = self.config.num_kv_groups as usize;
        let blocks = self.residences.blocks(residence);
        let gpu_lease = match source {
            Some(_) => {
                plan.transfers.resident_blocks.extend(core::iter::repeat_n(0, groups));
                None
            }
            None => {
                plan.transfers.resident_blocks.extend_from_slice(blocks);
                Some(Lease::touch(blocks, &mut plan.touch_gpu))
            }
        };
        if let Some(entry) = self.residences.get_mut(residence) {
            entry.holders += 1;
        }
        plan.touch_host.push(host);
        self.add_host_user(host);
        let host_lease = match source {
            // OK because the source's user count passes from the request to the transfer.
            Some(source) => Lease::adopt(&[host, source.0]),
            None => Lease::adopt(&[host]),
        };
        let id = self.transfers.insert(Transfer {
            kind,
            request,
            page,
            residence,
            host_block: HostBlockId(host),
            required,
            enqueued: 0,
            completed: 0,
            failed: false,
            gpu_lease,
            host_lease: Some(host_lease),
        });
        let list = &mut plan.transfers;
        list.transfer_id.push(id.0);
        list.kind.push(kind as u8);
        list.after_forward.push(u8::from(after_forward));
        list.host_block.push(host);
        list.source_host_block.push(source.map_or(0, |block| block.0));
        list.num_rows.push(rows as i32);
    }
}
