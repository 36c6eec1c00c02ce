// SPDX-License-Identifier: Apache-2.0
//! Runs the demonstration with its default settings and prints what each policy came to.
//!
//! `cargo run --release -p hotpage-core --example demo`; ends with status 1 on a wrong row.

use std::process::ExitCode;
use std::time::Instant;

use hotpage_core::sim::demo::{Demo, DemoConfig, DemoReport};

const STEPS_PER_CALL: u64 = 256;

fn main() -> ExitCode {
    match run() {
        Ok(report) => {
            print(&report);
            ExitCode::from(u8::from(report.mismatches() + report.leaked_blocks() > 0))
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> hotpage_core::Result<DemoReport> {
    let start = Instant::now();
    let mut demo = Demo::new(DemoConfig::default())?;
    while !demo.advance(STEPS_PER_CALL)?.finished {}
    println!("{:.1} s", start.elapsed().as_secs_f64());
    Ok(demo.report())
}

fn print(report: &DemoReport) {
    println!(
        "{:8} {:>7} {:>5} {:>4} {:>8} {:>11} {:>10} {:>8} {:>8} {:>6} {:>10} {:>6}",
        "policy",
        "steps",
        "mean",
        "max",
        "preempt",
        "recomputed",
        "prefilled",
        "D2H MB",
        "H2D MB",
        "hits",
        "rows",
        "wrong"
    );
    for policy in &report.policies {
        let e = &policy.engine;
        println!(
            "{:8} {:7} {:5.2} {:4} {:8} {:11} {:10} {:8.0} {:8.0} {:>6} {:10} {:6}",
            policy.policy.name(),
            e.steps,
            e.running_mean(),
            e.running_max,
            e.preemptions,
            e.recomputed_tokens,
            e.prefilled_tokens,
            e.bytes_to_host as f64 / 1e6,
            e.bytes_to_gpu as f64 / 1e6,
            e.hot_hit_rate().map_or("-".to_owned(), |rate| format!("{:.1}%", 100.0 * rate)),
            e.verdict.rows_checked,
            e.verdict.mismatches,
        );
    }
    let seen = report.states_seen();
    println!("states seen: full {}, mixed {}, none {}", seen.full, seen.mixed, seen.none);
    if let Some((policy, mismatch)) = report.first_mismatch() {
        println!("first wrong row, under {policy}: {mismatch}");
    }
}
