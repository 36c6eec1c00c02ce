// SPDX-License-Identifier: Apache-2.0
//! Owns the scheduler-latency table: p50 and p99 of the Coordinator's share of a step, of a
//! prefix-hit admission and of a finish, as a table on stdout and as JSON in a file.

use std::time::{Duration, Instant};

use hotpage_benches::{Cell, Fixture};
use serde::Serialize;

/// Cells with more pages than this need more memory than a small machine has.
const MAX_PAGES: u64 = 40_000_000;
/// Wall time after which a cell takes no more samples.
const CELL_BUDGET: Duration = Duration::from_millis(1_500);

#[derive(Serialize)]
struct Line {
    name: &'static str,
    requests: u32,
    context: u32,
    groups: u32,
    mtp: u32,
    p50_us: f64,
    p99_us: f64,
    samples: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let out = std::env::args().nth(1).unwrap_or_else(|| "build/bench-core.json".into());
    let mut lines = Vec::new();
    println!(
        "{:<18}{:>9}{:>10}{:>4}{:>5}{:>12}{:>12}{:>9}",
        "name", "requests", "context", "G", "mtp", "p50 us", "p99 us", "samples"
    );
    for context in [32_768, 131_072, 1_048_576] {
        for groups in [1, 6, 21] {
            for requests in [64, 256, 2_048] {
                for mtp in [0, 3] {
                    step(Cell { requests, context, groups, mtp }, &mut lines)?;
                }
            }
            let cell = Cell { requests: 1, context, groups, mtp: 0 };
            admit_and_finish(cell, &mut lines)?;
        }
    }
    if let Some(folder) = std::path::Path::new(&out).parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&out, serde_json::to_string_pretty(&lines)?)?;
    println!("{} lines in {out}", lines.len());
    Ok(())
}

fn step(cell: Cell, lines: &mut Vec<Line>) -> Result<(), hotpage_core::Error> {
    let pages = u64::from(cell.requests) * u64::from(cell.context / hotpage_benches::BLOCK_SIZE);
    if pages > MAX_PAGES {
        println!("step: {} requests x {} left out: {pages} pages", cell.requests, cell.context);
        return Ok(());
    }
    let mut fixture = Fixture::decoding(cell)?;
    let started = Instant::now();
    let mut samples = Vec::new();
    while samples.len() < 1_000 && started.elapsed() < CELL_BUDGET {
        samples.push(fixture.decode_step()?);
    }
    report("step", cell, samples, lines);
    Ok(())
}

fn admit_and_finish(cell: Cell, lines: &mut Vec<Line>) -> Result<(), hotpage_core::Error> {
    let mut admits = Vec::new();
    let mut finishes = Vec::new();
    let started = Instant::now();
    while admits.len() < 100 && (admits.len() < 3 || started.elapsed() < CELL_BUDGET * 2) {
        let mut fixture = Fixture::new(cell)?;
        fixture.prefill_resident()?;
        let (hosts, spent) = fixture.finish()?;
        finishes.push(spent);
        admits.push(fixture.admit_prefix_hit(&hosts)?);
        assert!(fixture.last_residency_rows() >= hosts.len(), "the copies were not adopted");
    }
    report("admit_prefix_hit", cell, admits, lines);
    report("finish", cell, finishes, lines);
    Ok(())
}

fn report(name: &'static str, cell: Cell, mut samples: Vec<Duration>, lines: &mut Vec<Line>) {
    samples.sort_unstable();
    let at = |q: f64| {
        let index = ((samples.len() - 1) as f64 * q).ceil() as usize;
        samples[index].as_secs_f64() * 1e6
    };
    let line = Line {
        name,
        requests: cell.requests,
        context: cell.context,
        groups: cell.groups,
        mtp: cell.mtp,
        p50_us: at(0.5),
        p99_us: at(0.99),
        samples: samples.len(),
    };
    println!(
        "{:<18}{:>9}{:>10}{:>4}{:>5}{:>12.1}{:>12.1}{:>9}",
        name,
        line.requests,
        line.context,
        line.groups,
        line.mtp,
        line.p50_us,
        line.p99_us,
        line.samples
    );
    lines.push(line);
}
