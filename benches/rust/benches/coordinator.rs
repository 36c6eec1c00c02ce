// SPDX-License-Identifier: Apache-2.0
//! Owns the statistical comparison of the Coordinator's step between two builds.

use std::time::Duration;

use criterion::Criterion;
use hotpage_benches::{Cell, Fixture};

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("step");
    group.sample_size(20).measurement_time(Duration::from_secs(2));
    for groups in [1, 21] {
        let cell = Cell { requests: 256, context: 131_072, groups, mtp: 0 };
        group.bench_function(format!("256x128K/G={groups}"), |bench| {
            bench.iter_custom(|iterations| {
                let Ok(mut fixture) = Fixture::decoding(cell) else { return Duration::MAX };
                (0..iterations).filter_map(|_| fixture.decode_step().ok()).sum()
            });
        });
    }
    group.finish();
    criterion.final_summary();
}
