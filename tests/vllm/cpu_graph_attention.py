# SPDX-License-Identifier: Apache-2.0
"""Owns attention that is replayed: the passes of decode batches as vLLM captures them, for a target
and a drafter, and the comparison of all that their layers have read.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

# First of all: it tells vLLM that this host has no GPU.
import sides  # noqa: F401
import torch
from cpu_attention import Attention, Batch, GatheringImpl, Part, gather
from cpu_graphs import SPOILT, Graph, GraphStreams
from worker_on_cpu import BLOCK, CpuWorker, row_bytes

TARGET, DRAFTER, DRAFT_DECODE = "target", "drafter", "draft decode"
"""Passes that vLLM captures each by itself: of the target; of the drafter over the same rows; all
later ones of the drafter, a row a request, as one graph.
"""


class Inputs:
    """What vLLM's runner, or its drafter, writes anew for each batch; padding follows.

    Args:
        max_requests: requests of a batch.
        rows: rows of each request.
    """

    def __init__(self, max_requests: int, rows: int) -> None:
        self.rows = rows
        self.query_start = torch.zeros(max_requests + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_requests, dtype=torch.int32)
        self.request = torch.zeros(max_requests * rows, dtype=torch.int32)
        self.values = torch.zeros(max_requests * rows, dtype=torch.int64)

    def stage(self, lengths: Sequence[int], values: Sequence[int]) -> None:
        """Writes a batch: tokens of each request, and a value for each row."""
        n = len(lengths)
        starts = torch.arange(len(self.query_start)).clamp(max=n) * self.rows
        self.query_start.copy_(starts)
        self.seq_lens.zero_()
        self.seq_lens[:n] = torch.tensor(lengths)
        # Rows of padding belong to request 0, as far as this table goes.
        self.request.zero_()
        of_rows = torch.arange(n, dtype=torch.int32).repeat_interleave(self.rows)
        self.request[: len(of_rows)] = of_rows
        self.values.zero_()
        self.values[: len(values)] = torch.tensor(values)

    def metadata(self, size: int, block_table: torch.Tensor) -> Any:
        """vLLM's sparse-MLA metadata of a batch that is padded to so many requests."""
        num_rows = size * self.rows
        return SimpleNamespace(
            num_reqs=size,
            num_actual_tokens=num_rows,
            max_query_len=self.rows,
            num_decodes=size,
            num_decode_tokens=num_rows,
            num_prefills=0,
            req_id_per_token=self.request[:num_rows],
            seq_lens=self.seq_lens[:size],
            query_start_loc=self.query_start[: size + 1],
            block_table=block_table[:size],
            block_size=BLOCK,
            prefill=None,
        )

    def spoil(self) -> None:
        """Overwrites everything: whoever reads it next must have written it."""
        for buffer in (self.query_start, self.seq_lens, self.request, self.values):
            buffer.fill_(SPOILT)


class _GraphImpl(GatheringImpl):
    """The backend whose kernel is enqueued, and leaves what it gathered for the comparison."""

    def __init__(self, cpu: CpuWorker, attention: Any) -> None:
        super().__init__(cpu, attention)
        self._computing = cpu.streams.computing
        self.read: dict[int, torch.Tensor] = {}
        """What each pass of the drafter, or the one of the target, has gathered."""
        self.at_pass = 0
        """The pass that is enqueued."""

    def _forward_mqa_kernel(
        self,
        q: Any,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        **settings: Any,
    ) -> tuple[None, None]:
        at_pass = self.at_pass

        def kernel() -> None:
            self.read[at_pass] = gather(kv_cache, topk_indices, valid_counts)

        self._computing.put(kernel)
        return None, None


class GraphAttention(Attention):
    """Forward passes of which those of decode batches are captured, for some numbers of requests.

    Every input of a graph lies in a buffer that is written anew for each replay, as vLLM does, and
    overwritten after the step.

    Args:
        cpu: the worker and its caches, on `GraphStreams`.
        seed: of the positions that are read.
        sizes: requests of the graphs.
    """

    def __init__(self, cpu: CpuWorker, seed: int, sizes: Sequence[int]) -> None:
        super().__init__(cpu, seed)
        assert isinstance(cpu.streams, GraphStreams)
        self._streams = cpu.streams
        self.sizes = sorted(sizes)
        self.rows = cpu.model.verification_rows
        max_requests, top_k = cpu.worker.caches.max_requests, cpu.model.top_k
        max_rows = max_requests * self.rows
        self._inputs, self._drafted = Inputs(max_requests, self.rows), Inputs(max_requests, 1)
        self.num_passes = max(self.rows - 2, 0) if cpu.model.drafts else 0
        """Later passes of the drafter: its first one gives a draft, too."""
        self._kinds = [TARGET]
        if cpu.model.drafts:
            self._kinds += [DRAFTER] + [DRAFT_DECODE] * (self.num_passes > 0)
        slots = cpu.tables.slot_mappings
        self._draft_slots = slots.new_zeros((self.num_passes, len(slots), max_requests))
        self._draft_values = torch.zeros((self.num_passes, max_requests), dtype=torch.int64)
        self._q = torch.empty((max_rows, 1))
        self._impls = {number: _GraphImpl(cpu, layer.attention) for number, layer, _ in self.layers}
        self._chosen = {
            (at_pass, number): torch.zeros((max_rows, top_k), dtype=torch.int32)
            for number, impl in self._impls.items()
            if impl.index_group_index == 0
            for at_pass in range(1 + self.num_passes)
        }
        self.graphs: dict[tuple[str, int], Graph] = {}
        """By pass and requests."""

    # What vLLM does before it serves.

    def capture(self) -> None:
        """Captures all graphs, the target's first, as vLLM: after a warm-up each, with metadata of
        its own, on a dummy batch.
        """
        self.graphs.clear()
        for kind in self._kinds:
            for size in reversed(self.sizes):
                self._stage_dummy(size)
                self._enqueue(kind, size)
                self._stage_dummy(size)
                with self._streams.capture() as graph:
                    self._enqueue(kind, size)
                self.graphs[kind, size] = graph
        self.spoil()

    def padded(self, size: int) -> Any:
        """vLLM's sparse-MLA metadata of the batch that was staged, for a graph."""
        return self._metadata(self._inputs, size)

    def _metadata(self, inputs: Inputs, size: int) -> Any:
        (source,) = self.cpu.cache_config.host_group_ids
        return inputs.metadata(size, self.cpu.tables.input_block_tables[source])

    def _enqueue(self, kind: str, size: int) -> None:
        """All that the passes of a graph do on the device."""
        if kind != DRAFT_DECODE:
            metadata = self._metadata(self._inputs, size)
            self._enqueue_pass(metadata, self._inputs.values, drafts=kind == DRAFTER)
            return
        # All passes share one metadata, in which the lengths grow; those of padding do, too.
        metadata = self._metadata(self._drafted, size)
        slots, put = self.cpu.tables.slot_mappings, self._streams.computing.put
        for at in range(self.num_passes):
            staged = self._draft_slots[at, :, :size]
            put(lambda staged=staged: slots[:, :size].copy_(staged))
            if at:
                put(lambda: self._drafted.seq_lens[:size].add_(1))
            self._enqueue_pass(metadata, self._draft_values[at], drafts=True, at_pass=1 + at)

    def _enqueue_pass(
        self, metadata: Any, values: torch.Tensor, *, drafts: bool, at_pass: int = 0
    ) -> None:
        num_rows, put = metadata.num_actual_tokens, self._streams.computing.put
        for number, layer, _ in self.layers:
            if layer.is_draft != drafts:
                continue
            impl = self._impls[number]
            group, at = impl.index_group, impl.index_group_index
            if at == 0:
                chosen = self._chosen[at_pass, number][:num_rows]
                put(lambda chosen=chosen: self.cpu.topk[: len(chosen)].copy_(chosen))
                group.set_logical_topk_ready(at)
            group.prepare_for_batch(at, metadata)
            self._write(layer, number, values[:num_rows])
            impl.at_pass = at_pass
            impl.forward_mqa(self._q[:num_rows], layer.attention.kv_cache, metadata, None)

    def _write(self, layer: Any, number: int, values: torch.Tensor) -> None:
        cache, slots, n = layer.handle.write_target(len(values), len(values))
        assert n == len(values)

        def kernel() -> None:
            real = slots >= 0
            rows = row_bytes(values[real].tolist(), number, self.width)
            cache[slots[real] // BLOCK, slots[real] % BLOCK] = rows.view(cache.dtype)

        self._streams.computing.put(kernel)

    def _stage_dummy(self, size: int) -> None:
        for inputs in (self._inputs, self._drafted):
            inputs.stage([inputs.rows] * size, [0])
        self._draft_slots.fill_(-1)
        for table in self.cpu.tables.input_block_tables:
            table[:size].zero_()
        self.cpu.tables.slot_mappings.fill_(-1)
        for chosen in self._chosen.values():
            self._choose_anything(chosen)

    def _choose_anything(self, chosen: torch.Tensor) -> None:
        """What an indexer leaves where no request is."""
        chosen.copy_(torch.from_numpy(self._rng.integers(-1, 4 * BLOCK, tuple(chosen.shape))))

    def replay_dummy(self, size: int) -> None:
        """Replays what a dummy step does, for requests that claim long contexts and have no blocks:
        its state rows are those of the batch before it.
        """
        self._stage_dummy(size)
        for inputs in (self._inputs, self._drafted):
            inputs.seq_lens[:size] = 4 * BLOCK
        for kind in self._kinds:
            self.graphs[kind, size].replay()
        self.spoil()

    # A step.

    def size_for(self, parts: Sequence[Part], rows: int) -> int | None:
        """Requests of the graph that serves these, of so many rows each; None if none does."""
        if any(part.num_tokens != rows for part in parts):
            return None
        return next((size for size in self.sizes if size >= len(parts)), None)

    def stage(self, batch: Batch) -> None:
        """Writes what the graphs of the target and of the drafter's first pass read."""
        values = [value for part in batch.parts for value in part.values[part.start :]]
        self._inputs.stage([len(part.values) for part in batch.parts], values)
        for table in self.cpu.tables.input_block_tables:
            table[len(batch.parts) :].zero_()
        self.cpu.tables.slot_mappings[:, batch.num_tokens :] = -1

    def replay(self, batch: Batch, size: int, *, drafts: bool) -> None:
        """Replays the graph of a staged batch, and compares all that its layers have read."""
        chosen = self._choose(batch, 0, drafts)
        self.graphs[DRAFTER if drafts else TARGET, size].replay()
        self._compare_pass(batch, chosen, 0, drafts, f"graph of {size}")

    def draft_on(self, batches: Sequence[Batch], size: int | None) -> None:
        """The drafter's later passes: a replay, or eagerly with metadata that they share.

        Args:
            batches: of each pass: a row a request.
            size: of the graph; None if there is none.
        """
        n = len(batches[0].parts)
        self._drafted.stage([len(part.values) for part in batches[0].parts], [])
        self._draft_slots.fill_(-1)
        self._draft_values.zero_()
        for at, batch in enumerate(batches):
            batch._write_tables()
            self._draft_slots[at, :, :n] = self.cpu.tables.slot_mappings[:, :n]
            self._draft_values[at, :n] = torch.tensor([part.values[-1] for part in batch.parts])
        self.cpu.tables.slot_mappings.fill_(-1)
        chosen = [self._choose(batch, 1 + at, True) for at, batch in enumerate(batches)]
        if size is None:
            self._enqueue(DRAFT_DECODE, n)
        else:
            self.graphs[DRAFT_DECODE, size].replay()
        for at, batch in enumerate(batches):
            where = f"pass {1 + at}, {'eager' if size is None else f'graph of {size}'}"
            self._compare_pass(batch, chosen[at], 1 + at, True, where)

    def _choose(self, batch: Batch, at_pass: int, drafts: bool) -> dict[int, list[list[int]]]:
        """Draws what the leaders select; behind the batch lies anything."""
        drawn = {}
        for number, layer, impl in self.layers:
            if layer.is_draft == drafts and impl.index_group_index == 0:
                drawn[number] = batch.draw_topk(self._rng)
                chosen = self._chosen[at_pass, number]
                self._choose_anything(chosen)
                chosen[: batch.num_tokens] = torch.tensor(drawn[number], dtype=torch.int32)
        return drawn

    def _compare_pass(
        self, batch: Batch, drawn: dict[int, list[list[int]]], at_pass: int, drafts: bool, name: str
    ) -> None:
        n, topk = batch.num_tokens, []
        for number, layer, _ in self.layers:
            if layer.is_draft != drafts:
                continue
            topk = drawn.get(number, topk)
            got, where = self._impls[number].read.pop(at_pass), f"layer {number}, {name}"
            self._compare(got[:n], batch.expected(topk, number, self.width), batch, where)
            assert not got[n:].any(), f"{where}: padding reads a row"

    def spoil(self) -> None:
        """Overwrites all inputs of the graphs."""
        self._inputs.spoil()
        self._drafted.spoil()
        for buffer in (self._draft_slots, self._draft_values, *self._chosen.values()):
            buffer.fill_(SPOILT)
        for impl in self._impls.values():
            impl.read.clear()
