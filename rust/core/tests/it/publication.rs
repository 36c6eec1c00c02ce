// SPDX-License-Identifier: Apache-2.0
//! Owns scenarios of prefixes that become findable: in order, without gaps, only when good.

use hotpage_core::config::CoordinatorConfig;
use hotpage_core::step::FreeReason;
use hotpage_core::testing::{Ack, small_config};

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
