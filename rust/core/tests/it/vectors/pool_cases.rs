// SPDX-License-Identifier: Apache-2.0
//! Owns the cases of `copy.json`, `mirror.json` and `pages.json`: operations on both pools.

use hotpage_core::dataplane::{ByteStores, CopyList, MirrorMask, MirrorTokens};
use hotpage_core::geometry::{Geometry, HostLayout, LayerPacking};
use hotpage_core::ids::HostBlockId;
use hotpage_core::index_group::IndexGroupTopology;
use serde_json::{Map, Value, json};

use super::table;
use crate::rng::Rng;

const GPU_SALT: u32 = 0x1000_0000;
const HOST_SALT: u32 = 0x2000_0000;

/// One operation, in the words of the JSON files.
enum Op {
    Copy { index_group: usize, block_stride_rows: u32, copies: CopyList },
    Replay { layer: u32, block_stride_rows: u32, copies: CopyList },
    Mirror { layers: Vec<u32>, resident_slot: Vec<i64>, host_row: Vec<i64> },
    Recycle { host_blocks: Vec<i32> },
    Spill { host_block: i32, resident_blocks: Vec<i32>, num_rows: u32 },
    Restore { host_block: i32, resident_blocks: Vec<i32>, num_rows: u32 },
    HostCopy { source: i32, target: i32, num_rows: u32 },
}

struct Sizes {
    packing: Vec<Vec<u32>>,
    block_size: u32,
    row_bytes: u32,
    gpu_blocks: u32,
    host_blocks: u32,
    layout: HostLayout,
}

/// Byte `at` of a pool before the first operation: the 32-bit finaliser of MurmurHash3 of
/// `at + salt`, its low byte. Any two rows differ.
fn fill(len: u64, salt: u32) -> Vec<u8> {
    (0..u32::try_from(len).unwrap())
        .map(|at| {
            let mut x = at.wrapping_add(salt);
            x = (x ^ (x >> 16)).wrapping_mul(0x85EB_CA6B);
            x = (x ^ (x >> 13)).wrapping_mul(0xC2B2_AE35);
            (x ^ (x >> 16)) as u8
        })
        .collect()
}

fn run(name: &str, sizes: &Sizes, ops: &[Op]) -> Value {
    let packing = LayerPacking { kv_groups: sizes.packing.clone() };
    let (bs, blocks) = (sizes.block_size, sizes.host_blocks);
    let geometry =
        Geometry::new(&packing, bs, sizes.row_bytes, sizes.gpu_blocks, blocks, sizes.layout)
            .unwrap();
    let mut gpu = fill(geometry.gpu_pool_bytes(), GPU_SALT);
    let mut host = fill(geometry.host_pool_bytes(), HOST_SALT);
    let mut mask = MirrorMask::new(blocks, bs);
    let steps: Vec<Value> = ops
        .iter()
        .map(|op| {
            let mut stores = ByteStores::new(&geometry, &mut gpu, &mut host).unwrap();
            let (mut step, mut expect) = apply(op, &geometry, &mut stores, &mut mask);
            expect.insert("gpu_crc32".into(), crc32fast::hash(&gpu).into());
            expect.insert("host_crc32".into(), crc32fast::hash(&host).into());
            step["expect"] = Value::Object(expect);
            step
        })
        .collect();
    json!({
        "name": name,
        "packing": sizes.packing,
        "block_size": bs,
        "row_bytes": sizes.row_bytes,
        "gpu_blocks": sizes.gpu_blocks,
        "host_blocks": blocks,
        "host_layout": layout_name(sizes.layout),
        "gpu_salt": GPU_SALT,
        "host_salt": HOST_SALT,
        "steps": steps,
    })
}

fn layout_name(layout: HostLayout) -> &'static str {
    match layout {
        HostLayout::RowInterleaved => "row_interleaved",
        HostLayout::LayerMajor => "layer_major",
    }
}

/// Carries the operation out; returns it and what it reports.
fn apply(
    op: &Op,
    geometry: &Geometry,
    stores: &mut ByteStores<'_>,
    mask: &mut MirrorMask,
) -> (Value, Map<String, Value>) {
    let mut expect = Map::new();
    let (step, bytes) = match op {
        Op::Copy { index_group, block_stride_rows, copies } => {
            let topology = IndexGroupTopology::new(geometry, &[]).unwrap();
            let group = topology.groups()[*index_group];
            let bytes = stores.copy_rows(&group, copies, *block_stride_rows).unwrap();
            let step = json!({ "op": "copy_rows", "index_group": index_group,
                "block_stride_rows": block_stride_rows,
                "copy_host_row": copies.host_row, "copy_hot_row": copies.hot_row });
            (step, Some(bytes))
        }
        Op::Replay { layer, block_stride_rows, copies } => {
            let bytes = stores.replay_copy(*layer, copies, *block_stride_rows).unwrap();
            let step = json!({ "op": "replay_copy", "layer": layer,
                "block_stride_rows": block_stride_rows,
                "copy_host_row": copies.host_row, "copy_hot_row": copies.hot_row });
            (step, Some(bytes))
        }
        Op::Mirror { layers, resident_slot, host_row } => {
            let tokens = MirrorTokens { resident_slot, host_row };
            let report = stores.mirror_rows(layers, tokens, mask).unwrap();
            expect.insert("copied".into(), report.copied.into());
            expect.insert("skipped".into(), report.skipped.into());
            expect.insert("lost".into(), report.lost.into());
            mask_json(geometry, mask, &mut expect);
            let step = json!({ "op": "mirror_rows", "layers": layers,
                "resident_slot": table(resident_slot, host_row.len()), "host_row": host_row });
            (step, None)
        }
        Op::Recycle { host_blocks } => {
            host_blocks.iter().for_each(|&block| mask.clear(HostBlockId(block)).unwrap());
            mask_json(geometry, mask, &mut expect);
            (json!({ "op": "recycle", "host_blocks": host_blocks }), None)
        }
        Op::Spill { host_block, resident_blocks, num_rows } => {
            let block = HostBlockId(*host_block);
            let bytes = stores.spill_page(block, resident_blocks, *num_rows).unwrap();
            let step = json!({ "op": "spill_page", "host_block": host_block,
                "resident_blocks": resident_blocks, "num_rows": num_rows });
            (step, Some(bytes))
        }
        Op::Restore { host_block, resident_blocks, num_rows } => {
            let block = HostBlockId(*host_block);
            let bytes = stores.restore_page(block, resident_blocks, *num_rows).unwrap();
            let step = json!({ "op": "restore_page", "host_block": host_block,
                "resident_blocks": resident_blocks, "num_rows": num_rows });
            (step, Some(bytes))
        }
        Op::HostCopy { source, target, num_rows } => {
            let (from, to) = (HostBlockId(*source), HostBlockId(*target));
            let bytes = stores.copy_host_page(from, to, *num_rows).unwrap();
            let step = json!({ "op": "copy_host_page", "source_host_block": source,
                "host_block": target, "num_rows": num_rows });
            (step, Some(bytes))
        }
    };
    if let Some(bytes) = bytes {
        expect.insert("bytes".into(), bytes.into());
    }
    (step, expect)
}

fn mask_json(geometry: &Geometry, mask: &MirrorMask, expect: &mut Map<String, Value>) {
    let blocks = 0..i32::try_from(geometry.host_blocks()).unwrap();
    let full: Vec<i32> = blocks.filter(|&block| mask.is_full(HostBlockId(block))).collect();
    expect.insert("mask_words".into(), mask.words().into());
    expect.insert("full_blocks".into(), full.into());
}

/// Both layouts and both row widths of one kind of case, over mixed group sizes.
fn variants(block_size: u32, ops: impl Fn(&Sizes, &mut Rng) -> Vec<Op>, what: &str) -> Vec<Value> {
    let mut cases = Vec::new();
    for layout in [HostLayout::RowInterleaved, HostLayout::LayerMajor] {
        for row_bytes in [656, 1152] {
            let sizes = Sizes {
                packing: vec![vec![1, 2], vec![4]],
                block_size,
                row_bytes,
                gpu_blocks: 6,
                host_blocks: 7,
                layout,
            };
            let ops = ops(&sizes, &mut Rng::new(u64::from(block_size + row_bytes)));
            let layout = layout_name(layout);
            let name = format!("{what}: {layout}, {row_bytes} byte rows, block size {block_size}");
            cases.push(run(&name, &sizes, &ops));
        }
    }
    cases
}

/// `misses` distinct host rows in ascending order and distinct hot rows, null blocks avoided.
fn copy_list(sizes: &Sizes, stride: u32, misses: usize, rng: &mut Rng) -> CopyList {
    let bs = sizes.block_size as usize;
    let mut host: Vec<usize> = (bs..sizes.host_blocks as usize * bs).collect();
    let mut hot: Vec<usize> = (bs..sizes.gpu_blocks as usize * bs).collect();
    for rows in [&mut host, &mut hot] {
        for i in (1..rows.len()).rev() {
            rows.swap(i, rng.below(i + 1));
        }
        rows.truncate(misses);
    }
    host.sort_unstable();
    CopyList {
        host_row: host.into_iter().map(|row| row as i32).collect(),
        hot_row: hot.into_iter().map(|r| (r / bs * stride as usize + r % bs) as i32).collect(),
    }
}

fn copy_ops(sizes: &Sizes, rng: &mut Rng) -> Vec<Op> {
    let (dense, strided) = (sizes.block_size, 4 * sizes.block_size);
    let most = (sizes.gpu_blocks as usize - 1) * sizes.block_size as usize;
    let shared = copy_list(sizes, dense, most.min(9), rng);
    vec![
        Op::Copy { index_group: 2, block_stride_rows: dense, copies: shared.clone() },
        Op::Replay { layer: 1, block_stride_rows: dense, copies: shared.clone() },
        Op::Replay { layer: 2, block_stride_rows: dense, copies: shared },
        Op::Copy {
            index_group: 1,
            block_stride_rows: strided,
            copies: copy_list(sizes, strided, most.min(17), rng),
        },
        Op::Copy {
            index_group: 0,
            block_stride_rows: dense,
            copies: copy_list(sizes, dense, most.min(40), rng),
        },
        Op::Copy { index_group: 2, block_stride_rows: dense, copies: CopyList::default() },
    ]
}

fn page_ops(sizes: &Sizes, _: &mut Rng) -> Vec<Op> {
    let bs = sizes.block_size;
    vec![
        Op::Spill { host_block: 3, resident_blocks: vec![5, 1], num_rows: bs },
        Op::Spill { host_block: 6, resident_blocks: vec![2, 3], num_rows: bs - bs / 2 },
        Op::Restore { host_block: 3, resident_blocks: vec![4, 3], num_rows: bs },
        Op::Restore { host_block: 1, resident_blocks: vec![1, 5], num_rows: 1 },
        Op::HostCopy { source: 3, target: 2, num_rows: bs / 2 },
        Op::Restore { host_block: 2, resident_blocks: vec![2, 5], num_rows: 0 },
    ]
}

/// A page filled row by row over three steps with padding between, a page that loses a row, a
/// block that is recycled.
fn mirror_ops(sizes: &Sizes, _: &mut Rng) -> Vec<Op> {
    let bs = i64::from(sizes.block_size);
    let all: Vec<u32> = (0..7).collect();
    let mirror = |layers: &[u32], tokens: &[[i64; 3]]| Op::Mirror {
        layers: layers.to_vec(),
        resident_slot: tokens.iter().map(|t| t[0]).chain(tokens.iter().map(|t| t[1])).collect(),
        host_row: tokens.iter().map(|t| t[2]).collect(),
    };
    let page = |rows: core::ops::Range<i64>| -> Vec<[i64; 3]> {
        rows.map(|row| [2 * bs + row, 5 * bs + row, 4 * bs + row]).collect()
    };
    let mut first = page(0..bs / 2);
    // Padding, null blocks on either side, a real token without host row, one whose page lacks a
    // block in a group.
    first.extend([[-1, -1, -1], [0, 0, 3], [3 * bs, 3 * bs, 0], [3 * bs, 4 * bs, -1]]);
    first.extend([[3 * bs, -1, 2 * bs], [-1, -1, 2 * bs]]);
    vec![
        mirror(&all, &first),
        mirror(&all, &page(bs / 2..bs - 1)),
        mirror(&all, &page(bs - 1..bs)),
        Op::Recycle { host_blocks: vec![4] },
        mirror(&[0, 3, 4], &[[bs, 4 * bs, 4 * bs], [bs, 4 * bs + bs - 1, 6 * bs + bs - 1]]),
    ]
}

pub(super) fn copies() -> Vec<Value> {
    [16, 64, 1].into_iter().flat_map(|bs| variants(bs, copy_ops, "misses")).collect()
}

pub(super) fn mirrors() -> Vec<Value> {
    [4, 16, 128].into_iter().flat_map(|bs| variants(bs, mirror_ops, "mirror")).collect()
}

pub(super) fn pages() -> Vec<Value> {
    [1, 16, 64].into_iter().flat_map(|bs| variants(bs, page_ops, "pages")).collect()
}
