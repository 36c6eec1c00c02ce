# SPDX-License-Identifier: Apache-2.0
"""Owns the run of invalidation on a CPU, and of the marks by which it finds what it frees.

Inputs and reference are those of the GPU tests.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from emulated import HOPPER_SHARED_BYTES, Emulated, HolderMarks, aligned, launch
from reference import HotState, invalidate
from resolve_cases import Shape, Workload, empty_states

from hotpage.kernels import _abi

BLOCK_SIZE = 16
HOST_BLOCKS = 5000


class Invalidation:
    """Row maps of some index groups as the kernel and as the reference see them."""

    def __init__(
        self, groups: int, state_rows: int, hot_rows: int, rng: np.random.Generator
    ) -> None:
        shape = (groups, state_rows, hot_rows)
        self.row_map, self.last_used = aligned(shape, np.int32, -1), aligned(shape, np.uint16, 0)
        rows = rng.integers(BLOCK_SIZE, HOST_BLOCKS * BLOCK_SIZE, shape)
        rows[..., 1:][rng.random((groups, state_rows, hot_rows - 1)) < 0.3] = -1
        self.row_map[...] = rows
        self.last_used[...] = np.where(rows >= 0, rng.integers(1, 30000, shape), 0)
        self.epoch = np.full((groups, state_rows), 30001, np.uint32)
        self.expected = []
        for group, state_row in np.ndindex(groups, state_rows):
            state = HotState(hot_rows)
            state.row_map[:] = self.row_map[group, state_row]
            state.last_used[:] = self.last_used[group, state_row]
            self.expected.append(state)
        self.holders = np.zeros((HOST_BLOCKS, -(-state_rows // 32)), np.uint32)
        for s in range(state_rows):
            held = rows[:, s][rows[:, s] >= 0]
            self.holders[np.unique(held // BLOCK_SIZE), s // 32] |= np.uint32(1 << s % 32)
        self.states = np.array(
            [
                (
                    self.row_map[g].ctypes.data,
                    self.last_used[g].ctypes.data,
                    self.epoch[g].ctypes.data,
                    hot_rows,
                )
                for g in range(groups)
            ],
            np.int64,
        )
        self.freed, self.scratch = np.zeros(1, np.int64), np.zeros(1, np.uint32)

    def params(self, recycled: np.ndarray, rewritten: np.ndarray) -> _abi.InvalidateParams:
        """A launch that looks at every state row."""
        groups, state_rows, hot_rows = self.row_map.shape
        return _abi.InvalidateParams(
            num_index_groups=groups,
            num_state_rows=state_rows,
            block_size=BLOCK_SIZE,
            num_recycled=len(recycled),
            num_rewritten=len(rewritten),
            max_blocks=3,
            max_hot_rows=hot_rows,
            num_host_blocks=HOST_BLOCKS,
            states=self.states.ctypes.data,
            recycled_host_block=recycled.ctypes.data,
            rewritten_host_row=rewritten.ctypes.data,
            freed=self.freed.ctypes.data,
            scratch=self.scratch.ctypes.data,
        )

    def check(self) -> None:
        """Compares every state with the reference."""
        hot_rows = self.row_map.shape[2]
        np.testing.assert_array_equal(
            self.row_map.reshape(-1, hot_rows), np.stack([s.row_map for s in self.expected])
        )
        np.testing.assert_array_equal(
            self.last_used.reshape(-1, hot_rows), np.stack([s.last_used for s in self.expected])
        )


@pytest.mark.parametrize("search", ["all", "holders", "active"])
@pytest.mark.parametrize(
    ("groups", "state_rows", "hot_rows"), [(1, 1, 4), (3, 5, 1028), (2, 70, 256)]
)
@pytest.mark.parametrize(
    ("num_recycled", "num_rewritten"), [(4, 0), (0, 64), (100, 300), (4000, 4200)]
)
def test_freed_slots_equal_the_reference(
    search: str,
    groups: int,
    state_rows: int,
    hot_rows: int,
    num_recycled: int,
    num_rewritten: int,
    kernels: ctypes.CDLL,
) -> None:
    rng = np.random.default_rng(groups * 1000 + num_recycled + num_rewritten)
    case = Invalidation(groups, state_rows, hot_rows, rng)
    held = case.row_map[case.row_map >= 0]
    recycled = (rng.choice(held, num_recycled) // BLOCK_SIZE).astype(np.int32)
    rewritten = rng.choice(held, num_rewritten).astype(np.int64)
    # Ids that nobody holds, padding, and rows that no row map can hold.
    recycled[::3] = rng.integers(-1, HOST_BLOCKS, len(recycled[::3]))
    rewritten[::5] = -1
    rewritten[1::7] += 2**32
    masks = np.full((2, HOST_BLOCKS, 1), 0xFFFF, np.uint64)
    active = np.arange(state_rows - 1, -1, -1, dtype=np.int32)
    params = case.params(recycled, rewritten)
    params.mask[0], params.mask[1] = masks[0].ctypes.data, masks[1].ctypes.data
    if search == "active":
        params.state_row, params.num_active = active.ctypes.data, state_rows
    words = case.holders.copy()
    if search == "holders":
        params.holders = case.holders.ctypes.data
        words[recycled[recycled >= 0]] = 0
    assert launch(kernels, "hotpage_invalidate", params, seed=num_recycled) == _abi.OK
    freed = invalidate(case.expected, rewritten, recycled, BLOCK_SIZE)
    case.check()
    assert case.freed.item() == freed
    assert case.scratch.item() == 0
    np.testing.assert_array_equal(case.holders, words)
    cleared = np.flatnonzero(masks[0] == 0)
    np.testing.assert_array_equal(masks[0], masks[1])
    assert cleared.tolist() == sorted(set(recycled[recycled > 0].tolist()))


def test_state_rows_that_are_not_active_or_of_epoch_0_keep_their_rows(kernels: ctypes.CDLL) -> None:
    case = Invalidation(2, 6, 128, np.random.default_rng(3))
    case.epoch[1, 1] = 0
    blocks, nothing = np.arange(HOST_BLOCKS, dtype=np.int32), np.empty(0, np.int64)
    active = np.array([4, -1, 1, 6], np.int32)
    params = case.params(blocks, nothing)
    params.state_row, params.num_active = active.ctypes.data, len(active)
    assert launch(kernels, "hotpage_invalidate", params) == _abi.OK
    for looked_at in (4, 1, 6 + 4):
        invalidate([case.expected[looked_at]], [], np.arange(HOST_BLOCKS), BLOCK_SIZE)
    case.check()


class MarkedSteps:
    """Resolves whose row maps an invalidation searches by the holder bits that they left."""

    def __init__(self, kernels: ctypes.CDLL, shape: Shape, copies: bool) -> None:
        self.kernels, self.shape = kernels, shape
        self.resolve = Emulated(kernels, shape, HOPPER_SHARED_BYTES)
        words = -(-shape.num_state_rows // 32)
        self.holders = np.zeros((shape.num_host_blocks, words), np.uint32)
        self.freed, self.scratch = np.zeros(1, np.int64), np.zeros(1, np.uint32)
        self.state = np.array(
            [
                self.resolve.row_map.ctypes.data,
                self.resolve.last_used.ctypes.data,
                self.resolve.epoch.ctypes.data,
                shape.hot_rows,
            ],
            np.int64,
        )
        self.copies = copies
        if copies:
            self._bind_copy()
        else:
            self.resolve.params.holders = self.holders.ctypes.data

    def _bind_copy(self) -> None:
        copy, layers, row_bytes = self.resolve.params.copy, 2, 16
        self.host = aligned((self.shape.num_host_rows, layers, row_bytes), np.uint8, 1)
        self.gpu = aligned((self.shape.num_physical_rows, layers, row_bytes), np.uint8, 0)
        copy.num_layers, copy.row_bytes = layers, row_bytes
        copy.host_row_stride = layers * row_bytes
        copy.gpu_block_stride = self.shape.block_stride_rows * row_bytes
        for i in range(layers):
            copy.host_layer[i] = self.host[:, i].ctypes.data
            copy.gpu_layer[i] = self.gpu.ctypes.data + i * self.gpu.nbytes // layers

    def mark_by_copy(self) -> None:
        """Copies the misses of the last resolve, as its launcher does, marks included."""
        state_row = self.resolve.inputs["state_row"].ctypes.data
        marks = HolderMarks(self.holders.ctypes.data, state_row, self.shape.num_state_rows)
        copy = self.resolve.params.copy
        assert self.kernels.emulate_copy(ctypes.byref(copy), ctypes.byref(marks), 3, 1) == 0

    def invalidate(self, blocks: np.ndarray, rows: np.ndarray) -> None:
        """Frees what is held of some blocks and rows, found by holders."""
        recycled, rewritten = blocks.astype(np.int32), rows.astype(np.int64)
        params = _abi.InvalidateParams(
            num_index_groups=1,
            num_state_rows=self.shape.num_state_rows,
            block_size=self.shape.block_size,
            num_recycled=len(recycled),
            num_rewritten=len(rewritten),
            max_blocks=2,
            max_hot_rows=self.shape.hot_rows,
            num_host_blocks=self.shape.num_host_blocks,
            states=self.state.ctypes.data,
            recycled_host_block=recycled.ctypes.data,
            rewritten_host_row=rewritten.ctypes.data,
            holders=self.holders.ctypes.data,
            freed=self.freed.ctypes.data,
            scratch=self.scratch.ctypes.data,
        )
        assert launch(self.kernels, "hotpage_invalidate", params) == _abi.OK


@pytest.mark.parametrize("copies", [False, True], ids=["marks of the resolve", "of the copy"])
def test_a_step_marks_the_holders_that_the_next_invalidation_needs(
    copies: bool, kernels: ctypes.CDLL
) -> None:
    shape = Shape(num_requests=6, rows_per_request=2, hot_rows=128)
    work, states = Workload(shape, 41), empty_states(shape)
    steps, rng = MarkedSteps(kernels, shape, copies), np.random.default_rng(43)
    freed = 0
    for seed in range(12):
        steps.resolve.step(work.step(), states, seed)
        if copies:
            steps.mark_by_copy()
        blocks = rng.integers(1, shape.num_host_blocks, 8)
        rows = rng.integers(shape.block_size, shape.num_host_rows, 40)
        steps.invalidate(blocks, rows)
        freed += invalidate(states, rows, blocks, shape.block_size)
        np.testing.assert_array_equal(steps.resolve.row_map, np.stack([s.row_map for s in states]))
    assert steps.freed.item() == freed
    assert freed > 20, "the workload must hold rows that are recycled"
