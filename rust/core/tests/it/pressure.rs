// SPDX-License-Identifier: Apache-2.0
//! Owns scenarios of a pool that runs short: who gives up pages, who gets them back, and when.

use hotpage_core::config::CoordinatorConfig;
use hotpage_core::error::Pool;
use hotpage_core::ids::{PageIndex, RequestId};
use hotpage_core::page::PageState;
use hotpage_core::step::{Admission, AdmissionQuery, FreeReason, PoolLevels, Refusal};
use hotpage_core::testing::small_config;

use crate::script::Script;

/// Blocks enough for a spell of full residency; short below 3 free blocks.
fn roomy() -> CoordinatorConfig {
    CoordinatorConfig { gpu_blocks: 20, transition_watermark: Some(3), ..small_config() }
}

/// A request of six pages that has a hot region and got all its pages back.
fn in_a_spell_of_full_residency() -> Script {
    let mut s = Script::new(roomy());
    s.admit(5).step(&[(0, 10)]).hot(0).land_all().step(&[]);
    assert_eq!(s.states(0)[..3], [PageState::Unpinned; 3]);
    s.grow(0).step(&[(0, 1)]).step(&[(0, 1)]);
    assert_eq!(s.states(0)[..3], [PageState::Clean; 3]);
    s
}

#[test]
fn a_spell_of_full_residency_that_shortage_ended_still_gives_up_its_pages_under_pressure() {
    let mut s = in_a_spell_of_full_residency();
    // Between once and twice the watermark there is no room and no pressure.
    s.tenant(7).step(&[]).grow(0).step(&[(0, 1)]);
    assert_eq!(s.states(0)[..3], [PageState::Clean; 3]);
    s.tenant(3).step(&[]);
    assert_eq!(s.states(0)[..3], [PageState::Unpinned; 3]);
    s.drain();
}

#[test]
fn a_hot_region_is_given_back_after_a_stated_spell_of_full_residency() {
    let mut s = in_a_spell_of_full_residency();
    let region = s.world.requests[&0].hot.clone();
    s.grow(0).step(&[(0, 1)]);
    assert_eq!(s.plan().hot_regions_returned, [0_i32; 0]);
    s.step(&[(0, 1)]);
    assert_eq!(s.plan().hot_regions_returned, [0]);
    assert_eq!(s.plan().free_gpu, region);
    assert!(!s.has_hot(0));
    assert!(s.plan().all_context_resident);
    s.drain();
}

#[test]
fn pages_in_the_tail_and_pages_with_a_copy_under_way_are_not_released() {
    let mut s = Script::small();
    s.admit(3).step(&[(0, 6)]).hot(0).step(&[]);
    assert_eq!(s.states(0), [PageState::Spilling; 3]);
    s.land_all();
    assert_eq!(s.states(0), [PageState::Unpinned, PageState::Clean, PageState::Clean]);
    let n = s.world.gpu.num_free();
    s.tenant(u8::try_from(n).unwrap()).step(&[]);
    assert_eq!(s.states(0)[1..], [PageState::Clean; 2], "the tail stays, whatever the pressure");
    s.drain();
}

#[test]
fn a_page_is_not_released_without_the_whole_hot_region() {
    let mut s = Script::new(CoordinatorConfig { transition_watermark: Some(8), ..small_config() });
    s.admit(5).step(&[(0, 10)]).land_all().step(&[]);
    assert_eq!(s.plan().hot_regions_wanted, [0]);
    assert_eq!(s.states(0), [PageState::Clean; 5], "asked, not forced");
    s.hot(0).step(&[]);
    assert_eq!(s.states(0)[..3], [PageState::Unpinned; 3]);
    s.drain();
}

#[test]
fn released_blocks_are_listed_tail_first_so_that_the_start_of_a_prefix_is_reused_last() {
    let mut s = Script::small();
    s.admit(5).step(&[(0, 10)]).land_all();
    let block = |s: &Script, page| {
        s.world.coordinator.resident_blocks(RequestId(0), PageIndex(page)).unwrap()[0]
    };
    let order = [block(&s, 2), block(&s, 1), block(&s, 0)];
    s.hot(0).step(&[]);
    assert_eq!(s.plan().unpin_gpu, order);
    s.drain();
}

#[test]
fn the_least_recently_scheduled_request_is_asked_first_and_only_as_many_as_are_needed() {
    let config = CoordinatorConfig {
        gpu_blocks: 24,
        host_blocks: 32,
        transition_watermark: Some(4),
        ..small_config()
    };
    let mut s = Script::new(config);
    s.admit(6).admit(6).admit(6).step(&[(0, 11), (1, 11), (2, 11)]).land_all();
    s.step(&[(1, 1)]).land_all().step(&[(0, 1)]).land_all();
    // Five blocks are free. Two short of the watermark, one request's three pages will do.
    s.tenant(3).step(&[]);
    assert_eq!(s.plan().hot_regions_wanted, [2]);
    s.drain();
}

#[test]
fn a_request_that_is_not_scheduled_any_more_stops_standing_for_the_others() {
    let config = CoordinatorConfig {
        gpu_blocks: 24,
        host_blocks: 32,
        transition_watermark: Some(4),
        ..small_config()
    };
    let mut s = Script::new(config);
    s.admit(6).admit(6).admit(6).step(&[(0, 11), (1, 11), (2, 11)]).land_all();
    s.step(&[(1, 1)]).land_all().step(&[(0, 1)]).land_all();
    s.tenant(3);
    for _ in 0..8 {
        s.step(&[]);
        assert_eq!(s.plan().hot_regions_wanted, [2]);
    }
    // So it is with the next one.
    for _ in 0..8 {
        s.step(&[]);
        assert_eq!(s.plan().hot_regions_wanted, [1]);
    }
    // Once a request has been scheduled again it is asked again, after those before it.
    s.step(&[(2, 1)]).land_all();
    for _ in 0..8 {
        s.step(&[]);
    }
    assert_eq!(s.plan().hot_regions_wanted, [2]);
    s.drain();
}

#[test]
fn a_request_whose_hot_region_costs_as_much_as_it_frees_is_never_asked() {
    // A region of three blocks; outside the tail one request has three pages, the other four.
    let config = CoordinatorConfig {
        gpu_blocks: 20,
        hot_rows: 6,
        transition_watermark: Some(10),
        max_model_len: 12,
        ..small_config()
    };
    let mut s = Script::new(config);
    s.admit(5).admit(6).step(&[(0, 10), (1, 12)]).land_all().step(&[]);
    assert_eq!(s.plan().hot_regions_wanted, [1]);
    s.drain();
}

#[test]
fn a_full_pool_of_clean_pages_admits_a_request_after_its_holders_gave_pages_up() {
    let config = CoordinatorConfig {
        block_size: 1,
        gpu_blocks: 101,
        host_blocks: 200,
        transition_watermark: Some(10),
        max_model_len: 62,
        admission_window_pages: 60,
        ..small_config()
    };
    let mut s = Script::new(config);
    s.admit(46).admit(46).step(&[(0, 46), (1, 46)]).land_all().step(&[]);
    let query = AdmissionQuery { num_tokens: 60, host_prefix_pages: 0, gpu_prefix_pages: 0 };
    let levels = |s: &Script| PoolLevels {
        gpu_free: s.world.gpu.num_free(),
        host_free: s.world.host.num_free(),
    };
    let refused = s.world.coordinator.try_admit(query, levels(&s));
    assert!(matches!(
        refused,
        Admission::Refused(Refusal::Short { pool: Pool::Gpu, reclaiming: true, .. })
    ));
    // The pages come free without a preemption.
    s.hot(0).hot(1).step(&[]);
    let fits = s.world.coordinator.try_admit(query, levels(&s));
    assert!(matches!(fits, Admission::Fits(cost) if cost.gpu_blocks == 60), "{fits:?}");
    s.admit(60).drain();
}

#[test]
fn blocks_of_a_preempted_request_with_copies_in_flight_are_pending_not_gone() {
    let mut s = Script::small();
    s.admit(4).admit(4).step(&[(0, 8), (1, 2)]);
    let free = s.world.gpu.num_free();
    s.free(0, FreeReason::Preempted);
    assert_eq!(s.world.gpu.num_free(), free, "the copies still read the blocks");
    let levels = PoolLevels { gpu_free: free, host_free: 0 };
    assert!(s.world.coordinator.has_pending_reclamation(levels), "so nobody else is preempted");
    s.land_all().step(&[]);
    assert_eq!(s.world.gpu.num_free(), free + 4);
    s.drain();
}

#[test]
fn waiting_imports_leave_room_for_a_running_request_to_give_up_pages() {
    let mut s = Script::new(CoordinatorConfig { gpu_blocks: 8, ..small_config() });
    s.import(4, true);
    let levels = PoolLevels { gpu_free: 3, host_free: 9 };
    let query = AdmissionQuery { num_tokens: 6, host_prefix_pages: 0, gpu_prefix_pages: 0 };
    let refused = s.world.coordinator.try_admit(query, levels);
    let short = matches!(refused, Admission::Refused(Refusal::Short { need: 4, free: 3, .. }));
    assert!(short, "three pages and one region stay free: {refused:?}");
    s.drain();
}

#[test]
fn a_steady_step_writes_nothing_that_grows_with_the_context() {
    let config = CoordinatorConfig {
        block_size: 1,
        gpu_blocks: 600,
        host_blocks: 600,
        max_model_len: 300,
        ..small_config()
    };
    for pages in [10, 200] {
        let mut s = Script::new(config.clone());
        s.admit(pages).hot(0).step(&[(0, pages - 2)]).land_all().step(&[]).step(&[(0, 1)]);
        s.land_all().step(&[(0, 1)]);
        let plan = s.plan();
        assert_eq!(plan.transfers.transfer_id.len(), 1, "the page just filled");
        assert!(plan.residency.page.len() <= 1 && plan.unpin_gpu.len() <= 1);
        assert!(plan.touch_gpu.len() <= 1 && plan.free_gpu.len() <= 1);
    }
}

#[test]
fn no_more_hot_regions_are_asked_for_than_the_pool_can_give() {
    let config = CoordinatorConfig {
        gpu_blocks: 24,
        host_blocks: 32,
        transition_watermark: Some(6),
        ..small_config()
    };
    let mut s = Script::new(config);
    s.admit(6).admit(6).admit(6).step(&[(0, 11), (1, 11), (2, 11)]).land_all();
    // One block is free, a region takes it; each request would give up four pages.
    s.tenant(4).step(&[]);
    assert_eq!(s.plan().hot_regions_wanted, [0]);
    let short = Refusal::Short { pool: Pool::Gpu, need: 1, free: 1, reclaiming: false };
    assert_eq!(s.plan().refusals, [(1, short), (2, short)]);
    s.drain();
}

#[test]
fn requests_that_get_their_pages_back_in_one_step_share_the_room() {
    let mut s = Script::new(CoordinatorConfig { gpu_blocks: 24, ..small_config() });
    s.admit(5).admit(5).step(&[(0, 9), (1, 9)]).hot(0).hot(1).land_all().step(&[]);
    assert_eq!(s.states(0)[..3], [PageState::Unpinned; 3]);
    assert_eq!(s.states(1)[..3], [PageState::Unpinned; 3]);
    // Nine blocks are free, five of them beyond twice the watermark: three pages may come back.
    s.tenant(8);
    assert_eq!(s.world.gpu.num_free(), 9);
    s.step(&[(0, 1), (1, 1)]);
    assert_eq!(s.states(0)[..3], [PageState::Clean; 3]);
    assert_eq!(s.states(1)[..3], [PageState::Unpinned; 3]);
    s.drain();
}

#[test]
fn what_a_hot_region_costs_is_taken_from_what_its_request_frees() {
    let config = CoordinatorConfig {
        gpu_blocks: 24,
        host_blocks: 32,
        transition_watermark: Some(6),
        ..small_config()
    };
    let mut s = Script::new(config);
    s.admit(6).admit(6).admit(6).step(&[(0, 11), (1, 11), (2, 11)]).land_all();
    // Two blocks are free, four short of the watermark; one request's four pages leave three.
    s.tenant(3).step(&[]);
    assert_eq!(s.plan().hot_regions_wanted, [0, 1]);
    s.drain();
}
