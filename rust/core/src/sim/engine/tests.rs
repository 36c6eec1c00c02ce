// SPDX-License-Identifier: Apache-2.0
//! Proves the engine end to end on small workloads: right bytes, no leak, faults noticed.

use super::*;
use crate::config::{HostCopy, ReleasePoint};
use crate::geometry::{HostLayout, LayerPacking};
use crate::sim::worker::{Difference, Fault, StatesSeen};
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
            engine.check_rules().unwrap();
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
        assert!(report.running_max >= 2, "{policy}: {report:?}");
        assert!(report.states.full);
    }
}

#[test]
fn only_hotpage_lets_requests_run_without_all_their_pages() {
    let states = |policy| run_clean(config(policy), 8).states;
    let all = StatesSeen { full: true, mixed: true, none: true };
    assert_eq!(states(ServingPolicy::Hotpage), all);
    let full = StatesSeen { full: true, ..StatesSeen::default() };
    assert_eq!(states(ServingPolicy::Preempt), full);
    assert_eq!(states(ServingPolicy::Offload), full);
}

#[test]
fn hotpage_runs_more_requests_and_moves_or_computes_less_than_the_others() {
    let [hotpage, preempt, offload] =
        ServingPolicy::ALL.map(|policy| run_clean(config(policy), 10));
    assert!(hotpage.running_mean() > 1.2 * preempt.running_mean(), "{hotpage:?} {preempt:?}");
    assert!(hotpage.running_mean() > 1.2 * offload.running_mean(), "{hotpage:?} {offload:?}");
    assert!(2 * hotpage.recomputed_tokens < preempt.recomputed_tokens);
    let pages = |report: &EngineReport| report.traffic.to_gpu();
    assert!(pages(&hotpage) < pages(&offload), "{hotpage:?} {offload:?}");
}

#[test]
fn both_layouts_copy_modes_and_release_points_and_several_ranks_read_the_right_bytes() {
    for host_layout in [HostLayout::RowInterleaved, HostLayout::LayerMajor] {
        for host_copy in [HostCopy::Mirrored, HostCopy::Spilled] {
            for release_point in [ReleasePoint::Enqueued, ReleasePoint::Completed] {
                for (num_ranks, num_host_writers) in [(1, 1), (3, 1), (3, 3)] {
                    let config = EngineConfig {
                        host_layout,
                        host_copy,
                        release_point,
                        num_ranks,
                        num_host_writers,
                        ..config(ServingPolicy::Hotpage)
                    };
                    let report = run_clean(config.clone(), 6);
                    assert!(report.states.mixed && report.hot.misses > 0, "{config:?}");
                    let spilled = host_copy == HostCopy::Spilled;
                    assert_eq!(report.traffic.spilled > 0, spilled);
                    assert_eq!(report.traffic.mirrored > 0, !spilled);
                }
            }
        }
    }
}

#[test]
fn rejected_drafts_are_never_read_later() {
    for policy in ServingPolicy::ALL {
        let drafts = EngineConfig {
            num_draft_tokens: 3,
            hot_rows: 80,
            gpu_blocks: 240,
            acceptance_ppm: 500_000,
            ..config(policy)
        };
        let report = run_clean(drafts, 8);
        assert!(report.rejected_rows > 50, "{policy}: {report:?}");
    }
}

#[test]
fn conversations_with_a_common_prefix_share_its_pages() {
    for policy in ServingPolicy::ALL {
        let with = |system_tokens| {
            let config = EngineConfig {
                system_tokens,
                max_model_len: 300,
                gpu_blocks: 280,
                ..config(policy)
            };
            run_clean(config, 6)
        };
        let (alone, shared) = (with(0), with(50));
        // 6 whole pages of 8 tokens in each first turn but the first one.
        let found = shared.prefix_hit_tokens.saturating_sub(alone.prefix_hit_tokens);
        assert!(found >= 5 * 48, "{policy}: {found}");
    }
}

#[test]
fn equal_seeds_give_equal_reports_and_other_seeds_do_not() {
    for policy in ServingPolicy::ALL {
        let with = |seed| run_clean(EngineConfig { seed, ..config(policy) }, 6);
        assert_eq!(with(7), with(7));
        if policy == ServingPolicy::Hotpage {
            assert_ne!(with(7), with(8));
        }
    }
}

#[test]
fn every_planted_fault_is_noticed_once_or_more_and_named() {
    for (policy, fault) in [
        (ServingPolicy::Hotpage, Fault::GpuRow),
        (ServingPolicy::Preempt, Fault::GpuRow),
        (ServingPolicy::Offload, Fault::GpuRow),
        (ServingPolicy::Hotpage, Fault::HostRow),
        (ServingPolicy::Hotpage, Fault::StaleHotSlots),
        (ServingPolicy::Hotpage, Fault::UnmirroredRow),
        (ServingPolicy::Offload, Fault::UnmirroredRow),
    ] {
        let report = run(EngineConfig { fault: Some(fault), ..config(policy) }, 8);
        assert!(report.verdict.mismatches > 0, "{policy} {fault:?}");
        let first = report.verdict.first_mismatch.unwrap();
        assert_eq!(first.difference, Difference::Bytes, "{policy} {fault:?}");
        assert!(first.to_string().ends_with("has wrong bytes"), "{first}");
    }
}

#[test]
fn a_row_that_was_not_mirrored_is_copied_with_its_page_and_never_read_wrong() {
    for release_point in [ReleasePoint::Enqueued, ReleasePoint::Completed] {
        let config = EngineConfig {
            mirror_loss_ppm: 20_000,
            // Few enough that host blocks are used again.
            host_blocks: 100,
            release_point,
            num_ranks: 2,
            num_host_writers: 2,
            ..config(ServingPolicy::Hotpage)
        };
        let report = run_clean(config, 6);
        assert!(report.traffic.spilled > 0, "pages with a hole are copied whole");
        assert!(
            report.failed_copies > 0,
            "a hole in the step that seals its page shows as failure"
        );
    }
}

#[test]
fn failed_copies_are_made_again_and_nobody_reads_what_they_left() {
    for release_point in [ReleasePoint::Enqueued, ReleasePoint::Completed] {
        let config = EngineConfig {
            host_copy: HostCopy::Spilled,
            copy_failure_ppm: 200_000,
            release_point,
            num_ranks: 2,
            num_host_writers: 2,
            ..config(ServingPolicy::Hotpage)
        };
        let report = run_clean(config, 6);
        assert!(report.failed_copies > 5, "{report:?}");
        if release_point == ReleasePoint::Completed {
            assert_eq!(report.lost_page_preemptions, 0, "a page is released only when it is safe");
        }
    }
}

#[test]
fn aborts_preemptions_and_prefix_resets_at_any_time_leave_nothing_behind() {
    for policy in ServingPolicy::ALL {
        let mut engine =
            Engine::new(EngineConfig { num_ranks: 3, num_host_writers: 3, ..config(policy) })
                .unwrap();
        let mut submitted = 0;
        for step in 0..600_u64 {
            if step % 7 == 0 && step < 500 {
                engine.submit(submitted, conversation(90), 0).unwrap();
                submitted += 1;
            }
            let pick = engine.conversations().nth(step as usize % 5);
            match (step % 11, pick) {
                (3, Some(id)) => engine.abort(id).unwrap(),
                (7, Some(id)) => engine.preempt(id).unwrap(),
                (5, _) if step % 5 == 0 => engine.reset_prefix_cache().unwrap(),
                _ => {}
            }
            engine.step().unwrap();
            engine.check_invariants().unwrap();
        }
        for _ in 0..5_000 {
            if engine.is_drained() {
                break;
            }
            engine.step().unwrap();
        }
        assert!(engine.is_drained(), "{policy}");
        engine.check_invariants().unwrap();
        let report = engine.report();
        assert_eq!((report.leased_blocks, report.verdict.mismatches), (0, 0), "{policy}");
        assert!(report.aborted > 10 && report.preemptions > 10, "{policy}: {report:?}");
        assert_eq!(engine.coordinator().num_live(), 0);
    }
}

#[test]
fn pools_that_are_too_small_are_refused_at_the_start_with_the_remedy() {
    let error = |config| Engine::new(config).map(|_| ()).unwrap_err().to_string();
    let small = EngineConfig { gpu_blocks: 40, ..config(ServingPolicy::Preempt) };
    assert_eq!(
        error(small),
        "the GPU pool has 39 blocks, one request needs 90; \
         lower max_model_len or hot_rows, or give the KV cache more GPU memory"
    );
    let small = EngineConfig { host_blocks: 20, ..config(ServingPolicy::Hotpage) };
    assert_eq!(
        error(small),
        "the host pool has 19 blocks, one request needs 32; raise the host pool or lower max_model_len"
    );
    let narrow = EngineConfig { hot_rows: 8, ..config(ServingPolicy::Hotpage) };
    assert!(error(narrow).starts_with("hot_rows is 8, expected at least 16"));
    let mut engine = Engine::new(config(ServingPolicy::Hotpage)).unwrap();
    let long = engine.submit(0, conversation(1_000), 0).unwrap_err().to_string();
    assert!(long.starts_with("max_model_len is 240, expected at least 1084"), "{long}");
}

#[test]
fn the_smallest_pools_that_are_accepted_still_serve_everything() {
    for policy in ServingPolicy::ALL {
        let accepted = |gpu_blocks, host_blocks| {
            let config = EngineConfig { gpu_blocks, host_blocks, ..config(policy) };
            config.validate().is_ok().then_some(config)
        };
        let gpu = (2..400).find(|&gpu| accepted(gpu, 400).is_some()).unwrap();
        let host = (2..400).find(|&host| accepted(400, host).is_some()).unwrap();
        let report = run_clean(accepted(gpu, host).unwrap(), 4);
        assert_eq!(report.leased_blocks, 0);
    }
}

#[test]
fn a_lost_row_that_landed_before_as_a_rejected_draft_is_still_lost() {
    for seed in 0..12 {
        for release_point in [ReleasePoint::Enqueued, ReleasePoint::Completed] {
            let config = EngineConfig {
                seed,
                mirror_loss_ppm: 40_000,
                num_draft_tokens: 3,
                acceptance_ppm: 300_000,
                hot_rows: 80,
                gpu_blocks: 240,
                release_point,
                ..config(ServingPolicy::Hotpage)
            };
            run_clean(config, 6);
        }
    }
}

#[test]
fn a_prompt_that_is_found_whole_still_computes_its_last_token() {
    let turn = Turn { prompt_tokens: 96, output_tokens: 4 };
    for policy in ServingPolicy::ALL {
        let mut engine = Engine::new(config(policy)).unwrap();
        for delay in [0, 40] {
            // The same stream twice: equal prompts of exactly 12 pages.
            engine.submit(1, Conversation { turns: vec![turn] }, delay).unwrap();
        }
        for _ in 0..80 {
            engine.step().unwrap();
        }
        let report = engine.report();
        assert!(engine.is_drained() && report.finished == 2, "{policy}: {report:?}");
        assert_eq!(report.prefix_hit_tokens, 88, "{policy}");
        assert_eq!(report.verdict.mismatches, 0, "{policy}");
    }
}
