// SPDX-License-Identifier: Apache-2.0
//! Owns what the ranks of a world say about copies: one word at a time, a whole report, and words
//! that must be refused.

use super::world::{World, accepted};
use super::{Ack, Check};
use crate::config::ReleasePoint;
use crate::ids::TransferId;
use crate::step::{TransferAck, TransferKind};

impl World {
    pub(super) fn ack(&mut self, pick: u8, rank: u8, ack: Ack) -> Check<bool> {
        let ids: Vec<i64> = self.model.transfers.keys().copied().collect();
        let Some(at) = usize::from(pick).checked_rem(ids.len()) else { return Ok(false) };
        let transfer = &self.model.transfers[&ids[at]];
        let rank = usize::from(rank) % transfer.done.len();
        let possible = match ack {
            Ack::Enqueued => !transfer.enqueued[rank],
            Ack::Completed | Ack::Failed => transfer.enqueued[rank] && !transfer.done[rank],
        };
        if possible {
            self.acknowledge(ids[at], rank, ack)?;
        }
        Ok(possible)
    }

    /// A rank enqueues everything that it has not, completes everything that all have enqueued by
    /// then, and reports it in one call.
    pub(super) fn report(&mut self, rank: u8, fail: bool) -> Check<bool> {
        let at_enqueue = self.config().release_point == ReleasePoint::Enqueued;
        let config = self.config().clone();
        let (mut enqueued, mut completed, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        let transfers: Vec<_> = self.model.transfers.clone().into_iter().collect();
        for (id, transfer) in &transfers {
            let rank = usize::from(rank) % transfer.done.len();
            if transfer.done[rank] {
                continue;
            }
            let to_host = matches!(transfer.kind, TransferKind::Spill | TransferKind::Mirrored);
            let fails = transfer.doomed[rank] || (fail && failed.is_empty());
            // Where blocks are released at enqueued, the bytes were fixed there.
            if to_host && (fails || !at_enqueue || !transfer.enqueued[rank]) {
                self.copy(transfer, rank, fails);
            }
            let request = self.requests.get_mut(&transfer.request);
            if let Some(request) = request.filter(|_| to_host && at_enqueue && fails) {
                request.doomed.insert(transfer.page);
            }
            let ack = TransferAck { transfer: TransferId(*id), count: 1 };
            if !transfer.enqueued[rank] {
                enqueued.push(ack);
            }
            (if fails { &mut failed } else { &mut completed }).push(ack);
        }
        let bad = [TransferAck { transfer: TransferId(-1), count: 1 }];
        self.refuse(|c| c.on_worker_output(&enqueued, &completed, &bad))?;
        accepted(self.coordinator.on_worker_output(&enqueued, &completed, &failed))?;
        for ack in &failed {
            self.model.transfers.entry(ack.transfer.0).and_modify(|t| t.failed = true);
        }
        for ack in &enqueued {
            let rank = usize::from(rank) % self.model.transfers[&ack.transfer.0].done.len();
            self.model.enqueued(ack.transfer.0, rank, &config);
        }
        for (acks, fails) in [(&completed, false), (&failed, true)] {
            for ack in acks {
                let rank = usize::from(rank) % self.model.transfers[&ack.transfer.0].done.len();
                self.model.completed(ack.transfer.0, rank, fails);
            }
        }
        Ok(!transfers.is_empty())
    }

    /// Lets a rank speak. Copies to the host happen at the last moment that the protocol allows:
    /// when they are enqueued if that is where blocks are released, else when they complete.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn acknowledge(&mut self, id: i64, rank: usize, ack: Ack) -> Check {
        let Some(transfer) = self.model.transfers.get(&id).cloned() else { return Ok(()) };
        let to_host = matches!(transfer.kind, TransferKind::Spill | TransferKind::Mirrored);
        let at_enqueue = self.config().release_point == ReleasePoint::Enqueued;
        let acks = [TransferAck { transfer: TransferId(id), count: 1 }];
        let failed = transfer.doomed[rank] || ack == Ack::Failed;
        match ack {
            Ack::Enqueued => {
                if to_host && at_enqueue {
                    self.copy(&transfer, rank, false);
                }
                accepted(self.coordinator.on_transfers_enqueued(&acks))?;
                let config = self.config().clone();
                self.model.enqueued(id, rank, &config);
            }
            Ack::Completed | Ack::Failed => {
                if to_host && (!at_enqueue || failed) {
                    self.copy(&transfer, rank, failed);
                }
                let request = self.requests.get_mut(&transfer.request);
                if let Some(request) = request.filter(|_| failed && to_host && at_enqueue) {
                    request.doomed.insert(transfer.page);
                }
                let said = if failed {
                    self.coordinator.on_transfers_failed(&acks)
                } else {
                    self.coordinator.on_transfers_completed(&acks)
                };
                accepted(said)?;
                self.model.completed(id, rank, failed);
                if !self.model.transfers.contains_key(&id) {
                    self.last_ended = Some(id);
                }
            }
        }
        Ok(())
    }

    pub(super) fn bad_ack(&mut self, pick: u8, ack: Ack) -> Check<bool> {
        let ids: Vec<i64> = self.model.transfers.keys().copied().collect();
        let mut batch = Vec::new();
        if let Some(at) = usize::from(pick).checked_rem(ids.len()) {
            let transfer = &self.model.transfers[&ids[at]];
            let count = u32::try_from(transfer.done.len()).unwrap_or(0) + 1;
            batch.push(vec![TransferAck { transfer: TransferId(ids[at]), count }]);
            if ack == Ack::Enqueued && !transfer.enqueued[0] {
                // One good word, then one about a copy that is not in flight.
                let good = TransferAck { transfer: TransferId(ids[at]), count: 1 };
                batch.push(vec![good, TransferAck { transfer: TransferId(-1), count: 1 }]);
            }
        }
        let ended = self.last_ended.unwrap_or(0);
        batch.push(vec![TransferAck { transfer: TransferId(ended), count: 1 }]);
        for acks in batch {
            self.refuse(|c| match ack {
                Ack::Enqueued => c.on_transfers_enqueued(&acks),
                Ack::Completed => c.on_transfers_completed(&acks),
                Ack::Failed => c.on_transfers_failed(&acks),
            })?;
        }
        Ok(true)
    }
}
