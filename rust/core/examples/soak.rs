// SPDX-License-Identifier: Apache-2.0
//! Runs random events in the embedded engine and prints events, seconds and memory.
//!
//! `cargo run --release -p hotpage-core --example soak -- [million events] [seed]`; ends with
//! status 1 if a row was wrong or a block was not given back.

use std::process::ExitCode;
use std::time::Instant;

use hotpage_core::sim::soak::Soak;

/// Events of one engine before the next configuration is drawn.
const EVENTS_PER_ENGINE: u64 = 500_000;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| match arguments.next() {
        None => Some(default),
        Some(text) => text.parse().ok(),
    };
    let (Some(millions), Some(seed)) = (number(10), number(1)) else {
        eprintln!("usage: soak [million events] [seed]");
        return ExitCode::from(2);
    };
    let events = millions * 1_000_000;
    let (mut soak, start, mut next) = (Soak::new(seed), Instant::now(), 0);
    let per_engine = EVENTS_PER_ENGINE.min(events);
    while soak.report().events < events {
        if let Err(error) = soak.run_engine(per_engine) {
            eprintln!("engine {} of seed {seed}: {error}", soak.report().engines);
            return ExitCode::FAILURE;
        }
        let report = soak.report();
        if report.events >= next || report.events >= events {
            next += events / 10;
            let (now, peak) = (memory_kib("VmRSS:"), memory_kib("VmHWM:"));
            let seconds = start.elapsed().as_secs_f64();
            println!("{seconds:8.1} s  RSS {now} KiB, peak {peak} KiB  {report:?}");
        }
    }
    let report = soak.report();
    if report.mismatches + report.leaked_blocks > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// A value of this process's memory status; 0 where the system does not tell.
fn memory_kib(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|value| value.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
