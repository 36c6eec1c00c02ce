// SPDX-License-Identifier: Apache-2.0
//! Owns the answer to "is there room for this request, and if not, why".

use super::Coordinator;
use crate::config::HostCopy;
use crate::error::Pool;
use crate::step::{Admission, AdmissionCost, AdmissionQuery, PoolLevels, Refusal};

impl Coordinator {
    /// What admitting a request takes from the pools, before looking at what is free.
    #[must_use]
    pub fn admission_cost(&self, query: AdmissionQuery) -> AdmissionCost {
        let config = &self.config;
        let pages = config.pages_for(query.num_tokens);
        let host_prefix = query.host_prefix_pages.min(pages);
        let gpu_prefix = query.gpu_prefix_pages.min(pages);
        // Saturation is exact enough: a cost of u32::MAX fits into no pool.
        let other = (pages - gpu_prefix).saturating_mul(config.other_blocks_per_page);
        let host_blocks = if config.host_copy == HostCopy::None { 0 } else { pages - host_prefix };
        let on_gpu = |pages: u32| pages.saturating_mul(config.num_kv_groups).saturating_add(other);
        if !config.transition {
            let gpu_blocks = on_gpu(pages - gpu_prefix);
            return AdmissionCost { gpu_blocks, host_blocks, hot_region: false };
        }
        // Host pages stay host-only, so a prefix hit costs a hot region and no pages. A long cold
        // prompt streams through a window: it holds that many pages and, once it is past them, a
        // hot region.
        let cold = pages - host_prefix.max(gpu_prefix);
        let resident = cold.min(config.admission_window_pages);
        let hot_region = host_prefix > gpu_prefix;
        let needs_hot = hot_region || cold > resident;
        let hot = if needs_hot { config.hot_region_blocks() } else { 0 };
        AdmissionCost { gpu_blocks: on_gpu(resident).saturating_add(hot), host_blocks, hot_region }
    }

    /// Says whether a request fits, given what the pools could hand out now.
    ///
    /// Beside requests that may have to transition, one hot region of GPU blocks is kept free,
    /// because without it none of them could give up a page.
    #[must_use]
    pub fn try_admit(&self, query: AdmissionQuery, levels: PoolLevels) -> Admission {
        let cost = self.admission_cost(query);
        let config = &self.config;
        let gpu_total = config.gpu_blocks.saturating_sub(1);
        if cost.gpu_blocks > gpu_total {
            let (need, total) = (cost.gpu_blocks, gpu_total);
            return Admission::Refused(Refusal::NeverFits { pool: Pool::Gpu, need, total });
        }
        let host_total = config.host_blocks.saturating_sub(1);
        if cost.host_blocks > host_total {
            let (need, total) = (cost.host_blocks, host_total);
            return Admission::Refused(Refusal::NeverFits { pool: Pool::Host, need, total });
        }
        let headroom =
            if config.transition && self.num_live > 0 { config.hot_region_blocks() } else { 0 };
        let need = cost.gpu_blocks.saturating_add(headroom);
        if need > levels.gpu_free {
            let reclaiming = self.has_pending_reclamation(levels);
            let free = levels.gpu_free;
            return Admission::Refused(Refusal::Short { pool: Pool::Gpu, need, free, reclaiming });
        }
        if cost.host_blocks > levels.host_free {
            let (need, free) = (cost.host_blocks, levels.host_free);
            let reclaiming = !self.transfers.is_empty();
            return Admission::Refused(Refusal::Short { pool: Pool::Host, need, free, reclaiming });
        }
        Admission::Fits(cost)
    }
}
