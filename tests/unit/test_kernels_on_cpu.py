# SPDX-License-Identifier: Apache-2.0
"""Owns the run of resolve and copy on a CPU: same fuzz, same reference, no GPU.

It finds wrong results, missing barriers and collectives that not all threads reach; it says nothing
about time.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from emulated import (
    HOPPER_SHARED_BYTES,
    NO_MARKS,
    SM120_SHARED_BYTES,
    Emulated,
    aligned,
    compile_kernels,
)
from resolve_cases import PLAIN, Odds, Shape, Workload, empty_states

from hotpage.kernels import _abi

WIDE = {"block_size": 64, "num_requests": 2}
SHAPES = {
    "one row": (Shape(), HOPPER_SHARED_BYTES, 12, {0}),
    "four rows": (Shape(rows_per_request=4, hot_rows=256), HOPPER_SHARED_BYTES, 6, {1}),
    "odd k, blocks of 48": (
        Shape(top_k=33, hot_rows=96, block_size=48, num_pages=20), HOPPER_SHARED_BYTES, 4, {0},
    ),
    "k 2,048 x 4": (
        Shape(top_k=2048, rows_per_request=4, hot_rows=10240, num_pages=250, **WIDE),
        HOPPER_SHARED_BYTES, 2, {2},
    ),
    "k 2,048 x 4 in little shared memory": (
        Shape(top_k=2048, rows_per_request=4, hot_rows=10240, num_pages=250, **WIDE),
        SM120_SHARED_BYTES, 2, {3},
    ),
    "k 4,096 x 8": (
        Shape(num_requests=1, top_k=4096, rows_per_request=8, hot_rows=32768, num_pages=4000),
        HOPPER_SHARED_BYTES, 2, {4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_resolve_equals_the_reference_in_every_variant(name: str, kernels: ctypes.CDLL) -> None:
    shape, shared_bytes, steps, variants = SHAPES[name]
    emulated, work = Emulated(kernels, shape, shared_bytes), Workload(shape, 1)
    states = empty_states(shape)
    used = {emulated.step(work.step(), states, seed) for seed in range(steps)}
    assert used == variants


@pytest.mark.parametrize(
    ("odds", "hot_rows"),
    [
        (Odds(resident_page=1.0, no_region=1.0), 128),
        (Odds(0, 0, 0, 0, 0, 0, uneven=False, working_set=0, redraw=2.0), 128),
        (Odds(0, 0, 0, 0, 0, 0, uneven=False, working_set=0, redraw=0), 128),
        (PLAIN, 64),
    ],
    ids=["no region", "every row missed", "every row hit", "region as large as the union"],
)
def test_extreme_mixes_equal_the_reference(odds: Odds, hot_rows: int, kernels: ctypes.CDLL) -> None:
    shape = Shape(hot_rows=hot_rows)
    emulated, work = Emulated(kernels, shape, HOPPER_SHARED_BYTES), Workload(shape, 3, odds)
    states = empty_states(shape)
    for seed in range(5):
        emulated.step(work.step(), states, seed)


def test_the_fifo_policy_keeps_the_age_of_a_row_that_is_read(root: Path, tmp_path: Path) -> None:
    kernels = compile_kernels(root, tmp_path, "-DHOTPAGE_ROW_POLICY=FifoRowPolicy")
    shape = Shape()
    emulated, work = Emulated(kernels, shape, HOPPER_SHARED_BYTES), Workload(shape, 9)
    states = empty_states(shape)
    for seed in range(6):
        emulated.step(work.step(), states, seed, fifo=True)


@pytest.mark.parametrize("gap", [2, 0])
def test_stamps_go_on_behind_the_last_sixteen_bit_epoch(gap: int, kernels: ctypes.CDLL) -> None:
    shape = Shape(rows_per_request=2)
    emulated, work = Emulated(kernels, shape, HOPPER_SHARED_BYTES), Workload(shape, 5)
    states = empty_states(shape)
    for seed in range(6):
        emulated.step(work.step(), states, seed)
    stamps = emulated.last_used.astype(np.int64)
    late = 65535 - gap - (stamps.max() - stamps)
    emulated.last_used[...] = np.where(stamps > 0, late, 0)
    emulated.epoch[:] = 65535 - gap
    for seed in range(6):
        emulated.step(work.step(), states, seed)
    assert emulated.epoch.min() < 1000


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("layers", "row_bytes", "requests", "blocks"),
    [(4, 656, 3, 4), (1, 656, 1, 1), (3, 1152, 700, 16), (8, 16, 5, 64)],
)
def test_copies_move_every_row_of_the_list_and_nothing_else(
    interleaved: bool, layers: int, row_bytes: int, requests: int, blocks: int, kernels: ctypes.CDLL
) -> None:
    rng = np.random.default_rng(layers)
    host_rows, gpu_blocks, block_size, length = 3000, 90, 16, 40
    host = aligned((host_rows, layers, row_bytes), np.uint8, 0)
    if not interleaved:
        host = host.reshape(layers, host_rows, row_bytes)
    host[...] = rng.integers(0, 256, host.shape, np.uint8)
    by_layer = host.transpose(1, 0, 2) if interleaved else host
    gpu = aligned((gpu_blocks, layers + 1, block_size, row_bytes), np.uint8, 7)
    expected = gpu.copy()
    stride = block_size * (layers + 1)
    places = rng.permutation(gpu_blocks * block_size)
    lists = [np.zeros((requests, length), np.int32) for _ in range(2)]
    counts = np.zeros(requests, np.int32)
    for request in range(requests):
        n = min(int(rng.integers(0, length)), len(places))
        taken, places = places[:n], places[n:]
        counts[request] = n
        lists[0][request, :n] = np.sort(rng.permutation(host_rows)[:n])
        lists[1][request, :n] = taken // block_size * stride + taken % block_size
        for layer in range(layers):
            rows = by_layer[layer][lists[0][request, :n]]
            expected[taken // block_size, layer, taken % block_size] = rows
    params = _abi.CopyParams(
        num_requests=requests,
        num_layers=layers,
        row_bytes=row_bytes,
        copy_list_stride=length,
        block_size=block_size,
        block_stride_rows=stride,
        host_row_stride=row_bytes * layers if interleaved else row_bytes,
        gpu_block_stride=stride * row_bytes,
        copy_host_row=lists[0].ctypes.data,
        copy_hot_row=lists[1].ctypes.data,
        copy_count=counts.ctypes.data,
    )
    for layer in range(layers):
        params.host_layer[layer] = by_layer[layer].ctypes.data
        params.gpu_layer[layer] = gpu.ctypes.data + layer * block_size * row_bytes
    assert kernels.emulate_copy(ctypes.byref(params), ctypes.byref(NO_MARKS), blocks) == 0
    np.testing.assert_array_equal(gpu, expected)
