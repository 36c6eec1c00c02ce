// SPDX-License-Identifier: Apache-2.0
//! Owns the mirror of each step's rows to the host pool, and what goes wrong with it.

use super::{Batch, Fault, Worker};
use crate::dataplane::{ByteStores, MirrorTokens};
use crate::error::Result;
use crate::ids::{HostBlockId, PageIndex};

impl Worker {
    /// Copies the step's rows to the host pool, drafts included: whatever is rejected is written
    /// again before its page is sealed.
    pub(super) fn mirror(&mut self, batch: &Batch) -> Result<()> {
        let layers: Vec<u32> = (0..self.geometry.num_layers()).collect();
        let mut host_row = batch.host_row.clone();
        self.lose_rows(batch, &mut host_row);
        let unmirrored = self.find_unmirrored(batch);
        let tokens = MirrorTokens { resident_slot: &batch.slot_mapping, host_row: &host_row };
        let mut stores = ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host)?;
        let report = stores.mirror_rows(&layers, tokens, &mut self.mask)?;
        self.traffic.mirrored +=
            report.copied * u64::from(self.geometry.num_layers() * self.geometry.row_bytes());
        if let Some(row) = unmirrored {
            let bs = i64::from(self.geometry.block_size());
            // OK because a host row is an int32 block id times the block size and more.
            self.poison_host_row(HostBlockId((row / bs) as i32), (row % bs) as u32);
        }
        self.invalidate(&batch.host_row, &[]);
        Ok(())
    }

    /// Draws tokens whose rows do not reach the host pool, and reports the pages of some.
    fn lose_rows(&mut self, batch: &Batch, host_row: &mut [i64]) {
        if self.mirror_loss_ppm == 0 {
            return;
        }
        let bs = self.geometry.block_size();
        for item in &batch.items {
            for at in 0..item.num_scheduled {
                if self.rng.below(1_000_000) < self.mirror_loss_ppm {
                    host_row[item.first_token + at as usize] = -1;
                    if self.rng.below(2) == 0 {
                        let page = PageIndex((item.num_computed + at) / bs);
                        self.mirror_lost.push((item.request, page));
                    }
                }
            }
        }
    }

    /// Host row of some request's first token, which every later row attends to.
    fn find_unmirrored(&mut self, batch: &Batch) -> Option<i64> {
        let first = batch.items.iter().find(|item| item.num_computed == 0)?;
        let strikes = self.fault.strike(Fault::UnmirroredRow);
        strikes.then(|| batch.host_row[first.first_token])
    }
}
