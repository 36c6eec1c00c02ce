// SPDX-License-Identifier: Apache-2.0
//! Owns the plan: what runs at each context length with ordinary residency, with hotpage and with
//! dense offloading, and what limits each.

use crate::capacity::{self, Footprint};
use crate::error::{self, config, size, within, Result};
use crate::link::{self, HostLayout};
use crate::memory::{bytes, registrations, GpuMemory, GIB};
use crate::model::Model;
use crate::packing::Packing;

/// Everything that a plan depends on.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// The model's geometry.
    pub model: Model,
    /// One GPU's memory.
    pub memory: GpuMemory,
    /// GPUs in all; they must be `tp x dp`.
    pub gpus: Option<i64>,
    /// Ranks of one replica.
    pub tp: i64,
    /// Replicas.
    pub dp: i64,
    /// Tokens of an engine block.
    pub block_size: i64,
    /// Hot rows of a request in each layer; the default is `(mtp + 2) x top-k`.
    pub hot_rows: Option<i64>,
    /// Speculative tokens.
    pub mtp: i64,
    /// Host pool of one replica; absent, it is taken to be large enough.
    pub host_pool_gib: Option<f64>,
    /// Host memory of one replica for dense offloading.
    pub offload_gib: Option<f64>,
    /// Most that one registration of pinned memory can hold.
    pub registration_gib: f64,
    /// Context lengths to plan for, output left out.
    pub contexts: Vec<i64>,
    /// Tokens that a request generates.
    pub output: i64,
    /// Longest request that the engine admits; by default each planned length in turn.
    pub max_model_len: Option<i64>,
    /// Tokens of a batch (`max_num_batched_tokens`).
    pub batched_tokens: i64,
    /// Most requests that a replica runs (`max_num_seqs`).
    pub max_num_seqs: i64,
    /// Selected rows that are found hot; by default the published rate for the hot rows.
    pub hit_rate: Option<f64>,
    /// Host link of one GPU in one direction, in GB/s; unknown, no link time is given.
    pub link_gbps: Option<f64>,
    /// Order of rows in the host pool.
    pub layout: HostLayout,
}

/// Batches that vLLM 0.33 has under way at once with asynchronous scheduling.
pub const CONCURRENT_BATCHES: u64 = 2;

/// More ranks than any replica has.
const MAX_RANKS: i64 = 1 << 16;

/// What keeps a number from being larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bind {
    /// GPU memory, taken by KV of all layers.
    GpuKv,
    /// GPU memory, taken mostly by indexer rows.
    GpuIndexer,
    /// GPU memory, taken mostly by hot regions.
    GpuHot,
    /// GPU memory: the pages in flight of the one request that is being admitted.
    GpuAdmission,
    /// The host pool.
    HostPool,
    /// The engine's limit of running requests.
    MaxNumSeqs,
}

/// Bytes of one request by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestBytes {
    /// GPU, ordinary residency.
    pub ordinary: u64,
    /// GPU with hotpage once it reads from host: the next four together.
    pub hotpage: u64,
    /// Indexer rows.
    pub indexer: u64,
    /// Hot rows.
    pub hot: u64,
    /// Rows of the tail, and of groups of a fixed number of blocks.
    pub tail: u64,
    /// What blocks hold beside these.
    pub padding: u64,
    /// Host pool.
    pub host: u64,
}

/// The answer for one context length. Numbers of requests are over all replicas.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Context length asked for.
    pub context: u64,
    /// Running requests with ordinary residency.
    pub ordinary: f64,
    /// Running requests with hotpage.
    pub hotpage: f64,
    /// Running requests with dense offloading: each must be resident to run.
    pub offload: f64,
    /// Requests whose KV the offload pool keeps beside the running ones.
    pub offload_kept: Option<f64>,
    /// True if hotpage carries more by keeping every page resident than by reading from host.
    pub resident: bool,
    /// What binds ordinary residency and dense offloading.
    pub ordinary_bind: Bind,
    /// What binds hotpage.
    pub hotpage_bind: Bind,
    /// vLLM's steady-state concurrency of one replica, host pool included where it is given.
    pub steady_state: f64,
    /// Bytes of one request.
    pub bytes: RequestBytes,
    /// Least host pool of one replica that does not limit hotpage, in GiB.
    pub min_host_pool_gib: f64,
    /// Milliseconds that one GPU's link is busy in a decode step, where the link is known.
    pub pcie_ms_per_step: Option<f64>,
    /// Bytes for KV on one GPU.
    pub kv_bytes: u64,
}

/// A plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// How layers share blocks.
    pub packing: Packing,
    /// Hit rate that the link times assume.
    pub hit_rate: f64,
    /// Host memory of all replicas' pools together, in GiB; the ranks of a replica share one pool.
    pub host_physical_gib: Option<f64>,
    /// Host blocks of one replica.
    pub host_blocks: Option<u64>,
    /// Pinned registrations of one replica's pool.
    pub host_registrations: Option<u64>,
    /// One answer for each context length.
    pub points: Vec<Point>,
    /// Shortest length from which on hotpage carries more than ordinary residency, up to the
    /// longest that can be served.
    pub crossover_context: Option<u64>,
}

/// Makes a plan.
///
/// # Errors
/// Any input out of its bounds, and a host pool under one request plus two pages.
pub fn plan(inputs: &Inputs) -> Result<Plan> {
    let machine = Machine::new(inputs)?;
    let points = inputs
        .contexts
        .iter()
        .map(|&context| machine.point(machine.check_context(context)?))
        .collect::<Result<Vec<_>>>()?;
    let host_registrations = match machine.host_blocks {
        None => None,
        Some(blocks) => {
            Some(registrations(blocks, machine.host_stride, bytes(inputs.registration_gib))?)
        }
    };
    Ok(Plan {
        host_physical_gib: machine
            .host_blocks
            .map(|blocks| (blocks * machine.host_stride) as f64 * machine.dp as f64 / GIB),
        host_blocks: machine.host_blocks,
        host_registrations,
        hit_rate: machine.hit_rate,
        crossover_context: machine.crossover(),
        points,
        packing: machine.packing,
    })
}

/// Inputs that passed their checks, with what follows from them for every length.
struct Machine<'a> {
    inputs: &'a Inputs,
    packing: Packing,
    tp: u64,
    dp: u64,
    output: u64,
    in_flight_tokens: u64,
    max_num_seqs: u64,
    max_model_len: Option<u64>,
    host_stride: u64,
    host_blocks: Option<u64>,
    hit_rate: f64,
}

impl<'a> Machine<'a> {
    fn new(inputs: &'a Inputs) -> Result<Self> {
        let model = &inputs.model;
        let packing = Packing::new(model, inputs.block_size, inputs.hot_rows, inputs.mtp)?;
        inputs.memory.validate()?;
        let tp = within("tp", inputs.tp, 1, MAX_RANKS, "give the ranks of one replica")?;
        let dp = within("dp", inputs.dp, 1, 1 << 16, "give the number of replicas")?;
        check_gpus(inputs.gpus, tp, dp)?;
        let positions = i64::try_from(model.max_positions).unwrap_or(i64::MAX);
        let longest = "the model has no more positions";
        let max_model_len = inputs
            .max_model_len
            .map(|tokens| within("max_model_len", tokens, 1, positions, longest))
            .transpose()?;
        let output = within("output", inputs.output, 0, positions, longest)?;
        let remedy = "give what the engine is started with";
        let batched = within("batched_tokens", inputs.batched_tokens, 1, 1 << 30, remedy)?;
        let max_num_seqs = within("max_num_seqs", inputs.max_num_seqs, 1, 1 << 30, remedy)?;
        if let Some(link_gbps) = inputs.link_gbps {
            size("link_gbps", link_gbps, 0.0, false, "give the rate of one direction")?;
        }
        let remedy = "leave it out for 256";
        size("registration_gib", inputs.registration_gib, 0.0, false, remedy)?;
        if let Some(offload_gib) = inputs.offload_gib {
            size("offload_gib", offload_gib, 0.0, true, "leave it out for none")?;
        }
        let expected = link::expected_hit_rate(packing.hot_rows, model.top_k);
        let hit_rate = inputs.hit_rate.unwrap_or(expected);
        if !(0.0..=1.0).contains(&hit_rate) {
            return Err(config("hit_rate", hit_rate, "0 to 1", "give a fraction"));
        }
        let host_stride = packing.host_block_stride(tp > 1);
        let host_blocks = match inputs.host_pool_gib {
            None => None,
            Some(gib) => {
                let gib = size("host_pool_gib", gib, 0.0, false, "leave it out to size it")?;
                Some(bytes(gib) / host_stride)
            }
        };
        Ok(Self {
            inputs,
            tp,
            dp,
            output,
            in_flight_tokens: CONCURRENT_BATCHES * batched,
            max_num_seqs,
            max_model_len,
            host_stride,
            host_blocks,
            hit_rate,
            packing,
        })
    }

    /// A context length with its bounds checked.
    fn check_context(&self, context: i64) -> Result<u64> {
        let positions = self.inputs.model.max_positions;
        let (limit, of) = match self.max_model_len {
            Some(limit) if limit < positions => (limit, "max_model_len"),
            _ => (positions, "the model's positions"),
        };
        let most = limit.saturating_sub(self.output);
        let context = within("context", context, 1, i64::MAX, "give a number of tokens")?;
        if context > most {
            let remedy = format!("context and output together pass {of} ({limit})");
            return Err(config("context", context, format!("at most {most}"), remedy));
        }
        let longest = self.admitted(context + self.output);
        let need = self.packing.pages(longest) + capacity::TAIL_PAGES;
        match self.host_blocks {
            Some(blocks) if blocks < need => Err(error::capacity(
                "host pool",
                format!("{blocks} pages"),
                format!("at least {need} (one request of {longest} tokens plus two pages)"),
                format!(
                    "raise --host-pool-gib to {:.1} or admit shorter requests",
                    round_up_tenth((need * self.host_stride) as f64 / GIB)
                ),
            )),
            _ => Ok(context),
        }
    }

    /// Longest request of the engine that serves requests of `tokens` tokens.
    fn admitted(&self, tokens: u64) -> u64 {
        self.max_model_len.unwrap_or(tokens)
    }

    fn kv_bytes(&self, tokens: u64) -> u64 {
        let Inputs { memory, model, .. } = self.inputs;
        memory.kv_bytes(self.tp, self.admitted(tokens), model.tokens_per_indexer_row)
    }

    /// Requests of one replica: ordinary, and hotpage as [`Limits`].
    fn limits(&self, tokens: u64) -> Limits {
        let kv_bytes = self.kv_bytes(tokens);
        let request = Footprint::new(&self.packing, tokens, self.in_flight_tokens);
        let blocks = kv_bytes / self.packing.block_bytes;
        let steady = capacity::steady_state(blocks, &request);
        let resident = capacity::resident(blocks, &request);
        Limits {
            request,
            kv_bytes,
            ordinary: capacity::ordinary(kv_bytes / self.packing.ordinary_block_bytes, &request),
            steady,
            resident: resident > steady,
            gpu: steady.max(resident),
            host: self.host_blocks.map(|blocks| capacity::host(blocks, &request)),
        }
    }

    fn point(&self, context: u64) -> Result<Point> {
        let tokens = context + self.output;
        let limits = self.limits(tokens);
        if limits.kv_bytes < self.packing.block_bytes {
            return Err(self.does_not_fit(tokens));
        }
        let seqs = self.max_num_seqs as f64;
        let ordinary = limits.ordinary.min(seqs);
        let (hotpage, hotpage_bind) = limits.hotpage(seqs);
        let request = &limits.request;
        let host_blocks = div_ceil_f64(limits.gpu.min(seqs) * request.pages as f64);
        let least_blocks = request.pages + capacity::TAIL_PAGES;
        let reads_host = if limits.resident { 0.0 } else { hotpage.floor() };
        let replicas = self.dp as f64;
        let kept = self.inputs.offload_gib.map(|gib| {
            let one =
                request.pages * (self.packing.host_page_bytes + self.packing.indexer_page_bytes);
            bytes(gib) as f64 / one as f64 * replicas
        });
        Ok(Point {
            context,
            ordinary: ordinary * replicas,
            hotpage: hotpage * replicas,
            offload: ordinary * replicas,
            offload_kept: kept,
            resident: limits.resident,
            ordinary_bind: if limits.ordinary > seqs { Bind::MaxNumSeqs } else { Bind::GpuKv },
            hotpage_bind,
            steady_state: limits.host.map_or(limits.steady, |host| limits.steady.min(host)),
            bytes: self.request_bytes(request),
            min_host_pool_gib: (host_blocks.max(least_blocks) * self.host_stride) as f64 / GIB,
            pcie_ms_per_step: self.step_ms(reads_host, tokens),
            kv_bytes: limits.kv_bytes,
        })
    }

    fn does_not_fit(&self, tokens: u64) -> error::PlanError {
        let memory = &self.inputs.memory;
        if let Some(kv_gib) = memory.kv_gib {
            let block = format!("at least one block of {} bytes", self.packing.block_bytes);
            return error::capacity("kv_gib", kv_gib, block, "give the KV cache more GPU memory");
        }
        let need = memory.weights_gib / self.tp as f64 + memory.runtime_gib;
        let usable = memory.hbm_gib * memory.utilization;
        let for_weights = usable - memory.runtime_gib;
        let remedy = if usable > need {
            format!("raise --tp, or admit less than {} tokens", self.admitted(tokens))
        } else if for_weights > 0.0 {
            // So many ranks leave a GPU nothing for KV, or less than one rank's share of weights.
            let least = (memory.weights_gib / for_weights).floor() as u64 + 1;
            let ranks = even_ranks(least, self.inputs.model.attention_heads);
            format!("the weights do not fit: raise --tp (or --gpus) to {ranks} or more")
        } else {
            "no weights fit beside the runtime: take GPUs with more memory".to_owned()
        };
        error::capacity(
            "usable GPU memory",
            format!("{usable:.1} GiB"),
            format!("above {need:.1} GiB (weights on one GPU, runtime) plus the prefill workspace"),
            remedy,
        )
    }

    fn request_bytes(&self, request: &Footprint) -> RequestBytes {
        let packing = &self.packing;
        let hotpage = request.steady * packing.block_bytes;
        let indexer = request.pages * packing.indexer_page_bytes;
        let hot = packing.hot_payload_bytes();
        let tail_pages = request.tail / packing.num_groups();
        let fixed: u64 = self
            .inputs
            .model
            .request_groups
            .iter()
            .map(|group| group.page_bytes * group.blocks_per_request)
            .sum();
        let tail = tail_pages * packing.host_page_bytes + fixed;
        RequestBytes {
            ordinary: request.ordinary * packing.ordinary_block_bytes,
            hotpage,
            indexer,
            hot,
            tail,
            padding: hotpage - indexer - hot - tail,
            host: request.pages * self.host_stride,
        }
    }

    fn step_ms(&self, requests: f64, tokens: u64) -> Option<f64> {
        let model = &self.inputs.model;
        let selected = model.top_k.min(tokens) * (self.inputs.mtp.unsigned_abs() + 1);
        let misses = (1.0 - self.hit_rate) * selected as f64;
        let groups = &self.packing.groups;
        let layout = self.inputs.layout;
        let ms = |link| link::step_ms(requests, misses, groups, model.row_bytes, link, layout);
        self.inputs.link_gbps.map(ms)
    }

    /// Walks down from the longest length while hotpage carries more.
    fn crossover(&self) -> Option<u64> {
        let longest = self.max_model_len.unwrap_or(self.inputs.model.max_positions);
        let of_host = self.host_blocks.map(|blocks| blocks.saturating_sub(capacity::TAIL_PAGES));
        let pages = self.packing.pages(longest).min(of_host.unwrap_or(u64::MAX));
        let seqs = self.max_num_seqs as f64;
        let wins = |pages: &u64| {
            let limits = self.limits((pages * self.packing.block_size).min(longest));
            limits.hotpage(seqs).0 > limits.ordinary.min(seqs)
        };
        let first = (1..=pages).rev().take_while(wins).last()?;
        Some((first * self.packing.block_size).min(longest))
    }
}

struct Limits {
    request: Footprint,
    kv_bytes: u64,
    ordinary: f64,
    steady: f64,
    resident: bool,
    gpu: f64,
    host: Option<f64>,
}

impl Limits {
    /// Running requests of one replica and what binds them.
    fn hotpage(&self, max_num_seqs: f64) -> (f64, Bind) {
        let on_gpu = (self.gpu, self.gpu_bind());
        let of_host = (self.host.unwrap_or(f64::INFINITY), Bind::HostPool);
        let of_engine = (max_num_seqs, Bind::MaxNumSeqs);
        let least = |a: (f64, Bind), b: (f64, Bind)| if b.0 < a.0 { b } else { a };
        least(least(on_gpu, of_host), of_engine)
    }

    fn gpu_bind(&self) -> Bind {
        let request = &self.request;
        if self.resident {
            return Bind::GpuKv;
        }
        // Blocks of the whole pool: one request in admission, the others in the steady state.
        let others = (self.gpu - 1.0).max(0.0);
        let in_flight = (request.admission - request.steady) as f64;
        let indexer = (others + 1.0) * request.pages as f64;
        let hot = (others + 1.0) * (request.hot + request.tail) as f64;
        if in_flight > indexer.max(hot) {
            Bind::GpuAdmission
        } else if hot > indexer {
            Bind::GpuHot
        } else {
            Bind::GpuIndexer
        }
    }
}

/// Least ranks from `least` on that share the attention heads evenly; `least` itself if the heads
/// are unknown or fewer.
fn even_ranks(least: u64, heads: Option<u64>) -> u64 {
    // Bounded, because a configuration may claim any number of heads.
    let most = heads.unwrap_or(0).min(MAX_RANKS.unsigned_abs());
    let even = |ranks: &u64| heads.map_or(false, |heads| heads % ranks == 0);
    (least..=most).find(even).unwrap_or(least)
}

fn check_gpus(gpus: Option<i64>, tp: u64, dp: u64) -> Result<()> {
    let needed = tp * dp;
    match gpus {
        Some(gpus) if i64::try_from(needed) != Ok(gpus) => Err(config(
            "gpus",
            gpus,
            format!("{needed} (tp {tp} x dp {dp})"),
            "leave --gpus out or change --tp or --dp",
        )),
        _ => Ok(()),
    }
}

fn div_ceil_f64(value: f64) -> u64 {
    value.ceil() as u64
}

fn round_up_tenth(value: f64) -> f64 {
    (value * 10.0).ceil() / 10.0
}
