// SPDX-License-Identifier: Apache-2.0
//! Owns the exhaustive proof at small scope: every event sequence over two requests of up to three
//! pages and two ranks, to a fixed depth, each state visited once. Every rule is checked after
//! every event, and every state is drained to prove that nothing stays leased.

use std::collections::HashSet;

use hotpage_core::config::{CoordinatorConfig, HostCopy, ReleasePoint};
use hotpage_core::step::FreeReason;
use hotpage_core::testing::{Ack, Event, Item, PrefixCopies, World, small_config};

const REQUESTS: usize = 2;
const PAGES: usize = 3;

/// One token a page, so that a page is written, sealed and copied within a few events; room for
/// both requests and their hot regions, but not for much else.
fn scope(host_copy: HostCopy, release_point: ReleasePoint) -> CoordinatorConfig {
    CoordinatorConfig {
        block_size: 1,
        gpu_blocks: 9,
        host_blocks: 9,
        hot_rows: 1,
        verification_rows: 1,
        hot_return_steps: 1,
        admission_window_pages: 3,
        max_model_len: 3,
        host_copy,
        release_point,
        ..small_config()
    }
}

fn world(config: CoordinatorConfig) -> World {
    let mut world = World::new(config).unwrap();
    world.gpu.hand_out_lowest_first();
    world.host.hand_out_lowest_first();
    world
}

fn step(items: &[(u8, u8)]) -> Event {
    let item = |&(pick, tokens)| Item { pick, tokens, drafts: 0, accepted: 0 };
    let items = items.iter().map(item).collect();
    Event::Step { items, fail_reads: false, lose_mirror: false }
}

/// Every event that could matter in this state; `World::apply` sorts out the impossible ones.
fn alphabet(world: &World) -> Vec<Event> {
    let mut events = vec![step(&[]), Event::Reset, Event::Shutdown];
    let live = world.requests.len();
    let all = PAGES as u8;
    if live + world.draining.len() < REQUESTS {
        events.extend([Event::Admit { pages: 1 }, Event::Admit { pages: all }]);
        for pick in 0..world.index.len() as u8 {
            for copies in [PrefixCopies::None, PrefixCopies::Readable, PrefixCopies::Fresh] {
                events.push(Event::AdmitPrefix { pick, copies });
            }
        }
        events.extend([true, false].map(|tail| Event::AdmitImport { tokens: all, tail }));
    }
    let importing = world.requests.values().filter(|r| r.importing.is_some()).count();
    for pick in 0..importing as u8 {
        events.extend([None, Some(1), Some(all)].map(|tokens| Event::EndImport { pick, tokens }));
    }
    let able: Vec<_> = world.requests.values().filter(|r| r.importing.is_none()).collect();
    for (pick, request) in (0..).zip(&able) {
        if request.host.len() < PAGES {
            events.push(Event::Grow { pick });
        }
        events.extend(
            [FreeReason::Finished, FreeReason::Preempted]
                .map(|reason| Event::Free { pick, reason }),
        );
        events.extend([true, false].map(|writable| Event::Redirect { pick, writable }));
        events.extend([Event::GrantHot { pick }, step(&[(pick, 1)]), step(&[(pick, all)])]);
        if request.host.len() > request.tags.len() {
            let items = vec![Item { pick, tokens: 1, drafts: 0, accepted: 0 }];
            events.push(Event::Step { items, fail_reads: false, lose_mirror: true });
        }
    }
    if able.len() == REQUESTS {
        events.push(step(&[(0, all), (1, all)]));
    }
    let waiting = world.model.requests.values();
    if waiting.into_iter().any(|r| !r.restores.is_empty() || !r.host_copies.is_empty()) {
        events.push(Event::Step { items: Vec::new(), fail_reads: true, lose_mirror: false });
    }
    if !world.model.transfers.is_empty() {
        events.extend([0, 1].map(|rank| Event::Report { rank, fail: false }));
    }
    for pick in 0..world.model.transfers.len() as u8 {
        for rank in 0..world.coordinator.config().num_ranks as u8 {
            for ack in [Ack::Enqueued, Ack::Completed, Ack::Failed] {
                events.push(Event::Ack { pick, rank, ack });
            }
        }
    }
    events.push(if world.tenants.is_empty() {
        Event::Tenant { blocks: world.gpu.num_free() as u8 }
    } else {
        Event::TenantsLeave
    });
    events
}

struct Explored {
    states: usize,
    events: usize,
}

/// Breadth first to `depth` events from `root`; the trace of a violation is the shortest there is.
fn explore(root: World, depth: usize) -> Explored {
    let mut seen = HashSet::from([root.future_digest()]);
    let mut frontier = vec![(root, Vec::new())];
    let mut events = 0;
    for level in 0..depth {
        let mut next = Vec::new();
        for (world, trace) in frontier {
            for event in alphabet(&world) {
                let mut after = world.clone();
                let happened = after.apply(&event);
                let mut trace: Vec<Event> = trace.clone();
                trace.push(event);
                let happened = happened.unwrap_or_else(|v| panic!("{v}\nafter {trace:#?}"));
                events += usize::from(happened);
                if !happened || !seen.insert(after.future_digest()) {
                    continue;
                }
                let drained = after.clone().drain();
                drained.unwrap_or_else(|v| panic!("at the end, {v}\nafter {trace:#?}"));
                if level + 1 < depth {
                    next.push((after, trace));
                }
            }
        }
        frontier = next;
    }
    Explored { states: seen.len(), events }
}

/// Roots from which the interesting ends are near: nothing at all; all pages computed and their
/// copies in flight; a published prefix and a request that reads it from the host.
fn roots(config: &CoordinatorConfig) -> [World; 3] {
    let play = |events: &[Event], land: bool| {
        let mut world = world(config.clone());
        for event in events {
            assert!(world.apply(event).unwrap(), "{event:?}");
        }
        if land {
            world.drain_transfers().unwrap();
        }
        world
    };
    let computed = [Event::Admit { pages: 3 }, step(&[(0, 3)]), Event::GrantHot { pick: 0 }];
    let copying = play(&computed, false);
    let mut published = play(&computed, true);
    let end = Event::Free { pick: 0, reason: FreeReason::Finished };
    for event in [step(&[]), end, Event::AdmitPrefix { pick: 2, copies: PrefixCopies::None }] {
        assert!(published.apply(&event).unwrap());
    }
    [world(config.clone()), copying, published]
}

const SPILLED: (HostCopy, ReleasePoint) = (HostCopy::Spilled, ReleasePoint::Completed);
const MIRRORED: (HostCopy, ReleasePoint) = (HostCopy::Mirrored, ReleasePoint::Enqueued);

fn explore_all(modes: &[(HostCopy, ReleasePoint)], depths: [usize; 3]) {
    for &(host_copy, release_point) in modes {
        let config = scope(host_copy, release_point);
        let names = ["nothing", "copies in flight", "a host-only prefix"];
        for ((root, name), depth) in roots(&config).into_iter().zip(names).zip(depths) {
            let started = std::time::Instant::now();
            let Explored { states, events } = explore(root, depth);
            println!(
                "{host_copy:?}, {release_point:?}, from {name}: {states} states, {events} events, \
                 depth {depth}, {:.1} s",
                started.elapsed().as_secs_f64()
            );
            assert!(states > 100, "the alphabet reaches next to nothing");
        }
    }
}

#[test]
fn every_short_event_sequence_at_small_scope_keeps_every_rule() {
    explore_all(&[SPILLED, MIRRORED], [5, 4, 4]);
}

#[test]
#[ignore = "minutes in release: cargo test --release --test it -- --ignored --nocapture exhaustive"]
fn every_event_sequence_of_seven_at_small_scope_keeps_every_rule() {
    explore_all(&[MIRRORED], [7, 5, 5]);
}
