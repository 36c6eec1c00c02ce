# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that mirror_rows moves, marks and counts what the numpy reference does."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from pool_cases import PACKINGS, filled_pools, hash_of, random_tokens  # noqa: E402
from pool_device import DeviceMirror, DevicePools, stream  # noqa: E402
from resolve_device import DEVICE, same  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels.layer_table import LayerTable, PoolLayer  # noqa: E402
from hotpage.kernels.mirror_rows import (  # noqa: E402
    MirrorMask,
    MirrorRows,
    ReportMirrored,
    SlotMappings,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", ["row_interleaved", "layer_major"])
@pytest.mark.parametrize("row_bytes", [16, 656, 1152])
def test_rows_mask_and_counters_equal_the_reference(
    packing: str, layout: str, row_bytes: int
) -> None:
    rng = np.random.default_rng(hash_of(packing, layout, row_bytes))
    for block_size, max_blocks in ((16, 0), (64, 3), (100, 1)):
        pools = filled_pools(
            PACKINGS[packing],
            block_size=block_size,
            row_bytes=row_bytes,
            gpu_blocks=12,
            host_blocks=10,
            host_layout=layout,
        )
        device = DevicePools(pools)
        mirror = DeviceMirror(device, 300, max_blocks=max_blocks)
        expected = np.zeros(3, np.int64)
        for n in (1, 2, 3, 7, 64, 131):
            slots, host = random_tokens(pools, n, rng)
            mirror.load(slots, host)
            mirror.run(n)
            expected += pools.mirror_rows(range(len(device.layers)), slots, host)
            where = f"block size {block_size}, {n} tokens"
            same(mirror.mask.counters.cpu().numpy(), expected, f"{where}: counters")
            assert mirror.mask_words() == pools.mask_words(), where
        device.check(f"block size {block_size}")


def test_a_chunk_of_prefill_and_its_report_make_pages_clean() -> None:
    pools = filled_pools([[1, 4]], block_size=64, gpu_blocks=20, host_blocks=20)
    device = DevicePools(pools)
    mirror = DeviceMirror(device, 1024)
    tokens = np.arange(64 * 16)
    slots, host = (tokens + 3 * 64)[None, :], tokens + 2 * 64
    host_block = torch.arange(20, dtype=torch.int32, device=DEVICE)
    missing = torch.full((20,), -7, dtype=torch.int32).pin_memory()
    report = ReportMirrored(mirror.mask, host_block, missing)
    for first, end in ((0, 500), (500, 1024)):
        mirror.load(slots[:, first:end], host[first:end])
        mirror.run(end - first)
    pools.mirror_rows(range(5), slots, host)
    report(20, stream())
    torch.cuda.synchronize()
    assert missing.tolist() == [64, 64] + [0] * 16 + [64, 64]
    assert pools.full_blocks() == list(range(2, 18))
    device.check("prefill")


def test_a_graph_replay_without_mirror_is_a_lost_row_and_not_a_clean_page() -> None:
    """Decode by graph: the forward of every token is replayed, the mirror of one is forgotten."""
    pools = filled_pools([[4]], block_size=16, gpu_blocks=4, host_blocks=4)
    device = DevicePools(pools)
    mirror = DeviceMirror(device, 8)
    row_source = torch.zeros(656, dtype=torch.uint8, device=DEVICE)
    at = torch.zeros((2, 1), dtype=torch.int64, device=DEVICE)
    leader = device.layers[0].gpu
    forward, mirrored = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        leader.index_put_((at[0], at[1]), row_source[None, :])
    with torch.cuda.graph(mirrored):
        mirror.run(8)
    host_block = torch.tensor([2, 3], dtype=torch.int32, device=DEVICE)
    missing = torch.full((2,), -7, dtype=torch.int32, device=DEVICE)
    report = ReportMirrored(mirror.mask, host_block, missing)
    for block, forgotten in ((2, None), (3, 5)):
        for token in range(16):
            mirror.slots.host_row.fill_(-1)
            mirror.slots.resident_slot.fill_(-1)
            mirror.load(np.array([[block * 16 + token]]), np.array([block * 16 + token]))
            row_source.fill_(token)
            at.copy_(torch.tensor([[block], [token]]))
            forward.replay()
            if token != forgotten:
                mirrored.replay()
    report(2, stream())
    torch.cuda.synchronize()
    assert missing.tolist() == [0, 1], "block 3 must not pass for clean"
    rows = device.layers[0].host[3, :, 0].tolist()
    assert [rows[i] for i in range(16) if i != 5] == [i for i in range(16) if i != 5]
    assert mirror.mask.counters.tolist()[2] == 1, "the missing row counts as lost"


def test_a_captured_mirror_reads_the_mappings_of_the_step_it_is_replayed_in() -> None:
    pools = filled_pools([[1, 4], [2]], gpu_blocks=16, host_blocks=16)
    device = DevicePools(pools)
    mirror = DeviceMirror(device, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mirror.run(64)
    assert mirror.mask.counters.tolist() == [0, 0, 0], "capturing ran the kernel"
    rng = np.random.default_rng(5)
    expected = np.zeros(3, np.int64)
    for n in (64, 3, 40):
        slots, host = random_tokens(pools, n, rng)
        padded = np.full((2, 64), -1), np.full(64, -1)
        padded[0][:, :n], padded[1][:n] = slots, host
        mirror.load(*padded)
        graph.replay()
        expected += pools.mirror_rows(range(7), *padded)
        torch.cuda.synchronize()
    same(mirror.mask.counters.cpu().numpy(), expected, "counters")
    device.check("replays")


def test_draft_rows_are_mirrored_from_the_snapshot_that_the_drafter_cannot_overwrite() -> None:
    pools = filled_pools([[4], [1]], gpu_blocks=16, host_blocks=16)
    device = DevicePools(pools)
    target = DeviceMirror(device, 32, [0, 1, 2, 3])
    snapshot = target.slots.snapshot()
    draft_mask = MirrorMask(16, 16, DEVICE)
    draft = MirrorRows(device.table([4]), snapshot, draft_mask)
    rng = np.random.default_rng(9)
    slots, host = random_tokens(pools, 20, rng, 0)
    target.load(slots, host)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        snapshot.take(target.slots, 20)
    graph.replay()
    target.run(20)
    # The drafter overwrites the mappings, and the next step's graph pads to another width.
    target.slots.resident_slot.fill_(33)
    target.slots.host_row.fill_(34)
    draft(32, stream())
    pools.mirror_rows([0, 1, 2, 3, 4], slots, host)
    device.check("draft")
    assert draft_mask.counters.tolist() == [20, 12, 0]
    assert draft_mask.words.cpu().numpy().view(np.uint64).reshape(-1).tolist() == pools.mask_words()


def test_two_streams_mirror_into_two_masks_at_once() -> None:
    pools = filled_pools([[4]], gpu_blocks=64, host_blocks=130, block_size=16)
    device = DevicePools(pools)
    mirrors = [DeviceMirror(device, 1024) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for i, mirror in enumerate(mirrors):
        tokens = np.arange(1000)
        mirror.load((tokens % 1000 + 16)[None, :], tokens + 16 + i * 1024)
        pools.mirror_rows(range(4), (tokens + 16)[None, :], tokens + 16 + i * 1024)
    torch.cuda.synchronize()
    for _ in range(5):
        for mirror, on in zip(mirrors, streams, strict=True):
            with torch.cuda.stream(on):
                mirror.run(1000)
    device.check("streams")
    merged = mirrors[0].mask.words | mirrors[1].mask.words
    assert merged.cpu().numpy().view(np.uint64).reshape(-1).tolist() == pools.mask_words()
    assert [m.mask.counters.tolist() for m in mirrors] == [[5000, 0, 0]] * 2


def test_host_rows_beyond_two_to_the_32_bytes_are_written() -> None:
    """A host pool of 5 GiB: rows on both sides of byte 2^31 and 2^32 arrive where they belong."""
    row_bytes, block_size, num_blocks = 656, 64, 128_000
    host = torch.zeros((num_blocks, block_size, row_bytes), dtype=torch.uint8).pin_memory()
    gpu = torch.zeros((3, block_size, row_bytes), dtype=torch.uint8, device=DEVICE)
    gpu.copy_(torch.randint(0, 256, gpu.shape, dtype=torch.uint8))
    edges = [2**31 // row_bytes, 2**32 // row_bytes, num_blocks * block_size - 2]
    rows = [row + i for row in edges for i in (0, 1)]
    table = LayerTable([PoolLayer(gpu, host, 0)])
    slots = SlotMappings(
        torch.arange(64, 64 + len(rows), device=DEVICE)[None, :],
        torch.tensor(rows, device=DEVICE),
        [0],
    )
    MirrorRows(table, slots, MirrorMask(num_blocks, block_size, DEVICE))(len(rows), stream())
    torch.cuda.synchronize()
    flat = host.view(-1, row_bytes)
    assert torch.equal(flat[rows], gpu.view(-1, row_bytes)[64 : 64 + len(rows)].cpu())
    assert not flat[[row - 1 for row in edges]].any()


def test_views_that_the_kernel_cannot_walk_are_refused_with_what_was_expected() -> None:
    pools = DevicePools(filled_pools([[2]]))
    layer = pools.layers[0]
    for bad, text in (
        (PoolLayer(layer.gpu[..., :640], layer.host[..., :640], 0), "not adjacent"),
        (PoolLayer(layer.gpu[..., 8:], layer.host[..., 8:], 0), "aligned"),
        (PoolLayer(layer.gpu, torch.empty_like(layer.host), 0), "not pinned"),
        (PoolLayer(layer.gpu, layer.host[:, :8], 0), "shape"),
    ):
        with pytest.raises(ConfigError, match=text):
            LayerTable([bad])
    with pytest.raises(ConfigError, match="num_kv_groups"):
        LayerTable([PoolLayer(layer.gpu, layer.host, 3)], num_kv_groups=2)
    mirror = DeviceMirror(pools, 8)
    with pytest.raises(ConfigError, match="num_tokens"):
        mirror.run(9)
