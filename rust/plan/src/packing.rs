// SPDX-License-Identifier: Apache-2.0
//! Owns the packing of layers into KV cache groups and the bytes of a block, as vLLM 0.33's
//! `get_hisparse_kv_cache_groups` and its block sizing do them.

use crate::error::{config, within, Result};
use crate::model::Model;

/// Hot slots are int16 on the GPU, so a hot region has at most this many rows.
pub const MAX_HOT_ROWS: u64 = 32_768;

/// Hot rows that vLLM 0.33 takes by default: every verification row's selection and one more
/// top-k of LRU slack, `(mtp + 2) x top-k`.
#[must_use]
pub const fn default_hot_rows(top_k: u64, mtp: u64) -> u64 {
    (mtp + 2) * top_k
}

/// How a model's layers share blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packing {
    /// Tokens of a GPU block.
    pub block_size: u64,
    /// Layers of each index group, by resident (and hot) KV cache group.
    pub groups: Vec<Vec<u64>>,
    /// Hot rows of a request in each layer.
    pub hot_rows: u64,
    /// Bytes of one layer's rows in one block.
    pub layer_page_bytes: u64,
    /// Bytes of all indexer rows of one block.
    pub indexer_page_bytes: u64,
    /// Bytes of one block of the pool that all GPU groups share.
    pub block_bytes: u64,
    /// Bytes of one block with ordinary residency, where one group holds every layer.
    pub ordinary_block_bytes: u64,
    /// Bytes of one page in the host pool, over all layers.
    pub host_page_bytes: u64,
    /// Blocks of a request in groups that do not grow with the context.
    pub request_blocks: u64,
}

impl Packing {
    /// Packs whole index groups while their pages fit in the indexer's page.
    ///
    /// # Errors
    /// Hot rows under the union of a step's selections or over the int16 limit, a block size
    /// that the kernels do not take, and what [`Model::validate`] refuses.
    pub fn new(model: &Model, block_size: i64, hot_rows: Option<i64>, mtp: i64) -> Result<Self> {
        model.validate()?;
        let mtp = within("mtp", mtp, 0, 64, "speculate fewer tokens")?;
        let block_size = gpu_block_size(block_size, model.tokens_per_indexer_row)?;
        let hot_rows = check_hot_rows(model.top_k, hot_rows, mtp)?;
        let served = model.served_leaders(mtp > 0);
        let layer_page_bytes = block_size * model.row_bytes;
        let num_leaders = count(&served);
        let indexer_page_bytes =
            num_leaders * (block_size / model.tokens_per_indexer_row) * model.indexer_row_bytes;
        let groups = pack(&index_groups(&served), layer_page_bytes, indexer_page_bytes);

        let host_page_bytes = served.len() as u64 * layer_page_bytes;
        let of_requests = model.request_groups.iter().map(|group| group.page_bytes).max();
        let of_requests = of_requests.unwrap_or(0);
        let widest = groups.iter().map(|group| group.iter().sum::<u64>() * layer_page_bytes).max();
        // A hot group's pages are aligned to themselves; all layers have the same page here, so
        // the least common multiple of the alignments is one layer's page.
        let block_bytes = round_up(
            widest.unwrap_or(0).max(indexer_page_bytes).max(of_requests),
            layer_page_bytes,
        );
        let ordinary_block_bytes = round_up(
            (host_page_bytes + indexer_page_bytes).max(of_requests),
            model.block_align_bytes,
        );
        Ok(Self {
            block_size,
            groups,
            hot_rows,
            layer_page_bytes,
            indexer_page_bytes,
            block_bytes,
            ordinary_block_bytes,
            host_page_bytes,
            request_blocks: model.request_groups.iter().map(|one| one.blocks_per_request).sum(),
        })
    }

    /// Resident KV cache groups (G); as many hot ones.
    #[must_use]
    pub fn num_groups(&self) -> u64 {
        self.groups.len() as u64
    }

    /// All groups that vLLM makes: source, indexer, resident, hot; groups of a fixed number of
    /// blocks not counted.
    #[must_use]
    pub fn num_kv_cache_groups(&self) -> u64 {
        2 + 2 * self.num_groups()
    }

    /// Sparse-MLA layers, draft layers counted where they are served.
    #[must_use]
    pub fn num_layers(&self) -> u64 {
        self.groups.iter().flatten().sum()
    }

    /// Index groups, one for each leader.
    #[must_use]
    pub fn num_leaders(&self) -> u64 {
        self.groups.iter().map(|group| group.len() as u64).sum()
    }

    /// Blocks of a hot region in one hot group.
    #[must_use]
    pub fn hot_blocks_per_group(&self) -> u64 {
        div_ceil(self.hot_rows, self.block_size)
    }

    /// Blocks of a hot region over all hot groups.
    #[must_use]
    pub fn hot_blocks(&self) -> u64 {
        self.hot_blocks_per_group() * self.num_groups()
    }

    /// Bytes that the rows of a hot region take, padding left out.
    #[must_use]
    pub fn hot_payload_bytes(&self) -> u64 {
        self.hot_rows * self.num_layers() * (self.layer_page_bytes / self.block_size)
    }

    /// Byte offset of each layer's page in a block of a resident group: a layer's region is one
    /// layer's page wide, whatever the block's stride is.
    #[must_use]
    pub fn layer_offsets(&self, group: usize) -> Vec<u64> {
        let layers: u64 = self.groups.get(group).map_or(0, |group| group.iter().sum());
        (0..layers).map(|layer| layer * self.layer_page_bytes).collect()
    }

    /// Pages of `tokens` tokens.
    #[must_use]
    pub fn pages(&self, tokens: u64) -> u64 {
        div_ceil(tokens, self.block_size)
    }

    /// Bytes from one host block to the next. Ranks of one host share a pool whose blocks begin
    /// on OS pages of 4,096 bytes (vLLM 0.33).
    #[must_use]
    pub fn host_block_stride(&self, shared: bool) -> u64 {
        round_up(self.host_page_bytes, if shared { 4096 } else { 1 })
    }
}

/// The block size that the GPU groups get. A larger block of the engine is split into the blocks
/// that the kernels read: vLLM's indexer takes pages of 64 rows, and of 32 or 64 rows if a row
/// stands for several tokens; the attention kernels want a multiple of 64 tokens.
fn gpu_block_size(engine_block: i64, tokens_per_indexer_row: u64) -> Result<u64> {
    let remedy = "use --block-size 64";
    let engine_block = within("block_size", engine_block, 1, 65_536, remedy)?;
    let rows: &[u64] = if tokens_per_indexer_row == 1 { &[64] } else { &[64, 32] };
    let sizes = rows.iter().map(|rows| rows * tokens_per_indexer_row);
    let mut sizes = sizes.filter(|size| size % 64 == 0).collect::<Vec<_>>();
    if let Some(&size) = sizes.iter().find(|&&size| engine_block % size == 0) {
        return Ok(size);
    }
    sizes.sort_unstable();
    let least = sizes.first().copied().unwrap_or(64);
    Err(config(
        "block_size",
        engine_block,
        format!("a multiple of {least}"),
        format!("use --block-size {least}"),
    ))
}

fn check_hot_rows(top_k: u64, hot_rows: Option<i64>, mtp: u64) -> Result<u64> {
    let union = (mtp + 1) * top_k;
    let limit = MAX_HOT_ROWS as i64;
    if union > MAX_HOT_ROWS {
        let expected = format!("at most {MAX_HOT_ROWS} (hot slots are int16)");
        let most = (MAX_HOT_ROWS / top_k).saturating_sub(1);
        let remedy = format!("speculate at most {most} tokens");
        return Err(config("verification rows x top-k", union, expected, remedy));
    }
    let default = default_hot_rows(top_k, mtp) as i64;
    let remedy = format!("use --hot-rows between {union} and {MAX_HOT_ROWS}: hot slots are int16");
    let given = within("hot_rows", hot_rows.unwrap_or(default), 1, limit, &remedy)?;
    if given < union {
        return Err(config(
            "hot_rows",
            given,
            format!("at least {union} ({} verification rows x top-k {top_k})", mtp + 1),
            "raise --hot-rows or speculate fewer tokens",
        ));
    }
    Ok(given)
}

/// Layers of each index group: a leader and the followers behind it.
fn index_groups(leaders: &[bool]) -> Vec<u64> {
    let mut groups: Vec<u64> = Vec::new();
    for &leader in leaders {
        match groups.last_mut() {
            Some(layers) if !leader => *layers += 1,
            _ => groups.push(1),
        }
    }
    groups
}

fn pack(index_groups: &[u64], layer_page_bytes: u64, limit_bytes: u64) -> Vec<Vec<u64>> {
    let mut packed: Vec<Vec<u64>> = Vec::new();
    let mut filled = 0;
    for &layers in index_groups {
        let bytes = layers * layer_page_bytes;
        match packed.last_mut() {
            Some(group) if filled + bytes <= limit_bytes => group.push(layers),
            _ => {
                packed.push(vec![layers]);
                filled = 0;
            }
        }
        filled += bytes;
    }
    packed
}

fn count(leaders: &[bool]) -> u64 {
    leaders.iter().filter(|&&leader| leader).count() as u64
}

pub(crate) fn div_ceil(value: u64, by: u64) -> u64 {
    value / by + u64::from(value % by != 0)
}

fn round_up(value: u64, to: u64) -> u64 {
    div_ceil(value, to) * to
}
