// SPDX-License-Identifier: Apache-2.0
//! Owns the tests of what moves: every byte names the layer and row it belongs to.

use hotpage_core::dataplane::{
    ByteStores, CopyList, HotState, MirrorMask, MirrorReport, MirrorTokens, ResolveInput,
    ResolveScratch, Resolved, resolve,
};
use hotpage_core::geometry::{Geometry, HostLayout, LayerPacking};
use hotpage_core::ids::{BlockId, HostBlockId};
use hotpage_core::index_group::IndexGroupTopology;

use crate::rng::Rng;

const LAYOUTS: [HostLayout; 2] = [HostLayout::RowInterleaved, HostLayout::LayerMajor];
const POISON: u8 = 0xEE;
const GPU_BLOCKS: u32 = 12;
const HOST_BLOCKS: u32 = 9;

/// Mixed group sizes: KV group 0 holds index groups of 1 and 2 layers, KV group 1 one of 4.
fn geometry(layout: HostLayout, block_size: u32, row_bytes: u32) -> Geometry {
    let packing = LayerPacking { kv_groups: vec![vec![1, 2], vec![4]] };
    Geometry::new(&packing, block_size, row_bytes, GPU_BLOCKS, HOST_BLOCKS, layout).unwrap()
}

/// Byte offset of a host row, from the layouts' definitions alone: base(g) = blocks x block size
/// x layers in earlier groups.
fn host_offset(layout: HostLayout, bs: usize, layer: usize, block: usize, token: usize) -> usize {
    let blocks = HOST_BLOCKS as usize;
    let (group_first, group_layers) =
        [(0, 1), (1, 2), (1, 2), (3, 4), (3, 4), (3, 4), (3, 4)][layer];
    match layout {
        HostLayout::RowInterleaved => {
            blocks * bs * group_first + (block * bs + token) * group_layers + layer - group_first
        }
        HostLayout::LayerMajor => (layer * blocks + block) * bs + token,
    }
}

/// Offset in rows of a GPU row: blocks of four layer pages, the widest KV cache group.
fn gpu_offset(bs: usize, layer: usize, block: usize, token: usize) -> usize {
    let page = [0, 1, 2, 0, 1, 2, 3][layer];
    (block * 4 + page) * bs + token
}

/// The bytes of the row that holds position `position` of `layer`.
fn pattern(layer: usize, position: usize, row_bytes: usize) -> Vec<u8> {
    let mut rng = Rng::new((layer * 1_000_003 + position) as u64);
    (0..row_bytes).map(|_| rng.below(POISON as usize) as u8).collect()
}

/// Both pools, all poison at first.
struct Pools {
    geometry: Geometry,
    gpu: Vec<u8>,
    host: Vec<u8>,
}

impl Pools {
    fn new(layout: HostLayout, block_size: u32, row_bytes: u32) -> Self {
        let geometry = geometry(layout, block_size, row_bytes);
        let gpu = vec![POISON; geometry.gpu_pool_bytes() as usize];
        let host = vec![POISON; geometry.host_pool_bytes() as usize];
        Self { geometry, gpu, host }
    }

    fn stores(&mut self) -> ByteStores<'_> {
        ByteStores::new(&self.geometry, &mut self.gpu, &mut self.host).unwrap()
    }

    fn sizes(&self) -> (usize, usize) {
        (self.geometry.block_size() as usize, self.geometry.row_bytes() as usize)
    }

    /// Where a host row lies, by the tests' own arithmetic.
    fn host_at(&mut self, layer: usize, block: usize, token: usize) -> &mut [u8] {
        let (bs, bytes) = self.sizes();
        let at = host_offset(self.geometry.host_layout(), bs, layer, block, token) * bytes;
        &mut self.host[at..at + bytes]
    }

    fn gpu_at(&mut self, layer: usize, block: usize, token: usize) -> &mut [u8] {
        let (bs, bytes) = self.sizes();
        let at = gpu_offset(bs, layer, block, token) * bytes;
        &mut self.gpu[at..at + bytes]
    }

    /// Fills a host block with the rows of page `page`, all layers.
    fn fill_host(&mut self, block: usize, page: usize) {
        let (bs, bytes) = self.sizes();
        for layer in 0..7 {
            for token in 0..bs {
                let row = pattern(layer, page * bs + token, bytes);
                self.host_at(layer, block, token).copy_from_slice(&row);
            }
        }
    }

    fn fill_gpu(&mut self, layer: usize, block: usize, page: usize) {
        let (bs, bytes) = self.sizes();
        for token in 0..bs {
            let row = pattern(layer, page * bs + token, bytes);
            self.gpu_at(layer, block, token).copy_from_slice(&row);
        }
    }
}

#[test]
fn each_layer_of_a_group_gets_its_own_row_and_nothing_else_is_written() {
    for (layout, row_bytes, block_size) in
        LAYOUTS.into_iter().flat_map(|l| [(l, 656, 16), (l, 1152, 4), (l, 656, 1)])
    {
        for stride in [block_size, 4 * block_size] {
            let mut pools = Pools::new(layout, block_size, row_bytes);
            let bs = block_size as usize;
            for block in 1..HOST_BLOCKS as usize {
                pools.fill_host(block, block);
            }
            let last = bs - 1;
            let copies = CopyList {
                host_row: vec![bs as i32, (8 * bs + last) as i32],
                hot_row: vec![(stride * 3 + last as u32) as i32, (stride * 11) as i32],
            };
            let topology = IndexGroupTopology::new(&pools.geometry, &[]).unwrap();
            let copied = pools.stores().copy_rows(&topology.groups()[2], &copies, stride).unwrap();
            assert_eq!(copied, 2 * 4 * u64::from(row_bytes));
            let mut expected = vec![POISON; pools.gpu.len()];
            let bytes = row_bytes as usize;
            for layer in 3..7 {
                for (position, block, token) in [(bs, 3, last), (8 * bs + last, 11, 0)] {
                    let at = gpu_offset(bs, layer, block, token) * bytes;
                    expected[at..at + bytes].copy_from_slice(&pattern(layer, position, bytes));
                }
            }
            assert!(pools.gpu == expected, "{layout:?} {row_bytes} {block_size} {stride}");
        }
    }
}

#[test]
fn replaying_the_list_layer_by_layer_equals_the_leader_copying_all_layers() {
    for layout in LAYOUTS {
        let mut at_once = Pools::new(layout, 16, 656);
        (1..9).for_each(|block| at_once.fill_host(block, block));
        let mut by_layer = Pools { host: at_once.host.clone(), ..Pools::new(layout, 16, 656) };
        let copies = CopyList { host_row: vec![17, 40, 143], hot_row: vec![16, 40, 50] };
        let topology = IndexGroupTopology::new(&at_once.geometry, &[]).unwrap();
        for group in topology.groups() {
            at_once.stores().copy_rows(group, &copies, 16).unwrap();
            for layer in group.layers() {
                by_layer.stores().replay_copy(layer, &copies, 16).unwrap();
            }
        }
        assert!(at_once.gpu == by_layer.gpu && at_once.host == by_layer.host);
        assert!(at_once.gpu.iter().any(|&byte| byte != POISON));
    }
}

#[test]
fn every_valid_row_holds_the_bytes_of_the_position_it_stands_for_on_every_layer() {
    for (layout, row_bytes) in LAYOUTS.into_iter().flat_map(|l| [(l, 656), (l, 1152)]) {
        let block_size = 4;
        let mut pools = Pools::new(layout, block_size, row_bytes);
        // Page p is host block 8 - p; pages 1 and 5 are resident too, page 6 has no copy at all.
        let host_blocks = [8, 7, 6, 5, 4, 3, 0];
        let residency = [0, 9, 0, 0, 0, 10, 0];
        for page in 0..6 {
            pools.fill_host(8 - page, page);
        }
        for layer in 3..7 {
            pools.fill_gpu(layer, 9, 1);
            pools.fill_gpu(layer, 10, 5);
        }
        let topology = IndexGroupTopology::new(&pools.geometry, &[]).unwrap();
        let group = topology.groups()[2];
        let mut state = HotState::new(12);
        let (mut scratch, mut out) = (ResolveScratch::default(), Resolved::default());
        let mut rng = Rng::new(u64::from(row_bytes));
        let stride = 16;
        for step in 0..60 {
            let topk: Vec<i32> = (0..12).map(|_| rng.below(32) as i32 - 2).collect();
            let input = ResolveInput {
                logical_topk: &topk,
                top_k: 6,
                seq_len: &[28, 27],
                residency: &residency,
                host_blocks: &host_blocks,
                hot_blocks: &[2, 11, 5],
                block_size,
                block_stride_rows: stride,
            };
            resolve(&input, &mut state, &mut scratch, &mut out).unwrap();
            assert_eq!(out.counters.overflow, 0);
            pools.stores().copy_rows(&group, &out.copies, stride).unwrap();
            for (row, seq_len) in [28, 27].into_iter().enumerate() {
                let readable =
                    topk[row * 6..][..6].iter().filter(|&&t| t >= 0 && t < seq_len.min(24));
                let physical = &out.physical_topk[row * 6..][..out.valid_counts[row] as usize];
                let readable: Vec<usize> = readable.map(|&t| t as usize).collect();
                assert_eq!(physical.len(), readable.len(), "step {step} row {row}");
                for (&position, &physical) in readable.iter().zip(physical) {
                    let (block, token) = (physical as usize / 16, physical as usize % 16);
                    for layer in 3..7 {
                        let expected = pattern(layer, position, row_bytes as usize);
                        assert!(pools.gpu_at(layer, block, token) == expected, "step {step}");
                        let stores = pools.stores();
                        let read = stores.physical_row(layer as u32, physical, stride).unwrap();
                        assert!(read == expected, "step {step} position {position}");
                    }
                }
            }
        }
        assert!(pools.gpu_at(3, 0, 0).iter().all(|&byte| byte == POISON));
    }
}

#[test]
fn copies_through_null_blocks_or_out_of_a_pool_are_refused_before_any_byte_moves() {
    let mut pools = Pools::new(HostLayout::RowInterleaved, 16, 656);
    (1..9).for_each(|block| pools.fill_host(block, block));
    let topology = IndexGroupTopology::new(&pools.geometry, &[]).unwrap();
    let group = topology.groups()[2];
    // Stride 64: token 16 of a block is another layer's row.
    for (host_row, hot_row) in
        [(15, 64), (-1, 64), (144, 64), (16, 63), (16, -1), (16, 768), (16, 80), (16, i32::MAX)]
    {
        let copies = CopyList { host_row: vec![16, host_row], hot_row: vec![65, hot_row] };
        let result = pools.stores().copy_rows(&group, &copies, 64);
        assert!(result.is_err(), "host row {host_row} to physical row {hot_row}");
        assert!(pools.gpu.iter().all(|&byte| byte == POISON));
    }
    let uneven = CopyList { host_row: vec![16, 17], hot_row: vec![65] };
    assert!(pools.stores().copy_rows(&group, &uneven, 64).is_err());
    let good = CopyList { host_row: vec![16], hot_row: vec![65] };
    assert!(pools.stores().replay_copy(7, &good, 64).is_err());
    assert!(pools.stores().replay_copy(u32::MAX, &good, 64).is_err());
    pools.stores().replay_copy(6, &good, 64).unwrap();
}

#[test]
fn a_spilled_and_restored_page_comes_back_whole_and_only_its_rows_move() {
    for (layout, row_bytes) in LAYOUTS.into_iter().flat_map(|l| [(l, 656), (l, 1152)]) {
        for num_rows in [0, 1, 7, 16] {
            let mut pools = Pools::new(layout, 16, row_bytes);
            (0..3).for_each(|layer| pools.fill_gpu(layer, 4, 2));
            (3..7).for_each(|layer| pools.fill_gpu(layer, 9, 2));
            let bytes = u64::from(num_rows) * 7 * u64::from(row_bytes);
            assert_eq!(pools.stores().spill_page(HostBlockId(5), &[4, 9], num_rows), Ok(bytes));
            let expected_gpu = pools.gpu.clone();
            let mut expected = Pools::new(layout, 16, row_bytes);
            for layer in 0..7 {
                for token in 0..num_rows as usize {
                    let row = pattern(layer, 32 + token, row_bytes as usize);
                    expected.host_at(layer, 5, token).copy_from_slice(&row);
                    let block = if layer < 3 { 8 } else { 1 };
                    expected.gpu_at(layer, block, token).copy_from_slice(&row);
                }
            }
            assert!(pools.host == expected.host, "spill {layout:?} {row_bytes} {num_rows}");
            assert!(pools.gpu == expected_gpu, "a spill leaves the GPU pool alone");
            pools.gpu.fill(POISON);
            assert_eq!(pools.stores().restore_page(HostBlockId(5), &[8, 1], num_rows), Ok(bytes));
            assert!(pools.gpu == expected.gpu, "restore {layout:?} {row_bytes} {num_rows}");
            assert_eq!(
                pools.stores().copy_host_page(HostBlockId(5), HostBlockId(8), num_rows),
                Ok(bytes)
            );
            for layer in 0..7 {
                for token in 0..16 {
                    let source = expected.host_at(layer, 5, token).to_vec();
                    assert!(pools.host_at(layer, 8, token) == source, "host copy {layer} {token}");
                }
            }
        }
    }
}

#[test]
fn page_copies_through_null_or_unknown_blocks_are_refused() {
    let mut pools = Pools::new(HostLayout::LayerMajor, 16, 656);
    let mut stores = pools.stores();
    for (host, gpu, rows) in [
        (0, vec![4, 9], 16),
        (9, vec![4, 9], 16),
        (-1, vec![4, 9], 16),
        (5, vec![0, 9], 16),
        (5, vec![4, 0], 16),
        (5, vec![4, 12], 16),
        (5, vec![4], 16),
        (5, vec![4, 9, 9], 16),
        (5, vec![4, 9], 17),
    ] {
        assert!(stores.spill_page(HostBlockId(host), &gpu, rows).is_err(), "{host} {gpu:?} {rows}");
        assert!(stores.restore_page(HostBlockId(host), &gpu, rows).is_err());
    }
    assert!(stores.copy_host_page(HostBlockId(5), HostBlockId(0), 1).is_err());
    assert!(stores.copy_host_page(HostBlockId(0), HostBlockId(5), 1).is_err());
    assert!(stores.gpu_row(0, BlockId::NULL, 0).is_err());
    assert!(stores.host_row(0, HostBlockId(1), 16).is_err());
    assert!(stores.gpu_row_mut(7, BlockId(1), 0).is_err());
    assert!(pools.gpu.iter().chain(&pools.host).all(|&byte| byte == POISON));
}

#[test]
fn pools_of_another_size_are_refused() {
    let geometry = geometry(HostLayout::LayerMajor, 16, 656);
    let mut gpu = vec![0; geometry.gpu_pool_bytes() as usize];
    let mut host = vec![0; geometry.host_pool_bytes() as usize + 1];
    assert!(ByteStores::new(&geometry, &mut gpu, &mut host).is_err());
    assert!(ByteStores::new(&geometry, &mut gpu[1..], &mut host[1..]).is_err());
    assert!(ByteStores::new(&geometry, &mut gpu, &mut host[1..]).is_ok());
}

#[test]
fn mirrored_rows_land_in_their_host_rows_and_padding_is_told_from_loss() {
    for (layout, row_bytes) in LAYOUTS.into_iter().flat_map(|l| [(l, 656), (l, 1152)]) {
        let mut pools = Pools::new(layout, 4, row_bytes);
        (0..3).for_each(|layer| pools.fill_gpu(layer, 3, 3));
        (3..7).for_each(|layer| pools.fill_gpu(layer, 6, 3));
        // Tokens: two real, graph padding, null blocks, no host row, null host block, one group
        // without a resident row, padding that names a host row.
        let resident_slot = [
            [13, 14, -1, 2, 13, 13, -1, -1], //
            [25, 26, -1, 0, 25, 25, 25, 0],
        ];
        let tokens = MirrorTokens {
            resident_slot: resident_slot.as_flattened(),
            host_row: &[29, 34, -1, 3, -1, 2, 30, 31],
        };
        let mut mask = MirrorMask::new(HOST_BLOCKS, 4);
        let report = pools.stores().mirror_rows(&[0, 1, 3, 4, 5, 6], tokens, &mut mask).unwrap();
        assert_eq!(report, MirrorReport { copied: 2, skipped: 3, lost: 3 });
        let mut expected = Pools::new(layout, 4, row_bytes);
        for layer in [0, 1, 3, 4, 5, 6] {
            for (position, block, token) in [(13, 7, 1), (14, 8, 2)] {
                let row = pattern(layer, position, row_bytes as usize);
                expected.host_at(layer, block, token).copy_from_slice(&row);
            }
        }
        assert!(pools.host == expected.host, "{layout:?} {row_bytes}");
        assert_eq!(mask.words(), [0, 0, 0, 0, 0, 0, 0, 0b10, 0b100]);
    }
}

#[test]
fn a_page_is_complete_only_after_the_draft_layers_have_been_mirrored_too() {
    let mut pools = Pools::new(HostLayout::RowInterleaved, 4, 656);
    let (mut target, mut draft) = (MirrorMask::new(9, 4), MirrorMask::new(9, 4));
    let tokens =
        MirrorTokens { resident_slot: &[4, 5, 6, 7, 8, 9, 10, 11], host_row: &[4, 5, 6, 7] };
    pools.stores().mirror_rows(&[0, 1, 2], tokens, &mut target).unwrap();
    assert!(target.is_full(HostBlockId(1)) && !draft.is_full(HostBlockId(1)));
    pools.stores().mirror_rows(&[3, 4, 5, 6], tokens, &mut draft).unwrap();
    assert!(target.is_full(HostBlockId(1)) && draft.is_full(HostBlockId(1)));
    target.clear(HostBlockId(1)).unwrap();
    assert!(!target.is_full(HostBlockId(1)));
}

#[test]
fn a_row_that_a_replayed_step_failed_to_mirror_keeps_its_page_incomplete() {
    let mut pools = Pools::new(HostLayout::RowInterleaved, 4, 656);
    let mut mask = MirrorMask::new(9, 4);
    for row in [8_i64, 9, 11] {
        let tokens = MirrorTokens { resident_slot: &[row, row], host_row: &[row] };
        pools.stores().mirror_rows(&[0], tokens, &mut mask).unwrap();
    }
    assert!(!mask.is_full(HostBlockId(2)), "row 10 never landed");
}

#[test]
fn a_mirror_out_of_a_pool_is_refused_before_any_byte_moves() {
    let mut pools = Pools::new(HostLayout::RowInterleaved, 4, 656);
    let mut mask = MirrorMask::new(9, 4);
    for (slots, rows) in [
        ([4, 48, 4, 4], [4, 5]),
        ([4, 4, 4, i64::MAX], [4, 5]),
        ([4; 4], [4, 36]),
        ([4; 4], [4, i64::MAX]),
    ] {
        let tokens = MirrorTokens { resident_slot: &slots, host_row: &rows };
        assert!(pools.stores().mirror_rows(&[0], tokens, &mut mask).is_err(), "{slots:?} {rows:?}");
    }
    let tokens = MirrorTokens { resident_slot: &[4; 3], host_row: &[4, 5] };
    assert!(pools.stores().mirror_rows(&[0], tokens, &mut mask).is_err());
    let tokens = MirrorTokens { resident_slot: &[4; 4], host_row: &[4, 5] };
    assert!(pools.stores().mirror_rows(&[7], tokens, &mut mask).is_err());
    assert!(pools.stores().mirror_rows(&[0], tokens, &mut MirrorMask::new(9, 8)).is_err());
    assert!(pools.stores().mirror_rows(&[0], tokens, &mut MirrorMask::new(8, 4)).is_err());
    assert!(pools.host.iter().all(|&byte| byte == POISON) && mask == MirrorMask::new(9, 4));
}
