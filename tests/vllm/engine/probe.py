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

from engine import digests
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
        num_decode_rows: how many requests at the front decode, with a row each.
        state_rows: `[requests]` on the device; each request's row in tables by request state.
    """

    names: list[str]
    starts: list[int]
    counts: list[int]
    num_decode_rows: int
    state_rows: torch.Tensor

    @property
    def last_positions(self) -> list[int]:
        """Position of each request's last token in this step."""
        return [start + count - 1 for start, count in zip(self.starts, self.counts, strict=True)]


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


@dataclass
class _Attended:
    keys: list[Key]
    layer: int
    digest: torch.Tensor
    wrong: torch.Tensor


@dataclass
class Probe:
    """Attached to one engine; `take` ends a run and begins the next.

    Args:
        engine: the engine.
        scripts: all tokens of each request by name; a sampled token is replaced by the script's.
        before_resolve: called with (group, logical top-k, batch) before a leader resolves.
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
        self._logits: list[tuple[list[Key], torch.Tensor, torch.Tensor]] = []
        self._attended: list[_Attended] = []
        self._num_wrong: torch.Tensor | None = None
        self._layers = self.engine.layers
        if self._layers:
            self._allocate()
            self._watch_steps()
            for at, layer in enumerate(self._layers):
                self._watch_writes(at, layer)
            for at, group in enumerate(self.engine.groups):
                self._watch_group(at, group)
        self._watch_sampling()

    # Results.

    def num_wrong(self) -> int:
        """Attended rows so far that are not what was written. Synchronises."""
        return 0 if self._num_wrong is None else int(self._num_wrong)

    def take(self) -> tuple[dict[Key, list[Outcome]], list[Fault]]:
        """Outcomes and faults since the last call. Synchronises."""
        attended: dict[Key, dict[int, int]] = {}
        faults = []
        for entry in self._attended:
            wrong = entry.wrong.tolist()
            for key, digest, bad in zip(entry.keys, entry.digest.tolist(), wrong, strict=True):
                attended.setdefault(key, {})[entry.layer] = digest
                if bad:
                    faults.append(Fault(key[0], key[1], entry.layer, bad))
        outcomes: dict[Key, list[Outcome]] = {}
        for keys, histories, logits in self._logits:
            rows = zip(keys, histories.tolist(), logits.cpu(), strict=True)
            for key, history, row in rows:
                of_layers = attended.get(key, {})
                digest = tuple(of_layers[layer] for layer in sorted(of_layers))
                outcomes.setdefault(key, []).append(Outcome(history, row, digest))
        self._logits.clear()
        self._attended.clear()
        if self._num_wrong is not None:
            self._num_wrong.zero_()
        return outcomes, faults

    # Hooks.

    def _allocate(self) -> None:
        handle = self._layers[0].hisparse_cache
        self._device = handle.view.cache.device
        rows = self.engine.core.scheduler.kv_cache_config.hisparse_host_num_blocks * BLOCK
        # One row more, for what has no host row.
        shape = (len(self._layers), rows + 1)
        self._written = torch.full(shape, -1, dtype=torch.int64, device=self._device)
        self._how = torch.zeros(rows + 1, dtype=torch.int64, device=self._device)
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=self._device)

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
            self._count_admissions(output)
            if self.before_forward is not None:
                self.before_forward(self._batch)

        connector.start_load_kv = start_load_kv

    def _read_batch(self, context: Any, output: Any, arguments: dict[str, Any]) -> Batch:
        request_ids = arguments["request_ids"]
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        metadata = context.attn_metadata[self._layers[0].layer_name]
        return Batch(
            [_name(request) for request in request_ids],
            [starts[request] for request in request_ids],
            [output.num_scheduled_tokens[request] for request in request_ids],
            metadata.num_decode_tokens,
            arguments["request_state_indices"][: len(request_ids)].long(),
        )

    def _count_admissions(self, output: Any) -> None:
        assert self._batch is not None
        hits = {_name(r.req_id): r.num_computed_tokens for r in output.scheduled_new_reqs}
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
            batch = self._batch
            if batch is None or handle.dummy_batch:
                return
            tokens = sum(batch.counts)
            rows = handle.slot_mapping[:tokens]
            host = self._places(handle.mirror_slot_mapping[:tokens])
            written = handle.view.cache[rows // BLOCK, rows % BLOCK].view(torch.uint8)
            self._written[at, host] = digests.of_rows(written)
            if at == 0:
                decoded = torch.arange(tokens, device=host.device) < batch.num_decode_rows
                self._how[host] = 1 + decoded.long()

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
            if batch is not None:
                physical = result[0] if isinstance(result, tuple) else result
                cache = group.physical_kv_cache(layer_index)
                self._check(first + layer_index, cache, logical, physical, batch)
            return result

        group.convert_logical_to_physical_topk = convert_logical_to_physical_topk

    def _check(
        self,
        layer: int,
        cache: torch.Tensor,
        logical: torch.Tensor,
        physical: torch.Tensor,
        batch: Batch,
    ) -> None:
        rows = logical.shape[0]
        table = self._layers[layer].hisparse_cache.source_block_table[:rows]
        valid = logical >= 0
        page = logical.clamp(min=0).long()
        host = table.gather(1, page // BLOCK).long() * BLOCK + page % BLOCK
        at = physical[:rows].clamp(min=0).long()
        got = digests.of_rows(cache[at // BLOCK, at % BLOCK].view(torch.uint8))
        wanted = self._written[layer][self._places(host)]
        wrong = (valid & ((physical[:rows] < 0) | (got != wanted))).sum(dim=1)
        # A selection that is too short would hide rows from this check.
        positions = torch.tensor(batch.last_positions[:rows], device=valid.device)
        wrong += (valid.sum(dim=1) != (positions + 1).clamp(max=logical.shape[1])).long()
        assert self._num_wrong is not None
        self._num_wrong += wrong.sum()
        keys = list(zip(batch.names, batch.last_positions, strict=True))[:rows]
        self._attended.append(_Attended(keys, layer, digests.of_lists(got, valid), wrong))

    def _places(self, host: torch.Tensor) -> torch.Tensor:
        last = self._written.shape[1] - 1
        return host.where((host >= 0) & (host < last), last).long()

    def _watch_sampling(self) -> None:
        runner = self.engine.runner
        sample, compute = runner.sample, runner.model.compute_logits
        current: list[tuple[list[str], list[int]]] = []

        def compute_logits(hidden: torch.Tensor, *more: Any) -> torch.Tensor:
            logits = compute(hidden, *more)
            if not current:
                return logits
            names, lengths = current[0]
            keys = [(name, length - 1) for name, length in zip(names, lengths, strict=True)]
            self._logits.append((keys, self._histories(lengths), logits.clone()))
            forced = [self._next(*key) for key in keys]
            # Out of place: what was recorded stays.
            result = torch.full_like(logits, -1e9)
            result[torch.arange(len(forced)), torch.tensor(forced)] = 0.0
            return result

        def sample_forced(hidden: torch.Tensor, batch: Any, *more: Any) -> Any:
            lengths = (batch.num_computed_tokens_np + batch.num_scheduled_tokens).tolist()
            current.append(([_name(r) for r in batch.req_ids], lengths[: batch.num_reqs]))
            try:
                return sample(hidden, batch, *more)
            finally:
                current.clear()

        runner.model.compute_logits = compute_logits
        runner.sample = sample_forced

    def _next(self, name: str, position: int) -> int:
        script = self.scripts.get(name, ())
        return script[position + 1] if position + 1 < len(script) else 0

    def _histories(self, lengths: list[int]) -> torch.Tensor:
        if not self._layers:
            return torch.zeros(len(lengths), dtype=torch.int64)
        table = self._layers[0].hisparse_cache.source_block_table[: len(lengths)].long()
        position = torch.arange(table.shape[1] * BLOCK, device=table.device)
        host = table[:, position // BLOCK] * BLOCK + position % BLOCK
        valid = position < torch.tensor(lengths, device=table.device).unsqueeze(1)
        return digests.of_lists(self._how[self._places(host)], valid)


def _name(request_id: str) -> str:
    """The name under which a request was added: vLLM appends a random part."""
    return request_id.rsplit("-", 1)[0]
