// SPDX-License-Identifier: Apache-2.0
//! Proves whole runs: cases that can be computed by hand, conservation, and the life-cycle rules
//! under pressure.

use super::*;
use crate::geometry::LayerPacking;
use crate::sim::engine::ServingPolicy;
use crate::sim::topk::ReuseTail;
use crate::sim::workload::Turn;

fn talk(turns: &[(u32, u32)]) -> Conversation {
    let turn = |&(prompt_tokens, output_tokens)| Turn { prompt_tokens, output_tokens };
    Conversation { turns: turns.iter().map(turn).collect() }
}

/// One layer with an indexer, blocks of 8 tokens and 160 bytes, steps of one millisecond: reading
/// the weights takes it, and nothing else takes any time unless a test says so.
fn config(policy: ServingPolicy, blocks: u64) -> SimulationConfig {
    SimulationConfig {
        policy,
        packing: LayerPacking { kv_groups: vec![vec![1]] },
        block_size: 8,
        row_bytes: 16,
        kv_bytes: 160 * (blocks + 1),
        block_bytes: 160,
        ordinary_block_bytes: 160,
        host_pool_bytes: 160 * 1_000,
        host_block_bytes: 128,
        indexer_page_bytes: 32,
        top_k: 4,
        hot_rows: 16,
        num_draft_tokens: 0,
        acceptance_ppm: 700_000,
        step_tokens: 64,
        in_flight_tokens: 128,
        max_running: 100,
        max_model_len: 32,
        hot_return_steps: 512,
        reuse_tail: ReuseTail::PUBLISHED_ALONE,
        conversations: vec![talk(&[(20, 9), (1, 2)])],
        num_users: 2,
        num_conversations: 2,
        seed: 1,
        cost: free_cost(),
    }
}

fn free_cost() -> CostModel {
    let fast = 1e12;
    CostModel {
        ranks: 1,
        weight_bytes: 1e6,
        active_params: 1.0,
        active_bytes: 1e6,
        expert_share: 1.0,
        expert_replicas: 1,
        hbm_gbps: 1.0,
        compute_tflops: fast,
        row_bytes: 0.0,
        indexer_row_bytes: 0.0,
        groups: vec![GroupCost { layers: 1, copy_gbps: fast }],
        resolve_us: [0.0; 2],
        resident_resolve_us: [0.0; 2],
        copy_us: 0.0,
        peers: None,
        stage_gbps: fast,
        restore_gbps: fast,
        mirror_gbps: fast,
        scheduler_us: 0.0,
        overhead_us: 0.0,
    }
}

/// Runs to the end, checking the life-cycle rules after every `every` steps.
fn run(config: SimulationConfig, every: u64) -> SimulationReport {
    let mut simulation = Simulation::new(config).unwrap();
    let mut fraction = 0.0;
    for _ in 0..100_000 {
        let finished = simulation.advance(every).unwrap();
        simulation.engine.check_rules().unwrap();
        assert!(simulation.fraction() >= fraction);
        fraction = simulation.fraction();
        if finished {
            assert_eq!(fraction, 1.0);
            return simulation.report();
        }
    }
    panic!("stuck: {:?}", simulation.engine.report());
}

fn near(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9, "{got}, expected {expected}");
}

fn near_latency(got: Option<Latency>, p50: f64, p90: f64) {
    let got = got.unwrap();
    assert!((got.p50 - p50).abs() < 1e-9 && (got.p90 - p90).abs() < 1e-9, "{got:?}");
}

// Two users ask for 20 and then 1 new tokens and get 9 and then 2. A first turn has 28 rows and so
// 4 pages, a second one 31 rows and as many: a pool of 4 pages serves one at a time. A first turn
// takes 9 steps, a second one 2, and each first turn overwrites all pages of the other user.

#[test]
fn preempting_computes_a_conversation_again_by_hand() {
    let report = run(config(ServingPolicy::Preempt, 4), 1);
    assert_eq!((report.conversations, report.turns, report.preemptions), (2, 4, 0));
    // First turns: steps 1 to 9 and 10 to 18. Second ones: 19 and 20, 21 and 22.
    near(report.seconds, 22e-3);
    near_latency(report.first_token, 1e-3, 10e-3);
    near_latency(report.later_first_token, 3e-3, 10e-3);
    near_latency(report.between_tokens, 1e-3, 1e-3);
    near(report.running_mean, 1.0);
    assert_eq!(
        (report.tokens.prefilled_tokens, report.tokens.recomputed_tokens),
        (20 + 20 + 30 + 30, 28 + 28)
    );
    assert_eq!((report.tokens.prompt_tokens, report.tokens.output_tokens), (42, 22));
    near(report.output_tokens_per_second(), 1e3);
    near(report.user_tokens_per_second.unwrap(), 1e3);
    assert_eq!((report.moved.to_host_bytes, report.moved.restored_bytes), (0, 0));
}

#[test]
fn offloading_brings_pages_back_by_hand() {
    // A page of 160 bytes takes half a millisecond, and a second turn gets 3 whole pages back.
    let cost = CostModel { restore_gbps: 160.0 / 0.5e-3 / 1e9, ..free_cost() };
    let report = run(SimulationConfig { cost, ..config(ServingPolicy::Offload, 4) }, 1);
    // Steps of one millisecond, but for the first step of the two second turns.
    near(report.seconds, 23e-3);
    near_latency(report.first_token, 1e-3, 10e-3);
    near_latency(report.later_first_token, 4e-3, 10.5e-3);
    // Rows 24 to 27 lay in a page that was not full.
    assert_eq!(
        (report.tokens.prefilled_tokens, report.tokens.recomputed_tokens),
        (20 + 20 + 6 + 6, 4 + 4)
    );
    assert_eq!(report.moved.restored_bytes, 2 * 3 * 160);
    // Every row of both users once, and the 8 that were computed again; 20 bytes with the indexer.
    assert_eq!(report.moved.to_host_bytes, (2 * 31 + 8) * 20);
}

#[test]
fn hotpage_reads_from_the_host_by_hand() {
    // Pages take a block for the rows and one for the indexer. A second turn holds a hot region of
    // 2 blocks, 4 indexer blocks and its last page: 7 of 8 blocks, so one turn runs at a time.
    let cost = CostModel {
        row_bytes: 1.0,
        // Attention reads rows of one byte too, in no time.
        hbm_gbps: 1e3,
        weight_bytes: 1e9,
        stage_gbps: 24.0 / 2.4e-3 / 1e9,
        groups: vec![GroupCost { layers: 1, copy_gbps: 1.0 / 1e-3 / 1e9 }],
        ..free_cost()
    };
    let report = run(SimulationConfig { cost, ..config(ServingPolicy::Hotpage, 8) }, 1);
    assert_eq!((report.turns, report.preemptions, report.running_max), (4, 0, 1));
    // The first of them finds its three whole pages on the host: 24 rows are staged behind 6 tokens
    // to compute, then 4 x 24 / 31 rows are missed by an empty hot region. It leaves one block with
    // a page of the other user, the one that is given up last, so there it is 16 rows.
    near(report.moved.staged_bytes, 24.0 + 16.0);
    near(report.moved.misses, 4.0 * (24.0 + 16.0) / 31.0);
    near(report.time.staging, 2.4e-3 + 1.6e-3);
    let all = 22e-3 + 4e-3 + report.moved.misses * 1e-3;
    assert!((report.seconds - all).abs() < 1e-6, "{} of {all}", report.seconds);
    // The indexer's rows come back, the pages do not.
    assert_eq!(report.moved.restored_bytes, 2 * 3 * 32);
    assert_eq!(report.tokens.recomputed_tokens, 8);
}

/// Conversations of up to 12 pages of 8 tokens under pools that hold a few of them.
fn pressed(policy: ServingPolicy, num_draft_tokens: u32) -> SimulationConfig {
    SimulationConfig {
        packing: LayerPacking { kv_groups: vec![vec![4], vec![1, 1]] },
        kv_bytes: 512 * 70,
        block_bytes: 512,
        ordinary_block_bytes: 768,
        host_block_bytes: 768,
        host_pool_bytes: 800 * 200,
        num_draft_tokens,
        hot_rows: 16 + 8 * num_draft_tokens,
        step_tokens: 32,
        in_flight_tokens: 64,
        max_model_len: 96,
        conversations: vec![
            talk(&[(40, 9), (6, 9), (1, 1), (7, 20)]),
            talk(&[(1, 1)]),
            talk(&[(60, 30)]),
        ],
        num_users: 9,
        num_conversations: 30,
        ..config(policy, 0)
    }
}

#[test]
fn every_turn_is_answered_and_every_token_counted_once_under_the_rules() {
    for policy in ServingPolicy::ALL {
        for drafts in [0, 3] {
            let report = run(pressed(policy, drafts), 1);
            assert_eq!((report.conversations, report.turns), (30, 10 * (4 + 1 + 1)), "{policy}");
            assert_eq!(report.tokens.prompt_tokens, 10 * (54 + 1 + 60));
            assert_eq!(report.tokens.output_tokens, 10 * (39 + 1 + 30));
            assert_eq!(report.leased_blocks, 0);
            assert_eq!(report.tokens.rejected_rows > 0, drafts > 0);
            assert!(report.running_mean > 1.0 && report.running_max <= 9);
            // What is computed is what was said but for last tokens, and what was lost.
            let computed = report.tokens.prefilled_tokens + report.tokens.output_tokens;
            let said = report.tokens.prompt_tokens
                + report.tokens.output_tokens
                + report.tokens.recomputed_tokens;
            assert!(computed <= said + report.turns, "{policy}: {computed} of {said}");
            assert!(report.refusals != crate::sim::engine::Refusals::default(), "{policy}");
        }
    }
}

#[test]
fn equal_settings_give_equal_reports_and_another_seed_other_drafts() {
    let report = run(pressed(ServingPolicy::Hotpage, 3), 7);
    assert_eq!(report, run(pressed(ServingPolicy::Hotpage, 3), 1_000));
    let other = SimulationConfig { seed: 2, ..pressed(ServingPolicy::Hotpage, 3) };
    assert_ne!(report.tokens.rejected_rows, run(other, 1_000).tokens.rejected_rows);
}

#[test]
fn rates_change_times_and_no_decision() {
    for policy in ServingPolicy::ALL {
        let base = run(pressed(policy, 0), 1_000);
        let slow = CostModel { hbm_gbps: 0.1, restore_gbps: 1e-6, ..free_cost() };
        let slow = run(SimulationConfig { cost: slow, ..pressed(policy, 0) }, 1_000);
        assert!(slow.seconds > 9.0 * base.seconds, "{policy}");
        assert_eq!(
            (slow.steps, slow.moved.restored_bytes),
            (base.steps, base.moved.restored_bytes)
        );
        assert_eq!(
            (slow.tokens.recomputed_tokens, slow.moved.misses),
            (base.tokens.recomputed_tokens, base.moved.misses)
        );
    }
}

#[test]
fn without_pressure_the_policies_serve_alike_and_nothing_is_read_back() {
    let reports = ServingPolicy::ALL.map(|policy| {
        let ample = SimulationConfig { kv_bytes: 512 * 5_000, ..pressed(policy, 0) };
        run(ample, 16)
    });
    for report in &reports {
        // Pages on the GPU can be found at once, pages on the host once they have landed.
        assert!((report.running_mean / reports[0].running_mean - 1.0).abs() < 0.02);
        near_latency(report.between_tokens, 1e-3, 1e-3);
        assert_eq!(
            (report.preemptions, report.moved.misses, report.moved.staged_bytes),
            (0, 0.0, 0.0)
        );
    }
    let [_, preempt, offload] = reports;
    assert_eq!((preempt.moved.to_host_bytes, offload.moved.restored_bytes), (0, 0));
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let error = |config| Simulation::new(config).map(|_| ()).unwrap_err().to_string();
    let base = || config(ServingPolicy::Hotpage, 20);
    let none = error(SimulationConfig { num_users: 0, ..base() });
    assert!(none.starts_with("concurrency is 0, expected at least 1"), "{none}");
    let none = error(SimulationConfig { conversations: Vec::new(), ..base() });
    assert!(none.starts_with("conversations is 0, expected at least 1"), "{none}");
    let many = error(SimulationConfig { num_conversations: 1 << 20, ..base() });
    assert!(many.starts_with("conversations is 1048576, expected at most 100000"), "{many}");
    let small = error(config(ServingPolicy::Preempt, 2));
    assert!(small.starts_with("the GPU pool has 2 blocks, one request needs 4"), "{small}");
    let mut long = Simulation::new(SimulationConfig { max_model_len: 31, ..base() }).unwrap();
    let long = long.advance(1).unwrap_err().to_string();
    assert!(long.starts_with("max_model_len is 31, expected at least 32"), "{long}");
}
