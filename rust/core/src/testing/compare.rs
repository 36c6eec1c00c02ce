// SPDX-License-Identifier: Apache-2.0
//! Owns the comparison of the reference with the Coordinator and with the pools.

use std::collections::BTreeMap;

use super::model::Model;
use super::{Check, ensure};
use crate::Coordinator;
use crate::config::ReleasePoint;
use crate::ids::{PageIndex, RequestId};
use crate::page::PageState;
use crate::step::StepPlan;

impl Model {
    /// Compares every page with the Coordinator's, and takes over its legal choices. `plan` is
    /// the one just built, if any.
    ///
    /// # Errors
    /// The rule that a page's state breaks.
    pub fn compare(&mut self, coordinator: &Coordinator, plan: Option<&StepPlan>) -> Check {
        let at_enqueued = coordinator.config().release_point == ReleasePoint::Enqueued;
        for (&id, request) in self.requests.iter_mut().filter(|(_, r)| r.draining.is_none()) {
            let (hot, tail) = (!request.hot.is_empty(), request.tail_start());
            let got = coordinator.num_pages(RequestId(id)).ok();
            let n = u32::try_from(request.pages.len()).ok();
            ensure(0, got == n, || format!("request {id} has {got:?} pages, expected {n:?}"))?;
            for (at, page) in (0_u32..).zip(&mut request.pages) {
                let state = coordinator.page_state(RequestId(id), PageIndex(at)).ok().flatten();
                let blocks = coordinator.resident_blocks(RequestId(id), PageIndex(at));
                let blocks = blocks.unwrap_or(&[]);
                let touched = plan
                    .is_some_and(|plan| blocks.iter().all(|block| plan.touch_gpu.contains(block)));
                let whole = hot && at < tail;
                use PageState as S;
                let legal = match (page.state, state) {
                    (old, Some(new)) if old == new => true,
                    (S::Clean, Some(S::Unpinned)) => whole,
                    (S::Enqueued, Some(S::Unpinned)) => whole && at_enqueued,
                    (S::Unpinned, Some(S::Clean)) => page.landed && touched,
                    (S::HostOnly, Some(S::Unpinned)) => plan.is_some() && page.landed,
                    (S::HostOnly, Some(S::Clean)) => page.landed && touched,
                    _ => false,
                };
                ensure(5, legal, || {
                    format!("request {id} page {at} is {state:?}, expected {:?}", page.state)
                })?;
                let adopted = page.state == S::HostOnly && state != Some(S::HostOnly);
                if adopted {
                    page.blocks = blocks.to_vec();
                }
                ensure(1, page.blocks == blocks, || {
                    format!("request {id} page {at} has {blocks:?}, expected {:?}", page.blocks)
                })?;
                page.state = state.unwrap_or(page.state);
            }
            let prefix = coordinator.durable_prefix(RequestId(id)).ok();
            let expected = Some(request.landed_prefix());
            ensure(3, prefix == expected, || {
                format!("request {id} has durable prefix {prefix:?}, expected {expected:?}")
            })?;
        }
        Ok(())
    }

    /// Holds on each GPU block that the model accounts for.
    #[must_use]
    pub fn gpu_holds(&self) -> BTreeMap<i32, u32> {
        let pages = self
            .requests
            .values()
            .filter(|request| request.draining.is_none())
            .flat_map(|request| &request.pages)
            .filter(|page| page.state.holds_blocks() || page.state == PageState::Importing)
            .flat_map(|page| &page.blocks);
        let copies =
            self.transfers.values().filter(|transfer| transfer.holds_gpu).flat_map(|t| &t.blocks);
        let hot = self.requests.values().flat_map(|request| &request.hot);
        count(pages.chain(copies).chain(hot))
    }

    /// Holds on each host block that the model accounts for.
    #[must_use]
    pub fn host_holds(&self) -> BTreeMap<i32, u32> {
        let live = self.requests.values().filter(|request| request.draining.is_none());
        let pages = live.clone().flat_map(|r| &r.pages).map(|page| &page.host);
        let sources = live.flat_map(|r| &r.host_copies).map(|(_, source)| source);
        let copies = self.transfers.values().flat_map(|t| [&t.host, &t.source]);
        let beyond = self.requests.values().flat_map(|r| r.beyond_gap.values()).flatten();
        count(pages.chain(sources).chain(copies).chain(beyond).filter(|&&block| block != 0))
    }
}

fn count<'a>(blocks: impl Iterator<Item = &'a i32>) -> BTreeMap<i32, u32> {
    let mut holds = BTreeMap::new();
    for &block in blocks {
        *holds.entry(block).or_insert(0) += 1;
    }
    holds
}
