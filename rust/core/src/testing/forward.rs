// SPDX-License-Identifier: Apache-2.0
//! Owns what the workers of a world do with rows: copies, writes of new rows, and reads of a
//! request's whole context, each compared with the tag that was written.

use super::model::ModelTransfer;
use super::toy::{FOREIGN, GARBAGE, MAX_ROWS, Rows};
use super::world::{ToyRequest, World, accepted};
use super::{Check, ensure, signed};
use crate::config::HostCopy;
use crate::ids::PageIndex;
use crate::step::{Scheduled, StepPlan, TransferKind};

impl World {
    /// Makes the copies that come before the forward pass.
    pub(super) fn copy_before_forward(&mut self, plan: &StepPlan, fail: bool) {
        for id in &plan.transfers.transfer_id {
            let Some(transfer) = self.model.transfers.get_mut(id) else { continue };
            if !matches!(transfer.kind, TransferKind::Restore | TransferKind::HostCopy) {
                continue;
            }
            if fail {
                transfer.doomed[0] = true;
                if let Some(request) = self.requests.get_mut(&transfer.request) {
                    request.doomed.insert(transfer.page);
                }
            }
            let transfer = transfer.clone();
            for rank in 0..transfer.done.len() {
                self.copy(&transfer, rank, transfer.doomed[rank]);
            }
        }
    }

    /// Makes a rank's part of a copy.
    pub(super) fn copy(&mut self, transfer: &ModelTransfer, rank: usize, fail: bool) {
        let at = |block: i32| block.unsigned_abs() as usize;
        let garbage = [GARBAGE; MAX_ROWS];
        let memory = &mut self.worker;
        match transfer.kind {
            TransferKind::Mirrored if fail => memory.host[rank][at(transfer.host)] = garbage,
            TransferKind::Mirrored => {}
            TransferKind::Spill => {
                let rows = transfer.blocks.first().map_or(garbage, |&b| memory.gpu[rank][at(b)]);
                memory.host[rank][at(transfer.host)] = if fail { garbage } else { rows };
            }
            TransferKind::Restore => {
                let writer = memory.host_of_rank(rank);
                let from = memory.host[writer][at(transfer.host)];
                for &block in &transfer.blocks {
                    let rows = transfer.rows as usize;
                    let to = &mut memory.gpu[rank][at(block)];
                    to[..rows].copy_from_slice(&if fail { garbage } else { from }[..rows]);
                }
            }
            TransferKind::HostCopy => {
                let rows = memory.host[rank][at(transfer.source)];
                memory.host[rank][at(transfer.host)] = if fail { garbage } else { rows };
            }
        }
    }

    /// Writes the rows of a scheduled request and reads its whole context on every rank. True if
    /// a row came from the host.
    pub(super) fn forward(&mut self, item: &Scheduled, mirror_lost: bool) -> Check<bool> {
        let id = item.request.0;
        let Some(request) = self.requests.get_mut(&id) else { return Ok(false) };
        let (start, n) = (item.num_computed_tokens as usize, item.num_scheduled_tokens as usize);
        request.tags.truncate(start);
        request.drafts = item.num_draft_tokens;
        for _ in 0..n {
            self.next_tag += 1;
            request.tags.push(self.next_tag);
        }
        if request.spoiled_from.is_some_and(|from| from >= start) {
            request.spoiled_from = None;
        }
        let request = request.clone();
        for (token, &tag) in request.tags.iter().enumerate().skip(start) {
            self.write(&request, id, token, tag, mirror_lost)?;
        }
        let mut reads_host = false;
        let block_size = self.config().block_size as usize;
        for (page, tags) in request.tags.chunks(block_size).enumerate() {
            for rank in 0..self.worker.gpu.len() {
                let found = self.read(&request, id, page, rank, &mut reads_host)?;
                for rows in found {
                    self.judge(id, page, rank, tags, &rows, start)?;
                }
            }
        }
        Ok(reads_host)
    }

    fn write(
        &mut self,
        request: &ToyRequest,
        id: u32,
        token: usize,
        tag: u32,
        mirror_lost: bool,
    ) -> Check {
        let block_size = self.config().block_size as usize;
        let (page, row) = (token / block_size, token % block_size);
        let table = self.worker.rows.get(&signed(id));
        let key = i32::try_from(page).unwrap_or(-1);
        let blocks = table.and_then(|t| t.residency.get(&key)).cloned().unwrap_or_default();
        ensure(2, !blocks.is_empty(), || format!("request {id} writes page {page} nowhere"))?;
        for memory in &mut self.worker.gpu {
            for &block in &blocks {
                memory[block.unsigned_abs() as usize][row] = tag;
            }
        }
        if self.config().host_copy == HostCopy::Mirrored {
            for (rank, memory) in self.worker.host.iter_mut().enumerate() {
                let lost = mirror_lost && rank == 0;
                memory[request.host[page].unsigned_abs() as usize][row] =
                    if lost { FOREIGN } else { tag };
            }
        }
        Ok(())
    }

    /// The rows of a page as one rank finds them, one for each KV cache group.
    fn read(
        &mut self,
        request: &ToyRequest,
        id: u32,
        page: usize,
        rank: usize,
        reads_host: &mut bool,
    ) -> Check<Vec<Rows>> {
        let writer = self.worker.host_of_rank(rank);
        let table = self.worker.rows.entry(signed(id)).or_default();
        if let Some(blocks) = table.residency.get(&i32::try_from(page).unwrap_or(-1)) {
            let memory = &self.worker.gpu[rank];
            return Ok(blocks.iter().map(|b| memory[b.unsigned_abs() as usize]).collect());
        }
        *reads_host = true;
        let ready = !table.hot.is_empty() && table.hot == request.hot;
        ensure(5, ready, || format!("request {id} misses page {page} without a hot region"))?;
        let block = request.host[page];
        let memory = &self.worker.host[writer];
        let rows =
            table.hot_rows.entry((rank, block)).or_insert(memory[block.unsigned_abs() as usize]);
        Ok(vec![*rows])
    }

    fn judge(
        &mut self,
        id: u32,
        page: usize,
        rank: usize,
        tags: &[u32],
        rows: &Rows,
        start: usize,
    ) -> Check {
        let wrong = tags.iter().zip(rows).find(|(tag, row)| tag != row);
        let Some((tag, row)) = wrong else { return Ok(()) };
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        let excused = *row == GARBAGE && request.doomed.contains(&u32::try_from(page).unwrap_or(0));
        ensure(2, excused, || {
            format!("request {id} page {page} rank {rank}: read row {row}, expected {tag}")
        })?;
        request.spoiled_from = Some(request.spoiled_from.map_or(start, |from| from.min(start)));
        Ok(())
    }

    pub(super) fn report_lost_mirror(&mut self, item: &Scheduled) -> Check {
        let block_size = self.config().block_size;
        let end = item.num_computed_tokens + item.num_scheduled_tokens;
        for page in item.num_computed_tokens / block_size..end.div_ceil(block_size) {
            let index = PageIndex(page);
            accepted(self.coordinator.on_mirror_lost(item.request, index))?;
            self.model.mirror_lost(item.request.0, page);
        }
        Ok(())
    }
}
