# SPDX-License-Identifier: Apache-2.0
"""Owns whole engines on a CPU that replay captured graphs for their decode batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from cpu_ahead import CpuServingAhead
from cpu_attention import Batch, Part
from cpu_graph_attention import GraphAttention
from cpu_serving import CpuServing
from serving import Life, row_values
from worker_on_cpu import BLOCK, CpuWorker


class CpuServingGraphs(CpuServing):
    """Serves with graphs of some numbers of requests; batches that none serves run eagerly.

    Args:
        cpu: the worker, on `GraphStreams`.
        traffic: what arrives.
        hot_return_steps: steps of full residency after which a hot region is given back.
        ahead: of `CpuServingAhead`, where it serves.
    """

    SIZES = (2, 4, 6)
    """Requests of the graphs."""
    EAGER = 15
    """Chance in percent that a pass which a graph serves runs eagerly."""
    RECAPTURE = 14
    """Chance in percent that all graphs are captured anew after a step."""
    DUMMIES = 15
    """Chance in percent that a dummy step, as of an idle replica, replays a graph after a step."""

    def __init__(
        self, cpu: CpuWorker, traffic: Any, hot_return_steps: int = 512, **ahead: Any
    ) -> None:
        super().__init__(cpu, traffic, hot_return_steps, **ahead)
        sizes = [size for size in self.SIZES if size <= cpu.worker.caches.max_requests]
        self.attention: GraphAttention = GraphAttention(cpu, traffic.seed, sizes)
        self._graph_rng = np.random.default_rng(traffic.seed ^ 0x6A09)
        self._size: int | None = None
        """Requests of the graph that the step replays."""
        self._scheduled: dict[str, tuple[Life, int]] = {}
        """Requests of the step and their drafts."""
        self._capture()
        cpu.worker.reset_hot_state()

    def _wanted(self, life: Life) -> tuple[int, int]:
        """Mostly as many drafts as there can be: graphs serve no others."""
        tokens, drafts = super()._wanted(life)
        most = self.side.shape.num_speculative_tokens
        prefills = life.request.num_tokens - life.request.num_computed_tokens > 1
        if prefills or not most or self.chance(15, "few", self.step):
            return tokens, drafts
        life.request.spec_token_ids = [7] * most
        return 1 + most, most

    def _chance(self, percent: int) -> bool:
        return bool(self._graph_rng.integers(100) < percent)

    def _batch(self, batch: list[tuple[Life, int, int]]) -> Batch:
        self._scheduled = {life.name: (life, drafts) for life, _, drafts in batch}
        return super()._batch(batch)

    def _capture(self) -> None:
        with nothing_changes(self.cpu, "a capture"):
            self.attention.capture()
        self.seen["captures"] += 1

    def _start_step(self, metadata: Any, batch: Batch) -> None:
        attention, worker = self.attention, self.cpu.worker
        self._size = attention.size_for(batch.parts, attention.rows)
        if self._size is None or self._chance(self.EAGER):
            self._size = None
            super()._start_step(metadata, batch)
            return
        attention.stage(batch)
        super()._start_step(metadata, batch)
        padded = attention.padded(self._size)
        worker.prepare_forward({layer.name: padded for layer in worker.caches.layers})
        behind = worker.caches.request_state_indices[len(batch.parts) :]
        assert (behind == -1).all(), "padding has the state row of a request"

    def _run_layers(self, batch: Batch, *, drafts: bool) -> None:
        attention, size = self.attention, self._size
        if size is None or (drafts and self._chance(self.EAGER)):
            super()._run_layers(batch, drafts=drafts)
            self.seen["eager passes"] += 1
        else:
            misses = self.misses
            attention.replay(batch, size, drafts=drafts)
            self.seen["replays of the drafter" if drafts else "replays"] += 1
            self.seen["padded replays"] += size > len(batch.parts)
            self.seen["misses in replays"] += self.misses - misses
        if not self.cpu.model.drafts:
            attention.spoil()

    def _forward_batch(self, metadata: Any, batch: Batch) -> None:
        super()._forward_batch(metadata, batch)
        if self._chance(self.DUMMIES):
            with nothing_changes(self.cpu, "a dummy step"):
                self.attention.replay_dummy(int(self._graph_rng.choice(self.attention.sizes)))
            self.seen["dummy steps"] += 1
        if self._chance(self.RECAPTURE):
            self._capture()
            if self._chance(50):
                self.cpu.worker.reset_hot_state()

    # The drafter's later passes.

    def _draft_on(self, batch: Batch) -> None:
        """A row a request and pass, behind the tokens that are accepted and the drafts so far."""
        attention = self.attention
        passes = [
            [self._drafted(part, at) for part in batch.parts] for at in range(attention.num_passes)
        ]
        # Blocks are allocated ahead for drafts, but not where prefill goes on.
        if passes and all(len(p.values) <= BLOCK * len(p.blocks[0]) for p in passes[-1]):
            size = None if self._chance(self.EAGER) else attention.size_for(passes[0], 1)
            attention.draft_on([Batch(self.cpu, parts) for parts in passes], size)
            self.seen["later drafts, eager" if size is None else "later drafts"] += 1
        for life, num_drafts in self._scheduled.values():
            accepted = self._accepted(life, num_drafts)
            self.seen["accepted drafts"] += accepted
            self.seen["rejected drafts"] += num_drafts - accepted
        super()._draft_on(batch)
        attention.spoil()

    def _drafted(self, part: Part, at: int) -> Part:
        life, num_drafts = self._scheduled[part.name]
        accepted = self._accepted(life, num_drafts)
        kept = part.values[: len(part.values) - num_drafts + accepted]
        drafted = row_values([-1 - part.state_row, self.step, *range(1 + at)])[2:]
        return Part(part.name, [*kept, *drafted], len(kept) + at, part.state_row, part.blocks)


class CpuServingGraphsAhead(CpuServingGraphs, CpuServingAhead):
    """The same under a scheduler that is a step ahead, whose stale steps are replays, too."""


@contextlib.contextmanager
def nothing_changes(cpu: CpuWorker, what: str) -> Iterator[None]:
    """Checks that what is done in between touches no request."""
    before = _state_of(cpu)
    yield
    for (name, old), (_, now) in zip(before, _state_of(cpu), strict=True):
        assert torch.equal(old, now), f"{what} changed {name}"


def _state_of(cpu: CpuWorker) -> list[tuple[str, torch.Tensor]]:
    """Copies of both pools, page tables, hot regions, row maps with their stamps, and counters."""
    worker = cpu.worker
    found = {
        "the GPU pool": cpu.gpu_pool,
        "residency": worker.caches.residency,
        "hot regions": worker._regions._of_state,
        "regions of the batch": worker._regions._of_batch,
        "state rows": worker.caches.request_state_indices,
    }
    for layer in worker.caches.layers:
        found[f"host rows of {layer.name}"] = cpu.host_rows(layer.name)
    for at, state in enumerate(worker.states):
        for name in ("row_map", "last_used", "epoch", "counters"):
            found[f"{name} of index group {at}"] = getattr(state, name)
    for at, mask in enumerate(worker._mirrors.masks):
        found[f"counters of mirrors {at}"] = mask.counters
    return [(name, tensor.clone()) for name, tensor in found.items()]
