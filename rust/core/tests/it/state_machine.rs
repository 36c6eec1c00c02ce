// SPDX-License-Identifier: Apache-2.0
//! Owns the random proof: sequences of every event against the toy world and its naive model.
//! `PROPTEST_CASES` raises the number of cases.

use hotpage_core::config::{CoordinatorConfig, HostCopy, ReleasePoint};
use hotpage_core::step::FreeReason;
use hotpage_core::testing::{Ack, Event, Item, PrefixCopies, World, small_config};
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

/// What decides which events make sense: the configuration. Everything else is in the world's
/// model, because events are total.
#[derive(Debug, Clone)]
struct Script {
    config: CoordinatorConfig,
}

fn configs() -> impl Strategy<Value = CoordinatorConfig> {
    let copies = prop_oneof![Just(HostCopy::Spilled), Just(HostCopy::Mirrored)];
    let points = prop_oneof![Just(ReleasePoint::Completed), Just(ReleasePoint::Enqueued)];
    let transition = prop::bool::weighted(0.9);
    (copies, points, 1..=3_u32, 1..=3_u32, 1..=2_u32, 0..=1_u32, 10..=24_u32, transition).prop_map(
        |(
            host_copy,
            release_point,
            ranks,
            writers,
            groups,
            reprefillable,
            gpu_blocks,
            transition,
        )| {
            CoordinatorConfig {
                host_copy,
                release_point,
                transition,
                num_ranks: ranks,
                num_host_writers: writers.min(ranks),
                num_kv_groups: groups,
                num_reprefillable_tokens: reprefillable,
                gpu_blocks: gpu_blocks.max(8 * groups),
                transition_watermark: Some(2 * groups),
                ..small_config()
            }
        },
    )
}

fn acks() -> impl Strategy<Value = Ack> {
    prop_oneof![6 => Just(Ack::Enqueued), 6 => Just(Ack::Completed), 1 => Just(Ack::Failed)]
}

fn items() -> impl Strategy<Value = Vec<Item>> {
    let item = (any::<u8>(), 1..=4_u8, 0..=1_u8, 0..=1_u8)
        .prop_map(|(pick, tokens, drafts, accepted)| Item { pick, tokens, drafts, accepted });
    prop::collection::vec(item, 0..=3)
}

fn events() -> impl Strategy<Value = Event> {
    let copies = prop_oneof![
        4 => Just(PrefixCopies::None),
        1 => Just(PrefixCopies::Readable),
        1 => Just(PrefixCopies::Fresh),
    ];
    let reasons = prop_oneof![
        Just(FreeReason::Finished),
        Just(FreeReason::Preempted),
        Just(FreeReason::Aborted),
    ];
    let rare = prop::bool::weighted(0.1);
    prop_oneof![
        6 => (1..=5_u8).prop_map(|pages| Event::Admit { pages }),
        5 => (any::<u8>(), copies).prop_map(|(pick, copies)| Event::AdmitPrefix { pick, copies }),
        2 => (1..=8_u8, any::<bool>())
            .prop_map(|(tokens, tail)| Event::AdmitImport { tokens, tail }),
        3 => (any::<u8>(), prop::option::weighted(0.8, 0..=8_u8))
            .prop_map(|(pick, tokens)| Event::EndImport { pick, tokens }),
        8 => any::<u8>().prop_map(|pick| Event::Grow { pick }),
        6 => any::<u8>().prop_map(|pick| Event::GrantHot { pick }),
        30 => (items(), rare, rare).prop_map(|(items, fail_reads, lose_mirror)| {
            Event::Step { items, fail_reads, lose_mirror }
        }),
        40 => (any::<u8>(), any::<u8>(), acks())
            .prop_map(|(pick, rank, ack)| Event::Ack { pick, rank, ack }),
        4 => (any::<u8>(), prop::bool::weighted(0.1))
            .prop_map(|(rank, fail)| Event::Report { rank, fail }),
        2 => (any::<u8>(), acks()).prop_map(|(pick, ack)| Event::BadAck { pick, ack }),
        6 => (1..=6_u8).prop_map(|blocks| Event::Tenant { blocks }),
        6 => Just(Event::TenantsLeave),
        3 => (any::<u8>(), any::<bool>())
            .prop_map(|(pick, writable)| Event::Redirect { pick, writable }),
        5 => (any::<u8>(), reasons).prop_map(|(pick, reason)| Event::Free { pick, reason }),
        1 => Just(Event::Reset),
        1 => Just(Event::Shutdown),
    ]
}

impl ReferenceStateMachine for Script {
    type State = Self;
    type Transition = Event;

    fn init_state() -> BoxedStrategy<Self::State> {
        configs().prop_map(|config| Self { config }).boxed()
    }

    fn transitions(_: &Self::State) -> BoxedStrategy<Self::Transition> {
        events().boxed()
    }

    fn apply(state: Self::State, _: &Self::Transition) -> Self::State {
        state
    }
}

struct LifeCycle;

impl StateMachineTest for LifeCycle {
    type SystemUnderTest = World;
    type Reference = Script;

    fn init_test(script: &Script) -> World {
        World::new(script.config.clone()).unwrap()
    }

    fn apply(mut world: World, _: &Script, event: Event) -> World {
        if let Err(violation) = world.apply(&event) {
            panic!("{violation}");
        }
        world
    }

    fn teardown(mut world: World, _: Script) {
        if let Err(violation) = world.drain() {
            panic!("at the end, {violation}");
        }
    }
}

fn settings() -> ProptestConfig {
    // 300 sequences take a few seconds in the dev profile.
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    ProptestConfig { cases, max_shrink_iters: 20_000, ..ProptestConfig::default() }
}

prop_state_machine! {
    #![proptest_config(settings())]

    #[test]
    fn every_event_sequence_keeps_every_rule_of_the_page_life_cycle(sequential 1..120 => LifeCycle);
}

/// A proof is only as good as what it reaches: every kind of decision must be made many times.
#[test]
fn random_sequences_reach_every_kind_of_decision() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut total = [0_u64; 15];
    for _ in 0..400 {
        let config = configs().new_tree(&mut runner).unwrap().current();
        let sequence = prop::collection::vec(events(), 120).new_tree(&mut runner).unwrap();
        let mut world = World::new(config).unwrap();
        for event in sequence.current().iter().filter(|event| **event != Event::Shutdown) {
            world.apply(event).unwrap();
        }
        let s = world.coordinator.stats();
        let counts = [
            s.admitted,
            s.finished,
            s.preempted,
            s.spills_planned,
            s.spills_completed,
            s.spills_failed,
            s.restores_planned,
            s.pages_released,
            s.pages_lost,
            s.pages_adopted,
            s.pages_repinned,
            s.hot_regions_granted,
            s.hot_regions_returned,
            s.pages_published,
            s.rows_rejected,
        ];
        for (sum, count) in total.iter_mut().zip(counts) {
            *sum += count;
        }
    }
    println!("{total:?}");
    assert!(total.iter().all(|&count| count >= 20), "{total:?}");
}
