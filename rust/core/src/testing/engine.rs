// SPDX-License-Identifier: Apache-2.0
//! Owns the toy engine's half of a world: admission, growth, imports, ends of requests, and the
//! index of published prefixes.

use super::events::PrefixCopies;
use super::world::{ToyRequest, World, accepted};
use super::{Check, ensure};
use crate::config::HostCopy;
use crate::ids::{HostBlockId, PageIndex, RequestId};
use crate::page::PageState;
use crate::step::{Admitted, FreePlan, FreeReason, ImportOutcome, PagesAllocated, Prefix};

impl World {
    /// Hands out GPU blocks, reports those that were watched, and overwrites them at once.
    fn take_gpu(&mut self, n: u32) -> Check<Option<Vec<i32>>> {
        let mut reused = Vec::new();
        let Some(blocks) = self.gpu.try_allocate(n as usize, &mut reused) else {
            return Ok(None);
        };
        accepted(self.coordinator.on_blocks_reused(&reused))?;
        self.model.reused(&reused)?;
        self.worker.scribble_gpu(&blocks);
        Ok(Some(blocks))
    }

    /// Hands out host blocks; published pages in them are forgotten.
    fn take_host(&mut self, n: u32) -> Option<Vec<i32>> {
        let blocks = self.host.try_allocate(n as usize, &mut Vec::new())?;
        self.index.retain(|_, block| !blocks.contains(block));
        self.worker.scribble_host(&blocks);
        Some(blocks)
    }

    fn fits(&self, gpu: u32, host: u32) -> bool {
        gpu <= self.gpu.num_free() && host <= self.host.num_free()
    }

    fn fresh_id(&self) -> u32 {
        let used = |id: &u32| self.requests.contains_key(id) || self.draining.contains_key(id);
        (0..).find(|id| !used(id)).unwrap_or(0)
    }

    fn has_host_pool(&self) -> bool {
        self.config().host_copy != HostCopy::None
    }

    pub(super) fn admit(&mut self, pages: u8) -> Check<bool> {
        let n = u32::from(pages).max(1);
        let host = if self.has_host_pool() { n } else { 0 };
        if !self.fits(n * self.config().num_kv_groups, host) {
            return Ok(false);
        }
        let id = self.fresh_id();
        let request = RequestId(id);
        let (prefix, none) = (Prefix::Host, &[][..]);
        let admitted = Admitted { request, prefix, host_blocks: none, resident_blocks: none };
        accepted(self.coordinator.on_admitted(&[admitted]))?;
        self.refuse(|c| c.on_admitted(&[admitted]))?;
        self.model.admitted(id, Vec::new());
        self.requests.insert(id, ToyRequest::default());
        for _ in 0..n {
            self.append(id)?;
        }
        Ok(true)
    }

    pub(super) fn grow(&mut self, pick: u8) -> Check<bool> {
        let Some(id) = self.picked(pick, false) else { return Ok(false) };
        let host = u32::from(self.has_host_pool());
        if !self.fits(self.config().num_kv_groups, host) || self.requests[&id].lost {
            return Ok(false);
        }
        self.append(id)?;
        Ok(true)
    }

    fn append(&mut self, id: u32) -> Check {
        let groups = self.config().num_kv_groups;
        let Some(blocks) = self.take_gpu(groups)? else { return Ok(()) };
        let host =
            if self.has_host_pool() { self.take_host(1).unwrap_or_default() } else { vec![] };
        let request = RequestId(id);
        let first_page = PageIndex(accepted(self.coordinator.num_pages(request))?);
        let pages =
            PagesAllocated { request, first_page, host_blocks: &host, resident_blocks: &blocks };
        accepted(self.coordinator.on_blocks_allocated(&[pages]))?;
        self.refuse(|c| c.on_blocks_allocated(&[pages]))?;
        let block = host.first().copied().unwrap_or(0);
        self.model.grown(id, block, blocks);
        self.requests.entry(id).or_default().host.push(block);
        Ok(())
    }

    pub(super) fn grant_hot(&mut self, pick: u8) -> Check<bool> {
        let Some(id) = self.picked(pick, false) else { return Ok(false) };
        if !self.requests[&id].hot.is_empty() || !self.config().transition {
            return Ok(false);
        }
        self.give_hot(id)
    }

    fn give_hot(&mut self, id: u32) -> Check<bool> {
        let Some(blocks) = self.take_gpu(self.config().hot_region_blocks())? else {
            return Ok(false);
        };
        accepted(self.coordinator.on_hot_region_allocated(RequestId(id), &blocks))?;
        self.refuse(|c| c.on_hot_region_allocated(RequestId(id), &blocks))?;
        self.requests.entry(id).or_default().hot.clone_from(&blocks);
        self.model.requests.entry(id).or_default().hot = blocks;
        Ok(true)
    }

    /// Published pages that a request with this prefix can reuse, in order.
    fn hit(&self, key: &[u32]) -> Vec<i32> {
        let block_size = self.config().block_size as usize;
        let prefixes = (1..=key.len() / block_size).map(|pages| &key[..pages * block_size]);
        prefixes.map_while(|prefix| self.index.get(prefix).copied()).collect()
    }

    pub(super) fn admit_prefix(&mut self, pick: u8, copies: PrefixCopies) -> Check<bool> {
        let keys: Vec<Vec<u32>> = self.index.keys().cloned().collect();
        let Some(at) = usize::from(pick).checked_rem(keys.len()) else { return Ok(false) };
        let host = self.hit(&keys[at]);
        if host.is_empty() {
            return Ok(false);
        }
        let groups = self.config().num_kv_groups;
        let n = u32::try_from(host.len()).unwrap_or(0);
        let dense = copies == PrefixCopies::Fresh;
        let fresh = if dense { n * groups } else { 0 };
        let hot = if self.config().transition { self.config().hot_region_blocks() } else { 0 };
        if !self.fits(fresh + hot, 0) || (hot == 0 && !dense) {
            return Ok(false);
        }
        self.host.touch(&host)?;
        let mut resident = Vec::new();
        for &block in &host {
            match copies {
                PrefixCopies::None => {}
                PrefixCopies::Fresh => {
                    resident.extend(self.take_gpu(groups)?.unwrap_or_default());
                }
                PrefixCopies::Readable => {
                    let copy = self.coordinator.readable_copy(HostBlockId(block));
                    let copy = copy.map_or_else(|| vec![0; groups as usize], <[i32]>::to_vec);
                    self.gpu.touch(
                        copy.iter().copied().filter(|&b| b != 0).collect::<Vec<_>>().as_slice(),
                    )?;
                    resident.extend(copy);
                }
            }
        }
        let id = self.fresh_id();
        let request = RequestId(id);
        let prefix = Prefix::Host;
        let admitted = Admitted { request, prefix, host_blocks: &host, resident_blocks: &resident };
        accepted(self.coordinator.on_admitted(&[admitted]))?;
        let mut pages = Vec::new();
        for (page, &block) in host.iter().enumerate() {
            let at = page * groups as usize;
            let blocks = resident.get(at..at + groups as usize).unwrap_or(&[]);
            let placed = blocks.iter().any(|&b| b != 0);
            let state = if placed { PageState::Clean } else { PageState::HostOnly };
            pages.push((state, block, if placed { blocks.to_vec() } else { Vec::new() }));
        }
        let host_only = pages.iter().any(|(state, ..)| *state == PageState::HostOnly);
        self.model.admitted(id, pages);
        if dense {
            let model = self.model.requests.entry(id).or_default();
            model.restores.extend((0..n).map(|page| (page, self.coordinator.config().block_size)));
        }
        let tags = keys[at][..host.len() * self.config().block_size as usize].to_vec();
        self.requests.insert(id, ToyRequest { host, tags, published: n, ..ToyRequest::default() });
        if host_only {
            self.give_hot(id)?;
        }
        Ok(true)
    }

    pub(super) fn admit_import(&mut self, tokens: u8, tail: bool) -> Check<bool> {
        let tokens = u32::from(tokens).max(1);
        let n = self.config().pages_for(tokens);
        let groups = self.config().num_kv_groups;
        let hot = if self.config().transition { self.config().hot_region_blocks() } else { 0 };
        let gpu = hot + if tail { groups } else { 0 };
        if !self.fits(gpu, n) || !self.has_host_pool() || hot == 0 {
            return Ok(false);
        }
        let blocks = if tail { self.take_gpu(groups)?.unwrap_or_default() } else { Vec::new() };
        let host = self.take_host(n).unwrap_or_default();
        let mut resident = vec![0; if tail { (n - 1) as usize * groups as usize } else { 0 }];
        resident.extend(&blocks);
        let id = self.fresh_id();
        let request = RequestId(id);
        let prefix = Prefix::Import { num_tokens: tokens };
        let admitted = Admitted { request, prefix, host_blocks: &host, resident_blocks: &resident };
        accepted(self.coordinator.on_admitted(&[admitted]))?;
        self.refuse(|c| c.on_freed(request, FreeReason::Aborted, &mut FreePlan::default()))?;
        let last = host.len() - 1;
        let tail_of = |page: usize| if page == last { blocks.clone() } else { Vec::new() };
        let pages = host.iter().enumerate();
        let pages = pages.map(|(page, &block)| (PageState::Importing, block, tail_of(page)));
        self.model.admitted(id, pages.collect());
        let importing = Some(tokens);
        let state = ToyRequest { host, importing, import_tail: blocks, ..ToyRequest::default() };
        self.requests.insert(id, state);
        self.give_hot(id)
    }

    pub(super) fn end_import(&mut self, pick: u8, tokens: Option<u8>) -> Check<bool> {
        let Some(id) = self.picked(pick, true) else { return Ok(false) };
        let Some(mut request) = self.requests.remove(&id) else { return Ok(false) };
        let planned = request.importing.take().unwrap_or(0);
        let landed = tokens.map_or(0, |n| u32::from(n).min(planned));
        let outcome = match tokens {
            Some(_) => ImportOutcome::Landed { num_tokens: landed },
            None => ImportOutcome::Failed,
        };
        let too_many = ImportOutcome::Landed { num_tokens: planned + 1 };
        self.refuse(|c| c.on_import_finished(RequestId(id), too_many))?;
        let block_size = self.config().block_size;
        for token in 0..landed {
            self.next_tag += 1;
            request.tags.push(self.next_tag);
            let block = request.host[(token / block_size) as usize].unsigned_abs() as usize;
            for memory in &mut self.worker.host {
                memory[block][(token % block_size) as usize] = self.next_tag;
            }
        }
        let kept = accepted(self.coordinator.on_import_finished(RequestId(id), outcome))?;
        self.refuse(|c| c.on_import_finished(RequestId(id), outcome))?;
        let tail = core::mem::take(&mut request.import_tail);
        let pages = request.host.len();
        let whole = landed / block_size;
        let keeps_tail = !tail.is_empty() && self.config().pages_for(landed) as usize == pages;
        let expected = if keeps_tail { self.config().pages_for(landed) } else { whole };
        ensure(3, kept == expected, || format!("import keeps {kept} pages, expected {expected}"))?;
        if !keeps_tail {
            self.gpu.release(&tail)?;
        }
        let dropped = request.host.split_off(kept as usize);
        self.host.release(&dropped)?;
        request.tags.truncate((kept * block_size) as usize);
        if keeps_tail && request.tags.len() == pages * block_size as usize {
            // The last token is computed again, so that there are logits to sample from.
            request.tags.pop();
        }
        self.model.imported(id, landed, kept, block_size);
        self.requests.insert(id, request);
        Ok(true)
    }

    pub(super) fn redirect(&mut self, pick: u8, writable: bool) -> Check<bool> {
        let Some(id) = self.picked(pick, false) else { return Ok(false) };
        let block_size = self.config().block_size;
        let groups = self.config().num_kv_groups;
        let request = RequestId(id);
        let pages = accepted(self.coordinator.num_pages(request))?;
        let host_only = |page: &PageIndex| {
            self.coordinator.page_state(request, *page) == Ok(Some(PageState::HostOnly))
        };
        let mut found = (0..pages).map(PageIndex).filter(host_only);
        let Some(page) = (if writable { found.next_back() } else { found.next() }) else {
            return Ok(false);
        };
        let durable = accepted(self.coordinator.durable_prefix(request))? > page.0;
        // Only the last page is written, and then its last token is computed again.
        let last = page.0 + 1 == pages;
        let full = self.requests[&id].tags.len() == (pages * block_size) as usize;
        if !durable
            || (writable && !(last && full))
            || self.requests[&id].lost
            || !self.fits(if writable { groups } else { 0 }, 1)
            || self.model.transfers.values().any(|t| t.request == id)
        {
            return Ok(false);
        }
        let blocks = if writable { self.take_gpu(groups)?.unwrap_or_default() } else { Vec::new() };
        let host = self.take_host(1).unwrap_or_default();
        let block = host.first().copied().unwrap_or(0);
        let given = writable.then_some(&blocks[..]);
        let fresh = HostBlockId(block);
        accepted(self.coordinator.on_host_block_redirected(request, page, fresh, given))?;
        self.refuse(|c| c.on_host_block_redirected(request, page, fresh, given))?;
        self.model.redirected(id, page.0, block, &blocks, block_size);
        let state = self.requests.entry(id).or_default();
        state.host[page.index()] = block;
        state.published = state.published.min(page.0);
        if writable {
            state.tags.pop();
        }
        Ok(true)
    }

    pub(super) fn tenant(&mut self, blocks: u8) -> Check<bool> {
        let Some(blocks) = self.take_gpu(u32::from(blocks).max(1))? else { return Ok(false) };
        self.tenants.extend(blocks);
        Ok(true)
    }

    pub(super) fn tenants_leave(&mut self) -> Check<bool> {
        let blocks = core::mem::take(&mut self.tenants);
        self.gpu.release(&blocks)?;
        Ok(!blocks.is_empty())
    }

    pub(super) fn free(&mut self, pick: u8, reason: FreeReason) -> Check<bool> {
        let Some(id) = self.picked(pick, false) else { return Ok(false) };
        let mut plan = FreePlan::default();
        accepted(self.coordinator.on_freed(RequestId(id), reason, &mut plan))?;
        self.refuse(|c| c.on_freed(RequestId(id), reason, &mut FreePlan::default()))?;
        self.publish(id, plan.publish_pages)?;
        self.model.freed(id, reason, &plan)?;
        self.gpu.unpin(&plan.unpin_gpu)?;
        self.gpu.release(&plan.free_gpu)?;
        let Some(request) = self.requests.remove(&id) else { return Ok(true) };
        // Tail first, so that the start of a prefix is recycled last.
        let host: Vec<i32> = request.host.iter().rev().copied().filter(|&b| b != 0).collect();
        self.host.release(&host)?;
        if !plan.retired {
            self.draining.insert(id, request);
        }
        Ok(true)
    }

    /// Publishes the first `pages` pages of a request, those that are not published yet.
    pub(super) fn publish(&mut self, id: u32, pages: u32) -> Check {
        let block_size = self.config().block_size as usize;
        let live = self.requests.get_mut(&id);
        let Some(request) = live.or_else(|| self.draining.get_mut(&id)) else {
            return ensure(3, pages == 0, || format!("request {id} is published after its end"));
        };
        let from = request.published as usize;
        request.published = request.published.max(pages);
        let request = request.clone();
        for page in from..pages as usize {
            let end = (page + 1) * block_size;
            let block = request.host[page];
            let good = request.tags.len() >= end && request.spoiled_from.is_none_or(|s| s >= end);
            ensure(3, good, || format!("request {id} publishes page {page}, which is not good"))?;
            let tags = &request.tags[page * block_size..end];
            for (rank, memory) in self.worker.host.iter().enumerate() {
                let rows = &memory[block.unsigned_abs() as usize][..block_size];
                ensure(3, rows == tags, || {
                    format!("request {id} page {page} rank {rank}: {rows:?} published for {tags:?}")
                })?;
            }
            let held = self.host.refs()[block.unsigned_abs() as usize] > 0;
            ensure(3, held, || format!("host block {block} is published and not held"))?;
            self.index.entry(request.tags[..end].to_vec()).or_insert(block);
        }
        Ok(())
    }

    pub(super) fn reset(&mut self) -> Check<bool> {
        accepted(self.coordinator.on_prefix_cache_reset())?;
        self.index.clear();
        Ok(true)
    }

    pub(super) fn shutdown(&mut self) -> Check<bool> {
        let (mut plan, mut free_host) = (FreePlan::default(), Vec::new());
        self.coordinator.shutdown(&mut plan, &mut free_host);
        self.shut_down = true;
        self.gpu.unpin(&plan.unpin_gpu)?;
        self.gpu.release(&plan.free_gpu)?;
        self.host.release(&free_host)?;
        let tenants = core::mem::take(&mut self.tenants);
        self.gpu.release(&tenants)?;
        for (pool, refs) in [("GPU", self.gpu.refs()), ("host", self.host.refs())] {
            let leased = refs.iter().filter(|&&n| n > 0).count();
            ensure(8, leased == 0, || format!("{leased} {pool} blocks are leased after shutdown"))?;
        }
        self.coordinator.shutdown(&mut plan, &mut free_host);
        let nothing = plan == FreePlan::default() && !self.coordinator.has_pending_work();
        ensure(8, nothing, || "a second shutdown still has something to do".into())?;
        self.requests.clear();
        self.draining.clear();
        Ok(true)
    }
}
