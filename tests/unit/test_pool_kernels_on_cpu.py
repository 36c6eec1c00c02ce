# SPDX-License-Identifier: Apache-2.0
"""Owns the run of mirror, pages and staging on a CPU: launchers and bodies, no GPU.

Inputs and reference are those of the GPU tests; a launch runs its blocks one after the other.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from emulated import aligned, launch
from pool_cases import (
    PACKINGS,
    SPANS,
    Context,
    expected_rows,
    fill_with_fp8_rows,
    filled_pools,
    hash_of,
    malformed_pages,
    random_pages,
    random_tokens,
)
from reference import Pools

from hotpage.kernels import _abi
from hotpage.kernels.layer_table import build_chunks

LAYOUTS = ("row_interleaved", "layer_major")
POISON = 0x5A


class Tables:
    """Layer table and chunk table of some layers of the reference's pools."""

    def __init__(self, pools: Pools, layers: list[int] | None = None, max_blocks: int = 2) -> None:
        rows = [
            (
                pools.gpu_layers[i].ctypes.data,
                pools.gpu_layers[i].strides[0],
                pools.host_layers[i].ctypes.data,
                pools.host_layers[i].strides[1],
                pools.kv_group_of_layer[i],
            )
            for i in (range(len(pools.gpu_layers)) if layers is None else layers)
        ]
        chunks = build_chunks([(row[2], row[3]) for row in rows], pools.row_bytes)
        self.layers = np.array(rows, np.int64)
        self.chunks = aligned((len(chunks), _abi.NUM_CHUNK_COLUMNS), np.int32, 0)
        self.chunks[...] = chunks
        self.params = _abi.PoolsParams(
            num_layers=len(rows),
            num_chunks=len(chunks),
            num_kv_groups=len(pools.packing),
            row_bytes=pools.row_bytes,
            block_size=pools.block_size,
            max_blocks=max_blocks,
            num_gpu_blocks=pools.gpu_blocks,
            num_host_blocks=pools.host_blocks,
            layers=self.layers.ctypes.data,
            chunks=self.chunks.ctypes.data,
        )


class Mirror:
    """Mask and counters of a mirror, and its launches."""

    def __init__(self, kernels: ctypes.CDLL, pools: Pools, tables: Tables) -> None:
        self.kernels, self.pools, self.tables = kernels, pools, tables
        self.mask = np.zeros((pools.host_blocks, -(-pools.block_size // 64)), np.uint64)
        self.counters = np.zeros(_abi.NUM_MIRROR_COUNTERS, np.int64)

    def run(self, slots: np.ndarray, host: np.ndarray, seed: int) -> None:
        """Mirrors `[G][tokens]` slots to `[tokens]` host rows; rows of other groups lie between."""
        groups, tokens = slots.shape
        resident_slot = np.full((2 * groups + 1, tokens + 3), 77, np.int64)
        resident_slot[1::2, :tokens] = slots
        slot_row = np.arange(1, 2 * groups, 2, dtype=np.int32)
        host_row = np.ascontiguousarray(host, np.int64)
        params = _abi.MirrorRowsParams(
            num_tokens=tokens,
            resident_slot_stride=tokens + 3,
            resident_slot=resident_slot.ctypes.data,
            slot_row=slot_row.ctypes.data,
            host_row=host_row.ctypes.data,
            mask=self.mask.ctypes.data,
            counters=self.counters.ctypes.data,
            pools=self.tables.params,
        )
        assert launch(self.kernels, "hotpage_mirror_rows", params, seed) == _abi.OK

    def report(self, host_block: np.ndarray) -> list[int]:
        """Rows of some blocks that have not landed."""
        missing = np.full(len(host_block), -7, np.int32)
        params = _abi.ReportMirroredParams(
            num_blocks=len(host_block),
            block_size=self.pools.block_size,
            num_host_blocks=self.pools.host_blocks,
            host_block=host_block.ctypes.data,
            mask=self.mask.ctypes.data,
            missing_rows=missing.ctypes.data,
            counters=self.counters.ctypes.data,
        )
        assert launch(self.kernels, "hotpage_report_mirrored", params) == _abi.OK
        return missing.tolist()


def check_pools(got: Pools, expected: Pools) -> None:
    """Compares every byte of both pools."""
    np.testing.assert_array_equal(got.gpu, expected.gpu)
    np.testing.assert_array_equal(got.host, expected.host)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mirrored_rows_mask_and_counters_equal_the_reference(
    packing: str, layout: str, kernels: ctypes.CDLL
) -> None:
    rng = np.random.default_rng(hash_of(packing, layout))
    for block_size, row_bytes, max_blocks in ((16, 16, 4), (64, 656, 2), (100, 1152, 1)):
        sizes: dict[str, Any] = {"block_size": block_size, "row_bytes": row_bytes}
        sizes |= {"gpu_blocks": 12, "host_blocks": 10, "host_layout": layout}
        pools, reference = (filled_pools(PACKINGS[packing], **sizes) for _ in range(2))
        mirror = Mirror(kernels, pools, Tables(pools, max_blocks=max_blocks))
        expected = np.zeros(3, np.int64)
        for n in (1, 7, 34):
            slots, host = random_tokens(pools, n, rng)
            mirror.run(slots, host, seed=n)
            expected += reference.mirror_rows(range(len(pools.gpu_layers)), slots, host)
            np.testing.assert_array_equal(mirror.counters, expected)
            assert mirror.mask.reshape(-1).tolist() == reference.mask_words()
        check_pools(pools, reference)


def test_a_block_is_reported_whole_only_after_its_last_row(kernels: ctypes.CDLL) -> None:
    pools = filled_pools([[1, 4]], block_size=64, gpu_blocks=6, host_blocks=6)
    mirror = Mirror(kernels, pools, Tables(pools))
    tokens = np.arange(64, 64 + 150)
    mirror.run((tokens + 64)[None, :], tokens, seed=1)
    blocks = np.array([1, 2, 3, 4, 0, 6, -1], np.int32)
    assert mirror.report(blocks) == [0, 0, 42, 64, 64, 64, 64]
    assert mirror.counters.tolist() == [150, 0, 42 + 4 * 64]
    last = np.arange(64 + 150, 64 * 4)
    mirror.run((last + 64)[None, :], last, seed=2)
    assert mirror.report(blocks[:3]) == [0, 0, 0]


class Pages:
    """A page list and its counters."""

    def __init__(self, kernels: ctypes.CDLL, tables: Tables) -> None:
        self.kernels, self.tables = kernels, tables
        self.counters = np.zeros(_abi.NUM_PAGES_COUNTERS, np.int64)

    def run(self, op: str, host: Any, blocks: Any, rows: Any, seed: int) -> None:
        """Spills or restores the pages."""
        lists = [np.ascontiguousarray(values, np.int32) for values in (host, blocks, rows)]
        params = _abi.CopyPagesParams(
            num_pages=len(lists[0]),
            host_block=lists[0].ctypes.data,
            resident_blocks=lists[1].ctypes.data,
            num_rows=lists[2].ctypes.data,
            counters=self.counters.ctypes.data,
            pools=self.tables.params,
        )
        assert launch(self.kernels, f"hotpage_{op}_pages", params, seed) == _abi.OK


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_equal_the_reference_in_both_directions(
    packing: str, layout: str, kernels: ctypes.CDLL
) -> None:
    rng = np.random.default_rng(hash_of("pages", packing, layout))
    n, groups = 3, len(PACKINGS[packing])
    for block_size, row_bytes, max_blocks in ((16, 656, 2), (5, 1152, 1), (64, 16, 3)):
        sizes: dict[str, Any] = {"block_size": block_size, "row_bytes": row_bytes}
        sizes |= {"gpu_blocks": 1 + n * groups, "host_blocks": 8, "host_layout": layout}
        pools, reference = (filled_pools(PACKINGS[packing], **sizes) for _ in range(2))
        pages = Pages(kernels, Tables(pools, max_blocks=max_blocks))
        for seed, op in enumerate(("spill", "restore", "spill")):
            chosen = random_pages(pools, n, rng)
            pages.run(op, *chosen, seed)
            for page in zip(*chosen, strict=True):
                (reference.spill_page if op == "spill" else reference.restore_page)(*page)
            check_pools(pools, reference)
        assert pages.counters.tolist() == [3 * n, 0]


@pytest.mark.parametrize("op", ["spill", "restore"])
def test_malformed_pages_are_left_out_whole_and_counted(op: str, kernels: ctypes.CDLL) -> None:
    sizes = {"gpu_blocks": 20, "host_blocks": 20}
    pools, reference = (filled_pools([[4], [1]], **sizes) for _ in range(2))
    good, bad, listed = malformed_pages()
    pages = Pages(kernels, Tables(pools))
    pages.run(op, *zip(*listed, strict=True), 1)
    for page in good:
        (reference.spill_page if op == "spill" else reference.restore_page)(*page)
    check_pools(pools, reference)
    assert pages.counters.tolist() == [len(good), len(bad)]


class Staging:
    """Workspace of some layers, filled with poison, and the launch that stages into it."""

    def __init__(self, pools: Pools, layers: list[int], spans: list[tuple[int, int]]) -> None:
        self.pools, self.layers, self.spans = pools, layers, spans
        self.num_rows = sum(end - first for first, end in spans)
        self.counters = np.zeros(_abi.NUM_STAGE_COUNTERS, np.int64)

    def run(
        self, kernels: ctypes.CDLL, context: Context, upconverts: bool, max_blocks: int
    ) -> np.ndarray:
        """Workspace `[layers][rows + 6][bytes]`; the launch hears of 5 rows too many."""
        pools, layers = self.pools, self.layers
        row_bytes = 1152 if upconverts else pools.row_bytes
        workspace = aligned((len(layers), self.num_rows + 6, row_bytes), np.uint8, POISON)
        starts = np.cumsum([0, *(end - first for first, end in self.spans)])
        first_position = [first for first, _ in self.spans]
        fields = (starts, first_position, context.state_row, context.residency, context.source)
        arrays = [np.ascontiguousarray(values, np.int32) for values in fields]
        params = _abi.StagePrefillParams(
            num_rows=self.num_rows + 5,
            num_requests=len(self.spans),
            num_layers=len(layers),
            row_bytes=pools.row_bytes,
            conversion=_abi.STAGE_FP8_TO_BF16 if upconverts else _abi.STAGE_RAW,
            block_size=pools.block_size,
            num_pages=context.residency.shape[1],
            num_state_rows=len(context.residency),
            max_blocks=max_blocks,
            num_gpu_blocks=pools.gpu_blocks,
            num_host_blocks=pools.host_blocks,
            gpu_block_bytes=pools.gpu_layers[layers[0]].strides[0],
            host_row_stride=pools.host_layers[layers[0]].strides[1],
            workspace_row_stride=row_bytes,
            residency_stride=context.residency.shape[1],
            source_block_table_stride=context.source.shape[1],
            row_start=arrays[0].ctypes.data,
            first_position=arrays[1].ctypes.data,
            state_row=arrays[2].ctypes.data,
            residency=arrays[3].ctypes.data,
            source_block_table=arrays[4].ctypes.data,
            counters=self.counters.ctypes.data,
        )
        for i, layer in enumerate(layers):
            params.host_layer[i] = pools.host_layers[layer].ctypes.data
            params.gpu_layer[i] = pools.gpu_layers[layer].ctypes.data
            params.workspace[i] = workspace[i].ctypes.data
        assert launch(kernels, "hotpage_stage_prefill", params, seed=len(layers)) == _abi.OK
        return workspace


def converted(rows: np.ndarray) -> np.ndarray:
    """Bytes of bfloat16 `[rows][576]` of fp8_ds_mla rows, by numpy."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    sizes = np.where(
        exponent > 0, (1 + mantissa / 8) * np.exp2(exponent - 7), mantissa * np.exp2(-9.0)
    )
    values = (np.where(bits < 128, 1, -1) * sizes).astype(np.float32)[rows[:, :512]]
    scales = np.ascontiguousarray(rows[:, 512:528]).view(np.float32)
    words = (values.reshape(-1, 4, 128) * scales[:, :, None]).reshape(-1, 512).view(np.uint32)
    # To the nearest bfloat16, to the even one of two that are as near.
    low, high = words & 0xFFFF, words >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    scaled = (high + up).astype(np.uint16).view(np.uint8)
    return np.concatenate([scaled.reshape(-1, 1024), rows[:, 528:]], axis=1)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_raw_rows_come_from_wherever_they_are(
    group: int, layout: str, kernels: ctypes.CDLL
) -> None:
    rng = np.random.default_rng(hash_of("stage", group, layout))
    layers = list(range(1, 1 + group))
    for row_bytes, max_blocks in ((656, 0), (1152, 2), (16, 1)):
        pools = filled_pools([[1, group]], row_bytes=row_bytes, host_layout=layout)
        for spans in SPANS.values():
            context = Context.random(pools, len(spans), rng)
            staging = Staging(pools, layers, spans)
            workspace = staging.run(kernels, context, False, max_blocks)
            for layer, got in zip(layers, workspace, strict=True):
                rows, counts = expected_rows(pools, context, spans, layer)
                np.testing.assert_array_equal(got[: staging.num_rows], rows)
                assert (got[staging.num_rows :] == POISON).all(), "guard rows"
            assert staging.counters.tolist() == counts.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPANS)
def test_fp8_rows_become_bfloat16(layout: str, name: str, kernels: ctypes.CDLL) -> None:
    pools, spans = filled_pools([[1], [4]], host_layout=layout), SPANS[name]
    fill_with_fp8_rows(pools)
    rng = np.random.default_rng(23)
    for layers in ([0], [1, 2, 3, 4]):
        context = Context.random(pools, len(spans), rng)
        staging = Staging(pools, layers, spans)
        workspace = staging.run(kernels, context, True, 2)
        for layer, got in zip(layers, workspace, strict=True):
            rows, counts = expected_rows(pools, context, spans, layer)
            np.testing.assert_array_equal(got[: staging.num_rows], converted(rows))
            assert (got[staging.num_rows :] == POISON).all(), "guard rows"
        assert staging.counters.tolist() == counts.tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 1025), ("row_bytes", 24), ("num_layers", 0), ("num_host_blocks", 2**40)],
)
def test_sizes_that_the_pool_kernels_do_not_take_are_refused(
    field: str, value: int, kernels: ctypes.CDLL
) -> None:
    pools = filled_pools([[1]])
    tables, some = Tables(pools), np.zeros(64, np.int64)
    at = some.ctypes.data
    setattr(tables.params, field, value)
    params = _abi.MirrorRowsParams(
        num_tokens=1, resident_slot_stride=1, resident_slot=at, slot_row=at, host_row=at,
        mask=at, counters=at, pools=tables.params,
    )  # fmt: skip
    status = launch(kernels, "hotpage_mirror_rows", params)
    assert status == _abi.STATUS_INVALID_ARGUMENT
    params.struct_size -= 8
    assert launch(kernels, "hotpage_mirror_rows", params) == _abi.STATUS_STRUCT_SIZE
