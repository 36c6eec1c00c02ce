// SPDX-License-Identifier: Apache-2.0
//! Owns the tests' view into the Coordinator: its tables, and digests of its whole state.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Coordinator, Pending};
use crate::ids::RequestId;
use crate::request::RequestState;
use crate::residency::Residences;
use crate::spill::Transfers;

/// Borrowed tables of a Coordinator.
pub(crate) struct Inspection<'a> {
    pub(crate) requests: Vec<(RequestId, &'a RequestState)>,
    pub(crate) residences: &'a Residences,
    pub(crate) transfers: &'a Transfers,
    pub(crate) host_users: &'a [u32],
    pub(crate) lru: Vec<RequestId>,
    /// GPU blocks whose release waits for the next plan.
    pub(crate) releasing_gpu: Vec<i32>,
    /// Host blocks whose release waits for the next plan.
    pub(crate) releasing_host: Vec<i32>,
    /// Sources of host copies that wait for the next plan.
    pub(crate) copy_sources: Vec<i32>,
    /// Requests in the publication list.
    pub(crate) publishing: &'a [RequestId],
}

impl Coordinator {
    pub(crate) fn inspect(&self) -> Inspection<'_> {
        let Pending { unpin_gpu, free_gpu, free_host, host_copies, publish, .. } = &self.pending;
        let requests = (0_u32..).map(RequestId).zip(&self.requests);
        Inspection {
            requests: requests.filter_map(|(id, r)| Some((id, r.as_deref()?))).collect(),
            residences: &self.residences,
            transfers: &self.transfers,
            host_users: &self.host_users,
            lru: self.lru.iter().collect(),
            releasing_gpu: unpin_gpu.iter().chain(free_gpu).copied().collect(),
            releasing_host: free_host.clone(),
            copy_sources: host_copies.iter().map(|(_, _, source)| source.0).collect(),
            publishing: publish,
        }
    }

    /// Digest of everything that a later call could see; equal before and after a refused call.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash_tables(&mut hasher);
        (self.step, self.transfers.last_id(), self.stats).hash(&mut hasher);
        for (id, _) in self.transfers.sorted() {
            id.hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Digest that is equal for states with the same future: step numbers and transfer ids enter
    /// only through their order, counters not at all.
    #[must_use]
    pub fn future_digest(&self) -> u64 {
        let mut relative = self.clone();
        let longest = u64::from(self.config.hot_return_steps) + 1;
        for state in relative.requests.iter_mut().flatten() {
            if state.full_since != 0 {
                state.full_since = (self.step + 1 - state.full_since).min(longest);
            }
        }
        let mut hasher = DefaultHasher::new();
        relative.hash_tables(&mut hasher);
        hasher.finish()
    }

    fn hash_tables(&self, hasher: &mut DefaultHasher) {
        for (id, state) in (0_u32..).zip(&self.requests) {
            if let Some(state) = state {
                (id, state).hash(hasher);
            }
        }
        for (_, transfer) in self.transfers.sorted() {
            transfer.hash(hasher);
        }
        self.residences.hash(hasher);
        self.lru.iter().collect::<Vec<_>>().hash(hasher);
        self.host_users.hash(hasher);
        self.pending.hash(hasher);
        self.hot_blocks.hash(hasher);
        (self.num_live, self.released_gpu, self.num_hot_wanted, self.shut_down).hash(hasher);
    }
}
