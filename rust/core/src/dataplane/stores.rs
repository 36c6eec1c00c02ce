// SPDX-License-Identifier: Apache-2.0
//! Owns the bytes of both pools and the copies between them: misses, mirrored rows, whole pages.

use super::mirror::{MirrorMask, MirrorReport, MirrorTokens, TokenRows};
use super::{CopyList, check_len, wrong_len};
use crate::error::{Error, Expected, ProtocolFault, Result};
use crate::geometry::{Geometry, LayerPlace};
use crate::ids::{BlockId, HostBlockId};
use crate::index_group::IndexGroup;

/// Both pools of one rank.
///
/// A failing call copies nothing: everything is checked before the first byte moves.
#[derive(Debug)]
pub struct ByteStores<'a> {
    geometry: &'a Geometry,
    gpu: &'a mut [u8],
    host: &'a mut [u8],
}

/// One token's place in both pools.
#[derive(Clone, Copy)]
struct RowPair {
    host_block: HostBlockId,
    host_token: u32,
    gpu_block: BlockId,
    gpu_token: u32,
}

#[derive(Clone, Copy)]
enum Direction {
    ToHost,
    ToGpu,
}

impl<'a> ByteStores<'a> {
    /// Borrows `[gpu_pool_bytes]` and `[host_pool_bytes]` of `geometry`.
    ///
    /// # Errors
    /// `Protocol` for a slice of another length; `Config` if row ids of a pool do not fit int32.
    pub fn new(geometry: &'a Geometry, gpu: &'a mut [u8], host: &'a mut [u8]) -> Result<Self> {
        let bytes = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
        check_len("GPU pool bytes", gpu.len(), bytes(geometry.gpu_pool_bytes()))?;
        check_len("host pool bytes", host.len(), bytes(geometry.host_pool_bytes()))?;
        for (name, blocks) in
            [("GPU rows", geometry.gpu_blocks()), ("host rows", geometry.host_blocks())]
        {
            let rows = i64::from(blocks) * i64::from(geometry.block_size());
            if rows > i64::from(i32::MAX) {
                return Err(Error::Config {
                    name,
                    got: rows,
                    expected: Expected::AtMost(i64::from(i32::MAX)),
                    remedy: "row ids are int32; use a smaller pool",
                });
            }
        }
        Ok(Self { geometry, gpu, host })
    }

    /// `[row_bytes]` of a row in the GPU pool.
    ///
    /// # Errors
    /// `Protocol` for an unknown layer, token or block, the null block included.
    pub fn gpu_row(&self, layer: u32, block: BlockId, token: u32) -> Result<&[u8]> {
        let at = self.gpu_at(layer, block, token)?;
        Ok(&self.gpu[at..at + self.row_bytes()])
    }

    /// `[row_bytes]` of a row in the GPU pool, to write.
    ///
    /// # Errors
    /// As `gpu_row`.
    pub fn gpu_row_mut(&mut self, layer: u32, block: BlockId, token: u32) -> Result<&mut [u8]> {
        let at = self.gpu_at(layer, block, token)?;
        let end = at + self.row_bytes();
        Ok(&mut self.gpu[at..end])
    }

    /// `[row_bytes]` of a row in the GPU pool, named as resolve names it.
    ///
    /// # Errors
    /// As `gpu_row`.
    pub fn physical_row(&self, layer: u32, row: i32, block_stride_rows: u32) -> Result<&[u8]> {
        let (block, token) = split(row, block_stride_rows);
        self.gpu_row(layer, BlockId(block), token)
    }

    /// `[row_bytes]` of a row in the host pool.
    ///
    /// # Errors
    /// `Protocol` for an unknown layer, token or block, the null block included.
    pub fn host_row(&self, layer: u32, block: HostBlockId, token: u32) -> Result<&[u8]> {
        let place = self.place(layer)?;
        self.check_host(block)?;
        self.check_token(token)?;
        let at = at(self.geometry.host_row_offset(place, block, token));
        Ok(&self.host[at..at + self.row_bytes()])
    }

    /// Copies the misses of an index group to the hot rows of **every layer** of the group.
    /// Returns the bytes copied.
    ///
    /// # Errors
    /// `Protocol` for an unknown layer or a row outside its pool or in a null block.
    pub fn copy_rows(
        &mut self,
        group: &IndexGroup,
        copies: &CopyList,
        block_stride_rows: u32,
    ) -> Result<u64> {
        self.replay_layers(group.layers(), copies, block_stride_rows)
    }

    /// Copies the misses of a copy list to the hot rows of one layer. Returns the bytes copied.
    ///
    /// # Errors
    /// As `copy_rows`.
    pub fn replay_copy(
        &mut self,
        layer: u32,
        copies: &CopyList,
        block_stride_rows: u32,
    ) -> Result<u64> {
        let next = layer.checked_add(1).ok_or_else(|| wrong_len("layer", layer as usize, 0))?;
        self.replay_layers(layer..next, copies, block_stride_rows)
    }

    /// Copies this step's rows of `layers` to the host pool and marks each row in `mask`, which
    /// is the mask of these layers: a page is complete when the masks of all its layers are full.
    /// A token is copied only if it has a host row and a resident row in each KV cache group.
    ///
    /// # Errors
    /// `Protocol` for arrays whose lengths disagree, an unknown layer, a row outside its pool.
    pub fn mirror_rows(
        &mut self,
        layers: &[u32],
        tokens: MirrorTokens<'_>,
        mask: &mut MirrorMask,
    ) -> Result<MirrorReport> {
        let geometry = self.geometry;
        tokens.check(geometry)?;
        mask.check(geometry)?;
        for &layer in layers {
            self.place(layer)?;
        }
        let mut report = MirrorReport::default();
        for token in 0..tokens.len() {
            match tokens.rows(token, geometry) {
                TokenRows::Skipped => report.skipped += 1,
                TokenRows::Lost => report.lost += 1,
                TokenRows::Real { host_block, host_token } => {
                    for &layer in layers {
                        let place = geometry.layers()[layer as usize];
                        let (gpu_block, gpu_token) =
                            tokens.resident(place.kv_group, token, geometry);
                        let pair = RowPair { host_block, host_token, gpu_block, gpu_token };
                        self.copy(place, pair, 1, Direction::ToHost);
                    }
                    mask.mark(host_block, host_token);
                    report.copied += 1;
                }
            }
        }
        Ok(report)
    }

    /// Copies the first `num_rows` rows of a page, all layers, from its GPU blocks `[G]` to its
    /// host block. Returns the bytes copied.
    ///
    /// # Errors
    /// `Protocol` for null or unknown blocks, or more rows than a page has.
    pub fn spill_page(
        &mut self,
        host_block: HostBlockId,
        resident_blocks: &[i32],
        num_rows: u32,
    ) -> Result<u64> {
        self.copy_page(host_block, resident_blocks, num_rows, Direction::ToHost)
    }

    /// Copies the first `num_rows` rows of a page, all layers, from its host block to its GPU
    /// blocks `[G]`. Returns the bytes copied.
    ///
    /// # Errors
    /// As `spill_page`.
    pub fn restore_page(
        &mut self,
        host_block: HostBlockId,
        resident_blocks: &[i32],
        num_rows: u32,
    ) -> Result<u64> {
        self.copy_page(host_block, resident_blocks, num_rows, Direction::ToGpu)
    }

    /// Copies the first `num_rows` rows of a page, all layers, inside the host pool. Returns the
    /// bytes copied.
    ///
    /// # Errors
    /// As `spill_page`.
    pub fn copy_host_page(
        &mut self,
        source: HostBlockId,
        target: HostBlockId,
        num_rows: u32,
    ) -> Result<u64> {
        self.check_host(source)?;
        self.check_host(target)?;
        self.check_num_rows(num_rows)?;
        let geometry = self.geometry;
        for &place in geometry.layers() {
            for token in 0..num_rows {
                let from = at(geometry.host_row_offset(place, source, token));
                let to = at(geometry.host_row_offset(place, target, token));
                self.host.copy_within(from..from + self.row_bytes(), to);
            }
        }
        Ok(self.bytes_of(num_rows as usize, geometry.num_layers()))
    }

    fn replay_layers(
        &mut self,
        layers: core::ops::Range<u32>,
        copies: &CopyList,
        block_stride_rows: u32,
    ) -> Result<u64> {
        check_len("hot_row", copies.hot_row.len(), copies.host_row.len())?;
        let geometry = self.geometry;
        let (first, end) = (layers.start as usize, layers.end as usize);
        let places = geometry
            .layers()
            .get(first..end)
            .ok_or_else(|| wrong_len("layers", geometry.layers().len(), end))?;
        for pair in self.pairs(copies, block_stride_rows) {
            self.check_host(pair.host_block)?;
            self.check_gpu(pair.gpu_block)?;
            self.check_token(pair.gpu_token)?;
        }
        // One host row is one contiguous read when the group's rows lie side by side.
        for pair in self.pairs(copies, block_stride_rows) {
            for &place in places {
                self.copy(place, pair, 1, Direction::ToGpu);
            }
        }
        Ok(self.bytes_of(copies.len(), layers.end - layers.start))
    }

    fn pairs<'c>(
        &self,
        copies: &'c CopyList,
        block_stride_rows: u32,
    ) -> impl Iterator<Item = RowPair> + use<'c> {
        let block_size = self.geometry.block_size();
        copies.host_row.iter().zip(&copies.hot_row).map(move |(&host_row, &hot_row)| {
            let (host_block, host_token) = split(host_row, block_size);
            let (gpu_block, gpu_token) = split(hot_row, block_stride_rows);
            RowPair {
                host_block: HostBlockId(host_block),
                host_token,
                gpu_block: BlockId(gpu_block),
                gpu_token,
            }
        })
    }

    fn copy_page(
        &mut self,
        host_block: HostBlockId,
        resident_blocks: &[i32],
        num_rows: u32,
        direction: Direction,
    ) -> Result<u64> {
        let geometry = self.geometry;
        check_len("resident_blocks", resident_blocks.len(), geometry.num_kv_groups() as usize)?;
        self.check_host(host_block)?;
        self.check_num_rows(num_rows)?;
        for &block in resident_blocks {
            self.check_gpu(BlockId(block))?;
        }
        for &place in geometry.layers() {
            let gpu_block = BlockId(resident_blocks[place.kv_group as usize]);
            let pair = RowPair { host_block, host_token: 0, gpu_block, gpu_token: 0 };
            self.copy(place, pair, num_rows, direction);
        }
        Ok(self.bytes_of(num_rows as usize, geometry.num_layers()))
    }

    /// Copies `num_rows` rows of one layer from `pair` on. Ids were checked.
    fn copy(&mut self, place: LayerPlace, pair: RowPair, num_rows: u32, direction: Direction) {
        let geometry = self.geometry;
        let bytes = self.row_bytes();
        let host_row =
            |token| at(geometry.host_row_offset(place, pair.host_block, pair.host_token + token));
        let gpu = at(geometry.gpu_row_offset(place, pair.gpu_block, pair.gpu_token));
        let host = host_row(0);
        // GPU rows of a layer's page are always side by side, host rows in some layouts only.
        let (times, run) = if num_rows > 1 && host_row(1) != host + bytes {
            (num_rows, bytes)
        } else {
            (1, num_rows as usize * bytes)
        };
        for token in 0..times {
            let (gpu, host) = (gpu + token as usize * bytes, host_row(token));
            let gpu = &mut self.gpu[gpu..gpu + run];
            let host = &mut self.host[host..host + run];
            match direction {
                Direction::ToHost => host.copy_from_slice(gpu),
                Direction::ToGpu => gpu.copy_from_slice(host),
            }
        }
    }

    fn gpu_at(&self, layer: u32, block: BlockId, token: u32) -> Result<usize> {
        let place = self.place(layer)?;
        self.check_gpu(block)?;
        self.check_token(token)?;
        Ok(at(self.geometry.gpu_row_offset(place, block, token)))
    }

    fn place(&self, layer: u32) -> Result<LayerPlace> {
        let layers = self.geometry.layers();
        let place = layers.get(layer as usize).copied();
        place.ok_or_else(|| wrong_len("layers", layers.len(), layer as usize + 1))
    }

    fn check_gpu(&self, block: BlockId) -> Result<()> {
        if block.0 > 0 && u32::try_from(block.0).is_ok_and(|b| b < self.geometry.gpu_blocks()) {
            return Ok(());
        }
        Err(ProtocolFault::BadBlock { block }.into())
    }

    fn check_host(&self, block: HostBlockId) -> Result<()> {
        if block.0 > 0 && u32::try_from(block.0).is_ok_and(|b| b < self.geometry.host_blocks()) {
            return Ok(());
        }
        Err(ProtocolFault::BadHostBlock { block }.into())
    }

    fn check_token(&self, token: u32) -> Result<()> {
        let block_size = self.geometry.block_size();
        if token < block_size {
            return Ok(());
        }
        Err(wrong_len("rows of a block", block_size as usize, token as usize + 1))
    }

    fn check_num_rows(&self, num_rows: u32) -> Result<()> {
        let block_size = self.geometry.block_size();
        if num_rows <= block_size {
            return Ok(());
        }
        Err(wrong_len("num_rows", num_rows as usize, block_size as usize))
    }

    fn row_bytes(&self) -> usize {
        self.geometry.row_bytes() as usize
    }

    fn bytes_of(&self, rows: usize, layers: u32) -> u64 {
        rows as u64 * u64::from(layers) * u64::from(self.geometry.row_bytes())
    }
}

/// Block and token of a row id; a negative id gives a block that no check passes.
fn split(row: i32, rows_per_block: u32) -> (i32, u32) {
    let unit = i64::from(rows_per_block.max(1));
    let (block, token) = (i64::from(row).div_euclid(unit), i64::from(row).rem_euclid(unit));
    // OK because both are at most as large as the row id or the block's rows.
    (block as i32, token as u32)
}

/// A checked byte offset as an index.
fn at(offset: u64) -> usize {
    // OK because ids were checked against a geometry whose pools are slices in memory.
    offset as usize
}
