// SPDX-License-Identifier: Apache-2.0
//! Runs the demonstration with its default settings and prints what each policy came to.

use std::time::Instant;

use hotpage_core::sim::demo::{Demo, DemoConfig};

fn main() -> hotpage_core::Result<()> {
    let mut demo = Demo::new(DemoConfig::default())?;
    let (mut policy, mut start) = (0, Instant::now());
    loop {
        let progress = demo.advance(64)?;
        if progress.policy_index != policy {
            println!("policy {policy}: {:.2} s", start.elapsed().as_secs_f64());
            (policy, start) = (progress.policy_index, Instant::now());
        }
        if progress.finished {
            break;
        }
    }
    let report = demo.report();
    for p in &report.policies {
        println!("{} gpu_blocks {} host_blocks {}", p.policy, p.gpu_blocks, p.host_blocks);
        println!(
            "running mean {:.2}, hit rate {:?}",
            p.engine.running_mean(),
            p.engine.hot_hit_rate()
        );
        println!("{:?}", p.engine);
    }
    println!("rows {} mismatches {}", report.rows_checked(), report.mismatches());
    Ok(())
}
