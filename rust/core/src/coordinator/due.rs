// SPDX-License-Identifier: Apache-2.0
//! Owns what is handed out between forward passes: work that is due, and residency rows.

use super::Coordinator;
use crate::error::Result;
use crate::ids::RequestId;
use crate::step::StepPlan;

impl Coordinator {
    /// Packages what can be done without a forward pass into `plan`: restores, copies that are
    /// made again, releases, publications and retired requests. An engine that calls it when the
    /// workers have reported gets blocks back one step earlier than by the next step's plan.
    ///
    /// Transfers in it belong before the next forward pass. Recycled host blocks, residency and
    /// hot regions stay for the next step's plan.
    ///
    /// # Errors
    /// `ShutDown`; `plan` is empty then.
    pub fn build_due_plan(&mut self, plan: &mut StepPlan) -> Result<()> {
        plan.clear();
        self.check_running()?;
        plan.step = self.step;
        self.plan_queued_transfers(plan);
        self.release_granted();
        self.flush(plan);
        Ok(())
    }

    /// Packages the residency of live requests into `plan`, as the next step's plan would, and
    /// says whether all their pages are readable in GPU blocks.
    ///
    /// # Errors
    /// `UnknownRequest`; nothing has changed then and `plan` is empty.
    pub fn take_residency(&mut self, requests: &[RequestId], plan: &mut StepPlan) -> Result<()> {
        plan.clear();
        self.check_running()?;
        for &request in requests {
            self.live(request)?;
        }
        plan.step = self.step;
        for &request in requests {
            self.package_residency(request, plan);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CoordinatorConfig, HostCopy, ReleasePoint};
    use crate::ids::{PageIndex, TransferId};
    use crate::page::PageState;
    use crate::step::{
        Admitted, ImportOutcome, PagesAllocated, PoolLevels, Prefix, Scheduled, StepEvents,
        TransferAck, TransferKind,
    };

    const LEVELS: PoolLevels = PoolLevels { gpu_free: 60, host_free: 60 };
    const COLD: Admitted<'static> = Admitted {
        request: RequestId(0),
        prefix: Prefix::Host,
        host_blocks: &[],
        resident_blocks: &[],
    };
    const TWO_PAGES: PagesAllocated<'static> = PagesAllocated {
        request: RequestId(0),
        first_page: PageIndex(0),
        host_blocks: &[1, 2],
        resident_blocks: &[1, 2],
    };

    fn core() -> Coordinator {
        Coordinator::new(CoordinatorConfig {
            block_size: 4,
            num_kv_groups: 1,
            gpu_blocks: 64,
            host_blocks: 64,
            other_blocks_per_page: 0,
            hot_rows: 8,
            top_k: 4,
            verification_rows: 2,
            num_ranks: 1,
            num_host_writers: 1,
            host_copy: HostCopy::Mirrored,
            release_point: ReleasePoint::Completed,
            transition: true,
            transition_watermark: Some(0),
            hot_return_steps: 4,
            admission_window_pages: 4,
            num_reprefillable_tokens: 0,
            max_model_len: 64,
        })
        .unwrap()
    }

    fn acks(ids: &[i64]) -> Vec<TransferAck> {
        ids.iter().map(|&id| TransferAck { transfer: TransferId(id), count: 1 }).collect()
    }

    fn scheduled(request: u32, start: u32, tokens: u32, drafts: u32) -> Scheduled {
        Scheduled {
            request: RequestId(request),
            num_computed_tokens: start,
            num_scheduled_tokens: tokens,
            num_draft_tokens: drafts,
        }
    }

    /// Request 0 has computed and published host blocks 1 and 2; its copies are unpinned.
    fn with_published_prefix() -> Coordinator {
        let mut core = core();
        let mut plan = StepPlan::default();
        let events =
            StepEvents { admitted: &[COLD], allocated: &[TWO_PAGES], ..StepEvents::default() };
        core.step(&events, &[scheduled(0, 0, 8, 0)], LEVELS, &mut plan).unwrap();
        let ids = plan.transfers.transfer_id.clone();
        core.on_worker_output(&acks(&ids), &acks(&ids), &[]).unwrap();
        core.build_due_plan(&mut plan).unwrap();
        assert_eq!(plan.publish.num_pages, [2]);
        assert_eq!((&plan.free_gpu[..], &plan.free_host[..]), (&[1, 2][..], &[1, 2][..]));
        core
    }

    #[test]
    fn a_due_plan_hands_out_releases_before_the_next_step_and_only_once() {
        let mut core = with_published_prefix();
        let mut plan = StepPlan::default();
        core.build_due_plan(&mut plan).unwrap();
        assert_eq!(plan, StepPlan { step: 1, all_context_resident: true, ..StepPlan::default() });
    }

    #[test]
    fn a_partial_import_shares_published_pages_and_restores_its_last_page() {
        let mut core = with_published_prefix();
        let mut plan = StepPlan::default();
        // Two published pages and one that a sibling fills; the last has a GPU block.
        let import = |host_blocks| Admitted {
            request: RequestId(1),
            prefix: Prefix::PartialImport { host_pages: 2, num_tokens: 10 },
            host_blocks,
            resident_blocks: &[0, 0, 3],
        };
        // The page to fill must be fresh.
        core.on_admitted(&[import(&[1, 2, 2])]).unwrap_err();
        core.on_admitted(&[import(&[1, 2, 3])]).unwrap();
        core.on_hot_region_allocated(RequestId(1), &[10, 11]).unwrap();
        let state = |core: &Coordinator, page| core.page_state(RequestId(1), PageIndex(page));
        assert_eq!(state(&core, 0), Ok(Some(PageState::HostOnly)));
        assert_eq!(state(&core, 2), Ok(Some(PageState::Importing)));
        let landed = ImportOutcome::Landed { num_tokens: 10 };
        assert_eq!(core.on_import_finished(RequestId(1), landed), Ok(3));
        core.build_due_plan(&mut plan).unwrap();
        assert_eq!(plan.transfers.kind, [TransferKind::Restore as u8]);
        assert_eq!((plan.transfers.host_block[0], plan.transfers.num_rows[0]), (3, 2));
        core.build_step_plan(&[scheduled(1, 10, 1, 0)], LEVELS, &mut plan).unwrap();
        // The published pages' GPU copies were found.
        assert_eq!(plan.residency.page, [0, 1, 2]);
        assert_eq!(plan.residency.blocks, [1, 2, 3]);
    }

    #[test]
    fn a_failed_partial_import_leaves_the_shared_copies_to_their_other_readers() {
        let mut core = with_published_prefix();
        let mut plan = StepPlan::default();
        core.on_admitted(&[Admitted {
            request: RequestId(1),
            prefix: Prefix::PartialImport { host_pages: 2, num_tokens: 10 },
            host_blocks: &[1, 2, 3],
            resident_blocks: &[0, 0, 3],
        }])
        .unwrap();
        // Adoption needs no step of the request itself.
        core.build_step_plan(&[], LEVELS, &mut plan).unwrap();
        assert_eq!(core.resident_blocks(RequestId(1), PageIndex(0)).unwrap(), [1]);
        assert_eq!(core.on_import_finished(RequestId(1), ImportOutcome::Failed), Ok(0));
        assert_eq!(core.resident_blocks(RequestId(0), PageIndex(0)).unwrap(), [1]);
        assert_eq!(core.readable_copy(crate::ids::HostBlockId(1)), Some(&[1][..]));
        let mut free = crate::step::FreePlan::default();
        core.on_freed(RequestId(1), crate::step::FreeReason::Preempted, &mut free).unwrap();
        assert!(free.unpin_gpu.is_empty() && free.free_gpu.is_empty());
    }

    #[test]
    fn the_last_page_of_a_completed_prefix_is_found_by_nobody_before_it_is_restored() {
        let mut core = with_published_prefix();
        core.on_blocks_reused(&[2]).unwrap_err();
        let mut free = crate::step::FreePlan::default();
        core.on_freed(RequestId(0), crate::step::FreeReason::Finished, &mut free).unwrap();
        core.on_blocks_reused(&[1, 2]).unwrap();
        // Both pages are published ones; only KV of other groups is missing.
        core.on_admitted(&[Admitted {
            request: RequestId(1),
            prefix: Prefix::PartialImport { host_pages: 2, num_tokens: 8 },
            host_blocks: &[1, 2],
            resident_blocks: &[0, 3],
        }])
        .unwrap();
        assert_eq!(core.readable_copy(crate::ids::HostBlockId(2)), None);
    }

    #[test]
    fn pages_beyond_the_known_tokens_are_not_sealed() {
        let mut core = core();
        let mut plan = StepPlan::default();
        let events = StepEvents {
            admitted: &[COLD],
            allocated: &[TWO_PAGES],
            known_tokens: &[3],
            ..StepEvents::default()
        };
        core.step(&events, &[scheduled(0, 0, 4, 0)], LEVELS, &mut plan).unwrap();
        assert!(plan.transfers.transfer_id.is_empty());
        let wrong = StepEvents { known_tokens: &[4, 4], ..StepEvents::default() };
        core.step(&wrong, &[scheduled(0, 4, 1, 0)], LEVELS, &mut plan).unwrap_err();
        let known = StepEvents { known_tokens: &[4], ..StepEvents::default() };
        core.step(&known, &[scheduled(0, 4, 1, 0)], LEVELS, &mut plan).unwrap();
        assert_eq!(plan.transfers.host_block, [1]);
    }

    #[test]
    fn residency_taken_outside_a_step_is_not_sent_again() {
        let mut core = with_published_prefix();
        let mut plan = StepPlan::default();
        core.on_blocks_allocated(&[PagesAllocated {
            request: RequestId(0),
            first_page: PageIndex(2),
            host_blocks: &[5],
            resident_blocks: &[6],
        }])
        .unwrap();
        core.take_residency(&[RequestId(0)], &mut plan).unwrap();
        assert_eq!((&plan.residency.page[..], &plan.residency.blocks[..]), (&[2][..], &[6][..]));
        core.take_residency(&[RequestId(0)], &mut plan).unwrap();
        assert!(plan.residency.page.is_empty());
        core.take_residency(&[RequestId(9)], &mut plan).unwrap_err();
    }
}
