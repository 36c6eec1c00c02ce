// SPDX-License-Identifier: Apache-2.0
//! Owns what must hold of an event before it changes anything: lengths, ranges, and blocks that
//! are what the event says they are.

use super::{Coordinator, host_users_of};
use crate::config::HostCopy;
use crate::error::{ProtocolFault, Result};
use crate::ids::{BlockId, HostBlockId, PageIndex, RequestId};
use crate::step::{Admitted, PagesAllocated, Prefix};

impl Coordinator {
    pub(super) fn check_admitted(&mut self, admitted: &Admitted<'_>, stamp: u64) -> Result<()> {
        let request = admitted.request;
        if self.requests.get(request.index()).is_some_and(Option::is_some) {
            return Err(ProtocolFault::RequestInUse { request }.into());
        }
        let groups = self.config.num_kv_groups as usize;
        let host = admitted.host_blocks;
        let resident = admitted.resident_blocks;
        let pages = match admitted.prefix {
            Prefix::Gpu => resident.len() / groups,
            Prefix::Host | Prefix::Import { .. } | Prefix::PartialImport { .. } => host.len(),
        };
        self.check_num_pages(request, pages)?;
        if pages == 0 && resident.is_empty() && host.is_empty() {
            return Ok(());
        }
        match admitted.prefix {
            Prefix::Gpu => {
                if self.config.host_copy != HostCopy::None {
                    let what = "a GPU-only prefix beside a host pool";
                    return Err(ProtocolFault::NotConfigured { what }.into());
                }
                check_len("host blocks", host.len(), 0)?;
                check_len("resident blocks", resident.len(), pages * groups)?;
                for (page, blocks) in resident.chunks_exact(groups).enumerate() {
                    self.check_gpu_prefix_blocks(PageIndex(page as u32), blocks)?;
                }
                Ok(())
            }
            Prefix::Host => {
                self.check_prefix_lengths(pages, resident)?;
                for (page, &block) in host.iter().enumerate() {
                    self.check_host_block(block)?;
                    if let Some(blocks) = page_blocks(resident, page, groups) {
                        let index = PageIndex(page as u32);
                        self.check_prefix_blocks(index, HostBlockId(block), blocks, stamp)?;
                    }
                }
                Ok(())
            }
            Prefix::Import { num_tokens } => self.check_import(admitted, 0, num_tokens, stamp),
            Prefix::PartialImport { host_pages, num_tokens } => {
                self.check_import(admitted, host_pages as usize, num_tokens, stamp)
            }
        }
    }

    /// Published pages first, then pages fresh from the pool.
    fn check_import(
        &mut self,
        admitted: &Admitted<'_>,
        host_pages: usize,
        num_tokens: u32,
        stamp: u64,
    ) -> Result<()> {
        let Admitted { request, host_blocks: host, resident_blocks: resident, .. } = *admitted;
        let groups = self.config.num_kv_groups as usize;
        let pages = host.len();
        self.check_prefix_lengths(pages, resident)?;
        check_len("host blocks", pages, self.config.pages_for(num_tokens) as usize)?;
        for (page, &block) in host.iter().enumerate() {
            if page < host_pages {
                self.check_host_block(block)?;
            } else {
                self.check_fresh_host_block(block, stamp)?;
            }
            let Some(blocks) = page_blocks(resident, page, groups) else { continue };
            if page + 1 != pages {
                // Only the page that decoding appends to is restored.
                let page = PageIndex(page as u32);
                return Err(ProtocolFault::WrongPageState { request, page }.into());
            }
            self.check_fresh_blocks(blocks, stamp)?;
        }
        Ok(())
    }

    /// Positions are counted in 31 bits where they cross to Python.
    fn check_num_pages(&self, request: RequestId, pages: usize) -> Result<(), ProtocolFault> {
        let limit = i32::MAX.unsigned_abs() / self.config.block_size;
        if pages > limit as usize {
            return Err(ProtocolFault::TooManyPages { request, pages, limit });
        }
        Ok(())
    }

    fn check_prefix_lengths(&self, pages: usize, resident: &[i32]) -> Result<()> {
        if self.config.host_copy == HostCopy::None {
            return Err(ProtocolFault::NotConfigured { what: "a host pool" }.into());
        }
        if resident.is_empty() {
            return Ok(());
        }
        let groups = self.config.num_kv_groups as usize;
        check_len("resident blocks", resident.len(), pages * groups)
    }

    /// A page of a host prefix may bring the blocks of a readable copy, or fresh ones.
    fn check_prefix_blocks(
        &mut self,
        page: PageIndex,
        host: HostBlockId,
        blocks: &[i32],
        stamp: u64,
    ) -> Result<()> {
        let id = self.residences.of_host_block(host);
        let same_page = self.residences.get(id).is_some_and(|residence| residence.page == page);
        if same_page && self.residences.blocks(id) == blocks {
            return Ok(());
        }
        self.check_fresh_blocks(blocks, stamp)
    }

    /// Blocks of the engine's own prefix cache: a page that somebody reads at the same position, or
    /// blocks that belong to no page.
    fn check_gpu_prefix_blocks(&self, page: PageIndex, blocks: &[i32]) -> Result<()> {
        for &block in blocks {
            self.check_block(block)?;
            let id = self.residences.of_block(BlockId(block));
            let known = self.residences.get(id);
            let same = known.is_none_or(|residence| {
                residence.page == page && self.residences.blocks(id) == blocks
            });
            // OK because check_block proved the index to be in range.
            if !same || self.hot_blocks.contains(block as usize) {
                return Err(ProtocolFault::BlockHeld { block: BlockId(block) }.into());
            }
        }
        Ok(())
    }

    /// Pages of GPU prefixes that no request reads yet: several requests of the batch may share
    /// one, with the same blocks and at the same position. Only after `check_admitted`.
    pub(super) fn check_shared_pages(&mut self, batch: &[Admitted<'_>]) -> Result<()> {
        let groups = self.config.num_kv_groups as usize;
        let base = self.stamp;
        // A block's stamp, less the base and one, is the index of its page here.
        let mut seen: Vec<(usize, &[i32])> = Vec::new();
        for admitted in batch.iter().filter(|admitted| admitted.prefix == Prefix::Gpu) {
            for (page, blocks) in admitted.resident_blocks.chunks_exact(groups).enumerate() {
                if blocks.iter().any(|&b| !self.residences.of_block(BlockId(b)).is_none()) {
                    continue;
                }
                let stamp_of = |block: i32| self.block_stamps[block as usize];
                let first = stamp_of(blocks[0]).checked_sub(base + 1);
                if first.and_then(|at| seen.get(at as usize)) == Some(&(page, blocks)) {
                    continue;
                }
                seen.push((page, blocks));
                self.stamp = base + seen.len() as u64;
                for &block in blocks {
                    // OK because check_gpu_prefix_blocks proved the index to be in range.
                    let slot = &mut self.block_stamps[block as usize];
                    if *slot > base {
                        return Err(ProtocolFault::BlockHeld { block: BlockId(block) }.into());
                    }
                    *slot = self.stamp;
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_allocated(&mut self, pages: &PagesAllocated<'_>, stamp: u64) -> Result<()> {
        let request = pages.request;
        let state = self.live(request)?;
        let expected = PageIndex(state.num_pages());
        if pages.first_page != expected {
            let got = pages.first_page;
            return Err(ProtocolFault::PageOutOfOrder { request, got, expected }.into());
        }
        if state.import_tokens.is_some() {
            return Err(ProtocolFault::WrongPageState { request, page: expected }.into());
        }
        let groups = self.config.num_kv_groups as usize;
        let count = pages.resident_blocks.len() / groups;
        check_len("resident blocks", pages.resident_blocks.len(), count * groups)?;
        self.check_num_pages(request, count.saturating_add(expected.index()))?;
        let host_expected = if self.config.host_copy == HostCopy::None { 0 } else { count };
        check_len("host blocks", pages.host_blocks.len(), host_expected)?;
        for &block in pages.host_blocks {
            self.check_fresh_host_block(block, stamp)?;
        }
        self.check_fresh_blocks(pages.resident_blocks, stamp)
    }

    fn check_block(&self, block: i32) -> Result<(), ProtocolFault> {
        let id = BlockId(block);
        let total = i64::from(self.config.gpu_blocks);
        if id.is_null() || block < 0 || i64::from(block) >= total {
            return Err(ProtocolFault::BadBlock { block: id });
        }
        Ok(())
    }

    /// Blocks fresh from the pool: real, no page's, and named once in the batch.
    pub(super) fn check_fresh_blocks(&mut self, blocks: &[i32], stamp: u64) -> Result<()> {
        for &block in blocks {
            self.check_block(block)?;
            let id = BlockId(block);
            let hot = self.hot_blocks.contains(block as usize);
            if hot || !self.residences.of_block(id).is_none() {
                return Err(ProtocolFault::BlockHeld { block: id }.into());
            }
            // OK because check_block proved the index to be in range.
            let slot = &mut self.block_stamps[block as usize];
            if *slot == stamp {
                return Err(ProtocolFault::BlockHeld { block: id }.into());
            }
            *slot = stamp;
        }
        Ok(())
    }

    fn check_host_block(&self, block: i32) -> Result<(), ProtocolFault> {
        let id = HostBlockId(block);
        let total = i64::from(self.config.host_blocks);
        if id.is_null() || block < 0 || i64::from(block) >= total {
            return Err(ProtocolFault::BadHostBlock { block: id });
        }
        Ok(())
    }

    /// A host block fresh from the pool: real, nobody's, and named once in the batch.
    pub(super) fn check_fresh_host_block(
        &mut self,
        block: i32,
        stamp: u64,
    ) -> Result<(), ProtocolFault> {
        self.check_host_block(block)?;
        let fault = ProtocolFault::HostBlockHeld { block: HostBlockId(block) };
        if host_users_of(&mut self.host_users, block).is_none_or(|users| *users > 0) {
            return Err(fault);
        }
        // OK because check_host_block proved the index to be in range.
        let slot = &mut self.host_stamps[block as usize];
        if *slot == stamp {
            return Err(fault);
        }
        *slot = stamp;
        Ok(())
    }
}

/// GPU blocks `[G]` of a page, `None` where it has none (null blocks or no array).
pub(super) fn page_blocks(resident: &[i32], page: usize, groups: usize) -> Option<&[i32]> {
    let blocks = resident.get(page * groups..(page + 1) * groups)?;
    if blocks.iter().all(|&block| block == BlockId::NULL.0) { None } else { Some(blocks) }
}

pub(super) fn check_len(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(ProtocolFault::WrongLength { what, got, expected }.into())
}
