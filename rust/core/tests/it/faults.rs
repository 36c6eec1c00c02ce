// SPDX-License-Identifier: Apache-2.0
//! Owns scenarios of things that go wrong: copies that fail, callers that break the protocol,
//! engines that stop in the middle.

use hotpage_core::config::{CoordinatorConfig, HostCopy, ReleasePoint};
use hotpage_core::coordinator::MAX_REQUEST_ID_GAP;
use hotpage_core::error::{Error, ProtocolFault};
use hotpage_core::ids::{HostBlockId, PageIndex, RequestId, TransferId};
use hotpage_core::page::PageState;
use hotpage_core::step::{
    AdmissionQuery, Admitted, FreeReason, PagesAllocated, PoolLevels, Prefix, Scheduled, StepPlan,
    TransferAck,
};
use hotpage_core::testing::{Ack, Event, PrefixCopies, World, small_config};

use crate::script::Script;

fn mirrored() -> CoordinatorConfig {
    CoordinatorConfig { host_copy: HostCopy::Mirrored, ..small_config() }
}

fn admitted(request: u32, prefix: Prefix) -> Admitted<'static> {
    Admitted { request: RequestId(request), prefix, host_blocks: &[], resident_blocks: &[] }
}

#[test]
fn request_ids_that_leave_gaps_can_never_make_the_tables_grow_past_the_limit() {
    let mut c = World::new(small_config()).unwrap().coordinator;
    let mut id = 0;
    let error = loop {
        id += MAX_REQUEST_ID_GAP - 1;
        match c.on_admitted(&[admitted(id, Prefix::Host)]) {
            Ok(()) => assert!(id < RequestId::LIMIT, "{id}"),
            Err(error) => break error,
        }
    };
    let max = i64::from(RequestId::LIMIT) - 1;
    let (what, got) = ("request id", i64::from(id));
    assert_eq!(error, ProtocolFault::OutOfRange { what, got, min: 0, max }.into());
}

#[test]
fn a_block_of_a_hot_region_is_not_accepted_as_a_page() {
    let mut s = Script::small();
    s.admit(3).hot(0);
    let block = s.world.requests[&0].hot[0];
    let first_page = PageIndex(3);
    let pages = PagesAllocated {
        request: RequestId(0),
        first_page,
        host_blocks: &[9],
        resident_blocks: &[block],
    };
    s.world.refuse(|c| c.on_blocks_allocated(&[pages])).unwrap();
    s.admit(1);
    s.world.refuse(|c| c.on_hot_region_allocated(RequestId(1), &[block])).unwrap();
    s.drain();
}

#[test]
fn an_admission_query_beyond_all_sizes_is_answered_and_does_not_wrap() {
    let world = World::new(CoordinatorConfig { num_kv_groups: 2, ..small_config() }).unwrap();
    for transition in [true, false] {
        let config = CoordinatorConfig { transition, ..world.coordinator.config().clone() };
        let config = CoordinatorConfig { gpu_blocks: 40, other_blocks_per_page: 9, ..config };
        let c = World::new(CoordinatorConfig { max_model_len: 6, ..config }).unwrap().coordinator;
        let query =
            AdmissionQuery { num_tokens: u32::MAX, host_prefix_pages: 0, gpu_prefix_pages: 0 };
        let cost = c.admission_cost(query);
        assert_eq!(cost.gpu_blocks, u32::MAX, "saturated");
    }
}

#[test]
fn a_page_whose_mirror_was_lost_after_it_was_sealed_is_copied_whole_and_never_published_before() {
    let mut s = Script::new(mirrored());
    s.admit(2).step(&[(0, 1)]).step_without_mirror(&[(0, 1)]);
    s.land_all();
    assert_eq!(s.state(0, 0), PageState::Dirty, "the acknowledgement stood for missing rows");
    s.step(&[(0, 1)]);
    assert_eq!(s.published(), []);
    s.land_all().step(&[]);
    assert_eq!(s.published(), [(0, 1)]);
    s.drain();
}

#[test]
fn a_mirror_that_was_lost_after_its_page_was_acknowledged_is_a_protocol_fault() {
    let mut s = Script::new(mirrored());
    s.admit(2).step(&[(0, 2)]).land_all();
    s.world.refuse(|c| c.on_mirror_lost(RequestId(0), PageIndex(0))).unwrap();
    s.drain();
}

#[test]
fn a_copy_known_to_have_failed_gives_up_no_block_when_the_last_rank_enqueues_it() {
    let release_point = ReleasePoint::Enqueued;
    let mut s = Script::new(CoordinatorConfig { release_point, ..small_config() });
    s.admit(4).step(&[(0, 8)]).hot(0);
    let (&id, _) = s.world.model.transfers.iter().find(|(_, t)| t.page == 0).unwrap();
    s.world.acknowledge(id, 0, Ack::Enqueued).unwrap();
    s.world.acknowledge(id, 0, Ack::Failed).unwrap();
    s.world.acknowledge(id, 1, Ack::Enqueued).unwrap();
    s.world.model.compare(&s.world.coordinator, None).unwrap();
    assert_eq!(s.state(0, 0), PageState::Spilling);
    s.world.acknowledge(id, 1, Ack::Completed).unwrap();
    assert_eq!(s.state(0, 0), PageState::Dirty);
    s.step(&[]);
    assert_eq!(s.plan().lost_pages, []);
    s.land_all().step(&[]);
    assert_eq!(s.state(0, 0), PageState::Unpinned);
    s.drain();
}

/// A published prefix of `pages` pages that nobody uses.
fn with_prefix(s: &mut Script, pages: u8) {
    s.admit(pages).step(&[(0, 2 * pages)]).land_all().step(&[]);
    s.free(0, FreeReason::Finished);
}

#[test]
fn rows_computed_from_a_restore_that_failed_are_never_published() {
    for late in [false, true] {
        let mut s = Script::small();
        with_prefix(&mut s, 2);
        s.admit_prefix(1, PrefixCopies::Fresh).grow(0);
        s.step_with_failing_reads(&[(0, 2)]);
        if late {
            // The page computed from bad rows lands before the restore's failure is known.
            s.ack(0, 2, Ack::Enqueued).ack(0, 2, Ack::Completed).step(&[]);
            assert_eq!(s.published(), [], "what it was computed from is not confirmed");
        }
        s.land_all().step(&[]);
        assert_eq!(s.plan().lost_pages.len(), 2);
        s.free(0, FreeReason::Finished);
        assert_eq!(s.world.index.len(), 2);
        s.drain();
    }
}

#[test]
fn a_request_that_finishes_while_its_restore_is_in_flight_publishes_nothing_unconfirmed() {
    let mut s = Script::small();
    with_prefix(&mut s, 2);
    s.admit_prefix(1, PrefixCopies::Fresh).grow(0).step_with_failing_reads(&[(0, 2)]);
    s.ack(0, 2, Ack::Enqueued).ack(0, 2, Ack::Completed).free(0, FreeReason::Finished);
    assert_eq!(s.world.index.len(), 2);
    s.drain();
}

#[test]
fn a_restored_copy_is_not_shared_before_it_is_known_to_be_good() {
    let mut s = Script::small();
    with_prefix(&mut s, 2);
    // The first holder's copies are gone; only the host has the prefix.
    s.tenant(11).then(Event::TenantsLeave);
    s.admit_prefix(1, PrefixCopies::Fresh).step_with_failing_reads(&[]);
    s.admit_prefix(1, PrefixCopies::None).grow(1).step(&[(1, 2)]);
    assert_eq!(s.state(1, 0), PageState::HostOnly);
    s.land_all().step(&[(1, 1)]);
    assert_eq!(s.plan().lost_pages, [(0, 0), (0, 1)], "nobody else read the bad rows");
    s.free(0, FreeReason::Preempted);
    s.admit_prefix(1, PrefixCopies::None).step(&[]);
    assert_eq!(s.state(0, 0), PageState::HostOnly);
    s.drain();
}

#[test]
fn a_restored_copy_is_shared_once_it_is_known_to_be_good() {
    let mut s = Script::small();
    with_prefix(&mut s, 2);
    s.tenant(11).then(Event::TenantsLeave);
    s.admit_prefix(1, PrefixCopies::Fresh).step(&[]).land_all();
    s.admit_prefix(1, PrefixCopies::None).step(&[]);
    assert_eq!(s.states(1), [PageState::Unpinned; 2]);
    s.drain();
}

#[test]
fn shutdown_gives_back_an_import_and_a_host_copy_that_no_plan_has_seen() {
    let mut s = Script::small();
    with_prefix(&mut s, 2);
    s.admit_prefix(1, PrefixCopies::None).then(Event::Redirect { pick: 0, writable: true });
    s.import(3, true);
    s.then(Event::Shutdown);
}

#[test]
fn after_shutdown_no_work_is_pending() {
    let mut s = Script::small();
    s.admit(2).step(&[(0, 4)]).land_all();
    assert!(s.world.coordinator.has_pending_work(), "pages wait to be published");
    s.then(Event::Shutdown);
    assert!(!s.world.coordinator.has_pending_work());
}

#[test]
fn a_page_is_not_redirected_again_before_its_copy_is_complete() {
    let mut s = Script::small();
    s.import(2, false).landed(Some(2)).then(Event::Redirect { pick: 0, writable: false });
    let (request, page, fresh) = (RequestId(0), PageIndex(0), HostBlockId(9));
    s.world.refuse(|c| c.on_host_block_redirected(request, page, fresh, None)).unwrap();
    s.step(&[]).land_all().then(Event::Redirect { pick: 0, writable: false });
    s.drain();
}

#[test]
fn a_page_whose_copy_is_known_to_have_failed_is_not_given_up_before_it_is_copied_again() {
    for host_copy in [HostCopy::Spilled, HostCopy::Mirrored] {
        let release_point = ReleasePoint::Enqueued;
        let mut s = Script::new(CoordinatorConfig { release_point, host_copy, ..small_config() });
        s.admit(4).step(&[(0, 8)]);
        let (&id, _) = s.world.model.transfers.iter().find(|(_, t)| t.page == 0).unwrap();
        s.ack(0, 0, Ack::Enqueued);
        if host_copy == HostCopy::Mirrored {
            let lost = s.world.coordinator.on_mirror_lost(RequestId(0), PageIndex(0));
            lost.unwrap();
            s.world.model.mirror_lost(0, 0);
        } else {
            s.world.acknowledge(id, 0, Ack::Failed).unwrap();
        }
        // Every rank has enqueued the copy, but it is known by now that the GPU copy is the only
        // good one: a hot region must not make the page go.
        s.hot(0).step(&[]);
        assert_ne!(s.state(0, 0), PageState::Unpinned, "{host_copy:?}");
        s.tenant(5).land_all().step(&[]);
        assert_eq!(s.plan().lost_pages, []);
        s.land_all().step(&[]).then(Event::TenantsLeave);
        assert_eq!(s.state(0, 0), PageState::Unpinned);
        s.drain();
    }
}

#[test]
fn an_acknowledgement_by_no_rank_is_refused() {
    let mut s = Script::small();
    s.admit(2).step(&[(0, 2)]);
    let (&id, _) = s.world.model.transfers.iter().next().unwrap();
    let acks = [TransferAck { transfer: TransferId(id), count: 0 }];
    s.world.refuse(|c| c.on_transfers_enqueued(&acks)).unwrap();
    s.ack(0, 0, Ack::Enqueued);
    s.world.refuse(|c| c.on_transfers_completed(&acks)).unwrap();
    let error = s.world.refuse(|c| c.on_transfers_failed(&acks)).unwrap();
    let (what, got, min, max) = ("acknowledgement count", 0, 1, 2);
    assert_eq!(error, ProtocolFault::OutOfRange { what, got, min, max }.into());
    s.ack(0, 0, Ack::Completed);
    assert_eq!(s.world.coordinator.stats().spills_failed, 0);
    s.drain();
}

#[test]
fn blocks_of_a_gpu_prefix_are_shared_at_one_position_only() {
    let config = CoordinatorConfig {
        host_copy: HostCopy::None,
        host_blocks: 0,
        num_host_writers: 0,
        transition: false,
        num_kv_groups: 2,
        gpu_blocks: 20,
        ..small_config()
    };
    let mut world = World::new(config).unwrap();
    let admitted = |request, resident_blocks| Admitted {
        request: RequestId(request),
        prefix: Prefix::Gpu,
        host_blocks: &[],
        resident_blocks,
    };
    for batch in [
        &[admitted(0, &[1, 1])][..],
        &[admitted(0, &[1, 2, 1, 2])],
        &[admitted(0, &[1, 2, 2, 3])],
        &[admitted(0, &[1, 2]), admitted(1, &[1, 3])],
        &[admitted(0, &[1, 2]), admitted(1, &[2, 1])],
        &[admitted(0, &[1, 2]), admitted(1, &[3, 4, 1, 2])],
        &[admitted(0, &[1, 2]), admitted(1, &[3, 4]), admitted(2, &[1, 4])],
    ] {
        let error = world.refuse(|c| c.on_admitted(batch)).unwrap();
        assert!(matches!(error, Error::Protocol(ProtocolFault::BlockHeld { .. })), "{error}");
    }
    let shared = [admitted(0, &[1, 2, 3, 4]), admitted(1, &[1, 2, 5, 6]), admitted(2, &[1, 2])];
    world.coordinator.on_admitted(&shared).unwrap();
    world.refuse(|c| c.on_admitted(&[admitted(3, &[3, 4])])).unwrap();
    world.coordinator.on_admitted(&[admitted(3, &[1, 2, 3, 4])]).unwrap();
}

#[test]
fn a_request_that_reads_pages_which_anybody_may_take_is_not_scheduled_without_a_hot_region() {
    let mut s = Script::small();
    with_prefix(&mut s, 2);
    let mut host: Vec<_> = s.world.index.iter().map(|(key, &block)| (key.len(), block)).collect();
    host.sort_unstable();
    let host_blocks = &[host[0].1, host[1].1][..];
    let mut c = s.world.coordinator.clone();
    let (request, levels, mut plan) = (RequestId(0), PoolLevels::default(), StepPlan::default());
    c.on_admitted(&[Admitted { host_blocks, ..admitted(0, Prefix::Host) }]).unwrap();
    c.build_step_plan(&[], levels, &mut plan).unwrap();
    assert_eq!(c.page_states(request).unwrap(), [PageState::Unpinned; 2], "both were adopted");
    let (first_page, num_draft_tokens) = (PageIndex(2), 0);
    let pages = PagesAllocated { request, first_page, host_blocks: &[15], resident_blocks: &[11] };
    c.on_blocks_allocated(&[pages]).unwrap();
    let (num_computed_tokens, num_scheduled_tokens) = (4, 1);
    let item = Scheduled { request, num_computed_tokens, num_scheduled_tokens, num_draft_tokens };
    let error = c.build_step_plan(&[item], levels, &mut plan).unwrap_err();
    assert_eq!(error, ProtocolFault::HotRegionMissing { request }.into());
}
