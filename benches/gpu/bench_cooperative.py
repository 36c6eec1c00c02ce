# SPDX-License-Identifier: Apache-2.0
"""Owns the bench of cooperative fetch: one process a GPU, all ways of fetching in one run.

    python benches/gpu/bench_cooperative.py --json FILE [--ranks 2] [--pool-gb 22]

Prints one JSON line per cell and way: {way, requests, layers, misses, us, gbps, speedup}. `us` is
the copy of one step's misses on the slowest rank: a captured graph of fresh steps between events,
median of the graphs, digest and both meetings of the ranks included. `gbps` counts the bytes that
every rank gets, and `speedup` is that over the ranks fetching privately at the same time. Before it
is timed, a cell is checked: hot regions after cooperative steps are bitwise those of a private
fetch, on every rank. `meetings` are launches that copy nothing. A meeting of the ranks on the
device aligns the start of what is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sides import HotpageSide
from timing import memcpy_gbps
from workload import BLOCK_SIZE, GB, ROW_BYTES, TOP_K, Cell, CellPools, Steps, make_steps

from hotpage.kernels.cooperative_copy import Channel, CooperativeCopy, RankMemory
from hotpage.kernels.replay_copy import CopyList, LayerRows
from hotpage.kernels.resolve_and_copy import ResolveOutputs
from hotpage.memory import PoolLayout, SharedHostPool
from hotpage.runtime.peers import Peers
from hotpage.runtime.rendezvous import Rendezvous

REQUESTS = (16, 64, 128)
MISSES = (1000, 17_536)
GRAPHS = 3
STEPS_PER_GRAPH = {1000: 6, 17_536: 2}
BLOCK_COUNTS = (16, 32, 64, 128)
GPU_BYTES = 3 * GB // 2
WAYS = ("alone", "private", "cooperative", "private group", "cooperative group")
"""The last two are resolve and copy together."""

MAX_STEPS = 2 + GRAPHS * max(STEPS_PER_GRAPH.values()) * len(WAYS)


class SharedPools(CellPools):
    """Pools whose host memory is the pool that all ranks share."""

    def __init__(self, ranks: Rendezvous, pool_gb: float, device: int) -> None:
        blocks = int(pool_gb * GB) // (4 * BLOCK_SIZE * ROW_BYTES)
        layout = PoolLayout((4,), BLOCK_SIZE, ROW_BYTES, blocks)
        self.pool = SharedHostPool(layout, ranks, device=device)
        gpu = torch.zeros(GPU_BYTES, dtype=torch.uint8, device="cuda")
        super().__init__(self.pool.bytes_tensor(), gpu)
        self.pool_gb = self.host.numel() / GB
        if ranks.rank == 0:
            torch.manual_seed(0)
            self.fill_host()
        ranks.barrier()


class Shared:
    """What the ranks share for the whole run, and where it lies on each of them.

    One allocation holds the hot rows of every step's copy list: a cell uses the first part.
    """

    def __init__(self, peers: Peers, pools: SharedPools) -> None:
        self.peers, self.channel = peers, Channel("cuda")
        self.hot_rows = torch.zeros((MAX_STEPS, max(REQUESTS) * TOP_K), dtype=torch.int32).cuda()
        self.nothing = CopyList.allocate(1, 1, "cuda")
        self.gpu = pools.gpu
        own = {
            "channel": self.channel.memory.data_ptr(),
            "gpu": self.gpu.data_ptr(),
            "hot_rows": self.hot_rows.data_ptr(),
            "nothing": self.nothing.hot_row.data_ptr(),
        }
        seen = peers.share(own)
        if seen is None:
            raise SystemExit("the ranks do not reach each other's memory")
        self._seen = seen

    def list_of(self, step: int, old: CopyList) -> CopyList:
        """A copy list of the same shape whose hot rows are shared."""
        requests, length = old.host_row.shape
        hot_row = self.hot_rows[step][: requests * length].view(requests, length)
        return CopyList(old.host_row, hot_row, old.count)

    def bind(
        self, copies: CopyList, layers: LayerRows, blocks: int, *, after_resolve: bool = False
    ) -> CooperativeCopy:
        """A cooperative copy of a shared list."""
        name, base = "hot_rows", self.hot_rows.data_ptr()
        if copies is self.nothing:
            name, base = "nothing", self.nothing.hot_row.data_ptr()
        offset = copies.hot_row.data_ptr() - base
        gpu = [layer.data_ptr() - self.gpu.data_ptr() for layer in layers.gpu]
        memories = [
            RankMemory(at["channel"], at[name] + offset, tuple(at["gpu"] + i for i in gpu))
            for at in self._seen
        ]
        return CooperativeCopy(
            copies, layers, self.channel, self.peers.rendezvous.rank, memories,
            max_copy_blocks=blocks, after_resolve=after_resolve,
        )  # fmt: skip


class CooperativeSide(HotpageSide):
    """A rank's steps, each with a cooperative copy of its list beside the private one."""

    def __init__(self, steps: Steps, pools: SharedPools, shared: Shared, blocks: int) -> None:
        super().__init__(steps, pools)
        self.copies = [shared.list_of(i, copies) for i, copies in enumerate(self.copies)]
        self.outputs = [
            ResolveOutputs(old.physical_topk, old.valid_counts, copies)
            for old, copies in zip(self.outputs, self.copies, strict=True)
        ]
        every = range(steps.cell.layers)
        layers = [self._layers(step, every) for step in range(len(self.copies))]
        bound = list(zip(self.copies, layers, strict=True))
        self.together = [shared.bind(*both, blocks) for both in bound]
        self.behind = [shared.bind(*both, blocks, after_resolve=True) for both in bound]
        self.meet = shared.bind(shared.nothing, layers[0], blocks)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _digest(pools: SharedPools) -> int:
    """A hash of the GPU pool's bytes."""
    words = pools.gpu.view(torch.int64)
    total = 0
    for part in words.split(1 << 26):
        factors = torch.arange(1, 2 * part.numel(), 2, device="cuda")
        total = total * 1_000_003 + int((part * factors).sum())
    return total % (1 << 61)


class Bench:
    """One rank's measurements."""

    def __init__(self, ranks: Rendezvous, args: argparse.Namespace) -> None:
        self.ranks, self.args = ranks, args
        self.pools = SharedPools(ranks, args.pool_gb, ranks.rank)
        peers = Peers.connect(ranks, device=ranks.rank)
        if peers is None:
            raise SystemExit("the ranks do not reach each other's memory")
        self.shared = Shared(peers, self.pools)
        self.lines: list[Any] = []
        self.has_met = False
        # torch collects garbage before every capture.
        gc.freeze()

    def emit(self, line: dict[str, Any]) -> None:
        """Prints a line on rank 0."""
        if self.ranks.rank == 0:
            print(json.dumps(line), flush=True)
            self.lines.append(line)

    def roofs(self) -> None:
        """Pinned copies of 1 GiB: one rank alone, then all at once."""
        gib = 1 << 30
        alone = 0.0
        if self.ranks.rank == 0:
            alone = memcpy_gbps(self.pools.host[:gib], self.pools.gpu[:gib], to_device=True)
        self.ranks.barrier()
        both = memcpy_gbps(self.pools.host[:gib], self.pools.gpu[:gib], to_device=True)
        alone, slowest = self.ranks.all_gather(alone)[0], min(self.ranks.all_gather(both))
        name = torch.cuda.get_device_name()
        self.emit(
            {
                "way": "memcpy", "device": name, "ranks": self.ranks.num_ranks,
                "pool_gb": round(self.pools.pool_gb, 1), "gbps": round(alone, 1),
                "gbps_at_once": round(slowest, 1),
            }
        )  # fmt: skip

    def check(self, side: CooperativeSide) -> None:
        """Raises unless cooperative steps leave every rank's pool as private ones do."""
        digests = []
        for together in (False, True):
            side.reset()
            self.pools.gpu.zero_()
            for step in range(4):
                side.resolve(step)
                if together:
                    side.together[step](_stream())
                else:
                    side.copy(step, range(side.steps.cell.layers))
            torch.cuda.synchronize()
            digests.append(_digest(self.pools))
        found = {digest for rank in self.ranks.all_gather(digests) for digest in rank}
        counts = self.shared.channel.counts()
        if len(found) != 1 or counts.failed or counts.different_requests:
            raise AssertionError(f"hot regions differ: {digests}, {counts}")

    def time(
        self, side: CooperativeSide, run: Callable[[int], None], steps: Sequence[int]
    ) -> float:
        """Microseconds a step, on the slowest rank, of one graph that runs fresh steps."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                run(step)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.ranks.barrier()
        torch.cuda._sleep(2_000_000)
        side.meet(_stream())
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return max(self.ranks.all_gather(start.elapsed_time(end) * 1000 / len(steps)))

    def meetings(self, side: CooperativeSide) -> None:
        """Launches that copy nothing: what the two meetings of the ranks cost."""
        us = statistics.median(
            self.time(side, lambda step: side.meet(_stream()), range(20)) for _ in range(GRAPHS)
        )
        self.emit({"way": "meetings", "blocks": "default", "us": round(us, 1)})

    def measure(self, cell: Cell, misses: int, blocks: int, ways: Sequence[str]) -> None:
        """Times a cell's ways, after its check."""
        per_graph = STEPS_PER_GRAPH[misses]
        num_steps = GRAPHS * per_graph * len(ways)
        steps = make_steps(cell, num_steps)
        side = CooperativeSide(steps, self.pools, self.shared, blocks)
        layers = list(range(cell.layers))
        self.check(side)
        if not self.has_met:
            self.has_met = True
            self.meetings(side)
        side.reset()
        groups = [range(i, i + per_graph) for i in range(2, 2 + num_steps, per_graph)]
        for step in range(2):
            side.resolve(step, layers)
        times: dict[str, float] = {}
        count = 0
        for i, way in enumerate(ways):
            own = groups[i * GRAPHS : (i + 1) * GRAPHS]
            all_steps = [step for group in own for step in group]
            if way.endswith("group"):
                side.prepare(all_steps, layers)
                side.prepare(all_steps)
            else:
                for step in all_steps:
                    side.resolve(step)
                    side.bind_copy(step, layers)
                count = side.misses(all_steps[0])
            times[way] = statistics.median(
                self.time(side, self._runner(side, way, layers), group) for group in own
            )
        for way, us in times.items():
            base = "private group" if way.endswith("group") else "private"
            self.emit(
                {
                    "way": way, "requests": cell.requests, "layers": cell.layers, "misses": count,
                    "blocks": blocks or "default", "us": round(us, 1),
                    "gbps": round(count * cell.layers * ROW_BYTES / us / 1000, 1),
                    "speedup": round(times[base] / us, 2) if base in times else None,
                }
            )  # fmt: skip
        counts = self.shared.channel.counts()
        if counts.failed or counts.different_requests:
            raise AssertionError(f"ranks did not agree: {counts}")

    def _runner(self, side: CooperativeSide, way: str, layers: list[int]) -> Callable[[int], None]:
        def nothing(step: int) -> None:
            torch.cuda._sleep(1)

        def group(step: int) -> None:
            side.resolve(step)
            side.behind[step](_stream())

        runners = {
            "alone": (lambda step: side.copy(step, layers)) if self.ranks.rank == 0 else nothing,
            "private": lambda step: side.copy(step, layers),
            "cooperative": lambda step: side.together[step](_stream()),
            "private group": lambda step: side.resolve(step, layers),
            "cooperative group": group,
        }
        return runners[way]

    def run(self) -> None:
        """Measures every cell, then the number of thread blocks."""
        self.roofs()
        for layers in (4, 1):
            for misses in MISSES:
                for requests in REQUESTS:
                    rate = round(misses / requests) / TOP_K
                    cell = Cell(requests, 1, layers, self.pools.pool_gb, rate)
                    self.measure(cell, misses, self.args.blocks, WAYS)
        for layers in (4, 1):
            for misses in MISSES:
                for blocks in BLOCK_COUNTS:
                    rate = round(misses / 64) / TOP_K
                    cell = Cell(64, 1, layers, self.pools.pool_gb, rate)
                    self.measure(cell, misses, blocks, ("private", "cooperative"))


def rank_main(name: str, rank: int, args: argparse.Namespace) -> None:
    """One rank's process."""
    torch.cuda.set_device(rank)
    with Rendezvous(name, rank, args.ranks) as ranks:
        bench = Bench(ranks, args)
        bench.run()
        ranks.barrier()
        if rank == 0 and args.json is not None:
            args.json.write_text("".join(json.dumps(line) + "\n" for line in bench.lines))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    parser.add_argument("--ranks", type=int, default=2, help="one GPU each")
    parser.add_argument("--pool-gb", type=float, default=22, help="host pool, shared")
    parser.add_argument("--blocks", type=int, default=0, help="thread blocks, 0 for the default")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.ranks:
        print(
            f"{args.ranks} ranks need as many CUDA devices: nothing was measured", file=sys.stderr
        )
        return 1
    context = multiprocessing.get_context("spawn")
    name = uuid.uuid4().hex
    processes = [
        context.Process(target=rank_main, args=(name, rank, args)) for rank in range(args.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
