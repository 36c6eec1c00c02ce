# SPDX-License-Identifier: Apache-2.0
"""Owns the run of the kernels' bodies on a CPU: same fuzz, same reference, no GPU.

Compiles the device headers with a C++ compiler and the shim in emulation/. It finds wrong results,
missing barriers and collectives that not all threads reach; it says nothing about time.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotpage.kernels import _abi

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gpu"))

from reference import Batch, HotState, resolve_batch  # noqa: E402
from resolve_cases import PLAIN, Odds, Shape, Workload, empty_states  # noqa: E402

POISON = -123456789
HOPPER_SHARED_BYTES = 232_448
SM120_SHARED_BYTES = 101_376


def compile_kernels(root: Path, folder: Path, *flags: str) -> ctypes.CDLL:
    """The kernels' bodies as a shared library."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    library = folder / "libkernels_on_cpu.so"
    includes = [f"-I{root / 'cuda/include'}", f"-I{HERE / 'emulation'}"]
    warnings = ["-Wall", "-Wno-unknown-pragmas"]
    source = HERE / "emulation" / "kernels_on_cpu.cpp"
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", *warnings, *includes, *flags]
    subprocess.run([compiler, *options, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def kernels(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as they are shipped."""
    return compile_kernels(root, tmp_path_factory.mktemp("emulation"))


def aligned(shape: tuple[int, ...], dtype: Any, fill: int) -> np.ndarray:
    """An array that starts at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


class Emulated:
    """Buffers of one index group in host memory."""

    def __init__(self, kernels: ctypes.CDLL, shape: Shape, shared_bytes: int) -> None:
        self.kernels, self.shape = kernels, shape
        union = shape.rows_per_request * shape.top_k
        states = (shape.num_state_rows, shape.hot_rows)
        self.row_map, self.last_used = aligned(states, np.int32, -1), aligned(states, np.uint16, 0)
        self.epoch = np.zeros(shape.num_state_rows, np.uint32)
        self.counters = np.zeros(_abi.NUM_COUNTERS, np.uint64)
        self.expected_counters = np.zeros(_abi.NUM_COUNTERS, np.uint64)
        # One row and one entry more than the kernel is told of: guards.
        self.physical_topk = np.zeros((shape.num_rows + 1, shape.top_k + 1), np.int32)
        self.valid_counts = np.zeros(shape.num_rows + 1, np.int32)
        self.copy_host_row = np.zeros((shape.num_requests, union), np.int32)
        self.copy_hot_row = np.zeros_like(self.copy_host_row)
        self.copy_count = np.zeros(shape.num_requests, np.int32)
        self.params = _abi.ResolveAndCopyParams(
            num_rows=shape.num_rows,
            max_rows_per_request=shape.rows_per_request,
            top_k=shape.top_k,
            hot_rows=shape.hot_rows,
            num_pages=shape.num_pages,
            num_state_rows=shape.num_state_rows,
            shared_limit_bytes=shared_bytes,
            num_physical_rows=shape.num_physical_rows,
            num_host_rows=shape.num_host_rows,
            logical_topk_stride=shape.top_k,
            physical_topk_stride=shape.top_k + 1,
            residency_stride=shape.num_pages,
            source_block_table_stride=shape.num_pages,
            hot_block_table_stride=shape.hot_rows // shape.block_size,
        )
        for name in (
            "row_map", "last_used", "epoch", "counters", "physical_topk", "valid_counts",
        ):  # fmt: skip
            setattr(self.params, name, getattr(self, name).ctypes.data)
        copy = self.params.copy
        copy.num_requests, copy.copy_list_stride = shape.num_requests, union
        copy.block_size, copy.block_stride_rows = shape.block_size, shape.block_stride_rows
        for name in ("copy_host_row", "copy_hot_row", "copy_count"):
            setattr(copy, name, getattr(self, name).ctypes.data)

    def resolve(self, batch: Batch, seed: int) -> int:
        """Runs the kernel's body; returns the variant that served it."""
        inputs = {
            name: np.ascontiguousarray(getattr(batch, name), np.int32)
            for name in (
                "logical_topk", "row_request", "state_row", "seq_len", "residency",
                "source_block_table", "hot_block_table",
            )
        }  # fmt: skip
        inputs["num_valid_rows"] = np.array([batch.num_valid_rows], np.int32)
        for name, array in inputs.items():
            setattr(self.params, name, array.ctypes.data)
        for output in (
            self.physical_topk, self.valid_counts, self.copy_host_row, self.copy_hot_row,
            self.copy_count,
        ):  # fmt: skip
            output.fill(POISON)
        variant = self.kernels.emulate_resolve(ctypes.byref(self.params), seed)
        assert variant != -2, "threads wait for each other for ever"
        assert variant >= 0, "no variant serves the shape"
        return variant

    def step(self, batch: Batch, states: list[HotState], seed: int, *, fifo: bool = False) -> int:
        """Resolves and compares outputs and state with the reference."""
        variant = self.resolve(batch, seed)
        before = [(state.row_map.copy(), state.last_used.copy()) for state in states]
        expected = resolve_batch(batch, states)
        if fifo:
            # First in, first out differs in this alone: a slot that keeps its row keeps its age.
            for state, (row_map, last_used) in zip(states, before, strict=True):
                kept = state.row_map == row_map
                state.last_used[kept] = last_used[kept]
        np.testing.assert_array_equal(self.physical_topk[:-1, :-1], expected.physical_topk)
        np.testing.assert_array_equal(self.valid_counts[:-1], expected.valid_counts)
        guards = [self.physical_topk[-1], self.physical_topk[:, -1], self.valid_counts[-1:]]
        assert all((guard == POISON).all() for guard in guards)
        for request, rows in enumerate(expected.copy_host_row):
            n = self.copy_count[request]
            np.testing.assert_array_equal(self.copy_host_row[request, :n], rows)
            np.testing.assert_array_equal(
                self.copy_hot_row[request, :n], expected.copy_hot_row[request]
            )
        np.testing.assert_array_equal(self.row_map, np.stack([s.row_map for s in states]))
        for stamps, state in zip(self.last_used, states, strict=True):
            np.testing.assert_array_equal(ages(stamps), ages(state.last_used))
        self.expected_counters += np.array(
            [expected.hits, expected.misses, expected.overflow], np.uint64
        )
        np.testing.assert_array_equal(self.counters, self.expected_counters)
        return variant


def ages(last_used: np.ndarray) -> np.ndarray:
    """Stamps replaced by their rank; 0 stays 0."""
    return np.unique(np.append(0, last_used), return_inverse=True)[1][1:]


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
    assert kernels.emulate_copy(ctypes.byref(params), blocks) == 0
    np.testing.assert_array_equal(gpu, expected)
