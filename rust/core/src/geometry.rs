// SPDX-License-Identifier: Apache-2.0
//! Owns where a row lies: the byte offset of (layer, block, token) in the GPU pool and in both
//! host layouts. All offsets are 64-bit; every id is widened before it is multiplied.

use crate::error::{Error, Expected, Result};
use crate::ids::{BlockId, HostBlockId};

/// Rows are copied in 16-byte units by the kernels.
pub const ROW_ALIGN_BYTES: u32 = 16;

/// Order of a page's rows in the host pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HostLayout {
    /// `[index group][host block][token][layer in group][row]`: one miss is one contiguous read.
    RowInterleaved,
    /// `[layer][host block][token][row]`: what siblings that read host pages themselves expect.
    LayerMajor,
}

/// Which layers share an indexer result and which of those share a KV cache group.
///
/// `kv_groups[g]` lists the index groups packed into resident KV cache group `g` (and into hot
/// group `g`), each as its number of layers. Layers are numbered in that order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerPacking {
    /// Layers of each index group, by KV cache group.
    pub kv_groups: Vec<Vec<u32>>,
}

/// Where one layer sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPlace {
    /// Resident KV cache group that holds the layer's pages.
    pub kv_group: u32,
    /// Index group, numbered over the whole model.
    pub index_group: u32,
    /// Position inside the index group; 0 is the leader.
    pub layer_in_index_group: u32,
    /// Position inside the KV cache group's block.
    pub layer_in_kv_group: u32,
    /// Layers in the index group.
    pub index_group_layers: u32,
    /// Layers in all earlier index groups.
    pub layers_before_group: u32,
}

/// Sizes that fix every offset.
#[derive(Debug, Clone)]
pub struct Geometry {
    block_size: u32,
    row_bytes: u32,
    gpu_blocks: u32,
    host_blocks: u32,
    host_layout: HostLayout,
    layers: Vec<LayerPlace>,
    num_kv_groups: u32,
    num_index_groups: u32,
    layers_per_block: u32,
}

impl Geometry {
    /// Checks the sizes and places every layer.
    ///
    /// # Errors
    /// `Config` for an empty packing, a row width that is not a multiple of 16 bytes, a block
    /// size outside 1..=1024, or pools without a usable block.
    pub fn new(
        packing: &LayerPacking,
        block_size: u32,
        row_bytes: u32,
        gpu_blocks: u32,
        host_blocks: u32,
        host_layout: HostLayout,
    ) -> Result<Self> {
        check("block_size", block_size, Expected::AtLeast(1), "use 16 to 128")?;
        check("block_size", block_size, Expected::AtMost(1024), "use 16 to 128")?;
        check(
            "row_bytes",
            row_bytes,
            Expected::MultipleOf(i64::from(ROW_ALIGN_BYTES)),
            "pad the row to a multiple of 16 bytes",
        )?;
        check("gpu_blocks", gpu_blocks, Expected::AtLeast(2), "block 0 is the null block")?;
        check("gpu_blocks", gpu_blocks, Expected::AtMost(i64::from(i32::MAX)), "ids are int32")?;
        check("host_blocks", host_blocks, Expected::AtMost(i64::from(i32::MAX)), "ids are int32")?;

        let mut layers = Vec::new();
        let mut index_group = 0_u32;
        let mut layers_per_block = 0_u32;
        for (kv_group, groups) in (0_u32..).zip(&packing.kv_groups) {
            let mut layer_in_kv_group = 0_u32;
            for &index_group_layers in groups {
                check(
                    "layers of an index group",
                    index_group_layers,
                    Expected::AtLeast(1),
                    "an index group has at least its leader",
                )?;
                let layers_before_group = to_u32(layers.len());
                for layer_in_index_group in 0..index_group_layers {
                    layers.push(LayerPlace {
                        kv_group,
                        index_group,
                        layer_in_index_group,
                        layer_in_kv_group,
                        index_group_layers,
                        layers_before_group,
                    });
                    layer_in_kv_group += 1;
                }
                index_group += 1;
            }
            check(
                "layers of a KV cache group",
                layer_in_kv_group,
                Expected::AtLeast(1),
                "give each KV cache group at least one index group",
            )?;
            layers_per_block = layers_per_block.max(layer_in_kv_group);
        }
        let num_kv_groups = to_u32(packing.kv_groups.len());
        check("KV cache groups", num_kv_groups, Expected::AtLeast(1), "the model has no layers")?;
        Ok(Self {
            block_size,
            row_bytes,
            gpu_blocks,
            host_blocks,
            host_layout,
            layers,
            num_kv_groups,
            num_index_groups: index_group,
            layers_per_block,
        })
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Bytes of one token in one layer.
    #[must_use]
    pub fn row_bytes(&self) -> u32 {
        self.row_bytes
    }

    /// Blocks of the GPU pool, the null block counted.
    #[must_use]
    pub fn gpu_blocks(&self) -> u32 {
        self.gpu_blocks
    }

    /// Blocks of the host pool, the null block counted; 0 without a host pool.
    #[must_use]
    pub fn host_blocks(&self) -> u32 {
        self.host_blocks
    }

    /// Order of rows in the host pool.
    #[must_use]
    pub fn host_layout(&self) -> HostLayout {
        self.host_layout
    }

    /// Resident KV cache groups (G); there are as many hot groups.
    #[must_use]
    pub fn num_kv_groups(&self) -> u32 {
        self.num_kv_groups
    }

    /// Index groups of the model.
    #[must_use]
    pub fn num_index_groups(&self) -> u32 {
        self.num_index_groups
    }

    /// Sparse-MLA layers, draft layers counted.
    #[must_use]
    pub fn num_layers(&self) -> u32 {
        to_u32(self.layers.len())
    }

    /// Places of all layers, in layer order.
    #[must_use]
    pub fn layers(&self) -> &[LayerPlace] {
        &self.layers
    }

    /// Bytes of one GPU block: room for the widest KV cache group, so that any block fits any.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        u64::from(self.layers_per_block) * self.layer_page_bytes()
    }

    /// Bytes of one page of one layer.
    #[must_use]
    pub fn layer_page_bytes(&self) -> u64 {
        u64::from(self.block_size) * u64::from(self.row_bytes)
    }

    /// Bytes of one host block over all layers.
    #[must_use]
    pub fn host_block_bytes(&self) -> u64 {
        u64::from(self.num_layers()) * self.layer_page_bytes()
    }

    /// Bytes of the GPU pool.
    #[must_use]
    pub fn gpu_pool_bytes(&self) -> u64 {
        u64::from(self.gpu_blocks) * self.block_bytes()
    }

    /// Bytes of the host pool.
    #[must_use]
    pub fn host_pool_bytes(&self) -> u64 {
        u64::from(self.host_blocks) * self.host_block_bytes()
    }

    /// Byte offset of a row in the GPU pool: `block x block_bytes + layer page + token`.
    #[must_use]
    pub fn gpu_row_offset(&self, layer: LayerPlace, block: BlockId, token: u32) -> u64 {
        widen(block.0) * self.block_bytes()
            + u64::from(layer.layer_in_kv_group) * self.layer_page_bytes()
            + u64::from(token) * u64::from(self.row_bytes)
    }

    /// Byte offset of a row in the host pool.
    ///
    /// Row-interleaved: `host_blocks x block_size x row_bytes x (layers in earlier groups)` is the
    /// group's base; inside it a token's rows lie side by side, one per layer of the group.
    #[must_use]
    pub fn host_row_offset(&self, layer: LayerPlace, block: HostBlockId, token: u32) -> u64 {
        let rows_per_layer = u64::from(self.host_blocks) * u64::from(self.block_size);
        let host_row = widen(block.0) * u64::from(self.block_size) + u64::from(token);
        let before = u64::from(layer.layers_before_group);
        let row = match self.host_layout {
            HostLayout::RowInterleaved => {
                rows_per_layer * before
                    + host_row * u64::from(layer.index_group_layers)
                    + u64::from(layer.layer_in_index_group)
            }
            HostLayout::LayerMajor => {
                rows_per_layer * (before + u64::from(layer.layer_in_index_group)) + host_row
            }
        };
        row * u64::from(self.row_bytes)
    }
}

fn check(name: &'static str, got: u32, expected: Expected, remedy: &'static str) -> Result<()> {
    let value = i64::from(got);
    let ok = match expected {
        Expected::AtLeast(bound) => value >= bound,
        Expected::AtMost(bound) => value <= bound,
        Expected::MultipleOf(unit) => value > 0 && value % unit == 0,
        Expected::Exactly(exact) => value == exact,
    };
    if ok { Ok(()) } else { Err(Error::Config { name, got: value, expected, remedy }) }
}

fn widen(id: i32) -> u64 {
    // OK because ids are checked non-negative where they enter the crate.
    u64::from(id.unsigned_abs())
}

fn to_u32(len: usize) -> u32 {
    // OK because layer counts are a few hundred; saturation is never reached.
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn geometry(layout: HostLayout, host_blocks: u32, row_bytes: u32) -> Geometry {
        let packing = LayerPacking { kv_groups: vec![vec![4], vec![1, 1]] };
        Geometry::new(&packing, 64, row_bytes, 8, host_blocks, layout).unwrap()
    }

    #[test]
    fn every_row_of_the_host_pool_has_its_own_place_in_both_layouts() {
        for layout in [HostLayout::RowInterleaved, HostLayout::LayerMajor] {
            let g = geometry(layout, 3, 656);
            let mut seen = HashSet::new();
            for &layer in g.layers() {
                for block in 0..3 {
                    for token in 0..64 {
                        let at = g.host_row_offset(layer, HostBlockId(block), token);
                        assert!(at % 656 == 0 && at + 656 <= g.host_pool_bytes());
                        assert!(seen.insert(at));
                    }
                }
            }
            assert_eq!(seen.len(), 6 * 3 * 64);
        }
    }

    #[test]
    fn a_miss_of_a_four_layer_group_is_one_contiguous_read() {
        let g = geometry(HostLayout::RowInterleaved, 3, 656);
        let at = |l: usize| g.host_row_offset(g.layers()[l], HostBlockId(2), 5);
        assert_eq!([at(1) - at(0), at(2) - at(1), at(3) - at(2)], [656; 3]);
    }

    #[test]
    fn offsets_do_not_wrap_at_two_or_four_gibibytes() {
        // Row numbers at which a 32-bit product would wrap (2^31 and 2^32 bytes).
        for (row_bytes, rows) in [(656, [3_273_604_u64, 6_547_207]), (1152, [1_864_136, 3_728_271])]
        {
            let packing = LayerPacking { kv_groups: vec![vec![1]] };
            let g =
                Geometry::new(&packing, 64, row_bytes, 2, 200_000, HostLayout::LayerMajor).unwrap();
            for row in rows {
                let block = HostBlockId(i32::try_from(row / 64).unwrap());
                let token = u32::try_from(row % 64).unwrap();
                let at = g.host_row_offset(g.layers()[0], block, token);
                assert_eq!(at, row * u64::from(row_bytes));
            }
        }
    }

    #[test]
    fn a_row_width_that_is_no_multiple_of_16_bytes_is_refused_with_a_remedy() {
        let packing = LayerPacking { kv_groups: vec![vec![1]] };
        let error = Geometry::new(&packing, 64, 652, 2, 2, HostLayout::LayerMajor).unwrap_err();
        assert_eq!(
            error.to_string(),
            "row_bytes is 652, expected a positive multiple of 16; pad the row to a multiple of 16 bytes"
        );
    }
}
