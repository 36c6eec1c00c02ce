// SPDX-License-Identifier: Apache-2.0
//! Proves the engine end to end on small workloads: right bytes, no leak, faults noticed.

use super::*;
use crate::config::{HostCopy, ReleasePoint};
use crate::geometry::{HostLayout, LayerPacking};
use crate::sim::worker::Fault;
use crate::sim::workload::Turn;

/// A request of the default workload below: 6 turns, up to 30 pages of 8 tokens.
fn config(policy: ServingPolicy) -> EngineConfig {
    EngineConfig {
        policy,
        packing: LayerPacking { kv_groups: vec![vec![4], vec![1, 1]] },
        block_size: 8,
        row_bytes: 32,
        host_layout: HostLayout::RowInterleaved,
        gpu_blocks: 200,
        host_blocks: 400,
        other_blocks_per_page: 1,
        top_k: 16,
        hot_rows: 32,
        num_draft_tokens: 0,
        acceptance_ppm: 700_000,
        num_ranks: 1,
        num_host_writers: 1,
        host_copy: HostCopy::Mirrored,
        release_point: ReleasePoint::Enqueued,
        hot_return_steps: 4,
        chunk_tokens: 32,
        step_tokens: 64,
        max_running: 12,
        max_model_len: 240,
        system_tokens: 0,
        think_steps: 5,
        seed: 7,
        copy_failure_ppm: 0,
        mirror_loss_ppm: 0,
        fault: None,
    }
}

fn conversation(first_prompt: u32) -> Conversation {
    let turn =
        |turn| Turn { prompt_tokens: if turn == 0 { first_prompt } else { 6 }, output_tokens: 9 };
    Conversation { turns: (0..6).map(turn).collect() }
}

/// Runs `conversations` to the end and checks that nothing is left.
fn run(config: EngineConfig, conversations: u64) -> EngineReport {
    let mut engine = Engine::new(config).unwrap();
    for number in 0..conversations {
        let first_prompt = 100 + 10 * u32::try_from(number % 5).unwrap();
        engine.submit(number, conversation(first_prompt), 3 * number).unwrap();
    }
    let mut steps = 0;
    while !engine.is_drained() {
        engine.step().unwrap();
        if steps % 16 == 0 {
            engine.check_invariants().unwrap();
        }
        steps += 1;
        assert!(steps < 50_000, "stuck: {:?}", engine.report());
    }
    engine.check_invariants().unwrap();
    let report = engine.report();
    assert_eq!(report.finished, 6 * conversations);
    assert_eq!(report.leased_blocks, 0);
    report
}

fn run_clean(config: EngineConfig, conversations: u64) -> EngineReport {
    let report = run(config, conversations);
    assert_eq!(report.verdict.first_mismatch, None);
    assert_eq!(report.verdict.mismatches, 0);
    assert!(report.verdict.rows_checked > 1_000);
    report
}

#[test]
fn every_policy_reads_the_right_bytes_and_gives_everything_back() {
    for policy in ServingPolicy::ALL {
        let report = run_clean(config(policy), 8);
        println!("{policy}: {report:#?}");
    }
}
