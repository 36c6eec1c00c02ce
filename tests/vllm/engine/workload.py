# SPDX-License-Identifier: Apache-2.0
"""Owns the conversations that are served, and the loop that serves them.

They are made so that a small pool is in want: more context than it holds, second turns whose first
turns' GPU pages others have taken meanwhile, requests that grow past what is left, and one that is
aborted while it decodes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.launch import Engine
from engine.models import VOCABULARY


@dataclass(frozen=True)
class Turn:
    """One request.

    Args:
        name: unique; no hyphen.
        tokens: prompt and answer.
        prompt: number of tokens of the prompt.
        after: the turns that must have ended before this one arrives.
        abort_at: answer tokens after which the user leaves; None for never.
        during: a running turn, and its answer's length at which this one arrives.
    """

    name: str
    tokens: tuple[int, ...]
    prompt: int
    after: tuple[str, ...] = ()
    abort_at: int | None = None
    during: tuple[str, int] | None = None


@dataclass(frozen=True)
class Scale:
    """Sizes of a workload, in requests and tokens."""

    conversations: int = 6
    prompt: int = 7000
    spread: int = 300
    answer: int = 72
    second_prompt: int = 200
    second_answer: int = 40


def make_turns(seed: int, scale: Scale) -> list[Turn]:
    """The first turns of all conversations, then the second turns of half of them."""
    draw = random.Random(seed)
    firsts, seconds = [], []
    for at in range(scale.conversations):
        prompt = scale.prompt + at * scale.spread + draw.randrange(64)
        # Answers of different lengths: the batch shrinks one by one.
        answer = scale.answer + 7 * at
        tokens = _draw_tokens(draw, prompt + answer)
        last = at == scale.conversations - 1
        firsts.append(Turn(f"c{at}", tuple(tokens), prompt, abort_at=answer // 3 if last else None))
        if at % 2 == 0 and not last:
            more = _draw_tokens(draw, scale.second_prompt + scale.second_answer)
            # Until then others have needed its pages.
            waits = tuple(f"c{other}" for other in range(min(at + 3, scale.conversations - 1)))
            seconds.append(
                Turn(
                    f"c{at}b",
                    (*tokens, *more),
                    len(tokens) + scale.second_prompt,
                    after=waits,
                )
            )
    return firsts + seconds


def make_returning_turns(seed: int, num_others: int = 4) -> list[Turn]:
    """A second turn whose pages are all still on the GPU, and others that take them from it later.

    It is granted a hot region for its prefix, finds the GPU copies and gives the region back, and
    needs one again when the others come.
    """
    draw, scale = random.Random(seed), Scale()
    first = _draw_tokens(draw, scale.prompt)
    more = _draw_tokens(draw, scale.second_prompt + 160)
    turns = [
        Turn("r0", tuple(first), scale.prompt - 4),
        Turn("r0b", (*first, *more), scale.prompt + scale.second_prompt, after=("r0",)),
    ]
    for at in range(num_others):
        tokens = tuple(_draw_tokens(draw, scale.prompt + 80))
        turns.append(Turn(f"r{at + 1}", tokens, scale.prompt, during=("r0b", 30)))
    return turns


def _draw_tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(2, VOCABULARY) for _ in range(count)]


@dataclass
class Served:
    """What became of a workload."""

    num_steps: int = 0
    num_aborted: int = 0
    num_preempted: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    """Answer tokens by turn."""


def serve(
    engine: Engine,
    turns: list[Turn],
    *,
    stop: Callable[[], bool] = lambda: False,
    max_steps: int = 3000,
) -> Served:
    """Serves all turns, or until `stop` says so; what is left then is aborted.

    Raises:
        AssertionError: an answer of the wrong length, or no end after `max_steps`.
    """
    from vllm import SamplingParams

    served = Served()
    llm = engine.llm.llm_engine
    with _counted_preemptions(engine, served):
        waiting, running = list(turns), dict[str, Turn]()
        answered: dict[str, int] = {}
        while waiting or running:
            assert served.num_steps < max_steps, f"no end after {max_steps} steps"
            for turn in [t for t in waiting if _may_arrive(t, served, answered)]:
                waiting.remove(turn)
                running[turn.name] = turn
                sampling = SamplingParams(
                    temperature=0.0,
                    max_tokens=len(turn.tokens) - turn.prompt,
                    ignore_eos=True,
                    detokenize=False,
                )
                prompt = {"prompt_token_ids": list(turn.tokens[: turn.prompt])}
                llm.add_request(turn.name, prompt, sampling)
            served.num_steps += 1
            for output in llm.step():
                turn = running.get(output.request_id)
                if turn is None:
                    continue
                answer = list(output.outputs[0].token_ids)
                _check_answer(turn, answer)
                answered[turn.name] = len(answer)
                if output.finished:
                    assert len(answer) == len(turn.tokens) - turn.prompt, turn.name
                elif turn.abort_at is None or len(answer) < turn.abort_at:
                    continue
                else:
                    llm.abort_request([turn.name])
                    served.num_aborted += 1
                served.answers[turn.name] = len(answer)
                del running[turn.name]
            if stop():
                llm.abort_request(list(running))
                break
    return served


def _may_arrive(turn: Turn, served: Served, answered: dict[str, int]) -> bool:
    if turn.during is not None and answered.get(turn.during[0], 0) < turn.during[1]:
        return False
    return all(name in served.answers for name in turn.after)


def _check_answer(turn: Turn, answer: list[int]) -> None:
    wanted = list(turn.tokens[turn.prompt : turn.prompt + len(answer)])
    assert answer == wanted, f"{turn.name}: a token was not forced"


class _counted_preemptions:  # noqa: N801
    """Counts vLLM's preemptions while it is entered."""

    def __init__(self, engine: Engine, served: Served) -> None:
        self._scheduler: Any = engine.scheduler
        self._served = served

    def __enter__(self) -> None:
        preempt = self._scheduler._preempt_request

        def counted(*arguments: Any, **more: Any) -> Any:
            self._served.num_preempted += 1
            return preempt(*arguments, **more)

        self._scheduler._preempt_request = counted

    def __exit__(self, *exception: object) -> None:
        del self._scheduler._preempt_request
