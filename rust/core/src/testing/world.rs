// SPDX-License-Identifier: Apache-2.0
//! Owns a whole toy deployment: Coordinator, pools, workers and reference model in one value that
//! takes events. Rows are tags that the workers really write, copy and read, so that a wrong page,
//! a copy made too late or a block handed out too early shows as a wrong row.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::model::Model;
use super::toy::{FOREIGN, ToyPool, ToyWorker};
use super::{Ack, Check, Event, Item, Violation, ensure, invariants};
use crate::config::{CoordinatorConfig, HostCopy};
use crate::error::{Pool, Result};
use crate::ids::RequestId;
use crate::step::{FreePlan, PoolLevels, Scheduled, StepPlan};
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
            Event::Report { rank, fail } => self.report(*rank, *fail),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{PrefixCopies, small_config};

    /// Thousands of requests pass through; the tables stay as large as what is alive at once.
    #[test]
    fn tables_stay_flat_while_requests_come_and_go() {
        let mut world = World::new(small_config()).unwrap();
        let step = |tokens| Event::Step {
            items: vec![Item { pick: 0, tokens, drafts: 0, accepted: 0 }],
            fail_reads: false,
            lose_mirror: false,
        };
        let report = |rank| Event::Report { rank, fail: false };
        let free = |reason| Event::Free { pick: 0, reason };
        use crate::step::FreeReason::{Finished, Preempted};
        for round in 0..2_000_u32 {
            let copies = [PrefixCopies::None, PrefixCopies::Fresh][round as usize % 2];
            let cycle = [
                Event::Admit { pages: 4 },
                step(8),
                Event::GrantHot { pick: 0 },
                report(0),
                report(1),
                step(1),
                free(if round % 3 == 0 { Preempted } else { Finished }),
                Event::AdmitPrefix { pick: round as u8, copies },
                step(1),
                Event::Tenant { blocks: 5 },
                step(1),
                free(Preempted),
                Event::TenantsLeave,
            ];
            for event in &cycle {
                world.apply(event).unwrap();
            }
            let (requests, residences) = world.coordinator.inspect().num_slots;
            assert!(requests <= 4 && residences <= 12, "{requests}, {residences}");
            assert!(world.coordinator.num_transfers() <= 12);
        }
        assert!(world.coordinator.stats().admitted >= 3_000);
        world.drain().unwrap();
    }
}
