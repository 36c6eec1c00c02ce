# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that replay_copy moves every row of lists of any length, however it sorts them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from resolve_device import DEVICE  # noqa: E402

from hotpage.kernels.replay_copy import CopyList, LayerRows, ReplayCopy  # noqa: E402

pytestmark = pytest.mark.gpu

ROW_BYTES = 48
BLOCK_SIZE = 64
HOST_ROWS = 100_000
BACKGROUND = 0xA5


class Replay:
    """Pools of one layer of short rows, a list of as many copies as asked for, and the bound op."""

    def __init__(self, num_requests: int, length: int, max_copy_blocks: int = 0) -> None:
        self.rng = np.random.default_rng(num_requests + length)
        host = torch.randint(0, 256, (HOST_ROWS, ROW_BYTES), dtype=torch.uint8)
        self.on_device = host.to(DEVICE)
        self.num_blocks = num_requests * length // BLOCK_SIZE + 2
        shape = (self.num_blocks, BLOCK_SIZE, ROW_BYTES)
        self.gpu = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
        self.copies = CopyList.allocate(num_requests, length, DEVICE)
        # Blocks of this layer alone: a physical row is a row of the pool.
        layers = LayerRows([host.pin_memory()], [self.gpu], BLOCK_SIZE)
        self.op = ReplayCopy(self.copies, layers, max_copy_blocks=max_copy_blocks)

    def load(self, counts: list[int]) -> None:
        """Writes a list of random rows, ascending in each request, and empties the GPU pool."""
        hot = self.rng.permutation(self.num_blocks * BLOCK_SIZE)[: sum(counts)].astype(np.int32)
        host_row = np.full(tuple(self.copies.host_row.shape), -1, np.int32)
        hot_row, rows, first = np.full_like(host_row, -1), [], 0
        for request, count in enumerate(counts):
            own = np.sort(self.rng.choice(HOST_ROWS, count, replace=False))
            host_row[request, :count] = own
            hot_row[request, :count] = hot[first : first + count]
            rows.append(own)
            first += count
        self.copies.host_row.copy_(torch.from_numpy(host_row))
        self.copies.hot_row.copy_(torch.from_numpy(hot_row))
        self.copies.count.copy_(torch.tensor(counts, dtype=torch.int32))
        self.gpu.fill_(BACKGROUND)
        self.expected = self.gpu.clone().view(-1, ROW_BYTES)
        taken, source = (torch.from_numpy(r.astype(np.int64)) for r in (hot, np.concatenate(rows)))
        self.expected[taken.to(DEVICE)] = self.on_device[source.to(DEVICE)]

    def check(self, where: str) -> None:
        """Compares every byte of the GPU pool."""
        assert torch.equal(self.gpu.view(-1, ROW_BYTES), self.expected), where


# A block of the cluster keeps 8,188 copies at a time; lists of fewer than 256 a block are sliced.
@pytest.mark.parametrize(
    ("max_copy_blocks", "counts"),
    [
        (0, [0, 0]),
        (0, [1047, 1000]),
        (0, [1048, 1000]),
        (0, [0, 3] * 512),
        (0, [65_504]),
        (0, [9_000, 0, 60_000, 1_001]),
        (1, [100, 155]),
        (1, [17_000]),
        (3, [15_000, 5_000]),
        (7, [3, 40_000]),
    ],
)
def test_lists_of_any_length_are_copied(max_copy_blocks: int, counts: list[int]) -> None:
    replay = Replay(len(counts), max(*counts, 1), max_copy_blocks)
    for step in range(3):
        replay.load(counts)
        replay.op(torch.cuda.current_stream().cuda_stream)
        replay.check(f"step {step}")


def test_a_captured_sweep_replays_with_lists_of_other_lengths() -> None:
    replay = Replay(3, 40_000)
    replay.load([700, 800, 900])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replay.op(torch.cuda.current_stream().cuda_stream)
    for counts in (
        [2000, 0, 5000],
        [10, 20, 30],
        [30_000, 25_000, 40_000],
        [0, 0, 0],
        [0, 0, 2500],
    ):
        replay.load(counts)
        graph.replay()
        replay.check(f"counts {counts}")


def test_sweeps_of_two_streams_leave_each_other_alone() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    replays = [Replay(2, 36_000), Replay(4, 1_500)]
    for step in range(10):
        replays[0].load([35_000 + step, 31_000])
        replays[1].load([1_200, 0, 1_500, 1_000 + step])
        torch.cuda.synchronize()
        for replay, stream in zip(replays, streams, strict=True):
            replay.op(stream.cuda_stream)
        torch.cuda.synchronize()
        for replay in replays:
            replay.check(f"step {step}")
