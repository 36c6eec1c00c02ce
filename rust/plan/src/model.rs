// SPDX-License-Identifier: Apache-2.0
//! Owns a model's cache geometry: which layers have an indexer and how wide their rows are.

use crate::error::{config, Result};

/// Rows are copied in 16-byte units by the kernels, so a row is a multiple of them.
pub const ROW_ALIGN_BYTES: u64 = 16;

/// More layers than any model has; lists of layers are built only below it.
pub const MAX_LAYERS: u64 = 4_096;

/// More draft layers than any model has.
const MAX_DRAFT_LAYERS: u64 = 64;

/// A KV cache group whose blocks do not grow with the context, such as the ring of raw keys that
/// a pooling indexer has not yet pooled. It takes no part in prefix caching, so its block size
/// binds nobody else's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestGroup {
    /// Bytes of the group's pages in one block, over its layers.
    pub page_bytes: u64,
    /// Blocks that each request holds.
    pub blocks_per_request: u64,
}

/// What the planner must know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// For each sparse-MLA layer in the model's order: does it have an indexer of its own?
    pub leaders: Vec<bool>,
    /// Draft (MTP) layers; each is an index group of its own and counts only with speculation.
    pub draft_layers: u64,
    /// Bytes of one token's KV in one layer.
    pub row_bytes: u64,
    /// Multiple that the backend wants between blocks of an ordinary pool, in bytes.
    pub block_align_bytes: u64,
    /// Bytes of one indexer row.
    pub indexer_row_bytes: u64,
    /// Tokens that share one indexer row; 1 without pooling.
    pub tokens_per_indexer_row: u64,
    /// Tokens that a row of the batch attends to.
    pub top_k: u64,
    /// Longest context of the model in tokens.
    pub max_positions: u64,
    /// Attention heads, which ranks share evenly; unknown, any number of ranks is advised.
    pub attention_heads: Option<u64>,
    /// Groups of a fixed number of blocks a request.
    pub request_groups: Vec<RequestGroup>,
}

impl Model {
    /// Checks what no later step checks.
    ///
    /// # Errors
    /// A model without layers or indexers, more layers than [`MAX_LAYERS`], one that begins with a
    /// layer that has no indexer, or a width that the kernels cannot copy.
    pub fn validate(&self) -> Result<()> {
        check_layers(self.leaders.len() as u64)?;
        if !self.leaders.contains(&true) {
            let remedy = "hotpage serves models with sparse attention; take ordinary residency";
            return Err(config("indexer layers", 0, "at least 1", remedy));
        }
        if !self.leaders[0] {
            // OK because some layer is a leader.
            let next = self.leaders.iter().position(|&leader| leader).unwrap_or(0);
            return Err(config(
                "first layer's indexer",
                "shared",
                "its own",
                format!("begin the stage {next} layers later or {} earlier", self.before(next)),
            ));
        }
        if self.row_bytes == 0 || self.row_bytes % ROW_ALIGN_BYTES != 0 {
            let expected = format!("a positive multiple of {ROW_ALIGN_BYTES}");
            return Err(config("row bytes", self.row_bytes, expected, "choose another KV dtype"));
        }
        for (name, value) in [
            ("indexer row bytes", self.indexer_row_bytes),
            ("tokens per indexer row", self.tokens_per_indexer_row),
            ("block alignment", self.block_align_bytes),
            ("top-k", self.top_k),
            ("max positions", self.max_positions),
        ] {
            if value == 0 {
                return Err(config(name, 0, "at least 1", "take it from the model's config.json"));
            }
        }
        if self.draft_layers > MAX_DRAFT_LAYERS {
            let expected = format!("at most {MAX_DRAFT_LAYERS}");
            let remedy = "take num_nextn_predict_layers from the model's config.json";
            return Err(config("draft layers", self.draft_layers, expected, remedy));
        }
        Ok(())
    }

    /// Layers back to the previous leader, judged by the distance of the next two: a stage knows
    /// only its own layers.
    fn before(&self, next: usize) -> usize {
        let after = self.leaders[next + 1..].iter().position(|&leader| leader);
        let period = after.map_or(next + 1, |distance| distance + 1);
        period.saturating_sub(next).max(1)
    }

    /// Leaders of the layers that are served: the draft layers lead themselves.
    #[must_use]
    pub fn served_leaders(&self, with_draft: bool) -> Vec<bool> {
        let mut leaders = self.leaders.clone();
        let drafts = if with_draft { self.draft_layers } else { 0 };
        leaders.resize(leaders.len() + drafts as usize, true);
        leaders
    }
}

/// Which of `layers` layers have an indexer, as vLLM 0.33 reads it from a configuration
/// (`index_topk_freq`, `index_skip_topk_offset`, `index_topk_pattern`). Layers are numbered over
/// the whole model; the pattern, if any, wins and says `S` for a layer that shares.
///
/// # Errors
/// A frequency of 0, more than [`MAX_LAYERS`] layers.
pub fn leaders(
    layers: u64,
    frequency: u64,
    offset: u64,
    pattern: Option<&str>,
) -> Result<Vec<bool>> {
    if frequency == 0 {
        return Err(config("index_topk_freq", 0, "at least 1", "take it from config.json"));
    }
    check_layers(layers)?;
    let shares = |layer: u64| match pattern {
        Some(text) => text.chars().nth(layer as usize) == Some('S'),
        None => (layer + 1).saturating_sub(offset) % frequency != 0,
    };
    Ok((0..layers).map(|layer| !shares(layer)).collect())
}

fn check_layers(layers: u64) -> Result<()> {
    if layers <= MAX_LAYERS {
        return Ok(());
    }
    let expected = format!("at most {MAX_LAYERS}");
    Err(config("num_hidden_layers", layers, expected, "take it from the model's config.json"))
}
