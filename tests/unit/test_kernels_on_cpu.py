# SPDX-License-Identifier: Apache-2.0
"""Owns the run of resolve and copy on a CPU: same fuzz, same reference, no GPU.

It finds wrong results, missing barriers and collectives that not all threads reach; it says nothing
about time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from emulated import (
    HOPPER_SHARED_BYTES,
    SM120_SHARED_BYTES,
    Emulated,
    HolderMarks,
    aligned,
    compile_kernels,
    launch,
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


class CopyCase:
    """Pools and a copy list in host memory; hot rows are distinct.

    host: uint8 `[layers][host rows][row_bytes]` in the place of a pool of random bytes.
    """

    def __init__(
        self,
        host_rows: int,
        layers: int,
        row_bytes: int,
        rows: list[np.ndarray],
        interleaved: bool,
        host: np.ndarray | None = None,
    ) -> None:
        self.layers, self.row_bytes, self.rows = layers, row_bytes, rows
        rng = np.random.default_rng(layers)
        num_copies = sum(len(r) for r in rows)
        requests, length, self.block_size = len(rows), max(len(r) for r in rows) + 1, 16
        if host is None:
            host = aligned((host_rows, layers, row_bytes), np.uint8, 0)
            if not interleaved:
                host = host.reshape(layers, host_rows, row_bytes)
            host[...] = rng.integers(0, 256, host.shape, np.uint8)
        self.by_layer = host.transpose(1, 0, 2) if interleaved else host
        gpu_blocks = num_copies // self.block_size + 2
        self.gpu = aligned((gpu_blocks, layers + 1, self.block_size, row_bytes), np.uint8, 7)
        self.stride = self.block_size * (layers + 1)
        places = rng.permutation(gpu_blocks * self.block_size)[:num_copies]
        self.places = np.split(places, np.cumsum([len(r) for r in rows])[:-1])
        self.host_row, self.hot_row = (np.full((requests, length), -1, np.int32) for _ in range(2))
        self.count = np.array([len(r) for r in rows], np.int32)
        for i, (own, taken) in enumerate(zip(rows, self.places, strict=True)):
            self.host_row[i, : len(own)] = own
            self.hot_row[i, : len(own)] = (
                taken // self.block_size * self.stride + taken % self.block_size
            )
        self.params = _abi.CopyParams(
            num_requests=requests,
            num_layers=layers,
            row_bytes=row_bytes,
            copy_list_stride=length,
            block_size=self.block_size,
            block_stride_rows=self.stride,
            host_row_stride=row_bytes * layers if interleaved else row_bytes,
            gpu_block_stride=self.stride * row_bytes,
            copy_host_row=self.host_row.ctypes.data,
            copy_hot_row=self.hot_row.ctypes.data,
            copy_count=self.count.ctypes.data,
        )
        for layer in range(layers):
            self.params.host_layer[layer] = self.by_layer[layer].ctypes.data
            self.params.gpu_layer[layer] = (
                self.gpu.ctypes.data + layer * self.block_size * row_bytes
            )

    def compare(self, kernels: ctypes.CDLL, copy: Callable[[], int]) -> None:
        """Copies; compares every byte of the GPU pool, and how often a row was written."""
        expected = self.gpu.copy()
        for own, taken in zip(self.rows, self.places, strict=True):
            for layer in range(self.layers):
                at = (taken // self.block_size, layer, taken % self.block_size)
                expected[at] = self.by_layer[layer][own]
        kernels.take_stored_bytes()
        assert copy() == 0
        np.testing.assert_array_equal(self.gpu, expected)
        assert kernels.take_stored_bytes() == self.count.sum() * self.layers * self.row_bytes

    def launch(self, kernels: ctypes.CDLL, max_blocks: int = 0, seed: int = 0) -> int:
        """Copies by replay_copy's launcher; returns the blocks that it took."""
        self.params.max_blocks = max_blocks
        self.compare(kernels, lambda: launch(kernels, "hotpage_replay_copy", self.params, seed))
        return int(kernels.count_launched_blocks())

    def check(self, kernels: ctypes.CDLL, blocks: int, *, sweeps: bool) -> None:
        """Copies by either body, and marks holders on the way."""
        requests = len(self.rows)
        state_row = np.arange(requests, dtype=np.int32)[::-1].copy()
        host_blocks = int(max(max(own, default=0) for own in self.rows)) // self.block_size + 1
        holders = np.zeros((host_blocks, (requests + 31) // 32), np.uint32)
        marks = HolderMarks(holders.ctypes.data, state_row.ctypes.data, requests)
        params, by = ctypes.byref(self.params), ctypes.byref(marks)
        self.compare(kernels, lambda: kernels.emulate_copy(params, by, blocks, int(sweeps)))
        wanted = np.zeros_like(holders)
        for own, held_by in zip(self.rows, state_row, strict=True):
            wanted[own // self.block_size, held_by // 32] |= np.uint32(1 << held_by % 32)
        np.testing.assert_array_equal(holders, wanted)


def random_rows(rng: np.random.Generator, host_rows: int, counts: list[int]) -> list[np.ndarray]:
    """Ascending host rows of each request."""
    return [np.sort(rng.permutation(host_rows)[:n]) for n in counts]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("layers", "row_bytes", "requests", "blocks"),
    [(4, 656, 3, 4), (1, 656, 1, 1), (3, 1152, 700, 16), (8, 16, 5, 64)],
)
def test_copies_move_every_row_of_the_list_and_nothing_else(
    interleaved: bool, layers: int, row_bytes: int, requests: int, blocks: int, kernels: ctypes.CDLL
) -> None:
    rng = np.random.default_rng(layers)
    counts = [int(rng.integers(0, 40 if requests < 100 else 5)) for _ in range(requests)]
    rows = random_rows(rng, 3000, counts)
    for sweeps in (False, True):
        case = CopyCase(3000, layers, row_bytes, rows, interleaved)
        case.check(kernels, blocks, sweeps=sweeps)


SWEEPS = {
    # Every block gets chunks of its own, whatever it holds of each request.
    "many requests": ([0, 700, 0, 0, 17, 1900, 1, 800], 5000, 4, 1),
    "two layers": ([1300, 0, 1401], 5000, 2, 2),
    "one block": ([1300, 1100], 5000, 1, 1),
    # More copies than the blocks hold at a time, the last window shorter than a chunk a block.
    "several windows": ([9000, 9000, 14_771], 40_000, 2, 1),
    "most blocks": ([1500, 1603], 5000, 20, 1),
    # Too few to sort: sliced instead.
    "few copies": ([100, 100], 5000, 16, 1),
    "none": ([0, 0], 5000, 16, 1),
}


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_move_every_row_of_the_list_and_nothing_else(
    name: str, interleaved: bool, kernels: ctypes.CDLL
) -> None:
    counts, host_rows, blocks, layers = SWEEPS[name]
    rows = random_rows(np.random.default_rng(2), host_rows, counts)
    CopyCase(host_rows, layers, 16, rows, interleaved).check(kernels, blocks, sweeps=True)


def sorted_list(kernels: ctypes.CDLL, case: CopyCase, blocks: int) -> np.ndarray:
    """Host rows in the order in which a sweep of one window kept them."""
    order = np.empty(case.count.sum(), np.int32)
    status = kernels.emulate_sweep_order(
        ctypes.byref(case.params), blocks, len(order), ctypes.c_void_p(order.ctypes.data)
    )
    assert status == 0
    return order


@pytest.mark.parametrize(("blocks", "least"), [(1, 256), (4, 1024), (8, 2048)])
def test_a_list_is_sorted_from_256_copies_a_block_on(
    blocks: int, least: int, kernels: ctypes.CDLL
) -> None:
    untouched = np.frombuffer(b"\x5a" * 4, np.int32)
    for num_copies in (least - 1, least):
        rows = random_rows(np.random.default_rng(5), 5000, [100, num_copies - 100])
        order = sorted_list(kernels, CopyCase(5000, 1, 16, rows, False), blocks)
        assert (order == untouched).all() == (num_copies < least)
        assert (np.sort(order) == np.sort(np.concatenate(rows))).all() == (num_copies >= least)


@pytest.mark.parametrize("blocks", [1, 8])
def test_sweeps_go_through_the_pool_in_order(blocks: int, kernels: ctypes.CDLL) -> None:
    pool = 5_000_000
    rows = random_rows(np.random.default_rng(6), pool, [700, 0, 1, 1299, 900])
    order = sorted_list(kernels, CopyCase(pool, 1, 16, rows, False), blocks)
    np.testing.assert_array_equal(np.sort(order), np.sort(np.concatenate(rows)))
    # Inside a bucket, a 4,096th of the pool, any order will do.
    bucket = (np.ptp(order) + 1) / 4096
    assert int((np.maximum.accumulate(order) - order).max()) <= bucket + 1


def test_rows_that_crowd_into_one_part_of_the_pool_are_copied(kernels: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    far = 2_000_000
    for crowd in (100, 3000):
        # A bucket is a 4,096th of the pool: all but two rows fall into the first one or few.
        rows = [*random_rows(rng, crowd, [crowd, crowd]), np.array([5, far - 1])]
        CopyCase(far, 1, 16, rows, False).check(kernels, 2, sweeps=True)


@pytest.fixture
def large_pool() -> Iterator[np.ndarray]:
    """All host rows that an int32 can name, 16 bytes each; memory only where a byte was written."""
    reserve_nothing = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing
    try:
        memory = mmap.mmap(-1, 2**31 * 16, flags)
    except OSError as error:
        pytest.skip(f"no 32 GiB of address space: {error}")
    return np.frombuffer(memory, np.uint8).reshape(1, 2**31, 16)


@pytest.mark.parametrize("crowded", [False, True])
def test_sweeps_reach_every_row_of_the_largest_pool(
    crowded: bool, large_pool: np.ndarray, kernels: ctypes.CDLL
) -> None:
    rng = np.random.default_rng(4)
    last = 2**31 - 1
    if crowded:
        # All but one copy are in one bucket: as many as the sort's counters have to hold.
        rows = [*random_rows(rng, 9000, [8189] * 8), np.array([last])]
    else:
        rows = [np.unique(rng.integers(0, last, 900)) for _ in range(3)]
        rows.append(np.array([0, last]))
    for own in rows:
        large_pool[0, own] = rng.integers(0, 256, (len(own), 16), np.uint8)
    case = CopyCase(2**31, 1, 16, rows, False, large_pool)
    assert case.launch(kernels) == 8


def test_requests_that_share_all_their_rows_get_a_copy_each(kernels: ctypes.CDLL) -> None:
    # As behind a shared prefix. Of 1,024 requests, every second has no miss.
    rows = [np.array([7, 8, 9, 40, 2999]) if i % 2 else np.array([], int) for i in range(1024)]
    assert CopyCase(3000, 1, 16, rows, False).launch(kernels) == 8


@pytest.mark.parametrize(
    ("max_blocks", "blocks"),
    [(0, 8), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8), (128, 8)],
)
def test_a_sweep_is_a_cluster_of_at_most_the_blocks_that_are_granted(
    max_blocks: int, blocks: int, kernels: ctypes.CDLL
) -> None:
    rows = random_rows(np.random.default_rng(8), 5000, [1300, 0, 1401])
    assert CopyCase(5000, 1, 16, rows, False).launch(kernels, max_blocks, seed=blocks) == blocks


@pytest.mark.parametrize(
    ("layers", "row_bytes", "interleaved", "sweeps"),
    [
        (3, 656, True, True),
        (4, 656, True, False),
        (4, 656, False, True),
        (2, 1008, True, True),
        (2, 1024, True, False),
        (1, 2048, False, False),
    ],
)
def test_rows_are_swept_if_less_than_two_kib_lie_side_by_side(
    layers: int, row_bytes: int, interleaved: bool, sweeps: bool, kernels: ctypes.CDLL
) -> None:
    rows = random_rows(np.random.default_rng(9), 1200, [200, 300])
    case = CopyCase(1200, layers, row_bytes, rows, interleaved)
    assert case.launch(kernels, 11) == (8 if sweeps else 11)


@pytest.fixture
def limit_clusters(kernels: ctypes.CDLL) -> Iterator[Callable[[int], None]]:
    """Makes the device refuse clusters of more blocks than these, for one test."""
    yield kernels.limit_clusters
    kernels.limit_clusters(8)
    kernels.take_last_error()


@pytest.mark.parametrize(("room", "blocks"), [(7, 4), (2, 2), (1, 1)])
def test_a_sweep_takes_the_cluster_that_a_part_of_a_gpu_has_room_for(
    room: int, blocks: int, limit_clusters: Callable[[int], None], kernels: ctypes.CDLL
) -> None:
    limit_clusters(room)
    rows = random_rows(np.random.default_rng(8), 5000, [1300, 0, 1401])
    assert CopyCase(5000, 1, 16, rows, False).launch(kernels) == blocks
    assert kernels.take_last_error() == 0, "the next launch would be blamed"


def test_a_refused_launch_is_not_blamed_on_the_next(
    limit_clusters: Callable[[int], None], kernels: ctypes.CDLL
) -> None:
    limit_clusters(0)
    case = CopyCase(100, 1, 16, [np.arange(50)], False)
    params = ctypes.byref(case.params)
    invalid_cluster_size = 912
    status = kernels.hotpage_replay_copy(params, None)
    assert status == _abi.STATUS_CUDA_BASE + invalid_cluster_size
    assert kernels.take_last_error() == 0
