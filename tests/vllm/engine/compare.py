# SPDX-License-Identifier: Apache-2.0
"""Owns the comparison of two runs of one workload, position by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.probe import Key, Outcome
    from engine.workload import Served, Turn

    Outcomes = Mapping[Key, list[Outcome]]

ENOUGH = 0.5
"""Least share of all answer positions that must be comparable.

The others follow a preemption: what a request had decoded is prefilled again, by another kernel
with other last bits, so their logits may differ without a fault. Their attended rows are still
checked against what was written.
"""


@dataclass
class Comparison:
    """Two runs, bit by bit.

    Args:
        num_positions: answer tokens that both runs computed.
        num_compared: those whose tokens were all computed by the same kernels in both runs.
        num_decode: those of the compared that a decode row computed, with attended rows.
        wrong_rows: compared positions whose attended rows differ.
        wrong_logits: compared positions whose logits differ.
    """

    num_positions: int = 0
    num_compared: int = 0
    num_decode: int = 0
    wrong_rows: list[Key] = field(default_factory=list)
    wrong_logits: list[Key] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Compared over all positions."""
        return self.num_compared / max(self.num_positions, 1)

    def check(self) -> None:
        """Raises AssertionError unless all that was compared is equal, and that was enough."""
        assert self.share >= ENOUGH, f"only {self.num_compared} of {self.num_positions} comparable"
        assert self.num_decode > 0, "no decode row was compared"
        assert not self.wrong_rows, f"attended rows differ at {self.wrong_rows[:5]}"
        assert not self.wrong_logits, f"logits differ at {self.wrong_logits[:5]}"


def compare(
    left: Outcomes, right: Outcomes, turns: list[Turn], served: tuple[Served, Served]
) -> Comparison:
    """Compares bit by bit what both runs computed in the same way."""
    result = Comparison()
    for key in _positions(turns, served):
        result.num_positions += 1
        pairs = [
            (a, b) for a in left.get(key, ()) for b in right.get(key, ()) if a.history == b.history
        ]
        if not pairs:
            continue
        a, b = pairs[0]
        result.num_compared += 1
        result.num_decode += bool(a.attended)
        if a.attended != b.attended:
            result.wrong_rows.append(key)
        if not torch.equal(_bits(a.logits), _bits(b.logits)):
            result.wrong_logits.append(key)
    return result


@dataclass
class Distance:
    """Log probabilities of two runs by different kernels, over the whole vocabulary.

    Args:
        num_positions: compared positions.
        mean: mean absolute difference.
        shuffled: the same between each position and the next one: what unrelated outputs give.
    """

    num_positions: int
    mean: float
    shuffled: float


def distance(
    left: Outcomes, right: Outcomes, turns: list[Turn], served: tuple[Served, Served]
) -> Distance:
    """Compares the last outcome of each position that both runs have."""
    keys = [key for key in _positions(turns, served) if key in left and key in right]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (
        torch.stack([run[key][-1].logits.float() for key in keys]).to(device).log_softmax(dim=-1)
        for run in (left, right)
    )
    return Distance(
        len(keys), float((a - b).abs().mean()), float((a - b.roll(1, dims=0)).abs().mean())
    )


def _positions(turns: list[Turn], served: tuple[Served, Served]) -> Iterator[Key]:
    for turn in turns:
        count = min(run.answers.get(turn.name, 0) for run in served)
        for position in range(turn.prompt - 1, turn.prompt - 1 + count):
            yield turn.name, position


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
