# SPDX-License-Identifier: Apache-2.0
"""Owns the hooks that watch an engine: what was written, what was attended, what came out.

Every row is digested when a layer writes it, under its host row, which names a token's place for
the life of its page. Every row that a decode row attends is gathered by its physical index and must
have the digest of the host row that its logical position stands for. That check needs no second
run; comparing the digests and logits of two runs comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine import digests, forcing
from engine.launch import BLOCK, Engine

Key = tuple[str, int]
"""A request's name and the position of the token that was computed."""


@dataclass
class Batch:
    """The step under way.

    Args:
        names: requests in the order of the batch.
        starts: tokens of each that were computed before.
        counts: tokens of each in this step.
        num_decode_rows: how many tokens at the front are decode rows.
        state_rows: `[requests]` on the device; each request's row in tables by request state.
    """

    names: list[str]
    starts: list[int]
    counts: list[int]
    num_decode_rows: int
    state_rows: torch.Tensor

    @property
    def decode_rows(self) -> list[tuple[int, int]]:
        """Request and position of each decode row."""
        return self._rows()[: self.num_decode_rows]

    @property
    def num_decoding(self) -> int:
        """Requests at the front that have decode rows."""
        return len({request for request, _ in self.decode_rows})

    def how(self) -> list[int]:
        """How each token is computed: by a prefill, or at which place of how many decode rows."""
        found = []
        for request, position in self._rows():
            place, count = position - self.starts[request], self.counts[request]
            is_decode_row = len(found) < self.num_decode_rows
            found.append(2 + place + 64 * count if is_decode_row else 1)
        return found

    def _rows(self) -> list[tuple[int, int]]:
        return [
            (request, start + at)
            for request, (start, count) in enumerate(zip(self.starts, self.counts, strict=True))
            for at in range(count)
        ]


@dataclass(frozen=True)
class Outcome:
    """What one row of one step gave.

    Args:
        history: digest of how each token up to this one was computed, by prefill or by decode.
        logits: before a token was forced, on the CPU.
        attended: per layer the digest of the attended rows; empty for prefill rows.
    """

    history: int
    logits: torch.Tensor
    attended: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fault:
    """An attended row that is not what was written."""

    name: str
    position: int
    layer: int
    num_rows: int


DRAFTER = "drafter"
"""Name in a fault of rows that the drafter attends to."""


@dataclass
class _Step:
    """What a step's decode rows attended to."""

    keys: list[Key]
    lists: torch.Tensor
    """int64 `[target layers, decode rows]`: digests of the lists of attended rows."""
    wrong: torch.Tensor
    """int64 of the same shape: attended rows that are not what was written."""


@dataclass
class Probe:
    """Attached to one engine; `take` ends a run and begins the next.

    Hooks inside the forward pass are operations on tensors that stay where they are, and no
    decisions: graphs captured after they were attached repeat them.

    Args:
        engine: the engine.
        scripts: all tokens of each request by name; a sampled token is replaced by the script's.
        before_resolve: called with (group, logical top-k, batch) before a leader resolves; only
            where layers run, not where graphs do.
        before_forward: called with the step's batch when its metadata has been absorbed.
    """

    engine: Engine
    scripts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    before_resolve: Callable[[int, torch.Tensor, Batch], None] | None = None
    before_forward: Callable[[Batch], None] | None = None
    num_host_only_admissions: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._batch: Batch | None = None
        self._logits: list[tuple[list[Key], list[int], torch.Tensor, torch.Tensor]] = []
        self._steps: list[_Step] = []
        self._num_wrong: torch.Tensor | None = None
        self._num_targets = len(self.engine.layers)
        self._layers = [*self.engine.layers, *self.engine.draft_layers]
        self._forced = forcing.Forcing(self.engine, lambda: self.scripts)
        if self._layers:
            self._allocate()
            self._watch_steps()
            for at, layer in enumerate(self._layers):
                self._watch_writes(at, layer)
            for at, group in enumerate(self.engine.groups_of(self._layers)):
                self._watch_group(at, group)
        self._forced.attach(self._record)
        self.recapture()

    def recapture(self) -> None:
        """Captures the engine's graphs with the hooks in them, and what has been poisoned since."""
        self.engine.recapture()
        if self._num_wrong is not None:
            # Captures run on requests that never were.
            self._num_wrong.zero_()
            self._wrong_drafts.zero_()

    # Results.

    def num_wrong(self) -> int:
        """Attended rows so far that are not what was written. Synchronises."""
        return 0 if self._num_wrong is None else int(self._num_wrong)

    @property
    def num_accepted(self) -> int:
        """Drafts accepted so far."""
        return self._forced.num_accepted

    @property
    def num_rejected(self) -> int:
        """Drafts rejected so far."""
        return self._forced.num_rejected

    def take(self) -> tuple[dict[Key, list[Outcome]], list[Fault]]:
        """Outcomes and faults since the last call. Synchronises."""
        attended: dict[Key, tuple[int, ...]] = {}
        faults = []
        for step in self._steps:
            lists, wrong = step.lists.t().tolist(), step.wrong.t().tolist()
            for key, digests_of_row, wrong_of_row in zip(step.keys, lists, wrong, strict=True):
                attended[key] = tuple(digests_of_row)
                faults += [
                    Fault(key[0], key[1], layer, bad)
                    for layer, bad in enumerate(wrong_of_row)
                    if bad
                ]
        outcomes: dict[Key, list[Outcome]] = {}
        for keys, chosen, histories, logits in self._logits:
            of_rows, on_cpu = histories.tolist(), logits.cpu()
            for key, at in zip(keys, chosen, strict=True):
                outcome = Outcome(of_rows[at], on_cpu[at], attended.get(key, ()))
                outcomes.setdefault(key, []).append(outcome)
        self._logits.clear()
        self._steps.clear()
        if self._num_wrong is not None:
            drafted = self._wrong_drafts.tolist()
            faults += [
                Fault(DRAFTER, 0, self._num_targets + at, bad)
                for at, bad in enumerate(drafted)
                if bad
            ]
            self._num_wrong.zero_()
            self._wrong_drafts.zero_()
        return outcomes, faults

    # Hooks.

    def _allocate(self) -> None:
        handle = self._layers[0].hisparse_cache
        self._device = handle.view.cache.device
        rows = self.engine.core.scheduler.kv_cache_config.hisparse_host_num_blocks * BLOCK
        spec = self.engine.spec
        num_rows = spec.max_num_seqs * (1 + spec.mtp)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self._device)

        # One row more, for what has no host row.
        self._written = zeros(len(self._layers), rows + 1) - 1
        self._how = zeros(rows + 1)
        self._how_of_token = zeros(spec.max_num_batched_tokens)
        self._lists = zeros(self._num_targets, num_rows)
        self._wrong = zeros(self._num_targets, num_rows)
        self._wrong_drafts = zeros(len(self._layers) - self._num_targets)
        self._num_wrong = zeros(1)[0]

    def _watch_steps(self) -> None:
        connector = self.engine.connector
        start = connector.start_load_kv

        def start_load_kv(context: Any, **arguments: Any) -> None:
            start(context, **arguments)
            output = arguments.get("scheduler_output")
            if output is None:
                self._batch = None
                return
            self.num_steps += 1
            self._batch = self._read_batch(context, output, arguments)
            how = torch.tensor(self._batch.how(), dtype=torch.int64)
            self._how_of_token[: len(how)].copy_(how)
            self._count_admissions(output)
            if self.before_forward is not None:
                self.before_forward(self._batch)

        connector.start_load_kv = start_load_kv

    def _read_batch(self, context: Any, output: Any, arguments: dict[str, Any]) -> Batch:
        request_ids = arguments["request_ids"]
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        counts = [output.num_scheduled_tokens[request] for request in request_ids]
        # Handed over where a graph will run and no layer.
        of_layers = arguments.get("attn_metadata") or context.attn_metadata
        metadata = of_layers[self._layers[0].layer_name]
        return Batch(
            [forcing.request_name(request) for request in request_ids],
            [starts[request] for request in request_ids],
            counts,
            # Of a graph's batch, those of the padding are among them.
            min(metadata.num_decode_tokens, sum(counts)),
            arguments["request_state_indices"][: len(request_ids)].long(),
        )

    def _count_admissions(self, output: Any) -> None:
        assert self._batch is not None
        hits = {
            forcing.request_name(new.req_id): new.num_computed_tokens
            for new in output.scheduled_new_reqs
        }
        handle = self._layers[0].hisparse_cache
        for row, name in enumerate(self._batch.names):
            pages = hits.get(name, 0) // BLOCK
            if pages:
                table = handle.residency[:, self._batch.state_rows[row], :pages]
                self.num_host_only_admissions += bool((table == 0).any())

    def _watch_writes(self, at: int, layer: Any) -> None:
        update = layer.update_kv_cache
        handle = layer.hisparse_cache

        def update_kv_cache(*arguments: Any, **more: Any) -> None:
            update(*arguments, **more)
            if handle.dummy_batch:
                return
            # Padding of a graph has no slot, and is digested into the row more.
            tokens = handle.num_actual_tokens
            rows = handle.slot_mapping[:tokens]
            host = self._places(handle.mirror_slot_mapping[:tokens])
            written = handle.view.cache[rows // BLOCK, rows % BLOCK].view(torch.uint8)
            self._written[at, host] = digests.of_rows(written)
            if at == 0:
                self._how[host] = self._how_of_token[:tokens]

        layer.update_kv_cache = update_kv_cache

    def _watch_group(self, at: int, group: Any) -> None:
        convert = group.convert_logical_to_physical_topk
        first = next(
            index for index, layer in enumerate(self._layers) if layer.impl.index_group is group
        )

        def convert_logical_to_physical_topk(
            layer_index: int, logical: torch.Tensor, metadata: Any, **more: Any
        ) -> Any:
            batch = self._batch
            if batch is not None and layer_index == 0 and self.before_resolve is not None:
                self.before_resolve(at, logical, batch)
            result = convert(layer_index, logical, metadata, **more)
            physical = result[0] if isinstance(result, tuple) else result
            cache = group.physical_kv_cache(layer_index)
            self._check(first + layer_index, cache, logical, physical, metadata)
            return result

        group.convert_logical_to_physical_topk = convert_logical_to_physical_topk

    def _check(
        self,
        layer: int,
        cache: torch.Tensor,
        logical: torch.Tensor,
        physical: torch.Tensor,
        metadata: Any,
    ) -> None:
        """Compares what the batch's decode rows attend to; prefill rows are left out."""
        rows = min(int(logical.shape[0]), metadata.num_decode_tokens)
        if not rows:
            return
        logical, physical = logical[:rows], physical[:rows]
        request = metadata.req_id_per_token[:rows].long()
        table = self._layers[layer].hisparse_cache.source_block_table[request]
        valid = logical >= 0
        page = logical.clamp(min=0).long()
        host = table.gather(1, page // BLOCK).long() * BLOCK + page % BLOCK
        at = physical.clamp(min=0).long()
        got = digests.of_rows(cache[at // BLOCK, at % BLOCK].view(torch.uint8))
        wanted = self._written[layer][self._places(host)]
        wrong = (valid & ((physical < 0) | (got != wanted))).sum(dim=1)
        row = torch.arange(rows, device=valid.device)
        starts = metadata.query_start_loc
        if layer < self._num_targets:
            # A selection that is too short would hide rows from this check. The drafter's later
            # passes may take over the selection of its first.
            past = metadata.seq_lens.long() - starts[1:].long()
            seen = past[request] + row + 1
            wrong += (valid.sum(dim=1) != seen.clamp(max=logical.shape[1])).long()
        wrong *= row < starts[-1]
        assert self._num_wrong is not None
        self._num_wrong += wrong.sum()
        if layer < self._num_targets:
            self._lists[layer, :rows] = digests.of_lists(got, valid)
            self._wrong[layer, :rows] = wrong
        else:
            self._wrong_drafts[layer - self._num_targets] += wrong.sum()

    def _places(self, host: torch.Tensor) -> torch.Tensor:
        last = self._written.shape[1] - 1
        return host.where((host >= 0) & (host < last), last).long()

    def _record(self, rows: list[forcing.LogitsRow], logits: torch.Tensor) -> None:
        """Keeps a step's logits, and what its decode rows attended to."""
        # Behind a rejected draft everything is computed for tokens that never were.
        chosen = [at for at, row in enumerate(rows) if row.counts]
        keys = [(rows[at].name, rows[at].position) for at in chosen]
        histories = self._histories(rows)
        self._logits.append((keys, chosen, histories, logits.clone()))
        batch = self._batch
        if batch is None or not batch.num_decode_rows:
            return
        counting = set(keys)
        of_rows = [(batch.names[request], position) for request, position in batch.decode_rows]
        kept = [at for at, key in enumerate(of_rows) if key in counting]
        index = torch.tensor(kept, dtype=torch.int64, device=self._device)
        self._steps.append(
            _Step([of_rows[at] for at in kept], self._lists[:, index], self._wrong[:, index])
        )

    def _histories(self, rows: list[forcing.LogitsRow]) -> torch.Tensor:
        if not self._layers:
            return torch.zeros(len(rows), dtype=torch.int64)
        request = torch.tensor([row.request for row in rows], device=self._device)
        lengths = torch.tensor([row.position + 1 for row in rows], device=self._device)
        table = self._layers[0].hisparse_cache.source_block_table[request].long()
        position = torch.arange(table.shape[1] * BLOCK, device=table.device)
        host = table[:, position // BLOCK] * BLOCK + position % BLOCK
        return digests.of_lists(self._how[self._places(host)], position < lengths.unsqueeze(1))
