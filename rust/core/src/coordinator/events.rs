// SPDX-License-Identifier: Apache-2.0
//! Owns the events that change block tables: admission, growth, reuse, hot regions, imports.

use super::Coordinator;
use super::check::{check_len, page_blocks};
use crate::error::{ProtocolFault, Result};
use crate::hot::HotRegion;
use crate::ids::{BlockId, HostBlockId, PageIndex, RequestId};
use crate::lease::Lease;
use crate::page::{PageEvent, PageState};
use crate::request::RequestState;
use crate::residency::ResidenceId;
use crate::step::{Admitted, ImportOutcome, PagesAllocated, Prefix};

impl Coordinator {
    /// Requests got their first pages. Host prefixes are not looked up on the GPU here: the
    /// admitting allocation counted those blocks as free, so readable copies are shared when the
    /// next plan is built.
    ///
    /// # Errors
    /// Protocol faults for ids in use, wrong lengths and bad blocks; nothing has changed then.
    pub fn on_admitted(&mut self, batch: &[Admitted<'_>]) -> Result<()> {
        self.check_running()?;
        let requests = self.next_stamp();
        let blocks = self.next_stamp();
        for admitted in batch {
            self.stamp_request(admitted.request, requests)?;
            self.check_admitted(admitted, blocks)?;
        }
        self.check_shared_pages(batch)?;
        for admitted in batch {
            self.admit(admitted);
        }
        Ok(())
    }

    /// Requests got further pages, all resident and not written yet.
    ///
    /// # Errors
    /// Protocol faults for unknown requests, gaps, wrong lengths and bad or held blocks; nothing
    /// has changed then.
    pub fn on_blocks_allocated(&mut self, batch: &[PagesAllocated<'_>]) -> Result<()> {
        self.check_running()?;
        let requests = self.next_stamp();
        let blocks = self.next_stamp();
        for pages in batch {
            self.live(pages.request)?;
            self.stamp_request(pages.request, requests)?;
            self.check_allocated(pages, blocks)?;
        }
        for pages in batch {
            self.append(pages);
        }
        Ok(())
    }

    /// The pool handed out blocks that were unpinned. Blocks that belong to no page any more are
    /// ignored: a block's watch can outlive its page.
    ///
    /// # Errors
    /// `BlockHeld` if a page or a transfer still holds one of them; nothing has changed then.
    pub fn on_blocks_reused(&mut self, blocks: &[i32]) -> Result<()> {
        self.check_running()?;
        for &block in blocks {
            let block = BlockId(block);
            let id = self.residences.of_block(block);
            if self.residences.get(id).is_some_and(|residence| residence.holders > 0) {
                return Err(ProtocolFault::BlockHeld { block }.into());
            }
        }
        for &block in blocks {
            let id = self.residences.of_block(BlockId(block));
            if !id.is_none() {
                self.lose(id);
            }
        }
        Ok(())
    }

    /// A request got its hot region, `[G][blocks per hot group]`.
    ///
    /// # Errors
    /// Protocol faults for unknown requests, a second region, a wrong length and bad or held
    /// blocks; nothing has changed then.
    pub fn on_hot_region_allocated(&mut self, request: RequestId, blocks: &[i32]) -> Result<()> {
        self.check_running()?;
        if !self.config.transition {
            return Err(ProtocolFault::NotConfigured { what: "a hot region" }.into());
        }
        if self.live(request)?.hot.is_held() {
            return Err(ProtocolFault::HotRegionHeld { request }.into());
        }
        check_len("hot region", blocks.len(), self.config.hot_region_blocks() as usize)?;
        let stamp = self.next_stamp();
        self.check_fresh_blocks(blocks, stamp)?;
        self.stats.hot_regions_granted += 1;
        if let Some(state) = self.slot(request) {
            state.hot = HotRegion::Granted(Lease::adopt(blocks));
        }
        for &block in blocks {
            // OK because check_fresh_blocks proved the index to be in range.
            self.hot_blocks.insert(block as usize);
        }
        self.pending.release.push(request);
        Ok(())
    }

    /// An import ended. Returns the pages that the block table keeps: the engine takes back the
    /// blocks of later ones and computes their tokens.
    ///
    /// The last kept page stays writable if the engine gave it GPU blocks: its rows are restored
    /// before the next forward pass, because decoding appends to it or computes its last token
    /// again.
    ///
    /// # Errors
    /// Protocol faults for unknown requests, no import under way, or more tokens than planned.
    pub fn on_import_finished(
        &mut self,
        request: RequestId,
        outcome: ImportOutcome,
    ) -> Result<u32> {
        self.check_running()?;
        let block_size = self.config.block_size;
        let state = self.live(request)?;
        let pages = state.num_pages();
        let wrong_state = ProtocolFault::WrongPageState { request, page: PageIndex(pages) };
        let Some(planned) = state.import_tokens else { return Err(wrong_state.into()) };
        let landed = match outcome {
            ImportOutcome::Landed { num_tokens } => num_tokens,
            ImportOutcome::Failed => 0,
        };
        if landed > planned {
            return Err(wrong_state.into());
        }
        let last = state.residences.last().copied().unwrap_or(ResidenceId::NONE);
        let has_tail = !last.is_none();
        // A partial page can only be kept if it is the page that has GPU blocks to append to.
        let whole = landed / block_size;
        let partial = landed % block_size;
        let kept = if partial > 0 && has_tail && whole + 1 == pages { pages } else { whole };
        self.land(request, kept, landed, has_tail && kept == pages);
        Ok(kept)
    }

    /// The engine replaced the host block of a shared page by a fresh one (copy-on-write), so that
    /// the request can write it. The copy is part of the next plan, before the forward pass.
    /// With `resident_blocks` `[G]` the page is also restored into them, writable.
    ///
    /// # Errors
    /// Protocol faults for unknown requests, pages that are not host-only, pages whose host copy
    /// is not complete (one that was redirected just now), bad or held blocks; nothing has changed
    /// then.
    pub fn on_host_block_redirected(
        &mut self,
        request: RequestId,
        page: PageIndex,
        host_block: HostBlockId,
        resident_blocks: Option<&[i32]>,
    ) -> Result<()> {
        self.check_running()?;
        let state = self.live(request)?;
        if state.state(page) != Some(PageState::HostOnly) || !state.is_durable(page) {
            return Err(ProtocolFault::WrongPageState { request, page }.into());
        }
        let stamp = self.next_stamp();
        self.check_fresh_host_block(host_block.0, stamp)?;
        if let Some(blocks) = resident_blocks {
            check_len("resident blocks", blocks.len(), self.config.num_kv_groups as usize)?;
            self.check_fresh_blocks(blocks, stamp)?;
        }
        self.redirect(request, page, host_block, resident_blocks);
        Ok(())
    }

    /// A worker found that a row of the page never reached the host pool by mirroring (a step
    /// whose mirror did not run, a slot without a host row): the page is copied whole instead of
    /// being acknowledged, and never published on the strength of mirrored rows. An
    /// acknowledgement that is under way counts as failed.
    ///
    /// # Errors
    /// `UnknownRequest`; `WrongPageState` past the end of the block table, and for a page that
    /// every writer has vouched for already: losses must be reported first.
    pub fn on_mirror_lost(&mut self, request: RequestId, page: PageIndex) -> Result<()> {
        self.check_running()?;
        let state = self.live(request)?;
        if state.state(page).is_none() || state.is_durable(page) {
            return Err(ProtocolFault::WrongPageState { request, page }.into());
        }
        if let Some(state) = self.slot(request) {
            state.set_needs_copy(page);
        }
        if self.transfers.fail_mirrored(request, page) {
            self.doubt_spill(request, page);
        }
        Ok(())
    }

    /// The engine emptied its prefix index: GPU copies that nobody reads cannot be found again.
    ///
    /// # Errors
    /// `ShutDown`.
    pub fn on_prefix_cache_reset(&mut self) -> Result<()> {
        self.check_running()?;
        let unread: Vec<ResidenceId> = self
            .residences
            .iter()
            .filter(|(_, r)| r.holders == 0 && r.readers.is_empty())
            .map(|(id, _)| id)
            .collect();
        for id in unread {
            self.residences.remove(id);
        }
        Ok(())
    }

    fn admit(&mut self, admitted: &Admitted<'_>) {
        let request = admitted.request;
        let groups = self.config.num_kv_groups as usize;
        let mut state = RequestState::new();
        match admitted.prefix {
            Prefix::Gpu => self.admit_gpu_prefix(&mut state, admitted, groups),
            Prefix::Host => self.admit_host_prefix(&mut state, admitted, groups),
            Prefix::Import { num_tokens } => self.admit_import(&mut state, admitted, 0, num_tokens),
            Prefix::PartialImport { host_pages, num_tokens } => {
                self.admit_import(&mut state, admitted, host_pages, num_tokens);
            }
        }
        for &block in admitted.host_blocks {
            self.add_host_user(block);
        }
        let index = request.index();
        if index >= self.requests.len() {
            self.requests.resize_with(index + 1, || None);
        }
        self.requests[index] = Some(Box::new(state));
        self.num_live += 1;
        self.stats.admitted += 1;
        self.lru.touch(request);
    }

    fn admit_gpu_prefix(&mut self, state: &mut RequestState, a: &Admitted<'_>, groups: usize) {
        for (page, blocks) in a.resident_blocks.chunks_exact(groups).enumerate() {
            let page = PageIndex(page as u32);
            let id = self.share_or_insert(blocks, HostBlockId::NULL, page, a.request);
            state.push_page(HostBlockId::NULL, id, PageState::Dirty);
        }
    }

    fn admit_host_prefix(&mut self, state: &mut RequestState, a: &Admitted<'_>, groups: usize) {
        let mut host_only = false;
        for (index, &block) in a.host_blocks.iter().enumerate() {
            let page = PageIndex(index as u32);
            let host = HostBlockId(block);
            match page_blocks(a.resident_blocks, index, groups) {
                None => {
                    host_only = true;
                    state.push_page(host, ResidenceId::NONE, PageState::HostOnly);
                }
                Some(blocks) => {
                    let shared = !self.residences.of_host_block(host).is_none()
                        && self.residences.blocks(self.residences.of_host_block(host)) == blocks;
                    let id = self.share_or_insert(blocks, host, page, a.request);
                    if !shared {
                        // Nobody else may read the blocks before the restore has completed.
                        self.residences.unlink(id);
                        state.unconfirmed_reads += 1;
                        let rows = self.config.block_size;
                        self.pending.restores.push((a.request, page, rows));
                    }
                    state.push_page(host, id, PageState::Clean);
                }
            }
            state.set_durable(page, true);
        }
        state.published = state.num_pages();
        state.sealed = state.num_pages();
        state.tail_seen = 0;
        if host_only {
            self.pending.adopt.push(a.request);
        }
    }

    /// The pages that the import fills, and a last page with GPU blocks, wait for its end; earlier
    /// published pages are readable at once.
    fn admit_import(
        &mut self,
        state: &mut RequestState,
        a: &Admitted<'_>,
        host_pages: u32,
        num_tokens: u32,
    ) {
        let groups = self.config.num_kv_groups as usize;
        let mut host_only = false;
        for (index, &block) in a.host_blocks.iter().enumerate() {
            let page = PageIndex(index as u32);
            let host = HostBlockId(block);
            if page.0 >= host_pages {
                self.recycle_host_block(block);
            }
            match page_blocks(a.resident_blocks, index, groups) {
                Some(blocks) => {
                    let id = self.residences.insert(blocks, host, page, a.request);
                    if page.0 < host_pages {
                        // Others may hit this host page, and must not find blocks that are still
                        // to be restored.
                        self.residences.unlink(id);
                    }
                    state.push_page(host, id, PageState::Importing);
                }
                None if page.0 < host_pages => {
                    host_only = true;
                    state.push_page(host, ResidenceId::NONE, PageState::HostOnly);
                }
                None => state.push_page(host, ResidenceId::NONE, PageState::Importing),
            }
            if page.0 < host_pages {
                state.set_durable(page, true);
            }
        }
        state.published = host_pages.min(state.num_pages());
        if num_tokens > 0 && !a.host_blocks.is_empty() {
            state.import_tokens = Some(num_tokens);
        }
        if host_only {
            self.pending.adopt.push(a.request);
        }
    }

    /// Holds `blocks` for `request`: the residence that they are already, or a fresh one.
    fn share_or_insert(
        &mut self,
        blocks: &[i32],
        host: HostBlockId,
        page: PageIndex,
        request: RequestId,
    ) -> ResidenceId {
        let id =
            blocks.first().map_or(ResidenceId::NONE, |&b| self.residences.of_block(BlockId(b)));
        if !id.is_none() && self.residences.blocks(id) == blocks {
            if let Some(residence) = self.residences.get_mut(id) {
                if residence.holders == 0 && residence.releasing {
                    self.released_gpu -= i64::from(self.config.num_kv_groups);
                }
                residence.holders += 1;
                residence.readers.push(request);
                return id;
            }
        }
        self.residences.insert(blocks, host, page, request)
    }

    fn append(&mut self, pages: &PagesAllocated<'_>) {
        let groups = self.config.num_kv_groups as usize;
        for (at, blocks) in pages.resident_blocks.chunks_exact(groups).enumerate() {
            let page = PageIndex(pages.first_page.0 + at as u32);
            let host = pages.host_blocks.get(at).copied().unwrap_or(HostBlockId::NULL.0);
            if host != HostBlockId::NULL.0 {
                self.recycle_host_block(host);
                self.add_host_user(host);
            }
            let id = self.residences.insert(blocks, HostBlockId(host), page, pages.request);
            if let Some(state) = self.slot(pages.request) {
                state.push_page(HostBlockId(host), id, PageState::Dirty);
            }
        }
    }

    /// A host block gets new contents: no GPU copy and no hot row of the old ones may be found.
    fn recycle_host_block(&mut self, block: i32) {
        self.residences.forget_host_block(HostBlockId(block));
        self.pending.recycled_host_blocks.push(block);
    }

    /// One block of the residence is gone, so the page is lost in all its KV cache groups.
    fn lose(&mut self, id: ResidenceId) {
        let Some(residence) = self.residences.remove(id) else { return };
        for &request in &residence.readers {
            let Some(state) = self.slot(request) else { continue };
            if state.apply(request, residence.page, PageEvent::BlockReused).is_ok() {
                if let Some(slot) = state.residences.get_mut(residence.page.index()) {
                    *slot = ResidenceId::NONE;
                }
                state.mark_changed(residence.page);
                self.stats.pages_lost += 1;
            }
        }
    }

    fn land(&mut self, request: RequestId, kept: u32, landed: u32, restore_tail: bool) {
        let block_size = self.config.block_size;
        let Some(state) = self.slot(request) else { return };
        state.import_tokens = None;
        let dropped = state.host_blocks.split_off(kept as usize);
        let dropped_states = state.states().get(kept as usize..).unwrap_or(&[]).to_vec();
        let dropped_residences = state.residences.split_off(kept as usize);
        state.truncate_states(kept);
        state.published = state.published.min(kept);
        for page in (kept..kept + dropped.len() as u32).map(PageIndex) {
            state.set_durable(page, false);
        }
        for page in (0..kept).map(PageIndex) {
            // OK because pages that the import fills are Importing until now; published ones are
            // in a later state, which stays.
            let _ = state.apply(request, page, PageEvent::ImportLanded);
            state.set_durable(page, (page.0 + 1) * block_size <= landed);
        }
        state.sealed = kept;
        if restore_tail {
            let page = PageIndex(kept - 1);
            let _ = state.apply(request, page, PageEvent::TailRestored);
            state.set_durable(page, false);
            // Its earlier rows are not mirrored by this engine, so it is copied whole.
            state.set_needs_copy(page);
            state.sealed = page.0;
            let rows = landed - page.0 * block_size;
            state.mark_changed(page);
            state.unconfirmed_reads += 1;
            self.pending.restores.push((request, page, rows));
        }
        for block in dropped {
            self.remove_host_user(block);
        }
        for (id, page_state) in dropped_residences.into_iter().zip(dropped_states) {
            if page_state == PageState::Importing {
                self.residences.remove(id);
            } else {
                // A copy that was adopted is somebody else's too.
                self.residences.remove_reader(id, request);
            }
        }
        self.queue_publication(request);
    }

    fn redirect(
        &mut self,
        request: RequestId,
        page: PageIndex,
        host_block: HostBlockId,
        resident_blocks: Option<&[i32]>,
    ) {
        self.recycle_host_block(host_block.0);
        self.add_host_user(host_block.0);
        let id = match resident_blocks {
            Some(blocks) => self.residences.insert(blocks, host_block, page, request),
            None => ResidenceId::NONE,
        };
        let block_size = self.config.block_size;
        let Some(state) = self.slot(request) else { return };
        let source =
            HostBlockId(core::mem::replace(&mut state.host_blocks[page.index()], host_block.0));
        state.set_durable(page, false);
        state.published = state.published.min(page.0);
        state.unconfirmed_reads += 1;
        if !id.is_none() {
            let _ = state.apply(request, page, PageEvent::TailRestored);
            state.residences[page.index()] = id;
            state.set_needs_copy(page);
            state.sealed = state.sealed.min(page.0);
            state.mark_changed(page);
            state.unconfirmed_reads += 1;
            self.pending.restores.push((request, page, block_size));
        }
        self.pending.host_copies.push((request, page, source));
    }
}
