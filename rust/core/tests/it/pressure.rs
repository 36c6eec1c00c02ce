// SPDX-License-Identifier: Apache-2.0
//! Owns scenarios of a pool that runs short: who gives up pages, who gets them back, and when.

use hotpage_core::config::CoordinatorConfig;
use hotpage_core::page::PageState;
use hotpage_core::step::{FreeReason, PoolLevels};
use hotpage_core::testing::{Event, small_config};

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
