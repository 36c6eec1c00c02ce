// SPDX-License-Identifier: Apache-2.0
//! Owns scenarios of prefixes that become findable: in order, without gaps, only when good.

use hotpage_core::config::CoordinatorConfig;
use hotpage_core::page::PageState;
use hotpage_core::step::{FreeReason, TransferKind};
use hotpage_core::testing::{Ack, Event, Item, PrefixCopies, small_config};

use crate::script::Script;

/// A request of four pages, all computed, with a copy of each in flight.
fn four_copies_in_flight() -> Script {
    let mut s = Script::new(CoordinatorConfig { gpu_blocks: 20, ..small_config() });
    s.admit(4).step(&[(0, 8)]);
    assert_eq!(s.in_flight().len(), 4);
    s
}

fn land(s: &mut Script, page: u32) {
    s.ack(0, page, Ack::Enqueued).ack(0, page, Ack::Completed);
}

#[test]
fn a_page_that_landed_behind_a_gap_is_published_when_the_gap_closes_after_the_request_ended() {
    let mut s = four_copies_in_flight();
    land(&mut s, 2);
    s.free(0, FreeReason::Finished);
    land(&mut s, 1);
    s.step(&[]);
    assert_eq!(s.published(), []);
    land(&mut s, 0);
    s.step(&[]);
    assert_eq!(s.published(), [(0, 3)]);
    land(&mut s, 3);
    s.step(&[]);
    assert_eq!(s.published(), [(0, 4)]);
    assert_eq!(s.plan().retired, [0]);
    s.drain();
}

#[test]
fn a_long_prefill_publishes_its_prefix_in_order_while_it_runs() {
    let mut s = Script::new(CoordinatorConfig { gpu_blocks: 20, ..small_config() });
    s.admit(5);
    for page in 0..4 {
        s.step(&[(0, 2)]).land_all();
        s.step(&[]);
        assert_eq!(s.published(), [(0, page + 1)], "each page as soon as it has landed");
    }
    s.drain();
}

#[test]
fn pages_that_land_out_of_order_are_published_only_without_a_gap_and_are_not_forgotten() {
    let mut s = four_copies_in_flight();
    for page in [3, 1] {
        land(&mut s, page);
        s.step(&[]);
        assert_eq!(s.published(), []);
    }
    land(&mut s, 0);
    s.step(&[]);
    assert_eq!(s.published(), [(0, 2)]);
    land(&mut s, 2);
    s.step(&[]);
    assert_eq!(s.published(), [(0, 4)]);
    s.drain();
}

#[test]
fn one_failed_copy_of_many_is_made_again_before_anything_behind_it_is_published() {
    let mut s = four_copies_in_flight();
    s.ack(0, 1, Ack::Enqueued).ack(0, 1, Ack::Failed);
    for page in [0, 2, 3] {
        land(&mut s, page);
    }
    assert_eq!(s.state(0, 1), PageState::Dirty);
    s.step(&[]);
    assert_eq!(s.published(), [(0, 1)]);
    assert_eq!(s.in_flight(), [TransferKind::Spill], "copied again");
    s.land_all().step(&[]);
    assert_eq!(s.published(), [(0, 4)]);
    s.drain();
}

#[test]
fn a_copy_that_fails_after_its_request_ended_closes_no_gap() {
    let mut s = four_copies_in_flight();
    land(&mut s, 2);
    s.free(0, FreeReason::Finished);
    land(&mut s, 0);
    s.ack(0, 1, Ack::Enqueued).ack(0, 1, Ack::Failed);
    land(&mut s, 3);
    s.step(&[]);
    assert_eq!(s.published(), [(0, 1)]);
    assert_eq!(s.plan().retired, [0]);
    s.drain();
}

#[test]
fn a_preempted_request_publishes_nothing_that_lands_later_and_its_late_words_hurt_nobody() {
    let mut s = four_copies_in_flight();
    land(&mut s, 0);
    s.step(&[]);
    s.free(0, FreeReason::Preempted);
    // Admitted again under a fresh id while its copies are in flight.
    s.admit_prefix(0, PrefixCopies::None).grow(0).step(&[(0, 2)]);
    assert_eq!(s.world.requests.keys().collect::<Vec<_>>(), [&1]);
    for page in [1, 2, 3] {
        land(&mut s, page);
    }
    s.step(&[]);
    assert_eq!(s.published(), []);
    assert_eq!(s.plan().retired, [0]);
    assert_eq!(s.world.index.len(), 1);
    s.land_all().step(&[]);
    assert_eq!(s.published(), [(1, 2)], "what the new admission computed counts");
    s.drain();
}

#[test]
fn a_word_that_never_comes_keeps_the_id_the_blocks_and_the_work_pending() {
    let mut s = four_copies_in_flight();
    s.free(0, FreeReason::Aborted);
    for page in [0, 1, 2] {
        land(&mut s, page);
    }
    for _ in 0..3 {
        s.step(&[]);
        assert!(s.plan().retired.is_empty());
        assert!(s.world.coordinator.has_pending_work());
    }
    s.admit(1);
    assert!(s.world.requests.contains_key(&1), "the id is not used again");
    land(&mut s, 3);
    s.step(&[]);
    assert_eq!(s.plan().retired, [0]);
    s.drain();
}

#[test]
fn rejected_drafts_seal_no_page_and_their_rows_are_reported() {
    let mut s = Script::new(CoordinatorConfig { gpu_blocks: 20, ..small_config() });
    s.admit(3).step(&[(0, 1)]);
    let decode = |accepted| Event::Step {
        items: vec![Item { pick: 0, tokens: 2, drafts: 1, accepted }],
        fail_reads: false,
        lose_mirror: false,
    };
    // Token 1 fills page 0; its draft opens page 1.
    s.then(decode(0));
    assert_eq!(s.in_flight(), [TransferKind::Spill]);
    // The draft was rejected: position 2 is written again, and the draft at 3 fills page 1.
    s.then(decode(0));
    assert_eq!(s.plan().replay.dropped_position, [2]);
    assert_eq!(s.plan().replay.dropped_rows, [1]);
    assert_eq!(s.plan().replay.row_provisional, [0, 1]);
    assert_eq!(s.in_flight().len(), 1, "a page that a draft fills is not copied");
    // The draft at 3 was accepted: page 1 is final, and was final before this step.
    s.then(decode(1));
    assert_eq!(s.in_flight().len(), 2);
    assert_eq!(s.plan().transfers.after_forward, [0]);
    s.drain();
}

#[test]
fn a_copy_that_lands_after_the_end_of_its_request_leaves_the_gpu_page_to_be_found() {
    let mut s = Script::small();
    s.admit(2).step(&[(0, 4)]).free(0, FreeReason::Finished).land_all().step(&[]);
    assert_eq!(s.published(), [(0, 2)]);
    s.admit_prefix(1, PrefixCopies::None).step(&[]);
    assert_eq!(s.states(0), [PageState::Unpinned; 2]);
    s.drain();
}
