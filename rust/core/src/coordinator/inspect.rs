// SPDX-License-Identifier: Apache-2.0
//! Owns the tests' view into the Coordinator's tables.

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
    /// GPU blocks that the pool is expected to gain with the next plan.
    pub(crate) released_gpu: i64,
    /// Host blocks whose release waits for the next plan.
    pub(crate) releasing_host: Vec<i32>,
    /// Sources of host copies that wait for the next plan.
    pub(crate) copy_sources: Vec<i32>,
    /// Entries of the tables that are indexed by request and by residence, vacant ones counted.
    pub(crate) num_slots: (usize, usize),
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
            released_gpu: self.released_gpu,
            releasing_host: free_host.clone(),
            copy_sources: host_copies.iter().map(|(_, _, source)| source.0).collect(),
            num_slots: (self.requests.len(), self.residences.num_slots()),
            publishing: publish,
        }
    }
}
