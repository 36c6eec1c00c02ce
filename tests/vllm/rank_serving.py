# SPDX-License-Identifier: Apache-2.0
"""Owns serving on several ranks: one scheduler, the same plans to all, vLLM's own aggregation of
what they answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpu_ahead import CpuServingAhead
from cpu_attention import Batch
from cpu_ranks import Ranks
from cpu_serving import CpuServing
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput
from worker_on_cpu import CpuWorker


class _OnRanks:
    """Sends steps to ranks in place of a worker's calls.

    The worker that the loop knows serves nothing: it has the configuration that all share.
    """

    answers_behind = 0
    """Steps that ranks may have in hand when the next one is sent."""

    def __init__(self, ranks: Ranks, cpu: CpuWorker, *arguments: Any, **options: Any) -> None:
        self.ranks = ranks
        self.num_ranks = self.num_host_writers = ranks.setup.num_ranks
        self._fillers = range(self.num_ranks)
        if ranks.setup.executor == "mp":
            self.num_host_writers, self._fillers = 1, range(1)
        self._aggregator = KVOutputAggregator(self.num_ranks)
        self._num_unanswered = 0
        self._meta: Any = None
        super().__init__(cpu, *arguments, **options)
        worker: Any = cpu.worker
        worker.start_step = lambda metadata, *_: self._send(metadata, None)
        worker.finish_forward = lambda: None
        self.side.report = self._tell

    def _send(self, metadata: Any, batch: Batch | None) -> None:
        parts = [] if batch is None else batch.parts
        pages = bool(self._rng.integers(2))
        self.ranks.step(metadata, parts, pages=pages, draft_seed=int(self._rng.integers(1 << 30)))
        self._num_unanswered += 1
        self._note_plans(metadata)

    def _forward_batch(self, metadata: Any, batch: Batch) -> None:
        for part in batch.parts:
            # A hit is no recomputation: nothing was sent of these tokens.
            self.seen["prefix hits"] += part.name not in self.worker.tables and part.start > 0
            self.worker.tables[part.name] = {}
        self._send(metadata, batch)

    def _answer(self) -> None:
        behind = self.answers_behind if self.running else 0
        while self._num_unanswered > behind:
            self._num_unanswered -= 1
            outputs = self.ranks.receive_all("step")
            total = self._aggregator.aggregate(outputs)
            assert total is not None
            self._meta = total.kv_connector_output.kv_connector_worker_meta
            self._report([], [])
        # Somebody is busy.
        self._acks = dict.fromkeys(range(self._num_unanswered), 0)

    def _tell(self, enqueued: Sequence[int], completed: Sequence[int], **outcome: Any) -> None:
        self.side.scheduler.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=self._meta, **outcome)
        )

    def _fill_import(self, name: str, values: list[int]) -> None:
        host = self.side.coordinator.host_manager.req_to_blocks[name]
        for rank in self._fillers:
            self.ranks.send("fill", [block.block_id for block in host], values, to=rank)
            self.ranks.receive("fill", rank)


class RankServing(_OnRanks, CpuServing):
    """Every step's answers come in before the next one is planned."""


class RankServingAhead(_OnRanks, CpuServingAhead):
    """Ranks get a step before the answers to the one before it have come in."""

    answers_behind = 1
