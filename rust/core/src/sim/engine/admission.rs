// SPDX-License-Identifier: Apache-2.0
//! Owns admission: what of a request's prefix is found where, what it takes to start, and the
//! blocks for it.

use super::{ConversationId, Engine, ServingPolicy, WorkerSide};
use crate::error::{Error, Result};
use crate::ids::HostBlockId;
use crate::step::{Admission, AdmissionQuery, Admitted, Prefix, Refusal};

use super::request::{Running, Work};

/// The part of a request's prefix that is in the prefix index.
#[derive(Debug, Default)]
struct Hit {
    num_pages: u32,
    /// `[pages]` host blocks; empty without a host pool.
    host_blocks: Vec<i32>,
    /// GPU blocks to share: `[pages][G + other]` without a host pool, `[G]` of each readable copy
    /// under dense residency with one.
    shared_blocks: Vec<i32>,
    /// `[pages]` where each page's readable copy starts in `shared_blocks`; dense residency only.
    copies: Vec<Option<usize>>,
    /// Leading pages whose GPU blocks somebody holds, so that sharing them takes nothing.
    num_leased_pages: u32,
}

/// Blocks fresh from the pools for one admission.
#[derive(Debug, Default)]
struct Grant {
    hot_region: Vec<i32>,
    /// `[pages][G]` of hit pages without a readable copy.
    restored: Vec<i32>,
    /// `[pages][other]` of hit pages.
    other: Vec<i32>,
    /// `[pages][G]` of new pages, then `[pages][other]`.
    new_pages: Vec<i32>,
    new_host: Vec<i32>,
}

impl<W: WorkerSide> Engine<W> {
    /// Admits waiting requests in their order until one does not fit.
    pub(super) fn admit_waiting(&mut self) -> Result<()> {
        while let Some(&id) = self.waiting.front() {
            let full = self.running.len() >= self.config.max_running as usize;
            if full || self.budget == 0 || !self.admit(id)? {
                break;
            }
            self.waiting.pop_front();
            self.running.push(id);
        }
        Ok(())
    }

    /// Admits and schedules one request, or changes nothing and returns false.
    fn admit(&mut self, id: ConversationId) -> Result<bool> {
        let hit = self.find_prefix(id);
        let Some(request) = self.request(id) else { return Ok(true) };
        let has_host_pool = self.config.policy.has_host_pool();
        let query = AdmissionQuery {
            num_tokens: request.num_known,
            host_prefix_pages: if has_host_pool { hit.num_pages } else { 0 },
            gpu_prefix_pages: if has_host_pool { 0 } else { hit.num_leased_pages },
        };
        let num_hit = hit.num_pages * self.config.block_size;
        let tokens = request.num_known - num_hit;
        let tokens = tokens.min(self.config.chunk_tokens).min(self.budget);
        let cost = match self.coordinator.try_admit(query, self.levels()) {
            Admission::Fits(cost) => cost,
            Admission::Refused(Refusal::NeverFits { pool, need, total }) => {
                return Err(Error::Capacity {
                    pool,
                    need: i64::from(need),
                    have: i64::from(total),
                    remedy: "give the pool more memory or shorten the conversations",
                });
            }
            Admission::Refused(refusal) => {
                self.report.refusals.count(refusal);
                return Ok(false);
            }
        };
        let new_pages = (num_hit + tokens).div_ceil(self.config.block_size) - hit.num_pages;
        let Some(grant) = self.allocate(&hit, new_pages, cost.hot_region)? else {
            self.report.refusals.gpu_short += 1;
            return Ok(false);
        };
        self.start(id, &hit, &grant)?;
        let (groups, ..) = self.blocks_per_page();
        let (resident, other) = grant.new_pages.split_at(new_pages as usize * groups);
        self.add_pages(id, new_pages, &grant.new_host, resident, other)?;
        self.report.prefix_hit_tokens += u64::from(num_hit);
        self.schedule(id, Work { tokens, drafts: 0 }, hit.num_pages);
        Ok(true)
    }

    /// Looks up as many leading pages as may be reused: at least one token is left to compute.
    fn find_prefix(&mut self, id: ConversationId) -> Hit {
        let block_size = self.config.block_size;
        let (groups, ..) = self.blocks_per_page();
        let Self { conversations, prefix, coordinator, gpu, config, .. } = self;
        let mut hit = Hit::default();
        let Some(state) = conversations.get_mut(id.0).and_then(Option::as_mut) else { return hit };
        let known = state.request.as_ref().map_or(0, |request| request.num_known);
        let mut all_leased = true;
        for &key in state.page_keys(known.saturating_sub(1) / block_size, block_size) {
            let Some(blocks) = prefix.get(key) else { break };
            hit.num_pages += 1;
            if !config.policy.has_host_pool() {
                hit.shared_blocks.extend_from_slice(blocks);
                all_leased &= blocks.iter().all(|&block| gpu.num_holds(block) > 0);
                hit.num_leased_pages += u32::from(all_leased);
                continue;
            }
            hit.host_blocks.extend_from_slice(blocks);
            if config.policy == ServingPolicy::Offload {
                let copy = blocks.first().and_then(|&b| coordinator.readable_copy(HostBlockId(b)));
                hit.copies.push(copy.map(|_| hit.shared_blocks.len()));
                hit.shared_blocks.extend_from_slice(copy.unwrap_or_default());
                debug_assert!(copy.is_none_or(|copy| copy.len() == groups));
            }
        }
        hit
    }

    /// Takes everything that the admission needs, or nothing. What is shared is touched first, so
    /// that the allocation cannot hand it out.
    fn allocate(&mut self, hit: &Hit, new_pages: u32, hot_region: bool) -> Result<Option<Grant>> {
        let (groups, other, host) = self.blocks_per_page();
        let (new_pages, hit_pages) = (new_pages as usize, hit.num_pages as usize);
        let num_restored = hit.copies.iter().filter(|copy| copy.is_none()).count() * groups;
        let hot = self.coordinator.config().hot_region_blocks() as usize;
        let sizes = [
            if hot_region { hot } else { 0 },
            num_restored,
            hit_pages * other * host,
            new_pages * (groups + other),
        ];
        self.gpu.touch(&hit.shared_blocks)?;
        self.host.touch(&hit.host_blocks)?;
        let (mut blocks, mut new_host) = (Vec::new(), Vec::new());
        let fits = new_pages * host <= self.host.num_available() as usize
            && self.allocate_gpu(sizes.iter().sum(), &mut blocks)?
            && self.allocate_host(new_pages * host, &mut new_host)?;
        if !fits {
            self.gpu.free(&blocks)?;
            self.gpu.free(&hit.shared_blocks)?;
            self.host.free(&hit.host_blocks)?;
            return Ok(None);
        }
        let mut rest = blocks.as_slice();
        let [hot_region, restored, other, new_pages] = sizes.map(|size| {
            let (part, tail) = rest.split_at(size);
            rest = tail;
            part.to_vec()
        });
        Ok(Some(Grant { hot_region, restored, other, new_pages, new_host }))
    }

    /// Tells the Coordinator and the worker, and enters the hit pages in the request's tables.
    fn start(&mut self, id: ConversationId, hit: &Hit, grant: &Grant) -> Result<()> {
        let request = self.ids.take();
        let resident_blocks = self.prefix_residency(hit, grant);
        let has_host_pool = self.config.policy.has_host_pool();
        let admitted = Admitted {
            request,
            prefix: if has_host_pool { Prefix::Host } else { Prefix::Gpu },
            host_blocks: &hit.host_blocks,
            resident_blocks: &resident_blocks,
        };
        self.report.events += 1 + u64::from(!grant.hot_region.is_empty());
        self.coordinator.on_admitted(&[admitted])?;
        if !grant.hot_region.is_empty() {
            self.coordinator.on_hot_region_allocated(request, &grant.hot_region)?;
        }
        // OK because there are as many state rows as requests that may run.
        let state_row = self.state_rows.pop_first().unwrap_or_default();
        if request.index() >= self.owners.len() {
            self.owners.resize(request.index() + 1, None);
        }
        self.owners[request.index()] = Some(id);
        if has_host_pool {
            self.report.bytes_to_gpu += u64::from(hit.num_pages) * self.indexer_page_bytes();
        }
        let block_size = self.config.block_size;
        let other_blocks = if has_host_pool { grant.other.clone() } else { self.shared_other(hit) };
        let Some(state) = self.conversations.get_mut(id.0).and_then(Option::as_mut) else {
            return Ok(());
        };
        let key = state.content.id() ^ ((state.turn as u64) << 48);
        self.worker.start(request, state_row, key)?;
        for (page, &block) in (0_u32..).zip(&hit.host_blocks) {
            self.batch.new_host_pages.push((state_row, page, block));
        }
        let Some(waiting) = state.request.as_mut() else { return Ok(()) };
        waiting.num_computed = hit.num_pages * block_size;
        waiting.running = Some(Running {
            id: request,
            state_row,
            num_pages: hit.num_pages,
            host_blocks: hit.host_blocks.clone(),
            other_blocks,
            resident_blocks: if has_host_pool { Vec::new() } else { resident_blocks },
            num_published: hit.num_pages,
        });
        Ok(())
    }

    /// `[pages][G]` GPU blocks of the hit pages: none where they stay host-only.
    fn prefix_residency(&self, hit: &Hit, grant: &Grant) -> Vec<i32> {
        let (groups, other, _) = self.blocks_per_page();
        match self.config.policy {
            ServingPolicy::Hotpage => Vec::new(),
            ServingPolicy::Preempt => {
                let pages = hit.shared_blocks.chunks_exact(groups + other);
                pages.flat_map(|page| &page[..groups]).copied().collect()
            }
            ServingPolicy::Offload => {
                let mut fresh = grant.restored.chunks_exact(groups);
                let pages = hit.copies.iter().flat_map(|copy| match copy {
                    Some(at) => &hit.shared_blocks[*at..at + groups],
                    // OK because one was allocated for each page without a copy.
                    None => fresh.next().unwrap_or_default(),
                });
                pages.copied().collect()
            }
        }
    }

    /// `[pages][other]` indexer blocks that come with pages of the GPU prefix index.
    fn shared_other(&self, hit: &Hit) -> Vec<i32> {
        let (groups, other, _) = self.blocks_per_page();
        let pages = hit.shared_blocks.chunks_exact(groups + other);
        pages.flat_map(|page| &page[groups..]).copied().collect()
    }
}
