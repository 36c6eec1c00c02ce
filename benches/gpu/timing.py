# SPDX-License-Identifier: Apache-2.0
"""Owns how the kernel bench takes times: captured graphs of fresh steps between events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Side(Protocol):
    """What both sides of the bench can do."""

    def resolve(self, step: int, copy_layers: Sequence[int] = ()) -> None:
        """Resolves a step and copies some layers on the current stream."""

    def copy(self, step: int, layers: Sequence[int]) -> None:
        """Copies layers of a step that was resolved."""

    def prepare(self, steps: Sequence[int], copy_layers: Sequence[int] = ()) -> None:
        """Does what must not happen inside a capture, for `resolve`."""

    def bind_copy(self, step: int, layers: Sequence[int]) -> None:
        """The same for `copy`."""


# Keeps the GPU busy while the host enqueues what is timed.
_HEAD_START_CYCLES = 2_000_000


def graph_us(run: Callable[[int], None], steps: Sequence[int]) -> float:
    """Microseconds per step of one graph that runs `steps` one after the other, replayed once.

    A replay uses every step's inputs once; nothing of a step was read before it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            run(step)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / len(steps)


def median_us(run: Callable[[int], None], groups: Sequence[Sequence[int]]) -> float:
    """Median over groups of steps of `graph_us`."""
    return statistics.median(graph_us(run, group) for group in groups)


def _sleep_cycles_per_us() -> float:
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / (start.elapsed_time(end) * 1000)


def exposed_us(
    side: Side, groups: Sequence[Sequence[int]], parts: Sequence[Sequence[int]], compute_us: float
) -> float:
    """Median of the time that the layers of a group take beyond their compute.

    A copy stream resolves and copies `parts` of the layers one after the other; the compute stream
    waits for a layer's part and then computes for `compute_us`, as a spinning block.
    """
    cycles = round(compute_us * _sleep_cycles_per_us())
    copy_stream = torch.cuda.Stream()

    def run(step: int) -> None:
        compute = torch.cuda.current_stream()
        copy_stream.wait_stream(compute)
        ready: dict[int, torch.cuda.Event] = {}
        for i, part in enumerate(parts):
            with torch.cuda.stream(copy_stream):
                if i == 0:
                    side.resolve(step, part)
                else:
                    side.copy(step, part)
                done = torch.cuda.Event()
                done.record(copy_stream)
            ready |= dict.fromkeys(part, done)
        for layer in sorted(ready):
            compute.wait_event(ready[layer])
            if cycles:
                torch.cuda._sleep(cycles)

    steps = [step for group in groups for step in group]
    side.prepare(steps, parts[0])
    for part in parts[1:]:
        for step in steps:
            side.bind_copy(step, part)
    num_layers = sum(len(part) for part in parts)
    return median_us(run, groups) - num_layers * compute_us


def memcpy_gbps(host: torch.Tensor, device: torch.Tensor, to_device: bool) -> float:
    """GB/s of one pinned copy of the two tensors' size, best of three."""
    best = 0.0
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if to_device:
            device.copy_(host, non_blocking=True)
        else:
            host.copy_(device, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        best = max(best, host.numel() / start.elapsed_time(end) / 1e6)
    return best
