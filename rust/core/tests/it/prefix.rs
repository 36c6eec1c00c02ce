// SPDX-License-Identifier: Apache-2.0
//! Owns scenarios of requests that start with pages from elsewhere: published host pages, readable
//! GPU copies, imports, and pages that two requests share until one writes.

use hotpage_core::Coordinator;
use hotpage_core::config::{CoordinatorConfig, HostCopy};
use hotpage_core::ids::{HostBlockId, PageIndex, RequestId};
use hotpage_core::page::PageState;
use hotpage_core::step::{
    Admitted, FreePlan, FreeReason, ImportOutcome, PagesAllocated, PoolLevels, Prefix, Scheduled,
    StepPlan, TransferKind,
};
use hotpage_core::testing::{Event, PrefixCopies, World, small_config};

use crate::script::Script;

/// Room for many requests, never enough to pin readable copies again.
fn roomy() -> CoordinatorConfig {
    CoordinatorConfig { gpu_blocks: 20, transition_watermark: Some(9), ..small_config() }
}

/// Three published pages with readable GPU copies that nobody holds.
fn published() -> Script {
    let mut s = Script::new(roomy());
    s.admit(3).step(&[(0, 6)]).land_all().step(&[]);
    s.free(0, FreeReason::Finished);
    assert_eq!(s.world.index.len(), 3);
    s
}

#[test]
fn readable_copies_are_shared_after_the_admitting_allocation_and_take_nothing_from_it() {
    let mut s = published();
    let free = s.world.gpu.num_free();
    s.admit_prefix(2, PrefixCopies::None);
    let region = s.world.coordinator.config().hot_region_blocks();
    assert_eq!(s.world.gpu.num_free(), free - region, "what admission counted as free still is");
    assert_eq!(s.states(0), [PageState::HostOnly; 3]);
    // Others that are served in the same pass take the blank blocks, and then one of the copies.
    s.tenant(15);
    s.grow(0).step(&[(0, 2)]);
    assert!(s.plan().touch_gpu.iter().all(|block| s.world.gpu.refs()[*block as usize] > 1));
    let adopted = s.states(0).iter().filter(|&&state| state == PageState::Unpinned).count();
    assert_eq!(adopted, 2, "the copies that were left");
    assert_eq!(s.world.coordinator.stats().pages_adopted, 2);
    s.drain();
}

#[test]
fn a_shared_copy_that_is_taken_later_leaves_the_reader_host_only() {
    let mut s = published();
    s.admit_prefix(2, PrefixCopies::None).grow(0).step(&[(0, 1)]);
    assert_eq!(s.states(0)[..3], [PageState::Unpinned; 3]);
    let n = s.world.gpu.num_free();
    s.tenant(u8::try_from(n).unwrap());
    assert_eq!(s.states(0)[..3], [PageState::HostOnly; 3]);
    s.step(&[(0, 1)]);
    assert!(!s.plan().all_context_resident);
    assert_eq!(s.plan().residency.page.len(), 3, "told once");
    s.drain();
}

#[test]
fn a_copy_is_shared_by_any_number_of_readers_and_lost_to_all_of_them_at_once() {
    let mut s = published();
    for _ in 0..3 {
        s.admit_prefix(2, PrefixCopies::None);
    }
    s.step(&[]);
    let blocks = s.world.coordinator.resident_blocks(RequestId(0), PageIndex(0)).unwrap().to_vec();
    for request in 0..3 {
        let same = s.world.coordinator.resident_blocks(RequestId(request), PageIndex(0)).unwrap();
        assert_eq!(same, blocks);
    }
    s.free(1, FreeReason::Aborted);
    let n = s.world.gpu.num_free();
    s.tenant(u8::try_from(n).unwrap());
    assert_eq!(s.state(0, 0), PageState::HostOnly);
    assert_eq!(s.state(2, 0), PageState::HostOnly);
    s.drain();
}

#[test]
fn an_import_that_fails_leaves_an_empty_table_and_gives_everything_back() {
    let mut s = Script::small();
    s.import(5, true);
    s.landed(None);
    assert_eq!(s.states(0), []);
    s.grow(0).step(&[(0, 2)]).free(0, FreeReason::Finished);
    s.drain();
}

#[test]
fn an_import_that_lands_in_part_keeps_whole_pages_and_the_rest_is_computed() {
    let mut s = Script::small();
    s.import(6, true).landed(Some(3));
    assert_eq!(s.states(0), [PageState::HostOnly], "a partial page without blocks is dropped");
    s.grow(0).step(&[(0, 2)]);
    assert_eq!(s.published(), [(0, 1)], "the landed page is found by others");
    s.drain();
}

#[test]
fn an_import_without_a_kept_tail_starts_host_only_and_grows_behind_it() {
    let mut s = Script::small();
    s.import(4, false).landed(Some(4));
    assert_eq!(s.states(0), [PageState::HostOnly; 2]);
    s.grow(0).step(&[(0, 1)]);
    assert_eq!(s.in_flight(), []);
    s.drain();
}

#[test]
fn an_imported_page_that_decoding_appends_to_is_restored_writable_and_copied_whole_when_full() {
    let mut s = Script::small();
    s.import(3, true).landed(Some(3));
    assert_eq!(s.states(0), [PageState::HostOnly, PageState::Dirty]);
    s.step(&[(0, 1)]);
    assert_eq!(s.in_flight(), [TransferKind::Restore, TransferKind::Spill]);
    assert_eq!(s.plan().transfers.num_rows, [1, 2]);
    assert_eq!(s.plan().transfers.after_forward, [0, 1]);
    s.land_all().step(&[]);
    assert_eq!(s.published(), [(0, 2)]);
    s.drain();
}

#[test]
fn a_restore_that_no_plan_has_taken_yet_is_pending_work() {
    let mut s = Script::small();
    s.import(1, true).landed(Some(1));
    assert!(s.world.coordinator.has_pending_work(), "nothing else is pending but the restore");
    s.drain();
}

#[test]
fn imports_of_127_128_and_129_tokens_keep_the_page_of_the_last_token_writable() {
    let config = CoordinatorConfig {
        block_size: 64,
        hot_rows: 64,
        top_k: 16,
        max_model_len: 512,
        gpu_blocks: 40,
        host_blocks: 40,
        ..small_config()
    };
    for (tokens, restored) in [(127, 63), (128, 64), (129, 1)] {
        let mut c = Coordinator::new(config.clone()).unwrap();
        let pages = config.pages_for(tokens) as usize;
        let host: Vec<i32> = (1..).take(pages).collect();
        let mut resident = vec![0; pages];
        resident[pages - 1] = 7;
        let request = RequestId(0);
        let prefix = Prefix::Import { num_tokens: tokens };
        let admitted = Admitted { request, prefix, host_blocks: &host, resident_blocks: &resident };
        c.on_admitted(&[admitted]).unwrap();
        c.on_hot_region_allocated(request, &[20]).unwrap();
        let kept = c.on_import_finished(request, ImportOutcome::Landed { num_tokens: tokens });
        assert_eq!(kept.unwrap() as usize, pages);
        let last = PageIndex(pages as u32 - 1);
        assert_eq!(c.page_state(request, last).unwrap(), Some(PageState::Dirty));
        // The last token is computed again.
        let item = Scheduled {
            request,
            num_computed_tokens: tokens - 1,
            num_scheduled_tokens: 1,
            num_draft_tokens: 0,
        };
        let mut plan = StepPlan::default();
        let levels = PoolLevels { gpu_free: 20, host_free: 20 };
        c.build_step_plan(&[item], levels, &mut plan).unwrap();
        assert_eq!(plan.transfers.kind[0], TransferKind::Restore as u8);
        assert_eq!(plan.transfers.num_rows[0], restored, "rows of the last page that landed");
        assert_eq!(plan.transfers.after_forward[0], 0);
        assert_eq!(plan.transfers.resident_blocks[0], 7);
    }
}

#[test]
fn a_request_under_import_takes_no_pages_is_not_scheduled_and_is_not_freed() {
    let mut s = Script::small();
    s.import(4, true);
    let item = Scheduled {
        request: RequestId(0),
        num_computed_tokens: 0,
        num_scheduled_tokens: 1,
        num_draft_tokens: 0,
    };
    let plan = &mut StepPlan::default();
    s.world.refuse(|c| c.build_step_plan(&[item], PoolLevels::default(), plan)).unwrap();
    let pages = PagesAllocated {
        request: RequestId(0),
        first_page: PageIndex(2),
        host_blocks: &[14],
        resident_blocks: &[9],
    };
    s.world.refuse(|c| c.on_blocks_allocated(&[pages])).unwrap();
    s.drain();
}

#[test]
fn an_import_of_no_tokens_is_an_ordinary_admission() {
    let mut c = World::new(small_config()).unwrap().coordinator;
    let request = RequestId(0);
    let prefix = Prefix::Import { num_tokens: 0 };
    c.on_admitted(&[Admitted { request, prefix, host_blocks: &[], resident_blocks: &[] }]).unwrap();
    c.build_step_plan(&[], PoolLevels::default(), &mut StepPlan::default()).unwrap();
    assert!(c.on_import_finished(request, ImportOutcome::Failed).is_err(), "nothing is under way");
}

#[test]
fn a_shared_host_page_is_copied_before_the_one_request_that_writes_it_runs() {
    let mut s = published();
    s.admit_prefix(2, PrefixCopies::None).admit_prefix(2, PrefixCopies::None);
    let shared = s.world.requests[&0].host[2];
    s.then(Event::Redirect { pick: 0, writable: true });
    s.step(&[(0, 1), (1, 1)]);
    let list = &s.plan().transfers;
    let kinds = [TransferKind::HostCopy, TransferKind::Restore, TransferKind::Spill];
    assert_eq!(list.kind, kinds.map(|kind| kind as u8));
    assert_eq!(list.source_host_block[0], shared);
    assert_eq!(list.after_forward, [0, 0, 1]);
    assert_eq!(s.world.requests[&1].host[2], shared, "the other request keeps the page");
    s.land_all().step(&[]);
    assert_eq!(s.published(), [(0, 3)]);
    s.drain();
}

#[test]
fn an_emptied_prefix_index_leaves_running_requests_alone_and_hides_unread_copies() {
    let mut s = published();
    s.admit_prefix(2, PrefixCopies::None).step(&[]);
    let host = s.world.requests[&0].host[0];
    s.then(Event::Reset);
    assert_eq!(s.states(0), [PageState::Unpinned; 3]);
    assert!(s.world.coordinator.readable_copy(HostBlockId(host)).is_some(), "it is read");
    s.free(0, FreeReason::Finished);
    s.then(Event::Reset);
    assert!(s.world.coordinator.readable_copy(HostBlockId(host)).is_none());
    s.drain();
}

#[test]
fn the_null_block_is_no_copy_no_page_and_no_host_page() {
    let mut world = World::new(roomy()).unwrap();
    let request = RequestId(0);
    let with = |prefix, host_blocks, resident_blocks| Admitted {
        request,
        prefix,
        host_blocks,
        resident_blocks,
    };
    for (host, resident) in [(&[0][..], &[][..]), (&[-1], &[]), (&[16], &[]), (&[1], &[20])] {
        world.refuse(|c| c.on_admitted(&[with(Prefix::Host, host, resident)])).unwrap();
    }
    world.coordinator.on_admitted(&[with(Prefix::Host, &[3], &[0])]).unwrap();
    let state = world.coordinator.page_state(request, PageIndex(0)).unwrap();
    assert_eq!(state, Some(PageState::HostOnly), "null blocks are no residence");
    world.refuse(|c| c.on_hot_region_allocated(request, &[0])).unwrap();
    assert!(world.coordinator.readable_copy(HostBlockId(0)).is_none());
}

#[test]
fn pages_of_the_engines_own_prefix_cache_are_held_by_each_request_and_freed_once_by_each() {
    let config = CoordinatorConfig {
        num_kv_groups: 2,
        host_copy: HostCopy::None,
        host_blocks: 0,
        transition: false,
        gpu_blocks: 20,
        ..small_config()
    };
    let mut world = World::new(config).unwrap();
    let c = &mut world.coordinator;
    let (a, b, none) = (RequestId(0), RequestId(1), &[][..]);
    let hit = |request, resident_blocks| Admitted {
        request,
        prefix: Prefix::Gpu,
        host_blocks: none,
        resident_blocks,
    };
    c.on_admitted(&[hit(a, none)]).unwrap();
    let pages = PagesAllocated {
        request: a,
        first_page: PageIndex(0),
        host_blocks: none,
        resident_blocks: &[1, 2, 3, 4],
    };
    c.on_blocks_allocated(&[pages]).unwrap();
    // Two pages that overlap a known one in part, or at another position, are no page.
    for wrong in [&[2, 1][..], &[1, 3], &[5, 2], &[3, 4]] {
        world.refuse(|c| c.on_admitted(&[hit(b, wrong)])).unwrap();
    }
    let c = &mut world.coordinator;
    c.on_admitted(&[hit(b, &[1, 2])]).unwrap();
    let mut plan = FreePlan::default();
    c.on_freed(a, FreeReason::Finished, &mut plan).unwrap();
    assert_eq!((plan.free_gpu.len(), plan.unpin_gpu.len()), (4, 0));
    c.on_blocks_reused(&[3, 4]).unwrap();
    assert!(c.on_blocks_reused(&[1]).is_err(), "the other request still holds it");
    c.on_freed(b, FreeReason::Finished, &mut plan).unwrap();
    assert_eq!(plan.free_gpu, [1, 2]);
    assert!(plan.retired);
    c.on_blocks_reused(&[1, 2]).unwrap();
}

#[test]
fn a_host_block_that_holds_other_rows_now_is_not_read_from_the_hot_region() {
    let mut s = Script::new(CoordinatorConfig { host_blocks: 9, ..roomy() });
    s.world.host.hand_out_lowest_first();
    s.admit(1).step(&[(0, 2)]).land_all().step(&[]).free(0, FreeReason::Finished);
    s.tenant(19).then(Event::TenantsLeave);
    // Its first page is read from the host, so its rows are hot.
    s.admit_prefix(0, PrefixCopies::None).grow(0).step(&[(0, 1)]);
    let old = s.world.requests[&0].host[0];
    assert!(s.world.worker.rows[&0].hot_rows.contains_key(&(0, old)));
    // The page moves to another host block, and the old one becomes a page of the same request.
    s.then(Event::Redirect { pick: 0, writable: false }).step(&[]).land_all().step(&[]);
    s.grow(0).grow(0).grow(0);
    assert_eq!(s.world.requests[&0].host[2], old);
    s.step(&[(0, 7)]).land_all();
    // That page is given up in its turn and read from the host.
    let n = s.world.gpu.num_free();
    s.step(&[]).tenant(u8::try_from(n).unwrap() + 2);
    assert_eq!(s.state(0, 2), PageState::HostOnly);
    s.step(&[]).then(Event::TenantsLeave).grow(0).step(&[(0, 1)]);
    assert!(s.world.worker.rows[&0].hot_rows.contains_key(&(0, old)), "it was read");
    s.drain();
}

#[test]
fn a_copy_is_not_shared_at_another_position_than_the_one_it_was_written_for() {
    let mut s = published();
    let second = *s.world.index.values().nth(1).unwrap();
    let c = &mut s.world.coordinator;
    let request = RequestId(7);
    let copy = c.readable_copy(HostBlockId(second)).unwrap().to_vec();
    let at_the_start = |resident_blocks| Admitted {
        request,
        prefix: Prefix::Host,
        host_blocks: core::slice::from_ref(&second),
        resident_blocks,
    };
    assert!(c.on_admitted(&[at_the_start(&copy)]).is_err());
    c.on_admitted(&[at_the_start(&[])]).unwrap();
    let levels = PoolLevels { gpu_free: 19, host_free: 12 };
    c.build_step_plan(&[], levels, &mut StepPlan::default()).unwrap();
    let state = c.page_state(request, PageIndex(0)).unwrap();
    assert_eq!(
        state,
        Some(PageState::HostOnly),
        "losing a block names one position to all readers"
    );
}
