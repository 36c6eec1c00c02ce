# SPDX-License-Identifier: Apache-2.0
"""Owns two ranks in two processes on one GPU: shared pool, events, peers, and a rank that dies.

Processes take turns on a GPU, so a meeting of ranks lasts milliseconds here.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# The processes of ranks are those of the unit tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from cooperative_cases import Sizes, expected_gpu, make_ranks  # noqa: E402
from ranks import die, run_ranks  # noqa: E402

from hotpage.kernels.cooperative_copy import Channel, CooperativeCopy  # noqa: E402
from hotpage.kernels.replay_copy import CopyList, LayerRows  # noqa: E402
from hotpage.memory import PoolLayout, SharedHostPool  # noqa: E402
from hotpage.runtime.events import WriteOrder  # noqa: E402
from hotpage.runtime.peers import Peers, bind_group_copy  # noqa: E402
from hotpage.runtime.rendezvous import Rendezvous  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = Sizes(requests=8, length=64, row_bytes=656, block_size=16, host_rows=16 * 60, hot_blocks=40)
LAYOUT = PoolLayout((SIZES.layers,), SIZES.block_size, SIZES.row_bytes, 60)
STEPS = 5


def _device(rank: int) -> int:
    """Two GPUs where there are two."""
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return device


class Rank:
    """One process's part of a cooperative copy out of the shared pool."""

    def __init__(self, ranks: Rendezvous, time_limit_s: float = 20.0) -> None:
        s = SIZES
        self.device = _device(ranks.rank)
        self.ranks = ranks
        self.pool = SharedHostPool(LAYOUT, ranks, device=self.device)
        self.order = WriteOrder(ranks, device=self.device)
        peers = Peers.connect(ranks, device=self.device)
        assert peers is not None, "ranks of one GPU reach each other"
        self.peers = peers
        device = torch.device("cuda", self.device)
        # Inside a larger allocation, as a layer of vLLM's KV pool is.
        page = s.block_size * s.row_bytes
        self.slab = torch.zeros(
            (s.hot_blocks, s.layers + 1, s.block_size, s.row_bytes),
            dtype=torch.uint8,
            device=device,
        )
        assert self.slab.stride(1) == page
        self.copies = CopyList.allocate(s.requests, s.length, device)
        host = [self.pool.layer_rows(i).reshape(-1, s.row_bytes) for i in range(s.layers)]
        gpu = [self.slab[:, i] for i in range(s.layers)]
        self.layers = LayerRows(host, gpu, s.block_stride_rows)
        self.channel = Channel(device)
        self.stream = torch.cuda.Stream()
        self.copy = bind_group_copy(
            self.peers, self.channel, self.copies, self.layers, index_group=1,
            max_copy_blocks=8, time_limit_s=time_limit_s,
        )  # fmt: skip
        assert isinstance(self.copy, CooperativeCopy)

    def load(self, step: int):
        """This step's list on this rank; rank 0 also writes the pool, on its stream."""
        cases = make_ranks(SIZES, np.random.default_rng(step), different=(2,) if step == 3 else ())
        case = cases[self.ranks.rank]
        self.slab.copy_(torch.from_numpy(case.gpu))
        self.copies.host_row.copy_(torch.from_numpy(case.host_row))
        self.copies.hot_row.copy_(torch.from_numpy(case.hot_row))
        self.copies.count.copy_(torch.from_numpy(case.count))
        self.rows = torch.from_numpy(cases[0].host).to(self.slab.device)
        torch.cuda.synchronize()
        self.ranks.barrier()
        if self.ranks.rank == 0:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(20_000_000)
                flat = self.pool.bytes_tensor()[: self.rows.numel()]
                flat.copy_(self.rows.reshape(-1), non_blocking=True)
            self.order.record(self.stream.cuda_stream)
        self.order.wait(self.stream.cuda_stream)
        # Both ranks read the same pool: every row is rank 0's.
        for other in cases:
            other.host = cases[0].host
        return cases

    def check(self, cases, what: str) -> None:
        torch.cuda.synchronize()
        expected = expected_gpu(SIZES, cases, self.ranks.rank)
        np.testing.assert_array_equal(self.slab.cpu().numpy(), expected, what)

    def close(self) -> None:
        self.ranks.barrier()
        self.peers.close()
        self.order.close()
        del self.layers, self.copy
        self.pool.close()


def _copies(name: str, rank: int, n: int) -> list:
    with Rendezvous(name, rank, n) as ranks:
        one = Rank(ranks)
        for step in range(STEPS):
            cases = one.load(step)
            one.copy(one.stream.cuda_stream)
            one.check(cases, f"step {step}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=one.stream):
            one.copy(one.stream.cuda_stream)
        for step in range(STEPS, 2 * STEPS):
            cases = one.load(step)
            with torch.cuda.stream(one.stream):
                graph.replay()
            one.check(cases, f"replayed step {step}")
        counts = one.channel.counts()
        one.close()
        return [counts.shared_launches, counts.different_requests, counts.failed_launches]


def test_two_processes_fetch_for_each_other_out_of_one_pool() -> None:
    outcomes = run_ranks(_copies, 2, time_limit_s=120)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert [outcome.value for outcome in outcomes] == [[2 * STEPS, 1, 0]] * 2


def _one_dies(dying: int, name: str, rank: int, n: int) -> list:
    with Rendezvous(name, rank, n) as ranks:
        one = Rank(ranks, time_limit_s=1.0)
        cases = one.load(0)
        one.copy(one.stream.cuda_stream)
        one.check(cases, "together")
        cases = one.load(1)
        # What rank 0 wrote has landed before anybody dies.
        torch.cuda.synchronize()
        ranks.barrier()
        if rank == dying:
            die()
        start = time.monotonic()
        one.copy(one.stream.cuda_stream)
        one.check(cases, "after the other died")
        waited = time.monotonic() - start
        start = time.monotonic()
        one.copy(one.stream.cuda_stream)
        one.check(cases, "alone")
        counts = one.channel.counts()
        return [waited, time.monotonic() - start, counts.failed, counts.lost_ranks]


@pytest.mark.parametrize("dying", [0, 1])
def test_a_process_that_dies_leaves_the_other_with_its_rows_and_no_fault(dying: int) -> None:
    outcomes = run_ranks(functools.partial(_one_dies, dying), 2, time_limit_s=120)
    assert outcomes[dying] is None
    survivor = outcomes[1 - dying]
    assert survivor.error == ""
    waited, alone, failed, lost = survivor.value
    assert 0.9 < waited < 5
    assert alone < 0.5
    assert (failed, lost) == (True, 0)
