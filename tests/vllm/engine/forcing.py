# SPDX-License-Identifier: Apache-2.0
"""Owns the forcing of tokens: what is sampled is the script's, what is drafted often is.

Both are forced where vLLM's own sampler and drafter have run, so that they run as ever. Which
drafts are right depends on a token's place alone: two runs reject the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.launch import Engine
from engine.models import VOCABULARY

Scripts = Callable[[], Mapping[str, Sequence[int]]]


@dataclass(frozen=True)
class LogitsRow:
    """One row of a step's logits.

    Args:
        name: of its request.
        request: row of the request in the batch.
        position: of the token that it was computed for.
        counts: whether that token and all before it are the script's.
    """

    name: str
    request: int
    position: int
    counts: bool


def is_right(name: str, position: int) -> bool:
    """Whether a draft at this place is the script's token: two in three."""
    return (7 * position + sum(name.encode())) % 3 != 0


def request_name(request_id: str) -> str:
    """The name under which a request was added: vLLM appends a random part."""
    return request_id.rsplit("-", 1)[0]


class Forcing:
    """Forces the tokens of one engine.

    Args:
        engine: the engine.
        scripts: gives all tokens of each request by name.
    """

    def __init__(self, engine: Engine, scripts: Scripts) -> None:
        self._engine, self._scripts = engine, scripts
        self.num_accepted = 0
        self.num_rejected = 0

    def attach(self, record: Callable[[list[LogitsRow], torch.Tensor], None]) -> None:
        """Hooks in.

        Args:
            record: called with each step's rows and their logits before anything is forced.
        """
        self._force_samples(record)
        if self._engine.spec.mtp:
            self._force_drafts()

    def _force_samples(self, record: Callable[[list[LogitsRow], torch.Tensor], None]) -> None:
        runner = self._engine.runner
        sample, compute = runner.sample, runner.model.compute_logits
        current: list[list[LogitsRow]] = []

        def compute_logits(hidden: torch.Tensor, *more: Any) -> torch.Tensor:
            logits = compute(hidden, *more)
            if not current:
                return logits
            rows = current[0]
            record(rows, logits)
            forced = [self._token(row.name, row.position + 1) for row in rows]
            # Out of place: what was recorded stays.
            result = torch.full_like(logits, -1e9)
            result[torch.arange(len(forced)), torch.tensor(forced)] = 0.0
            return result

        def sample_forced(hidden: torch.Tensor, batch: Any, *more: Any) -> Any:
            current.append(_logits_rows(batch))
            try:
                return sample(hidden, batch, *more)
            finally:
                current.clear()

        runner.model.compute_logits = compute_logits
        runner.sample = sample_forced

    def _force_drafts(self) -> None:
        speculator = self._engine.runner.speculator
        propose = speculator.propose

        def propose_forced(batch: Any, *more: Any, **named: Any) -> torch.Tensor:
            drafts = propose(batch, *more, **named)
            if named.get("dummy_run"):
                return drafts
            # Arguments of this place: metadata, slots, hidden states (two), sampled, rejected.
            sampled = more[4].tolist()
            self.num_rejected += int(more[5][: batch.num_reqs].sum())
            forced = []
            for row, drafted in zip(_requests(batch), sampled, strict=False):
                self.num_accepted += max(drafted - 1, 0)
                after = row.end - row.num_drafts + drafted
                forced.append([self._draft(row.name, after + at) for at in range(drafts.shape[1])])
            return torch.tensor(forced, dtype=drafts.dtype, device=drafts.device)

        speculator.propose = propose_forced

    def _draft(self, name: str, position: int) -> int:
        token = self._token(name, position)
        return token if is_right(name, position) else (token + 1) % VOCABULARY

    def _token(self, name: str, position: int) -> int:
        script = self._scripts().get(name, ())
        return script[position] if position < len(script) else 0


@dataclass(frozen=True)
class _Request:
    name: str
    end: int
    """Tokens computed after this step, rejected drafts counted."""
    num_drafts: int


def _requests(batch: Any) -> list[_Request]:
    ends = (batch.num_computed_tokens_np + batch.num_scheduled_tokens).tolist()
    rows = batch.cu_num_logits_np.tolist()
    return [
        _Request(request_name(request), ends[at], rows[at + 1] - rows[at] - 1)
        for at, request in enumerate(batch.req_ids[: batch.num_reqs])
    ]


def _logits_rows(batch: Any) -> list[LogitsRow]:
    """Logits are computed for the last token of each request and for the drafts before it."""
    found = []
    for at, request in enumerate(_requests(batch)):
        counts = True
        for position in range(request.end - 1 - request.num_drafts, request.end):
            if position > request.end - 1 - request.num_drafts:
                counts = counts and is_right(request.name, position)
            found.append(LogitsRow(request.name, at, position, counts))
    return found
