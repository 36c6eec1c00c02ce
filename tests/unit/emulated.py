# SPDX-License-Identifier: Apache-2.0
"""Owns the build of the kernels for a CPU, and the buffers that resolves on it work in.

Compiles device code with a C++ compiler and the shim in emulation/.
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

EMULATION = Path(__file__).resolve().parent / "emulation"
# The cases and the reference are those of the GPU tests.
sys.path.insert(0, str(EMULATION.parent.parent / "gpu"))

from reference import Batch, HotState, resolve_batch  # noqa: E402
from resolve_cases import Shape  # noqa: E402

from hotpage.kernels import _abi  # noqa: E402

POISON = -123456789
HOPPER_SHARED_BYTES = 232_448
SM120_SHARED_BYTES = 101_376

LAUNCHED_SOURCES = (
    "mirror_rows",
    "spill_pages",
    "restore_pages",
    "stage_prefill",
    "invalidate",
    "digest_copies",
    "reset_states",
    "replay_copy",
)


def compile_kernels(root: Path, folder: Path, *flags: str) -> ctypes.CDLL:
    """Bodies of resolve and copies, and the other kernels with their launchers, as a library."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    library = folder / "libkernels_on_cpu.so"
    includes = [f"-I{root / 'cuda/include'}", f"-I{EMULATION}"]
    # Device code reads vectors of words where bytes were written, as nvcc allows.
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", *includes, *flags]
    warnings = ["-Wall", "-Wno-unknown-pragmas"]
    # nvcc includes the runtime's header in every source, too.
    options += [*warnings, "-include", "cuda_runtime.h", "-x", "c++"]
    sources = [EMULATION / "kernels_on_cpu.cpp", EMULATION / "ranks_on_cpu.cpp"]
    sources += [root / "cuda/src" / f"{name}.cu" for name in LAUNCHED_SOURCES]
    subprocess.run([compiler, *options, *sources, "-o", library], check=True)
    kernels = ctypes.CDLL(str(library))
    kernels.take_stored_bytes.restype = ctypes.c_uint64
    # Otherwise an argument that a caller leaves out is whatever the register holds.
    kernels.emulate_copy.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_uint, ctypes.c_int]
    return kernels


def aligned(shape: tuple[int, ...], dtype: Any, fill: int) -> np.ndarray:
    """An array that starts at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def launch(kernels: ctypes.CDLL, name: str, params: ctypes.Structure, seed: int = 0) -> int:
    """Calls a launcher; its status, the time-out of a launch that never ends excepted."""
    kernels.seed_launches(seed)
    status = getattr(kernels, name)(ctypes.byref(params), None)
    assert status < _abi.STATUS_CUDA_BASE, "threads wait for each other for ever"
    return status


class HolderMarks(ctypes.Structure):
    """Which holder bits a copy sets, as in holders.cuh."""

    _fields_ = [
        ("holders", ctypes.c_uint64),
        ("state_row", ctypes.c_uint64),
        ("num_state_rows", ctypes.c_int32),
    ]


NO_MARKS = HolderMarks()


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
        self.inputs = {
            name: np.ascontiguousarray(getattr(batch, name), np.int32)
            for name in (
                "logical_topk", "row_request", "state_row", "seq_len", "residency",
                "source_block_table", "hot_block_table",
            )
        }  # fmt: skip
        self.inputs["num_valid_rows"] = np.array([batch.num_valid_rows], np.int32)
        for name, array in self.inputs.items():
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
