// SPDX-License-Identifier: Apache-2.0
//! Owns the digest by which tests see that a refused event changed nothing.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::Coordinator;

impl Coordinator {
    /// A number that changes with everything the Coordinator decides by. The stamps that find
    /// duplicates inside a batch are left out: a refused batch uses some up. For tests: the cost
    /// is O(pools + pages), and values of different builds do not compare.
    #[must_use]
    pub fn state_digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash_tables(&mut hasher);
        (self.step, self.stats).hash(&mut hasher);
        for (id, _) in self.transfers.sorted() {
            id.hash(&mut hasher);
        }
        hasher.finish()
    }

    /// A number that is equal for states with the same future: step numbers and transfer ids enter
    /// only through their order, counters not at all.
    #[cfg(any(test, feature = "testing"))]
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CoordinatorConfig, HostCopy, ReleasePoint};
    use crate::error::{Error, Expected, ProtocolFault};
    use crate::ids::{PageIndex, RequestId, TransferId};
    use crate::step::{
        Admitted, ImportOutcome, PagesAllocated, PoolLevels, Prefix, Scheduled, StepEvents,
        StepPlan, TransferAck,
    };

    const LEVELS: PoolLevels = PoolLevels { gpu_free: 40, host_free: 40 };

    fn config() -> CoordinatorConfig {
        CoordinatorConfig {
            block_size: 4,
            num_kv_groups: 1,
            gpu_blocks: 64,
            host_blocks: 64,
            other_blocks_per_page: 0,
            hot_rows: 8,
            top_k: 4,
            verification_rows: 2,
            num_ranks: 2,
            num_host_writers: 2,
            host_copy: HostCopy::Spilled,
            release_point: ReleasePoint::Enqueued,
            transition: true,
            transition_watermark: None,
            hot_return_steps: 4,
            admission_window_pages: 4,
            num_reprefillable_tokens: 0,
            max_model_len: 64,
        }
    }

    fn admitted(request: u32) -> Admitted<'static> {
        Admitted {
            request: RequestId(request),
            prefix: Prefix::Host,
            host_blocks: &[],
            resident_blocks: &[],
        }
    }

    /// A request whose first page is being spilled by transfer 1.
    fn spilling() -> (Coordinator, StepPlan) {
        let mut core = Coordinator::new(config()).unwrap();
        let mut plan = StepPlan::default();
        let pages = PagesAllocated {
            request: RequestId(0),
            first_page: PageIndex(0),
            host_blocks: &[1, 2],
            resident_blocks: &[1, 2],
        };
        let events =
            StepEvents { admitted: &[admitted(0)], allocated: &[pages], ..StepEvents::default() };
        core.step(&events, &[scheduled(0, 5, 0)], LEVELS, &mut plan).unwrap();
        assert_eq!(plan.transfers.transfer_id, [1]);
        (core, plan)
    }

    fn scheduled(start: u32, tokens: u32, drafts: u32) -> Scheduled {
        Scheduled {
            request: RequestId(0),
            num_computed_tokens: start,
            num_scheduled_tokens: tokens,
            num_draft_tokens: drafts,
        }
    }

    fn ack(transfer: i64, count: u32) -> TransferAck {
        TransferAck { transfer: TransferId(transfer), count }
    }

    #[test]
    fn a_wild_request_id_is_a_fault_and_no_table_of_its_size() {
        let mut core = Coordinator::new(config()).unwrap();
        let before = core.state_digest();
        for wild in [i32::MAX.unsigned_abs(), u32::MAX, super::super::MAX_REQUEST_ID_GAP] {
            let error = core.on_admitted(&[admitted(wild)]).unwrap_err();
            assert!(matches!(error, Error::Protocol(ProtocolFault::OutOfRange { .. })), "{error}");
            let pages = PagesAllocated {
                request: RequestId(wild),
                first_page: PageIndex(0),
                host_blocks: &[1],
                resident_blocks: &[1],
            };
            let unknown = ProtocolFault::UnknownRequest { request: RequestId(wild) };
            assert_eq!(core.on_blocks_allocated(&[pages]), Err(unknown.clone().into()));
            let item = Scheduled { request: RequestId(wild), ..scheduled(0, 1, 0) };
            let mut plan = StepPlan::default();
            assert_eq!(core.build_step_plan(&[item], LEVELS, &mut plan), Err(unknown.into()));
        }
        assert_eq!(core.state_digest(), before);
        assert!(core.request_stamps.is_empty());
        core.on_admitted(&[admitted(super::super::MAX_REQUEST_ID_GAP - 1)]).unwrap();
        assert_ne!(core.state_digest(), before);
    }

    #[test]
    fn a_worker_output_with_one_wrong_list_changes_nothing() {
        let (mut core, _) = spilling();
        let before = core.state_digest();
        let two = ack(1, 2);
        for (enqueued, completed, failed) in [
            (vec![two], vec![ack(9, 1)], vec![]),
            (vec![two], vec![ack(1, 2)], vec![ack(1, 1)]),
            (vec![two], vec![], vec![ack(1, 1), ack(1, 2)]),
            (vec![ack(1, 1)], vec![ack(1, 2)], vec![]),
            (vec![ack(1, 3)], vec![], vec![]),
        ] {
            core.on_worker_output(&enqueued, &completed, &failed).unwrap_err();
            assert_eq!(core.state_digest(), before, "{enqueued:?} {completed:?} {failed:?}");
        }
        core.on_worker_output(&[two], &[ack(1, 1)], &[]).unwrap();
        core.on_worker_output(&[], &[ack(1, 1)], &[]).unwrap();
        assert_eq!(core.stats().spills_completed, 1);
        assert_eq!(core.num_transfers(), 0);
    }

    #[test]
    fn a_copy_that_failed_on_one_rank_is_made_again_though_all_ranks_enqueued_it() {
        let (mut core, mut plan) = spilling();
        core.on_worker_output(&[ack(1, 2)], &[ack(1, 1)], &[ack(1, 1)]).unwrap();
        assert_eq!(core.stats().spills_failed, 1);
        core.build_step_plan(&[], LEVELS, &mut plan).unwrap();
        assert_eq!(plan.transfers.transfer_id, [2]);
        assert!(plan.lost_pages.is_empty());
    }

    #[test]
    fn more_drafts_than_the_hot_region_was_sized_for_are_refused() {
        let (mut core, mut plan) = spilling();
        let before = core.state_digest();
        let error = core.build_step_plan(&[scheduled(5, 3, 2)], LEVELS, &mut plan).unwrap_err();
        let (what, got, min, max) = ("num_draft_tokens", 2, 0, 1);
        assert_eq!(error, ProtocolFault::OutOfRange { what, got, min, max }.into());
        assert_eq!(core.state_digest(), before);
        core.build_step_plan(&[scheduled(5, 2, 1)], LEVELS, &mut plan).unwrap();
    }

    #[test]
    fn an_import_without_pages_is_no_import() {
        let mut core = Coordinator::new(config()).unwrap();
        let import = Admitted { prefix: Prefix::Import { num_tokens: 40 }, ..admitted(0) };
        core.on_admitted(&[import]).unwrap();
        let outcome = ImportOutcome::Landed { num_tokens: 40 };
        core.on_import_finished(RequestId(0), outcome).unwrap_err();
    }

    #[test]
    fn settings_whose_products_would_wrap_are_refused() {
        for (wrong, name) in [
            (CoordinatorConfig { num_kv_groups: 1 << 20, ..config() }, "num_kv_groups"),
            (CoordinatorConfig { other_blocks_per_page: u32::MAX, ..config() }, "other_blocks"),
            (CoordinatorConfig { block_size: 1 << 30, ..config() }, "block_size"),
            (CoordinatorConfig { gpu_blocks: 1 << 30, ..config() }, "gpu_blocks"),
            (CoordinatorConfig { max_model_len: u32::MAX, ..config() }, "max_model_len"),
            (CoordinatorConfig { transition: false, hot_rows: 1 << 31, ..config() }, "hot_rows"),
        ] {
            match Coordinator::new(wrong).unwrap_err() {
                Error::Config { name: got, expected: Expected::AtMost(_), .. } => {
                    assert!(got.starts_with(name), "{got}");
                }
                other => panic!("{name}: {other}"),
            }
        }
    }
}
