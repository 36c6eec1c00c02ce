# SPDX-License-Identifier: Apache-2.0
"""Owns the bench of resolve and copy beside vLLM 0.33's ops: one run, the same inputs, each once.

    python benches/gpu/bench_kernels.py --json FILE [--vllm-library _C_stable_libtorch.abi3.so]

Prints one JSON line per op and cell: {op, requests, rows, layers, pool_gb, miss_rate, us, vllm_us,
ratio, gbps, roof_gbps}. `us` is the median over captured graphs of fresh steps; `ratio` is vllm_us
over us; `gbps` counts the bytes of the copied rows; the roof is a pinned cudaMemcpy host to device
of the same run. vLLM's columns are null without its library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from sides import HotpageSide, VllmSide
from timing import exposed_us, median_us, memcpy_gbps
from workload import GB, ROW_BYTES, Cell, Pools, make_steps

REQUESTS = (1, 16, 64, 128)
USUAL_MISSES = {1: 0.145, 4: 0.06}
"""Missing references of a step, by verification rows, as measured with hot rows of two top-k."""

GRAPHS = 3
RESOLVES_PER_GRAPH = 6
COPIES_PER_GRAPH = 2
COMPUTE_US = (0.0, 150.0, 500.0)
"""Modelled compute of a layer."""
COPY_BLOCKS = (0, 8, 16, 32, 64, 264)


def cells(pools_gb: Sequence[float]) -> Iterator[Cell]:
    """The bench's cells, the largest pool first."""
    largest = max(pools_gb)
    for rows in (1, 4):
        for requests in REQUESTS:
            yield Cell(requests, rows, 1, min(pools_gb), 0.0, resident=True)
            yield Cell(requests, rows, 4, largest, 0.0)
            yield Cell(requests, rows, 4, largest, USUAL_MISSES[rows])
            if requests == 64:
                yield Cell(requests, rows, 4, largest, 0.13)
            for pool_gb in pools_gb:
                yield Cell(requests, rows, 1, pool_gb, USUAL_MISSES[rows])


def burst_cells(pools_gb: Sequence[float]) -> Iterator[Cell]:
    """Cells in which every row is missing."""
    for rows in (1, 4):
        for requests in (1, 64):
            yield Cell(requests, rows, 4, max(pools_gb), 1.0)


class StepCounter:
    """Hands out steps, every one once."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, graphs: int, per_graph: int) -> list[list[int]]:
        """Groups of consecutive steps."""
        first = self._next
        self._next += graphs * per_graph
        return [
            list(range(first + g * per_graph, first + (g + 1) * per_graph)) for g in range(graphs)
        ]


Side = HotpageSide | VllmSide


def measure(side: Side, first_step: int) -> dict[str, float]:
    """Microseconds of each op on one side, and `misses` of the last step."""
    cell = side.steps.cell
    layers = range(cell.layers)
    steps = StepCounter(first_step)
    side.reset()
    for step in range(first_step):
        side.resolve(step, layers if cell.misses_per_request else ())
    groups = steps.take(GRAPHS, RESOLVES_PER_GRAPH)
    side.prepare([s for g in groups for s in g])
    us = {"resolve": median_us(side.resolve, groups)}
    if cell.misses_per_request == 0:
        return us

    def both(copied: Sequence[int]) -> Callable[[int], None]:
        return lambda step: side.resolve(step, copied)

    for op, copied in (("leader_ready", [0]), ("group_ready", list(layers))):
        groups = steps.take(GRAPHS, COPIES_PER_GRAPH)
        side.prepare([s for g in groups for s in g], copied)
        us[op] = median_us(both(copied), groups)
    for op, copied in (("copy_leader", [0]), ("copy_group", list(layers))):
        if op == "copy_leader" and cell.layers == 1:
            continue
        groups = steps.take(GRAPHS, COPIES_PER_GRAPH)
        for step in (s for g in groups for s in g):
            side.resolve(step)
            side.bind_copy(step, copied)
        us[op] = median_us(lambda step, layers=copied: side.copy(step, layers), groups)
        us["misses"] = side.misses(groups[0][0])
    return us


def num_steps() -> int:
    """Steps that `measure` takes, those that fill the hot regions not counted."""
    return GRAPHS * (RESOLVES_PER_GRAPH + 4 * COPIES_PER_GRAPH)


def lines_of(
    cell: Cell, ours: dict[str, float], theirs: dict[str, float], roof: float
) -> list[Any]:
    """The printed lines of one cell."""
    lines = []
    for op, us in ours.items():
        if op == "misses":
            continue
        copied = {"resolve": 0, "leader_ready": 1, "copy_leader": 1}.get(op, cell.layers)
        num_bytes = ours.get("misses", 0) * copied * ROW_BYTES
        vllm_us = theirs.get(op)
        lines.append(
            {
                "op": op,
                "requests": cell.requests,
                "rows": cell.rows,
                "layers": cell.layers,
                "pool_gb": cell.pool_gb,
                "miss_rate": cell.miss_rate,
                "resident": cell.resident,
                "us": round(us, 1),
                "vllm_us": None if vllm_us is None else round(vllm_us, 1),
                "ratio": None if vllm_us is None else round(vllm_us / us, 2),
                "gbps": round(num_bytes / us / 1000, 1) if num_bytes else None,
                "roof_gbps": round(roof, 1),
            }
        )
    return lines


def copy_us(side: HotpageSide, first_step: int) -> float:
    """Microseconds of the copy of all layers, alone."""
    layers = list(range(side.steps.cell.layers))
    groups = StepCounter(first_step).take(GRAPHS, COPIES_PER_GRAPH)
    side.reset()
    for step in range(groups[-1][-1] + 1):
        side.resolve(step)
        side.bind_copy(step, layers)
    return median_us(lambda step: side.copy(step, layers), groups)


def few_block_lines(pools: Pools, pool_gb: float, roof: float) -> Iterator[Any]:
    """The copy's rate with a bounded number of thread blocks."""
    for rows, layers in ((1, 4), (4, 4), (4, 1)):
        cell = Cell(64, rows, layers, pool_gb, USUAL_MISSES[rows])
        steps = make_steps(cell, GRAPHS * COPIES_PER_GRAPH)
        for blocks in COPY_BLOCKS:
            side = HotpageSide(steps, pools, max_copy_blocks=blocks)
            us = copy_us(side, steps.num_warm)
            num_bytes = side.misses(steps.num_warm) * layers * ROW_BYTES
            yield {
                "op": "copy_blocks",
                "max_copy_blocks": blocks,
                "requests": 64,
                "rows": rows,
                "layers": layers,
                "pool_gb": pool_gb,
                "us": round(us, 1),
                "gbps": round(num_bytes / us / 1000, 1),
                "roof_gbps": round(roof, 1),
            }


def exposed_lines(pools: Pools, pool_gb: float, with_vllm: bool) -> Iterator[Any]:
    """Time that the layers of a group wait for rows, beside modelled compute."""
    ways: list[tuple[str, Callable[[Any], Side], list[list[int]]]] = [
        ("whole group", lambda s: HotpageSide(s, pools), [[0, 1, 2, 3]]),
        ("leader first", lambda s: HotpageSide(s, pools), [[0], [1, 2, 3]]),
        ("leader first, 16 blocks", lambda s: HotpageSide(s, pools, max_copy_blocks=16),
         [[0], [1, 2, 3]]),
    ]  # fmt: skip
    if with_vllm:
        ways.append(("vllm", lambda s: VllmSide(s, pools), [[0], [1], [2], [3]]))
    for rows in (1, 4):
        cell = Cell(64, rows, 4, pool_gb, USUAL_MISSES[rows])
        steps = make_steps(cell, len(COMPUTE_US) * GRAPHS)
        for way, make, parts in ways:
            side = make(steps)
            for step in range(steps.num_warm):
                side.resolve(step, range(4))
            counter = StepCounter(steps.num_warm)
            for compute_us in COMPUTE_US:
                groups = counter.take(GRAPHS, 1)
                us = exposed_us(side, groups, parts, compute_us)
                yield {
                    "op": "exposed",
                    "way": way,
                    "requests": 64,
                    "rows": rows,
                    "layers": 4,
                    "pool_gb": pool_gb,
                    "compute_us": compute_us,
                    "us": round(us, 1),
                }


def load_vllm(library: Path | None) -> bool:
    """True if vLLM's ops are registered now."""
    if library is None:
        return False
    torch.ops.load_library(str(library))
    return hasattr(torch.ops._C_cache_ops, "hisparse_resolve_residency")


def run(args: argparse.Namespace, out: TextIO | None) -> None:
    """Measures every cell."""
    with_vllm = load_vllm(args.vllm_library)
    pools_gb = [float(part) for part in args.pools.split(",")]

    def emit(line: Any) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if out is not None:
            out.write(text + "\n")
            out.flush()

    pools = Pools(max(pools_gb), int(13 * GB))
    gib = 1 << 30
    roof = memcpy_gbps(pools.host[:gib], pools.gpu[:gib], to_device=True)
    back = memcpy_gbps(pools.host[:gib], pools.gpu[:gib], to_device=False)
    name = torch.cuda.get_device_name()
    emit({"op": "memcpy", "device": name, "h2d_gbps": round(roof, 1), "d2h_gbps": round(back, 1)})

    def compare(cell: Cell) -> None:
        steps = make_steps(cell, num_steps())
        side = HotpageSide(steps, pools)
        ours = measure(side, steps.num_warm)
        if cell.requests == 1 and not cell.resident:
            last = len(steps.logical_topk) - 1
            side.resolve(last, range(cell.layers))
            side.check(last, range(cell.layers))
        theirs = measure(VllmSide(steps, pools), steps.num_warm) if with_vllm else {}
        for line in lines_of(cell, ours, theirs, roof):
            emit(line)

    parts = args.only.split(",")
    if "cells" in parts:
        for cell in cells(pools_gb):
            compare(cell)
    if "exposed" in parts:
        for line in exposed_lines(pools, max(pools_gb), with_vllm):
            emit(line)
    if "blocks" in parts:
        for line in few_block_lines(pools, max(pools_gb), roof):
            emit(line)
    if "bursts" in parts:
        for cell in burst_cells(pools_gb):
            compare(cell)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    parser.add_argument("--vllm-library", type=Path, help="vLLM 0.33's _C_stable_libtorch.abi3.so")
    parser.add_argument("--pools", default="5,22", help="host pools in GB, the largest allocated")
    parser.add_argument("--only", default="cells,exposed,blocks,bursts", help="parts to run")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        return 1
    if args.json is None:
        run(args, None)
    else:
        with args.json.open("w") as out:
            run(args, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
