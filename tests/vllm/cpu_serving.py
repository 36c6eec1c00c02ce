# SPDX-License-Identifier: Apache-2.0
"""Owns whole engines on a CPU: our scheduler side, its metadata, the worker and its answers."""

from __future__ import annotations

import ctypes
import pickle
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_attention import Attention, Batch, Part
from cpu_streams import Streams
from serving import Life, Serving, Traffic, row_values
from sides import HOTPAGE, Shape, make_side, pickled
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus
from worker_on_cpu import BLOCK, CpuWorker, Model, cache_config, row_bytes


@dataclass(frozen=True)
class BoundShape(Shape):
    """A shape whose cache groups are those that the worker's caches are bound by."""

    config: Any = None

    def cache_config(self) -> KVCacheConfig:
        """The worker's own groups."""
        assert self.config is not None
        return self.config


class CpuServing(Serving):
    """Serves a traffic with a scheduler and a worker that compares all that attention reads.

    Args:
        cpu: the worker.
        traffic: what arrives.
        hot_return_steps: steps of full residency after which a hot region is given back.
    """

    num_ranks = num_host_writers = 1

    def __init__(self, cpu: CpuWorker, traffic: Traffic, hot_return_steps: int = 512) -> None:
        model, config = cpu.model, cpu.cache_config
        assert config.hisparse_host_num_blocks is not None
        shape = BoundShape(
            num_groups=len(cpu.worker.caches.residency),
            block_size=BLOCK,
            hot_blocks=model.hot_rows // BLOCK,
            num_blocks=config.num_blocks,
            host_blocks=config.hisparse_host_num_blocks,
            max_model_len=cpu.max_pages * BLOCK,
            max_in_flight_tokens=traffic.chunk,
            num_speculative_tokens=model.verification_rows - 1,
            config=generate_scheduler_kv_cache_config(
                [cache_config(cpu.config, model, cpu.host_blocks)]
            ),
        )
        side = make_side(
            HOTPAGE, shape, hot_return_steps=hot_return_steps, num_ranks=self.num_ranks,
            num_host_writers=self.num_host_writers,
        )  # fmt: skip
        super().__init__(side, traffic)
        # What the loop itself asks of a worker.
        self.worker: Any = SimpleNamespace(tables={}, fill_import=self._fill_import)
        self.cpu, self.attention = cpu, Attention(cpu, traffic.seed)
        self._rng = np.random.default_rng(traffic.seed)
        self._state_rows: dict[str, int] = {}
        self._tables: dict[str, list[list[int]]] = {}
        """What vLLM's runner has been told of each request, group by group."""
        self._free_rows = list(range(cpu.worker.caches.max_requests))
        self._returned: set[int] = set()
        """Dense ids of requests that gave a hot region back."""
        self._pages = True
        """Whether the step runs the backend that stages pages."""
        self.seen: Counter[str] = Counter()
        """What the trace has met."""
        self.enqueued: list[int] = []
        self.completed: list[int] = []

    def _execute(self, batch: list[tuple[Life, int, int]]) -> None:
        drafts = {life.name: [7] * count for life, _, count in batch if count}
        planned = self.side.plan([(life.name, tokens) for life, tokens, _ in batch], drafts)
        metadata = pickle.loads(pickled(planned))
        worker = self.cpu.worker
        if batch:
            self._forward_batch(metadata, self._batch(batch))
        else:
            worker.start_step(metadata, None, None, 0)
            worker.finish_forward()
        for life, tokens, num_drafts in batch:
            self._sample(life, tokens, num_drafts)
        self._answer()

    def _batch(self, batch: list[tuple[Life, int, int]]) -> Batch:
        """The step in the order of the runner, which is not the scheduler's."""
        parts = []
        for at in self._rng.permutation(len(batch)):
            life, tokens, num_drafts = batch[at]
            request = life.request
            end = request.num_computed_tokens + tokens
            tokens_known = request.all_token_ids[: end - num_drafts]
            parts.append(
                Part(
                    life.name,
                    row_values([*tokens_known, *[7] * num_drafts]),
                    request.num_computed_tokens,
                    self._state_row(life.name),
                    self._blocks(life.name),
                )
            )
        rows = self.cpu.model.verification_rows
        return Batch(self.cpu, sorted(parts, key=lambda part: part.num_tokens > rows))

    def _state_row(self, name: str) -> int:
        if name not in self._state_rows:
            # As vLLM's runner: the row that was left last is taken first.
            self._state_rows[name] = self._free_rows.pop()
        return self._state_rows[name]

    def _blocks(self, name: str) -> list[list[int]]:
        """Block tables as vLLM's runner has them: they only grow, so that a hot region which
        replaces another one never gets there.
        """
        managers = self.side.manager.coordinator.single_type_managers
        tables = self._tables.setdefault(name, [[] for _ in managers])
        for table, manager in zip(tables, managers, strict=True):
            blocks = manager.req_to_blocks.get(name, ())
            table.extend(block.block_id for block in blocks[len(table) :])
        return tables

    def _forward_batch(self, metadata: Any, batch: Batch) -> None:
        fresh = set(batch.names) - self.worker.tables.keys()
        self._start_step(metadata, batch)
        self._note(metadata, batch, fresh)
        self._run_layers(batch, drafts=False)
        self.cpu.worker.finish_forward()
        if self.cpu.model.drafts:
            self.cpu.streams.computing.put(lambda: None)
            self._run_layers(batch, drafts=True)
            self._draft_on(batch)

    def _start_step(self, metadata: Any, batch: Batch) -> None:
        self.cpu.worker.start_step(metadata, batch.state_rows, batch.names, batch.num_tokens)

    def _run_layers(self, batch: Batch, *, drafts: bool) -> None:
        """The target's forward pass, or the drafter's first one."""
        if not drafts:
            fp8 = self.cpu.model.kv_cache_dtype == "fp8_ds_mla"
            self._pages = bool(self._rng.integers(2)) or not fp8
        self.attention.run(batch, batch.metadata(), drafts=drafts, pages=self._pages)

    def _draft_on(self, batch: Batch) -> None:
        """The drafter's later passes write other slot mappings over those of the target's."""
        slots = self.cpu.tables.slot_mappings
        slots.copy_(torch.from_numpy(self._rng.integers(BLOCK, 4 * BLOCK, slots.shape)))

    def _note(self, metadata: Any, batch: Batch, fresh: set[str]) -> None:
        residency = self.cpu.worker.caches.residency
        for part in batch.parts:
            self.worker.tables[part.name] = {}
            if part.name in fresh and part.start:
                hit = residency[:, part.state_row, : part.start // BLOCK]
                self.seen["prefix hits"] += 1
                self.seen["host-only admissions"] += int((hit == 0).all(0).any())
        self._note_plans(metadata)
        resident = metadata.all_context_pages_resident
        prefills = len(batch.parts) - batch.num_decodes
        if prefills:
            self.seen["prefill resident" if resident else "prefill staged"] += 1
        self.seen["mixed batches"] += bool(prefills and batch.num_decodes)

    def _note_plans(self, metadata: Any) -> None:
        for plan in metadata.plans:
            self._note_regions(plan)
            blocks = plan.residency_blocks
            self.seen["pages given up"] += int((blocks == 0).all(axis=-1).sum())
            for kind in plan.transfer_kind.tolist():
                self.seen[f"transfer {kind}"] += 1

    def _note_regions(self, plan: Any) -> None:
        for id in plan.hot_region_request.tolist():
            self.seen["hot regions"] += 1
            self.seen["hot regions in the place of another"] += id in self._returned
        self._returned.difference_update(plan.residency_cleared.tolist())
        self._returned.update(plan.hot_regions_returned.tolist())

    def _answer(self) -> None:
        worker = self.cpu.worker
        enqueued, completed = worker.take_transfer_updates()
        self.enqueued += enqueued
        self.completed += completed
        for id in enqueued:
            self._acks[id] = self.step
        for id in completed:
            del self._acks[id]
        assert not worker.take_completed_host_copies(), "no hit ends inside a block"
        self._report(enqueued, completed)

    def _fill_import(self, name: str, values: list[int]) -> None:
        """A sibling writes the host rows of an import, of all layers."""
        host = self.side.coordinator.host_manager.req_to_blocks[name]
        at = torch.arange(len(values))
        blocks = torch.tensor([host[page].block_id for page in (at // BLOCK).tolist()])
        for number, layer, _ in self.attention.layers:
            rows = row_bytes(values, number, self.attention.width)
            self.cpu.host_rows(layer.name)[blocks, at % BLOCK] = rows

    def _preempt(self, life: Life) -> None:
        super()._preempt(life)
        self._leave(life.name)
        self.seen["preemptions"] += 1

    def _finish(self, life: Life, status: RequestStatus) -> None:
        super()._finish(life, status)
        self._leave(life.name)
        self.seen["aborts"] += status == RequestStatus.FINISHED_ABORTED

    def _leave(self, name: str) -> None:
        self._tables.pop(name, None)
        row = self._state_rows.pop(name, None)
        if row is not None:
            self._free_rows.append(row)

    @property
    def misses(self) -> int:
        """Hot misses of all index groups so far."""
        return sum(int(state.counters[1]) for state in self.cpu.worker.states)

    @property
    def hits(self) -> int:
        """Hot hits of all index groups so far."""
        return sum(int(state.counters[0]) for state in self.cpu.worker.states)


def check_end(serving: CpuServing) -> None:
    """What holds once a trace has drained: what was enqueued was completed, in that order, no page
    had to be copied again, no row was lost, and every block of both pools is free.
    """
    worker = serving.cpu.worker
    assert serving.enqueued == serving.completed
    assert len(set(serving.completed)) == len(serving.completed)
    assert worker.num_repaired_pages == 0
    assert int(worker._mirrors.counters[2]) == 0, "rows lost by mirrors"
    assert all(int(state.counters[2]) == 0 for state in worker.states), "misses without a slot"
    assert int(worker.staged_counters[2]) == 0, "rows staged from nowhere"
    check_nothing_leaks(serving)


def check_nothing_leaks(serving: CpuServing) -> None:
    """Every block of both pools is free once the trace has drained."""
    side = serving.side
    for pool in (side.manager.block_pool, side.coordinator.get_host_block_pool()):
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks[1:])
    assert not side.coordinator.pending_spills
    assert len(serving.cpu.worker._acks) == 0


def serve(
    model: Model,
    kernels: ctypes.CDLL,
    patch: pytest.MonkeyPatch,
    traffic: Traffic,
    *,
    streams: Streams | None = None,
    poisoned: bool = False,
    hot_return_steps: int = 512,
    kind: type[CpuServing] = CpuServing,
    **sizes: Any,
) -> CpuServing:
    """Serves a traffic to its end.

    Args:
        kind: what serves it.
        poisoned: vLLM's own views of the host pool show poison; only for interleaved rows.
        hot_return_steps: of `CpuServing`.
        sizes: of `CpuWorker`.
    """
    cpu = CpuWorker(
        model, kernels, patch, streams=streams, register=False,
        max_requests=traffic.num_requests, max_tokens=traffic.num_requests * traffic.chunk, **sizes,
    )  # fmt: skip
    cpu.bind()
    if poisoned:
        cpu.move_vllm_views()
    cpu.worker.register_kv_caches(cpu.kv_caches)
    cpu.gpu_pool.fill_(0xA5)
    serving = kind(cpu, traffic, hot_return_steps)
    serving.run(max_steps=400)
    return serving
