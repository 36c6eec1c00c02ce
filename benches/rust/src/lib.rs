// SPDX-License-Identifier: Apache-2.0
//! Owns the fixture that the Coordinator's benches share: a batch of long requests in steady
//! decode, with the smallest pools that make every event of a real engine happen.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hotpage_core::config::{CoordinatorConfig, HostCopy, ReleasePoint};
use hotpage_core::ids::{PageIndex, RequestId, TransferId};
use hotpage_core::step::{
    Admitted, FreePlan, FreeReason, PagesAllocated, PoolLevels, Prefix, Scheduled, StepPlan,
    TransferAck,
};
use hotpage_core::{Coordinator, Result};

/// Tokens per block, as vLLM runs these models.
pub const BLOCK_SIZE: u32 = 64;
/// Rows that the indexer selects.
pub const TOP_K: u32 = 2_048;

/// One cell of the bench table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Requests in the batch.
    pub requests: u32,
    /// Tokens of each request's context at the start.
    pub context: u32,
    /// Resident KV cache groups.
    pub groups: u32,
    /// Speculative tokens.
    pub mtp: u32,
}

impl Cell {
    /// Hot rows of the cell: 2 x top-k without speculation, (mtp + 2) x top-k with it.
    #[must_use]
    pub fn hot_rows(self) -> u32 {
        if self.mtp == 0 { 2 * TOP_K } else { (self.mtp + 2) * TOP_K }
    }

    fn config(self, spare_pages: u32, resident_pages: u32) -> CoordinatorConfig {
        let pages = self.context.div_ceil(BLOCK_SIZE) + spare_pages;
        let hot = self.hot_rows() / BLOCK_SIZE * self.groups;
        CoordinatorConfig {
            block_size: BLOCK_SIZE,
            num_kv_groups: self.groups,
            // Regions and tails of all requests, and little beside: blocks go round fast.
            gpu_blocks: self.requests * (hot + 4 * self.groups)
                + (resident_pages + 4) * self.groups
                + hot
                + 1,
            host_blocks: (self.requests + 2) * (pages + 4) + 1,
            other_blocks_per_page: 0,
            hot_rows: self.hot_rows(),
            top_k: TOP_K,
            verification_rows: 1 + self.mtp,
            num_ranks: 8,
            num_host_writers: 1,
            host_copy: HostCopy::Mirrored,
            release_point: ReleasePoint::Completed,
            transition: true,
            transition_watermark: None,
            hot_return_steps: 64,
            admission_window_pages: 3,
            num_reprefillable_tokens: 0,
            max_model_len: pages * BLOCK_SIZE,
        }
    }
}

/// A pool that hands out blocks first in, first out and reports reuse of unpinned ones.
#[derive(Debug)]
struct FifoPool {
    free: VecDeque<i32>,
    watched: Vec<bool>,
    reused: Vec<i32>,
}

impl FifoPool {
    fn new(blocks: u32) -> Self {
        // OK because configurations bound block counts by i32::MAX.
        let last = blocks as i32;
        Self { free: (1..last).collect(), watched: vec![false; blocks as usize], reused: vec![] }
    }

    fn take(&mut self, count: u32) -> Vec<i32> {
        let blocks: Vec<i32> = self.free.drain(..count as usize).collect();
        for &block in &blocks {
            if std::mem::take(&mut self.watched[block as usize]) {
                self.reused.push(block);
            }
        }
        blocks
    }

    fn give(&mut self, blocks: &[i32], watch: bool) {
        for &block in blocks {
            self.watched[block as usize] = watch;
        }
        self.free.extend(blocks);
    }

    fn level(&self) -> u32 {
        self.free.len() as u32
    }
}

struct Running {
    request: RequestId,
    computed: u32,
    pages: u32,
    hosts: Vec<i32>,
}

/// A Coordinator with its pools, requests and a worker that answers at once.
pub struct Fixture {
    cell: Cell,
    coordinator: Coordinator,
    gpu: FifoPool,
    host: FifoPool,
    running: Vec<Running>,
    plan: StepPlan,
    free_plan: FreePlan,
    acks: Vec<TransferAck>,
    next_request: u32,
    step: u32,
}

impl Fixture {
    /// Pools that hold one context of `cell` in full residency, no requests.
    ///
    /// # Errors
    /// `Config` or `Capacity` if the cell cannot work.
    pub fn new(cell: Cell) -> Result<Self> {
        Self::with_config(cell, cell.config(64, cell.context.div_ceil(BLOCK_SIZE)))
    }

    fn with_config(cell: Cell, config: CoordinatorConfig) -> Result<Self> {
        Ok(Self {
            cell,
            gpu: FifoPool::new(config.gpu_blocks),
            host: FifoPool::new(config.host_blocks),
            coordinator: Coordinator::new(config)?,
            running: Vec::new(),
            plan: StepPlan::default(),
            free_plan: FreePlan::default(),
            acks: Vec::new(),
            next_request: 0,
            step: 0,
        })
    }

    /// Pools with the cell's requests in them, each resumed on a host-only context.
    ///
    /// # Errors
    /// None unless the fixture itself is wrong.
    pub fn decoding(cell: Cell) -> Result<Self> {
        let mut fixture = Self::with_config(cell, cell.config(64, 0))?;
        for index in 0..cell.requests {
            // Spread over a page, so that about one request in 64 crosses a boundary each step.
            let tail = (index * 37) % BLOCK_SIZE;
            fixture.admit_host_only(cell.context, tail)?;
        }
        for _ in 0..BLOCK_SIZE {
            fixture.decode_step()?;
        }
        Ok(fixture)
    }

    fn levels(&self) -> PoolLevels {
        PoolLevels { gpu_free: self.gpu.level(), host_free: self.host.level() }
    }

    fn fresh_request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request - 1)
    }

    fn admit_host_only(&mut self, context: u32, tail: u32) -> Result<()> {
        let pages = context / BLOCK_SIZE;
        let request = self.fresh_request();
        let hosts = self.host.take(pages);
        self.coordinator.on_admitted(&[Admitted {
            request,
            prefix: Prefix::Host,
            host_blocks: &hosts,
            resident_blocks: &[],
        }])?;
        let region = self.gpu.take(self.coordinator.config().hot_region_blocks());
        self.drain_reuse()?;
        self.coordinator.on_hot_region_allocated(request, &region)?;
        let first = Running { request, computed: pages * BLOCK_SIZE, pages, hosts };
        self.running.push(first);
        // The tail of the prompt, computed as one chunk.
        let at = self.running.len() - 1;
        self.grow(at, tail.max(1))?;
        let item = scheduled(&self.running[at], tail.max(1), 0);
        let levels = self.levels();
        self.coordinator.build_step_plan(&[item], levels, &mut self.plan)?;
        self.running[at].computed += tail.max(1);
        self.apply_plan();
        Ok(())
    }

    /// Gives the request pages for `tokens` more tokens.
    fn grow(&mut self, at: usize, tokens: u32) -> Result<Duration> {
        let running = &self.running[at];
        let target = (running.computed + tokens).div_ceil(BLOCK_SIZE);
        if target <= running.pages {
            return Ok(Duration::ZERO);
        }
        let count = target - running.pages;
        let host_blocks = self.host.take(count);
        let resident_blocks = self.gpu.take(count * self.cell.groups);
        let timer = Instant::now();
        self.drain_reuse()?;
        let running = &self.running[at];
        self.coordinator.on_blocks_allocated(&[PagesAllocated {
            request: running.request,
            first_page: PageIndex(running.pages),
            host_blocks: &host_blocks,
            resident_blocks: &resident_blocks,
        }])?;
        let spent = timer.elapsed();
        let running = &mut self.running[at];
        running.pages = target;
        running.hosts.extend(host_blocks);
        Ok(spent)
    }

    fn drain_reuse(&mut self) -> Result<()> {
        let reused = std::mem::take(&mut self.gpu.reused);
        self.coordinator.on_blocks_reused(&reused)
    }

    /// One decode step of the whole batch. Returns the time spent in the Coordinator: allocation
    /// events, the plan, and the acknowledgements of all its transfers.
    ///
    /// # Errors
    /// None unless the fixture itself is wrong.
    pub fn decode_step(&mut self) -> Result<Duration> {
        let tokens = 1 + self.cell.mtp;
        self.step += 1;
        let mut spent = Duration::ZERO;
        let mut batch = Vec::with_capacity(self.running.len());
        for at in 0..self.running.len() {
            spent += self.grow(at, tokens)?;
            batch.push(scheduled(&self.running[at], tokens, self.cell.mtp));
        }
        let levels = self.levels();
        let timer = Instant::now();
        self.coordinator.build_step_plan(&batch, levels, &mut self.plan)?;
        spent += timer.elapsed();
        for (at, running) in self.running.iter_mut().enumerate() {
            // Between none and all drafts are accepted, differently for each request.
            running.computed += 1 + (self.step + at as u32) % (self.cell.mtp + 1);
        }
        spent += self.acknowledge()?;
        self.apply_plan();
        Ok(spent)
    }

    fn acknowledge(&mut self) -> Result<Duration> {
        self.acks.clear();
        let list = &self.plan.transfers;
        for (&id, &kind) in list.transfer_id.iter().zip(&list.kind) {
            let restore = hotpage_core::step::TransferKind::Restore as u8;
            let config = self.coordinator.config();
            let count = if kind == restore { config.num_ranks } else { config.num_host_writers };
            self.acks.push(TransferAck { transfer: TransferId(id), count });
        }
        let timer = Instant::now();
        self.coordinator.on_transfers_enqueued(&self.acks)?;
        self.coordinator.on_transfers_completed(&self.acks)?;
        Ok(timer.elapsed())
    }

    /// Gives unpinned blocks back to the pool. Leases that transfers took and ended cancel out.
    fn apply_plan(&mut self) {
        let unpinned = std::mem::take(&mut self.plan.unpin_gpu);
        self.gpu.give(&unpinned, true);
    }

    /// Computes a fresh request of the cell's context in full residency, acknowledges its copies
    /// and returns it.
    ///
    /// # Errors
    /// None unless the fixture itself is wrong.
    pub fn prefill_resident(&mut self) -> Result<RequestId> {
        let request = self.fresh_request();
        let chunk = 8_192;
        self.coordinator.on_admitted(&[Admitted {
            request,
            prefix: Prefix::Host,
            host_blocks: &[],
            resident_blocks: &[],
        }])?;
        self.running.push(Running { request, computed: 0, pages: 0, hosts: vec![] });
        let at = self.running.len() - 1;
        while self.running[at].computed < self.cell.context {
            let tokens = chunk.min(self.cell.context - self.running[at].computed);
            self.grow(at, tokens)?;
            let item = scheduled(&self.running[at], tokens, 0);
            let levels = self.levels();
            self.coordinator.build_step_plan(&[item], levels, &mut self.plan)?;
            self.running[at].computed += tokens;
            self.acknowledge()?;
            self.apply_plan();
        }
        let levels = self.levels();
        self.coordinator.build_step_plan(&[], levels, &mut self.plan)?;
        self.apply_plan();
        Ok(request)
    }

    /// Finishes the newest request; returns its host blocks and the time that `on_freed` took.
    ///
    /// # Errors
    /// None unless the fixture itself is wrong.
    pub fn finish(&mut self) -> Result<(Vec<i32>, Duration)> {
        let Some(last) = self.running.pop() else { return Ok((vec![], Duration::ZERO)) };
        let timer = Instant::now();
        self.coordinator.on_freed(last.request, FreeReason::Finished, &mut self.free_plan)?;
        let spent = timer.elapsed();
        self.gpu.give(&self.free_plan.unpin_gpu, true);
        self.gpu.give(&self.free_plan.free_gpu, false);
        Ok((last.hosts, spent))
    }

    /// Admits a request onto `hosts`, whose GPU copies are readable, gives it a hot region and
    /// builds its first plan; returns the Coordinator's time for all of it.
    ///
    /// # Errors
    /// None unless the fixture itself is wrong.
    pub fn admit_prefix_hit(&mut self, hosts: &[i32]) -> Result<Duration> {
        let request = self.fresh_request();
        let region = self.gpu.take(self.coordinator.config().hot_region_blocks());
        let host_tail = self.host.take(1);
        let gpu_tail = self.gpu.take(self.cell.groups);
        let timer = Instant::now();
        self.drain_reuse()?;
        self.coordinator.on_admitted(&[Admitted {
            request,
            prefix: Prefix::Host,
            host_blocks: hosts,
            resident_blocks: &[],
        }])?;
        self.coordinator.on_hot_region_allocated(request, &region)?;
        let pages = hosts.len() as u32;
        self.coordinator.on_blocks_allocated(&[PagesAllocated {
            request,
            first_page: PageIndex(pages),
            host_blocks: &host_tail,
            resident_blocks: &gpu_tail,
        }])?;
        let item = Scheduled {
            request,
            num_computed_tokens: pages * BLOCK_SIZE,
            num_scheduled_tokens: 1,
            num_draft_tokens: 0,
        };
        let levels = self.levels();
        self.coordinator.build_step_plan(&[item], levels, &mut self.plan)?;
        let spent = timer.elapsed();
        let mut all = hosts.to_vec();
        all.extend(host_tail);
        self.running.push(Running {
            request,
            computed: pages * BLOCK_SIZE + 1,
            pages: pages + 1,
            hosts: all,
        });
        Ok(spent)
    }

    /// The Coordinator's counters.
    #[must_use]
    pub fn stats(&self) -> hotpage_core::stats::Stats {
        self.coordinator.stats()
    }

    /// Residency rows of the last plan: what its cost was spent on.
    #[must_use]
    pub fn last_residency_rows(&self) -> usize {
        self.plan.residency.page.len()
    }
}

fn scheduled(running: &Running, tokens: u32, drafts: u32) -> Scheduled {
    Scheduled {
        request: running.request,
        num_computed_tokens: running.computed,
        num_scheduled_tokens: tokens,
        num_draft_tokens: drafts,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn steady_decode_seals_copies_releases_and_loses_pages() {
        let cell = Cell { requests: 8, context: 8_192, groups: 3, mtp: 3 };
        let mut fixture = Fixture::decoding(cell).unwrap();
        for _ in 0..600 {
            fixture.decode_step().unwrap();
        }
        let stats = fixture.stats();
        assert!(stats.spills_completed > 50, "{stats:?}");
        assert!(stats.pages_released > 50, "{stats:?}");
        assert!(stats.pages_lost > 0 && stats.rows_rejected > 0, "{stats:?}");
    }

    #[test]
    fn a_prefix_hit_adopts_every_page_of_the_finished_request() {
        let cell = Cell { requests: 1, context: 8_192, groups: 3, mtp: 0 };
        let mut fixture = Fixture::new(cell).unwrap();
        fixture.prefill_resident().unwrap();
        let (hosts, _) = fixture.finish().unwrap();
        fixture.admit_prefix_hit(&hosts).unwrap();
        assert_eq!(fixture.stats().pages_adopted, 128);
    }
}
