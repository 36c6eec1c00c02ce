# SPDX-License-Identifier: Apache-2.0
"""Owns whole engines on a CPU whose scheduler is a step ahead of the worker, as vLLM's is by
default: steps of requests that have left still run, and so do dummy steps of an idle replica.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ahead import Admission, ServingAhead
from cpu_attention import Batch, Part
from cpu_serving import CpuServing
from serving import Life, Serving, row_values
from sides import pickled
from vllm.v1.request import RequestStatus
from worker_on_cpu import BLOCK, CpuWorker


@dataclass
class Entry:
    """One request of a planned step: what the runner is told, and what was known of its tokens."""

    admission: Admission
    start: int
    count: int
    tables: list[list[int]]
    tokens: list[int]


class CpuServingAhead(CpuServing, ServingAhead):
    """Serves with one step in flight and compares all that attention reads, of stale steps, too.

    Args:
        cpu: the worker.
        traffic: what arrives; without imports and drafts.
        hot_return_steps: steps of full residency after which a hot region is given back.
        dummies: chance in percent that a dummy step follows a step.
        sessions: chance in percent that a request that has its answer waits for more input, with
            its blocks and its state row.
    """

    def __init__(
        self, cpu: CpuWorker, traffic: Any, hot_return_steps: int, dummies: int, sessions: int
    ) -> None:
        super().__init__(cpu, traffic, hot_return_steps)
        self._dummies, self._sessions = dummies, sessions
        self._left: list[str] = []
        """Requests that the runner has not been told to forget."""
        self._waits: list[tuple[int, Life]] = []
        """Sessions without input, and the step in which more comes."""

    def run(self, max_steps: int) -> None:
        """As Serving's; sessions go on until nobody waits for input."""
        Serving.run(self, max_steps)
        while self._waits:
            Serving.run(self, max_steps)
        while self._flights:
            self._land(self._flights.popleft())

    # The scheduler.

    def _schedule(self) -> list[tuple[Life, int, int]]:
        for due, life in list(self._waits):
            if due <= self.step:
                self._waits.remove((due, life))
                self._resume_session(life)
        return super()._schedule()

    def _resume_session(self, life: Life) -> None:
        """As vLLM: the last token was never an input, and makes room for what comes."""
        request = life.request
        kept = request.num_tokens - 1
        del request._all_token_ids[kept:], request.block_hashes[kept // BLOCK :]
        request._output_token_ids.clear()
        num_more = 1 + self.draw(100, "more", life.name, self.step)
        request._all_token_ids.extend(range(500, 500 + num_more))
        request.update_block_hashes()
        request.num_prompt_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        self.running.append(life)
        if request.num_tokens + life.num_output >= self.side.shape.max_model_len:
            self._finish(life, RequestStatus.FINISHED_ABORTED)
        else:
            self.seen["sessions gone on"] += 1

    def _execute(self, batch: list[tuple[Life, int, int]]) -> None:
        planned = self.side.plan([(life.name, tokens) for life, tokens, _ in batch])
        managers = self.side.manager.coordinator.single_type_managers
        entries = []
        for life, count, _ in batch:
            request, start = life.request, life.request.num_computed_tokens
            admission = self._admissions.setdefault(life.name, Admission(life, start))
            tables = [[b.block_id for b in m.req_to_blocks.get(life.name, ())] for m in managers]
            tokens = list(request.all_token_ids[: start + count])
            entries.append(Entry(admission, start, count, tables, tokens))
            request.num_computed_tokens += count
            request.num_output_placeholders += request.num_computed_tokens >= request.num_tokens
        left, self._left = self._left, []
        flight: Any = (pickle.loads(pickled(planned)), entries, left)
        self._flights.append(flight)
        if len(self._flights) > 1:
            self._land(self._flights.popleft())

    def _leave(self, name: str) -> None:
        self._left.append(name)

    # The worker.

    def _land(self, flight: Any) -> None:
        metadata, entries, left = flight
        for name in left:
            super()._leave(name)
        if entries:
            parts = [self._part(entries[at]) for at in self._rng.permutation(len(entries))]
            batch = Batch(self.cpu, sorted(parts, key=lambda part: part.num_tokens > 1))
            self._forward_batch(metadata, batch)
        else:
            self.cpu.worker.start_step(metadata, None, None, 0)
            self.cpu.worker.finish_forward()
        if self.chance(self._dummies, "dummy", self.step):
            self._dummy_step()
        for entry in entries:
            entry.admission.num_written = entry.start + entry.count
            if self._is_current(entry.admission):
                self._result(entry.admission)
        self._answer()
        self._free_held_back()

    def _part(self, entry: Entry) -> Part:
        life, end = entry.admission.life, entry.start + entry.count
        assert entry.admission.num_written == entry.start
        known = self._tables.setdefault(life.name, [[] for _ in entry.tables])
        for table, blocks in zip(known, entry.tables, strict=True):
            table.extend(blocks[len(table) :])
        tokens = entry.tokens
        if self._is_current(entry.admission):
            # What the step before has sampled is known to the device.
            tokens = list(life.request.all_token_ids[:end])
        else:
            self.seen["stale parts"] += 1
        values = row_values([*tokens, *[9] * (end - len(tokens))])
        return Part(life.name, values, entry.start, self._state_row(life.name), known)

    def _result(self, admission: Admission) -> None:
        life, request = admission.life, admission.life.request
        if admission.num_written < request.num_tokens:
            return
        request.num_output_placeholders -= 1
        request.append_output_token_ids([self.draw(50, "token", life.name, request.num_tokens)])
        if len(request.output_token_ids) < life.num_output:
            return
        if not self.chance(self._sessions, "session", life.name, self.step):
            self._finish(life, RequestStatus.FINISHED_STOPPED)
            return
        # The step in flight is stale; its row is written again.
        request.num_computed_tokens -= request.num_output_placeholders
        request.num_output_placeholders = 0
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self._admissions[life.name] = Admission(life, request.num_computed_tokens)
        self.running.remove(life)
        self._waits.append((self.step + 1 + self.draw(4, "wait", life.name, self.step), life))

    def _dummy_step(self) -> None:
        """The connector is off, tables are zeroed and slots padding, and state rows are those of
        the last batch, whose requests may be gone and whose regions may be somebody else's.
        """
        self.seen["dummy steps"] += 1
        cpu, n = self.cpu, 2
        for table in cpu.tables.input_block_tables:
            table.zero_()
        cpu.tables.slot_mappings.fill_(-1)
        before = [cpu.gpu_pool.clone(), *(state.row_map.clone() for state in cpu.worker.states)]
        rows = torch.arange(n + 1, dtype=torch.int32)
        metadata = SimpleNamespace(
            num_decodes=n, num_decode_tokens=n, num_actual_tokens=n, num_reqs=n, max_query_len=1,
            req_id_per_token=rows[:n], query_start_loc=rows, prefill=None,
            seq_lens=torch.full((n,), 300, dtype=torch.int32),
        )  # fmt: skip
        chosen = [self._rng.permutation(300)[: cpu.model.top_k] for _ in range(n)]
        topk = torch.from_numpy(np.array(chosen, np.int32))
        for _, layer, impl in self.attention.layers:
            group, at = impl.index_group, impl.index_group_index
            group.prepare_for_batch(at, metadata)
            group.convert_logical_to_physical_topk(
                at, topk, metadata, block_stride_rows=None, return_valid_counts=True
            )
            assert layer.handle.write_target(n, n)[1].tolist() == [-1] * n
        after = [cpu.gpu_pool, *(state.row_map for state in cpu.worker.states)]
        assert all(map(torch.equal, before, after)), "a dummy step wrote where requests read"
