// SPDX-License-Identifier: Apache-2.0
//! Owns transfers in flight: who owes how many acknowledgements, and which leases they end.

use std::collections::HashMap;

use crate::error::{ProtocolFault, Result};
use crate::ids::{HostBlockId, PageIndex, RequestId, TransferId};
use crate::lease::Lease;
use crate::residency::ResidenceId;

/// Acknowledgements of one transfer by this many ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferAck {
    /// The transfer.
    pub transfer: TransferId,
    /// Ranks that said so in this batch.
    pub count: u32,
}

/// What a transfer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TransferKind {
    /// Copy a page GPU to host.
    Spill = 0,
    /// Move nothing: acknowledge that every row of the page was mirrored.
    Mirrored = 1,
    /// Copy rows host to GPU.
    Restore = 2,
    /// Copy a page host to host, `source_host_block` to `host_block`.
    HostCopy = 3,
}

/// Names and numbers of the kinds, as bindings expose them.
pub const KIND_NUMBERS: [(&str, u8); 4] = [
    ("spill", TransferKind::Spill as u8),
    ("mirrored", TransferKind::Mirrored as u8),
    ("restore", TransferKind::Restore as u8),
    ("host_copy", TransferKind::HostCopy as u8),
];

impl TransferKind {
    /// The kind with this number.
    #[must_use]
    pub const fn from_u8(value: u8) -> Option<Self> {
        match value {
            0 => Some(Self::Spill),
            1 => Some(Self::Mirrored),
            2 => Some(Self::Restore),
            3 => Some(Self::HostCopy),
            _ => None,
        }
    }

    /// True if the host copy of a page is complete when the transfer is.
    #[must_use]
    pub const fn is_to_host(self) -> bool {
        matches!(self, Self::Spill | Self::Mirrored)
    }
}

/// One copy that some rank has not completed.
#[cfg_attr(any(test, feature = "testing"), derive(Clone))]
#[derive(Debug, Hash)]
pub struct Transfer {
    /// What it does.
    pub kind: TransferKind,
    /// The admission that it belongs to.
    pub request: RequestId,
    /// The page that it copies.
    pub page: PageIndex,
    /// The residence copied from or to.
    pub residence: ResidenceId,
    /// The host block copied from or to.
    pub host_block: HostBlockId,
    /// Acknowledgements that it needs, fixed when it was planned.
    pub required: u32,
    /// Ranks that have put it in stream order.
    pub enqueued: u32,
    /// Ranks that are done, failures counted.
    pub completed: u32,
    /// True once some rank has said that its copy failed.
    pub failed: bool,
    /// Hold on the GPU blocks until the release point.
    pub gpu_lease: Option<Lease>,
    /// Hold on the host blocks until completion.
    pub host_lease: Option<Lease>,
}

/// Which count a batch of acknowledgements adds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckKind {
    /// In stream order.
    Enqueued,
    /// Done.
    Completed,
    /// Done, and the bytes cannot be trusted.
    Failed,
}

/// All transfers in flight.
#[cfg_attr(any(test, feature = "testing"), derive(Clone))]
#[derive(Debug, Default)]
pub struct Transfers {
    in_flight: HashMap<i64, Transfer>,
    last_id: i64,
    /// Transfers that hold GPU blocks.
    num_gpu_leases: usize,
}

impl Transfers {
    /// Transfers in flight.
    #[must_use]
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// True if nothing is in flight.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Transfers in flight, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (TransferId, &Transfer)> {
        self.in_flight.iter().map(|(&id, transfer)| (TransferId(id), transfer))
    }

    /// Transfers in flight, oldest first.
    #[must_use]
    pub fn sorted(&self) -> Vec<(i64, &Transfer)> {
        let mut sorted: Vec<_> = self.in_flight.iter().map(|(&id, t)| (id, t)).collect();
        sorted.sort_unstable_by_key(|(id, _)| *id);
        sorted
    }

    /// Starts to track a transfer; ids rise and are never used twice.
    pub fn insert(&mut self, transfer: Transfer) -> TransferId {
        self.last_id += 1;
        self.num_gpu_leases += usize::from(transfer.gpu_lease.is_some());
        self.in_flight.insert(self.last_id, transfer);
        TransferId(self.last_id)
    }

    /// The transfer, if it is in flight.
    #[must_use]
    pub fn get(&self, id: TransferId) -> Option<&Transfer> {
        self.in_flight.get(&id.0)
    }

    /// True if some transfer holds GPU blocks.
    #[must_use]
    pub fn holds_gpu_blocks(&self) -> bool {
        self.num_gpu_leases > 0
    }

    /// Stops tracking all transfers and returns them.
    pub fn drain(&mut self) -> impl Iterator<Item = Transfer> + '_ {
        self.num_gpu_leases = 0;
        self.in_flight.drain().map(|(_, transfer)| transfer)
    }

    /// Adds a batch of acknowledgements. On an error nothing was added.
    ///
    /// # Errors
    /// `UnknownTransfer`, `TooManyAcks`, `CompletedBeforeEnqueued`.
    pub fn acknowledge(&mut self, kind: AckKind, acks: &[TransferAck]) -> Result<()> {
        for (done, ack) in acks.iter().enumerate() {
            if let Err(fault) = self.add(kind, *ack) {
                for earlier in &acks[..done] {
                    self.take_back(kind, *earlier);
                }
                return Err(fault.into());
            }
        }
        if kind == AckKind::Failed {
            for ack in acks {
                if let Some(transfer) = self.in_flight.get_mut(&ack.transfer.0) {
                    transfer.failed = true;
                }
            }
        }
        Ok(())
    }

    /// Marks the acknowledgement of a page's mirrored rows, if one is under way, as failed; true
    /// if there is one.
    /// Costs a look at every transfer in flight, which a lost mirror is rare enough for.
    pub fn fail_mirrored(&mut self, request: RequestId, page: PageIndex) -> bool {
        let mut found = false;
        for transfer in self.in_flight.values_mut() {
            let same = (transfer.request, transfer.page) == (request, page);
            if same && transfer.kind == TransferKind::Mirrored {
                transfer.failed = true;
                found = true;
            }
        }
        found
    }

    /// Takes a batch back that was added, as if it had never come. Only before anything was done
    /// about it, and never for failures: their mark stays.
    pub fn take_back_all(&mut self, kind: AckKind, acks: &[TransferAck]) {
        for ack in acks {
            self.take_back(kind, *ack);
        }
    }

    /// The GPU lease of a transfer that every rank has enqueued.
    pub fn take_gpu_lease(&mut self, id: TransferId) -> Option<Lease> {
        let lease = self.in_flight.get_mut(&id.0)?.gpu_lease.take()?;
        self.num_gpu_leases -= 1;
        Some(lease)
    }

    /// Stops tracking a transfer that every rank has completed.
    pub fn take_completed(&mut self, id: TransferId) -> Option<Transfer> {
        let transfer = self.in_flight.get(&id.0)?;
        if transfer.completed < transfer.required {
            return None;
        }
        let transfer = self.in_flight.remove(&id.0)?;
        self.num_gpu_leases -= usize::from(transfer.gpu_lease.is_some());
        Some(transfer)
    }

    fn add(&mut self, kind: AckKind, ack: TransferAck) -> Result<(), ProtocolFault> {
        let TransferAck { transfer: id, count } = ack;
        let transfer =
            self.in_flight.get_mut(&id.0).ok_or(ProtocolFault::UnknownTransfer { transfer: id })?;
        let required = transfer.required;
        if count == 0 {
            let (what, max) = ("acknowledgement count", i64::from(required));
            return Err(ProtocolFault::OutOfRange { what, got: 0, min: 1, max });
        }
        match kind {
            AckKind::Enqueued => {
                let got = transfer.enqueued.saturating_add(count);
                if got > required {
                    return Err(ProtocolFault::TooManyAcks { transfer: id, got, required });
                }
                transfer.enqueued = got;
            }
            AckKind::Completed | AckKind::Failed => {
                let got = transfer.completed.saturating_add(count);
                if got > required {
                    return Err(ProtocolFault::TooManyAcks { transfer: id, got, required });
                }
                if got > transfer.enqueued {
                    return Err(ProtocolFault::CompletedBeforeEnqueued {
                        transfer: id,
                        completed: got,
                        enqueued: transfer.enqueued,
                    });
                }
                transfer.completed = got;
            }
        }
        Ok(())
    }

    fn take_back(&mut self, kind: AckKind, ack: TransferAck) {
        if let Some(transfer) = self.in_flight.get_mut(&ack.transfer.0) {
            match kind {
                AckKind::Enqueued => transfer.enqueued -= ack.count,
                AckKind::Completed | AckKind::Failed => transfer.completed -= ack.count,
            }
        }
    }
}
