// SPDX-License-Identifier: Apache-2.0
//! Owns a whole toy deployment: Coordinator, pools, workers and reference model in one value that
//! takes events. Rows are tags that the workers really write, copy and read, so that a wrong page,
//! a copy made too late or a block handed out too early shows as a wrong row.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::model::{Model, ModelTransfer};
use super::toy::{FOREIGN, GARBAGE, MAX_ROWS, Rows, ToyPool, ToyWorker};
use super::{Ack, Check, Event, Item, Violation, ensure, invariants, signed};
use crate::config::{CoordinatorConfig, HostCopy, ReleasePoint};
use crate::error::{Pool, Result};
use crate::ids::{RequestId, TransferId};
use crate::step::{FreePlan, PoolLevels, Scheduled, StepPlan, TransferAck, TransferKind};
use crate::{Coordinator, Error};

/// A request as the engine knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct ToyRequest {
    /// Host block of each page.
    pub host: Vec<i32>,
    /// Tag of the row of each token that was written.
    pub tags: Vec<u32>,
    /// Drafts at the end of `tags`.
    pub drafts: u32,
    /// Hot region.
    pub hot: Vec<i32>,
    /// Tokens of an import under way.
    pub importing: Option<u32>,
    /// GPU blocks of the import's last page.
    pub import_tail: Vec<i32>,
    /// Leading published pages.
    pub published: u32,
    /// Pages that a failed copy may have spoiled.
    pub doomed: BTreeSet<u32>,
    /// First token that was computed from spoiled rows.
    pub spoiled_from: Option<usize>,
    /// The plan reported a lost page: the engine may only free the request.
    pub lost: bool,
}

/// The deployment.
#[derive(Debug, Clone)]
pub struct World {
    /// The system under test.
    pub coordinator: Coordinator,
    /// GPU blocks.
    pub gpu: ToyPool,
    /// Host blocks.
    pub host: ToyPool,
    /// All ranks.
    pub worker: ToyWorker,
    /// The reference.
    pub model: Model,
    /// Live requests.
    pub requests: BTreeMap<u32, ToyRequest>,
    /// Freed requests that are not retired.
    pub draining: BTreeMap<u32, ToyRequest>,
    /// Published pages: the tags of the whole prefix, and the host block of its last page.
    pub index: BTreeMap<Vec<u32>, i32>,
    /// GPU blocks held by others.
    pub tenants: Vec<i32>,
    /// The plan built last.
    pub plan: StepPlan,
    pub(super) next_tag: u32,
    pub(super) last_ended: Option<i64>,
    pub(super) shut_down: bool,
}

impl World {
    /// A deployment without requests.
    ///
    /// # Errors
    /// As `Coordinator::new`.
    pub fn new(config: CoordinatorConfig) -> Result<Self> {
        Ok(Self {
            gpu: ToyPool::new(Pool::Gpu, config.gpu_blocks),
            host: ToyPool::new(Pool::Host, config.host_blocks),
            worker: ToyWorker::new(&config),
            coordinator: Coordinator::new(config)?,
            model: Model::default(),
            requests: BTreeMap::new(),
            draining: BTreeMap::new(),
            index: BTreeMap::new(),
            tenants: Vec::new(),
            plan: StepPlan::default(),
            next_tag: 0,
            last_ended: None,
            shut_down: false,
        })
    }

    /// Carries out one event and checks every rule. True if the event could happen.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn apply(&mut self, event: &Event) -> Check<bool> {
        if self.shut_down {
            return self.refuse_after_shutdown();
        }
        let happened = match event {
            Event::Admit { pages } => self.admit(*pages),
            Event::AdmitPrefix { pick, copies } => self.admit_prefix(*pick, *copies),
            Event::AdmitImport { tokens, tail } => self.admit_import(*tokens, *tail),
            Event::EndImport { pick, tokens } => self.end_import(*pick, *tokens),
            Event::Grow { pick } => self.grow(*pick),
            Event::GrantHot { pick } => self.grant_hot(*pick),
            Event::Step { items, fail_reads, lose_mirror } => {
                self.step(items, *fail_reads, *lose_mirror)
            }
            Event::Ack { pick, rank, ack } => self.ack(*pick, *rank, *ack),
            Event::BadAck { pick, ack } => self.bad_ack(*pick, *ack),
            Event::Tenant { blocks } => self.tenant(*blocks),
            Event::TenantsLeave => self.tenants_leave(),
            Event::Redirect { pick, writable } => self.redirect(*pick, *writable),
            Event::Free { pick, reason } => self.free(*pick, *reason),
            Event::Reset => self.reset(),
            Event::Shutdown => self.shutdown(),
        }?;
        if happened && !self.shut_down {
            self.model.compare(&self.coordinator, None)?;
            self.check()?;
        }
        Ok(happened)
    }

    /// Runs the invariants.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn check(&self) -> Check {
        invariants::check(&self.coordinator, &self.gpu, &self.host, &self.tenants)
    }

    /// Frees every request, acknowledges every copy, and checks that nothing is leased.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn drain(&mut self) -> Check {
        if self.shut_down {
            return Ok(());
        }
        while self.requests.values().any(|request| request.importing.is_some()) {
            self.apply(&Event::EndImport { pick: 0, tokens: None })?;
        }
        while !self.requests.is_empty() {
            let reason = crate::step::FreeReason::Finished;
            self.apply(&Event::Free { pick: 0, reason })?;
        }
        self.drain_transfers()?;
        self.tenants_leave()?;
        let steps = 3;
        for _ in 0..steps {
            if self.coordinator.has_pending_work() {
                self.step(&[], false, false)?;
            }
        }
        ensure(8, !self.coordinator.has_pending_work(), || "work is pending for ever".into())?;
        ensure(8, self.draining.is_empty(), || format!("{:?} never retire", self.draining.keys()))?;
        for (pool, refs) in [("GPU", self.gpu.refs()), ("host", self.host.refs())] {
            let leased = refs.iter().filter(|&&n| n > 0).count();
            ensure(8, leased == 0, || format!("{leased} {pool} blocks are leased at the end"))?;
        }
        Ok(())
    }

    /// Acknowledges every copy on every rank.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn drain_transfers(&mut self) -> Check {
        while let Some((&id, transfer)) = self.model.transfers.iter().next() {
            for rank in 0..transfer.done.len() {
                let Some(transfer) = self.model.transfers.get(&id) else { break };
                let (enqueued, done) = (transfer.enqueued[rank], transfer.done[rank]);
                if !enqueued {
                    self.acknowledge(id, rank, Ack::Enqueued)?;
                }
                if !done
                    && self.model.transfers.get(&id).is_some_and(|t| t.enqueued.iter().all(|&e| e))
                {
                    self.acknowledge(id, rank, Ack::Completed)?;
                }
            }
            self.check()?;
        }
        Ok(())
    }

    /// Digest that is equal for worlds with the same future: tags enter by where they are equal,
    /// rows that nobody can read not at all.
    #[must_use]
    pub fn future_digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.coordinator.future_digest().hash(&mut hasher);
        (&self.gpu, &self.host, &self.tenants, self.shut_down).hash(&mut hasher);
        self.model.requests.hash(&mut hasher);
        for transfer in self.model.transfers.values() {
            transfer.hash(&mut hasher);
        }
        let mut names = BTreeMap::new();
        let mut name = |tag: u32, hasher: &mut DefaultHasher| {
            let next = names.len();
            let fixed = tag >= FOREIGN;
            (if fixed { tag as usize } else { *names.entry(tag).or_insert(next) }).hash(hasher);
        };
        for request in self.requests.values().chain(self.draining.values()) {
            request.tags.iter().for_each(|&tag| name(tag, &mut hasher));
            ToyRequest { tags: Vec::new(), ..request.clone() }.hash(&mut hasher);
        }
        for (pool, memory) in [(&self.gpu, &self.worker.gpu), (&self.host, &self.worker.host)] {
            let published = |b: usize| self.index.values().any(|&i| i.unsigned_abs() as usize == b);
            let is_host = core::ptr::eq(pool, &self.host);
            for (at, rows) in memory.iter().flat_map(|rank| rank.iter().enumerate()) {
                if !pool.is_blank(at) || (is_host && published(at)) {
                    rows.iter().for_each(|&tag| name(tag, &mut hasher));
                }
            }
        }
        for (id, row) in self.worker.rows.iter().filter(|(id, _)| self.lives(**id)) {
            (id, &row.residency, &row.hot).hash(&mut hasher);
            for (key, rows) in &row.hot_rows {
                key.hash(&mut hasher);
                rows.iter().for_each(|&tag| name(tag, &mut hasher));
            }
        }
        let mut index: Vec<_> = self.index.iter().map(|(key, block)| (block, key)).collect();
        index.sort_unstable();
        for (block, key) in index {
            block.hash(&mut hasher);
            key.iter().for_each(|&tag| name(tag, &mut hasher));
        }
        hasher.finish()
    }

    fn lives(&self, id: i32) -> bool {
        self.requests.contains_key(&id.unsigned_abs())
    }

    pub(super) fn config(&self) -> &CoordinatorConfig {
        self.coordinator.config()
    }

    pub(super) fn levels(&self) -> PoolLevels {
        PoolLevels { gpu_free: self.gpu.num_free(), host_free: self.host.num_free() }
    }

    /// The live request that a pick means, importing or not.
    pub(super) fn picked(&self, pick: u8, importing: bool) -> Option<u32> {
        let fits = |r: &ToyRequest| r.importing.is_some() == importing;
        let ids: Vec<u32> =
            self.requests.iter().filter(|(_, r)| fits(r)).map(|(&id, _)| id).collect();
        ids.get(usize::from(pick).checked_rem(ids.len())?).copied()
    }

    fn step(&mut self, items: &[Item], fail_reads: bool, lose_mirror: bool) -> Check<bool> {
        let scheduled = self.schedule(items);
        let levels = self.levels();
        let mut plan = core::mem::take(&mut self.plan);
        accepted(self.coordinator.build_step_plan(&scheduled, levels, &mut plan))?;
        let outcome = self.carry_out(&scheduled, &plan, fail_reads, lose_mirror);
        self.plan = plan;
        outcome.map(|()| true)
    }

    /// Turns items into a legal batch.
    fn schedule(&mut self, items: &[Item]) -> Vec<Scheduled> {
        let mut batch: Vec<Scheduled> = Vec::new();
        for item in items {
            let Some(id) = self.picked(item.pick, false) else { continue };
            let state = |page| self.coordinator.page_state(RequestId(id), page).ok().flatten();
            let block_size = self.config().block_size;
            let Some(request) = self.requests.get(&id) else { continue };
            let (host_only, writable) = self.readable(id);
            if request.lost
                || (host_only && request.hot.is_empty())
                || batch.iter().any(|other| other.request.0 == id)
            {
                continue;
            }
            let n = u32::try_from(request.tags.len()).unwrap_or(0);
            let rejected = request.drafts.saturating_sub(u32::from(item.accepted));
            let start = n - rejected;
            let first = crate::ids::PageIndex(start / block_size);
            let capacity = writable * block_size;
            let tokens = u32::from(item.tokens).min(capacity.saturating_sub(start));
            if tokens == 0 || state(first) != Some(crate::page::PageState::Dirty) {
                continue;
            }
            batch.push(Scheduled {
                request: RequestId(id),
                num_computed_tokens: start,
                num_scheduled_tokens: tokens,
                num_draft_tokens: u32::from(item.drafts).min(tokens - 1),
            });
        }
        batch
    }

    /// Whether a request reads from the host, and its pages.
    fn readable(&self, id: u32) -> (bool, u32) {
        use crate::page::PageState as S;
        let count = |s| self.coordinator.num_pages_in(RequestId(id), s).unwrap_or(0);
        let pages = self.coordinator.num_pages(RequestId(id)).unwrap_or(0);
        (count(S::HostOnly) + count(S::Unpinned) > 0, pages)
    }

    fn carry_out(
        &mut self,
        scheduled: &[Scheduled],
        plan: &StepPlan,
        fail_reads: bool,
        lose_mirror: bool,
    ) -> Check {
        self.gpu.touch(&plan.touch_gpu)?;
        self.host.touch(&plan.touch_host)?;
        for (at, &id) in plan.publish.request.iter().enumerate() {
            self.publish(id.unsigned_abs(), plan.publish.num_pages[at].unsigned_abs())?;
        }
        self.gpu.unpin(&plan.unpin_gpu)?;
        self.gpu.release(&plan.free_gpu)?;
        self.host.release(&plan.free_host)?;
        for id in &plan.hot_regions_returned {
            if let Some(request) = self.requests.get_mut(&id.unsigned_abs()) {
                request.hot.clear();
            }
        }
        self.worker.apply_tables(plan)?;
        let config = self.config().clone();
        self.model.planned(scheduled, plan, &config)?;
        self.model.compare(&self.coordinator, Some(plan))?;
        self.check_holds()?;
        for &(id, _) in &plan.lost_pages {
            if let Some(request) = self.requests.get_mut(&id.unsigned_abs()) {
                request.lost = true;
            }
        }
        for id in &plan.retired {
            self.draining.remove(&id.unsigned_abs());
        }
        self.copy_before_forward(plan, fail_reads);
        let ids: Vec<RequestId> = scheduled.iter().map(|item| item.request).collect();
        invariants::check_plan(&self.coordinator, plan, &self.gpu, &self.worker, &ids)?;
        let mut reads_host = false;
        for (at, item) in scheduled.iter().enumerate() {
            let mirror_lost = lose_mirror && at == 0 && config.host_copy == HostCopy::Mirrored;
            reads_host |= self.forward(item, mirror_lost)?;
            if mirror_lost {
                self.report_lost_mirror(item)?;
            }
        }
        ensure(0, plan.all_context_resident != reads_host, || {
            format!("all context resident: {}, host reads: {reads_host}", plan.all_context_resident)
        })
    }

    /// The pools count exactly the leases that the reference knows of.
    fn check_holds(&self) -> Check {
        let mut expected = self.model.gpu_holds();
        for &block in &self.tenants {
            *expected.entry(block).or_insert(0) += 1;
        }
        compare_holds("GPU", &expected, self.gpu.refs())?;
        compare_holds("host", &self.model.host_holds(), self.host.refs())
    }

    /// Makes the copies that come before the forward pass.
    fn copy_before_forward(&mut self, plan: &StepPlan, fail: bool) {
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
    fn copy(&mut self, transfer: &ModelTransfer, rank: usize, fail: bool) {
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
    fn forward(&mut self, item: &Scheduled, mirror_lost: bool) -> Check<bool> {
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

    fn report_lost_mirror(&mut self, item: &Scheduled) -> Check {
        let block_size = self.config().block_size;
        let end = item.num_computed_tokens + item.num_scheduled_tokens;
        for page in item.num_computed_tokens / block_size..end.div_ceil(block_size) {
            let index = crate::ids::PageIndex(page);
            accepted(self.coordinator.on_mirror_lost(item.request, index))?;
            self.model.mirror_lost(item.request.0, page);
        }
        Ok(())
    }

    fn ack(&mut self, pick: u8, rank: u8, ack: Ack) -> Check<bool> {
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

    fn bad_ack(&mut self, pick: u8, ack: Ack) -> Check<bool> {
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

    /// Makes a call that must be refused, and checks that it changed nothing.
    ///
    /// # Errors
    /// The event protocol, if the call succeeds or changes the Coordinator.
    pub fn refuse<T>(&mut self, call: impl FnOnce(&mut Coordinator) -> Result<T>) -> Check<Error> {
        let before = self.coordinator.state_digest();
        match call(&mut self.coordinator) {
            Ok(_) => Err(Violation { rule: 0, what: "a call was not refused".into() }),
            Err(error) => {
                let same = self.coordinator.state_digest() == before;
                ensure(0, same, || format!("a refused call changed the state ({error})"))?;
                Ok(error)
            }
        }
    }

    fn refuse_after_shutdown(&mut self) -> Check<bool> {
        self.refuse(|c| c.on_transfers_enqueued(&[]))?;
        self.refuse(|c| c.on_blocks_reused(&[1]))?;
        self.refuse(|c| {
            c.on_freed(RequestId(0), crate::step::FreeReason::Aborted, &mut FreePlan::default())
        })?;
        Ok(false)
    }
}

/// Turns an unexpected refusal into a violation.
pub(super) fn accepted<T>(outcome: Result<T>) -> Check<T> {
    outcome.map_err(|error| Violation { rule: 0, what: format!("refused: {error}") })
}

fn compare_holds(what: &str, expected: &BTreeMap<i32, u32>, refs: &[u32]) -> Check {
    for (block, &got) in (0_i32..).zip(refs) {
        let expected = expected.get(&block).copied().unwrap_or(0);
        ensure(8, got == expected, || {
            format!("{what} block {block} has {got} holds, the reference counts {expected}")
        })?;
    }
    Ok(())
}
