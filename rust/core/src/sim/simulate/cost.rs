// SPDX-License-Identifier: Apache-2.0
//! Owns the time of a step: what its load costs on one replica, by constants that the caller gives.
//!
//! # Model
//!
//! The ranks of a replica share the weights and hold the same KV rows. A step takes the longest of
//! four things that run side by side:
//!
//! - *the GPU*: a fixed overhead; the linear layers, by what takes longer, reading the weights that
//!   the step's tokens touch or computing 2 FLOP a token and active parameter; reading the rows
//!   that decode rows attend to and the indexer's rows of every context; then what nothing hides:
//!   resolve and the copy of its misses for each index group, since a group's misses arrive before
//!   its attention, and host-only contexts staged for prefill;
//! - *the link to the GPU*: copies of misses and staging above, and pages that come back;
//! - *the link to the host*: mirrored rows and spilled pages;
//! - *the scheduler*, which runs one step ahead.

/// Layers of one index group and the rate at which its misses are read from the host pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupCost {
    /// Layers of the group.
    pub layers: u32,
    /// GB/s of one rank's copies.
    pub copy_gbps: f64,
}

/// Ranks that fetch misses for each other: each reads its part and writes it to all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeerCost {
    /// GB/s at which a rank writes to the others.
    pub write_gbps: f64,
    /// Microseconds that ranks take to meet, a copy.
    pub meet_us: f64,
}

/// Constants of a step's cost. GB are 10^9 bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct CostModel {
    /// Ranks of the replica.
    pub ranks: u32,
    /// Bytes of all weights.
    pub weight_bytes: f64,
    /// Parameters that one token is computed with.
    pub active_params: f64,
    /// Bytes of these parameters.
    pub active_bytes: f64,
    /// Chance that a token is computed with a given expert; 1 if a step reads all weights.
    pub expert_share: f64,
    /// Replicas that share one set of experts and step together; 1 if each has its own.
    pub expert_replicas: u32,
    /// GB/s of one GPU's memory.
    pub hbm_gbps: f64,
    /// TFLOP/s of one GPU in the linear layers.
    pub compute_tflops: f64,
    /// Bytes of one token's KV in one layer.
    pub row_bytes: f64,
    /// Bytes of one token in one indexer layer.
    pub indexer_row_bytes: f64,
    /// The index groups, each with a leader.
    pub groups: Vec<GroupCost>,
    /// Microseconds of a leader's resolve with misses: a part of its own and one for each
    /// verification row.
    pub resolve_us: [f64; 2],
    /// The same if every page of the batch is resident.
    pub resident_resolve_us: [f64; 2],
    /// Microseconds of a group's copy beside its bytes.
    pub copy_us: f64,
    /// How ranks fetch for each other; each fetches every miss for itself without.
    pub peers: Option<PeerCost>,
    /// GB/s at which contexts are staged for prefill.
    pub stage_gbps: f64,
    /// GB/s at which whole pages come back to the GPU.
    pub restore_gbps: f64,
    /// GB/s of rows and pages to the host.
    pub mirror_gbps: f64,
    /// Microseconds of the scheduler for each running request.
    pub scheduler_us: f64,
    /// Microseconds of a forward pass beside everything else.
    pub overhead_us: f64,
}

/// What a step has to do on one replica.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepLoad {
    /// Tokens of the forward pass; 0 without one.
    pub tokens: u32,
    /// Rows that decode rows attend to in each layer.
    pub attended_rows: u64,
    /// Indexer rows that the batch's requests read in each indexer layer.
    pub indexed_rows: u64,
    /// Most verification rows of a request; 0 without decode rows.
    pub verification_rows: u32,
    /// True if a hot region is read.
    pub reads_host: bool,
    /// True if attention goes through hot regions and residency tables at all.
    pub resolves: bool,
    /// Misses in each index group.
    pub misses: f64,
    /// Context rows that are staged for prefill in each layer.
    pub staged_rows: u64,
    /// Bytes of whole pages that come back to the GPU.
    pub restored_bytes: u64,
    /// Bytes to the host.
    pub to_host_bytes: u64,
    /// Requests that run.
    pub running: u32,
}

/// Seconds of a step by what takes them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTime {
    /// Linear layers.
    pub linear: f64,
    /// Rows read from the GPU's memory for attention and the indexer.
    pub kv: f64,
    /// Resolve of all index groups.
    pub resolve: f64,
    /// Copies of misses.
    pub misses: f64,
    /// Staging for prefill.
    pub staging: f64,
    /// Fixed part of a forward pass.
    pub overhead: f64,
    /// The step: the longest of GPU, both directions of the link and scheduler.
    pub step: f64,
}

impl StepTime {
    /// The GPU's part of the step: everything that runs one after the other.
    #[must_use]
    pub fn gpu(&self) -> f64 {
        self.linear + self.kv + self.resolve + self.misses + self.staging + self.overhead
    }

    /// Adds another step's seconds.
    pub(super) fn add(&mut self, other: &Self) {
        self.linear += other.linear;
        self.kv += other.kv;
        self.resolve += other.resolve;
        self.misses += other.misses;
        self.staging += other.staging;
        self.overhead += other.overhead;
        self.step += other.step;
    }
}

/// Bytes a second of a rate in GB/s.
const GIGA: f64 = 1e9;
/// Seconds of a microsecond.
const MICRO: f64 = 1e-6;

impl CostModel {
    /// Seconds of a step.
    #[must_use]
    pub fn step(&self, load: &StepLoad) -> StepTime {
        let mut time = StepTime::default();
        if load.tokens > 0 {
            time.overhead = self.overhead_us * MICRO;
            time.linear = self.linear(load.tokens);
            time.kv = self.attention_bytes(load) / (self.hbm_gbps * GIGA);
            time.resolve = self.resolve(load);
            time.misses = self.copies(load.misses);
            time.staging = self.staged_bytes(load) / (self.stage_gbps * GIGA);
        }
        let restored = load.restored_bytes as f64 / (self.restore_gbps * GIGA);
        let to_gpu = time.misses + time.staging + restored;
        let to_host = load.to_host_bytes as f64 / (self.mirror_gbps * GIGA);
        let scheduler = self.scheduler_us * MICRO * f64::from(load.running);
        time.step = time.gpu().max(to_gpu).max(to_host).max(scheduler);
        time
    }

    /// Bytes of the misses of a step, in all layers.
    #[must_use]
    pub fn missed_bytes(&self, load: &StepLoad) -> f64 {
        load.misses * self.layers() * self.row_bytes
    }

    /// Bytes that are staged for prefill in a step, in all layers.
    #[must_use]
    pub fn staged_bytes(&self, load: &StepLoad) -> f64 {
        load.staged_rows as f64 * self.layers() * self.row_bytes
    }

    fn layers(&self) -> f64 {
        self.groups.iter().map(|group| f64::from(group.layers)).sum()
    }

    fn linear(&self, tokens: u32) -> f64 {
        let ranks = f64::from(self.ranks);
        let read = self.weight_bytes_read(tokens) / (ranks * self.hbm_gbps * GIGA);
        let flop = 2.0 * self.active_params * f64::from(tokens);
        read.max(flop / (ranks * self.compute_tflops * 1e12))
    }

    /// Bytes of the weights that `tokens` tokens of each replica touch, on the ranks of one replica.
    /// Each token chooses its experts alike and on its own. What all tokens share follows from the
    /// bytes of all weights and of one token's.
    fn weight_bytes_read(&self, tokens: u32) -> f64 {
        if self.expert_share >= 1.0 {
            return self.weight_bytes;
        }
        let experts = (self.weight_bytes - self.active_bytes) / (1.0 - self.expert_share);
        let replicas = f64::from(self.expert_replicas);
        let untouched = (1.0 - self.expert_share).powf(f64::from(tokens) * replicas);
        self.weight_bytes - experts + experts * (1.0 - untouched) / replicas
    }

    fn attention_bytes(&self, load: &StepLoad) -> f64 {
        let rows = load.attended_rows as f64 * self.layers() * self.row_bytes;
        let leaders = self.groups.len() as f64;
        rows + load.indexed_rows as f64 * leaders * self.indexer_row_bytes
    }

    fn resolve(&self, load: &StepLoad) -> f64 {
        if !load.resolves || load.verification_rows == 0 {
            return 0.0;
        }
        let [own, row] = if load.reads_host { self.resolve_us } else { self.resident_resolve_us };
        let leader = own + row * f64::from(load.verification_rows);
        leader * MICRO * self.groups.len() as f64
    }

    /// Seconds of the copies of `misses` rows in each index group, one group after the other.
    fn copies(&self, misses: f64) -> f64 {
        if misses <= 0.0 {
            return 0.0;
        }
        let ranks = f64::from(self.ranks);
        let of_group = |group: &GroupCost| {
            let bytes = misses * f64::from(group.layers) * self.row_bytes;
            let alone = bytes / (group.copy_gbps * GIGA);
            match self.peers {
                Some(peers) if self.ranks > 1 => {
                    let written = bytes * (ranks - 1.0) / ranks / (peers.write_gbps * GIGA);
                    (alone / ranks).max(written) + peers.meet_us * MICRO
                }
                _ => alone + self.copy_us * MICRO,
            }
        };
        self.groups.iter().map(of_group).sum()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Rates that make every time a round number.
    pub(crate) fn model() -> CostModel {
        CostModel {
            ranks: 2,
            weight_bytes: 8e9,
            active_params: 1e9,
            active_bytes: 1e9,
            expert_share: 1.0,
            expert_replicas: 1,
            hbm_gbps: 1_000.0,
            compute_tflops: 1.0,
            row_bytes: 100.0,
            indexer_row_bytes: 10.0,
            groups: vec![
                GroupCost { layers: 4, copy_gbps: 50.0 },
                GroupCost { layers: 1, copy_gbps: 20.0 },
            ],
            resolve_us: [12.0, 3.0],
            resident_resolve_us: [4.0, 1.0],
            copy_us: 7.0,
            peers: None,
            stage_gbps: 49.0,
            restore_gbps: 50.0,
            mirror_gbps: 50.0,
            scheduler_us: 12.0,
            overhead_us: 100.0,
        }
    }

    fn near(got: f64, expected: f64) {
        assert!((got - expected).abs() <= 1e-9 * expected.abs(), "{got}, expected {expected}");
    }

    #[test]
    fn a_decode_step_is_the_sum_of_what_nothing_hides() {
        let load = StepLoad {
            tokens: 2,
            attended_rows: 2_000,
            indexed_rows: 50_000,
            verification_rows: 1,
            reads_host: true,
            resolves: true,
            misses: 1_000.0,
            running: 2,
            ..StepLoad::default()
        };
        let time = model().step(&load);
        // 8 GB over two ranks of 1,000 GB/s, or 2 tokens x 2 GFLOP over 2 TFLOP/s.
        near(time.linear, 4e-3);
        // 2,000 rows x 5 layers x 100 B and 50,000 rows x 2 leaders x 10 B.
        near(time.kv, (1e6 + 1e6) / 1e12);
        near(time.resolve, 2.0 * 15e-6);
        // 400 kB at 50 GB/s, 100 kB at 20 GB/s, and 7 us each.
        near(time.misses, 8e-6 + 5e-6 + 14e-6);
        near(time.step, 100e-6 + 4e-3 + 2e-6 + 30e-6 + 27e-6);
        let resident = model().step(&StepLoad { reads_host: false, misses: 0.0, ..load });
        near(resident.resolve, 2.0 * 5e-6);
        near(model().step(&StepLoad { resolves: false, ..load }).resolve, 0.0);
    }

    #[test]
    fn a_long_prefill_is_computed_longer_than_weights_are_read() {
        let load = StepLoad { tokens: 8_192, staged_rows: 98_000, ..StepLoad::default() };
        let time = model().step(&load);
        near(time.linear, 8_192.0 * 2e9 / 2e12);
        near(time.staging, 98_000.0 * 5.0 * 100.0 / 49e9);
        assert_eq!((time.resolve, time.misses), (0.0, 0.0));
    }

    #[test]
    fn weights_are_read_as_far_as_tokens_touch_them() {
        let model = CostModel { expert_share: 1.0 / 32.0, ..model() };
        near(model.weight_bytes_read(1), 1e9);
        let experts = 7e9 * 32.0 / 31.0;
        near(model.weight_bytes_read(2), 8e9 - experts * (31.0_f64 / 32.0).powi(2));
        near(model.weight_bytes_read(100_000), 8e9);
        // Four replicas: each reads what all share and a quarter of the experts that 4 tokens touch.
        let spread = CostModel { expert_replicas: 4, ..model.clone() };
        let touched = 1.0 - (31.0_f64 / 32.0).powi(4);
        near(spread.weight_bytes_read(1), 8e9 - experts + experts * touched / 4.0);
        near(spread.weight_bytes_read(100_000), 8e9 - experts + experts / 4.0);
    }

    #[test]
    fn what_runs_beside_the_pass_counts_if_it_takes_longer() {
        let pass = StepLoad { tokens: 1, ..StepLoad::default() };
        near(model().step(&StepLoad { restored_bytes: 1_000_000_000, ..pass }).step, 20e-3);
        near(model().step(&StepLoad { to_host_bytes: 2_000_000_000, ..pass }).step, 40e-3);
        near(model().step(&StepLoad { running: 1_000, ..pass }).step, 12e-3);
        let no_pass = StepLoad { restored_bytes: 50_000_000, ..StepLoad::default() };
        near(model().step(&no_pass).step, 1e-3);
        assert_eq!(model().step(&StepLoad::default()).step, 0.0);
    }

    #[test]
    fn ranks_that_fetch_for_each_other_take_what_was_measured_of_two() {
        let group = GroupCost { layers: 4, copy_gbps: 48.7 };
        let peers = Some(PeerCost { write_gbps: 355.0, meet_us: 10.0 });
        let model = CostModel { row_bytes: 656.0, groups: vec![group], peers, ..model() };
        // Measured on two H200: 36.4 us at 1,024 misses, 483 us at 17,536.
        assert!((model.copies(1_024.0) / 36.4e-6 - 1.0).abs() < 0.05);
        assert!((model.copies(17_536.0) / 483e-6 - 1.0).abs() < 0.01);
        let alone = CostModel { peers: None, copy_us: 7.0, ..model.clone() };
        assert!(alone.copies(17_536.0) > 1.9 * model.copies(17_536.0));
        let one = CostModel { ranks: 1, ..model };
        assert!(one.copies(17_536.0) > 1.9 * 483e-6, "one rank has no peers");
    }
}
