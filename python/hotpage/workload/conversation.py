# SPDX-License-Identifier: Apache-2.0
"""Owns the shape of a workload: conversations of turns, in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation and its answer.

    Attributes:
        prompt_tokens: new tokens of the prompt, at least 1; the context before it is not counted.
        output_tokens: tokens of the answer, at least 1.
    """

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in their order; each one's context is everything before it."""

    turns: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole conversation."""
        return sum(turn.prompt_tokens + turn.output_tokens for turn in self.turns)
