# SPDX-License-Identifier: Apache-2.0
"""Owns real processes that play the ranks of a host, and what they hand back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")


def die() -> None:
    """Ends this process at once, as the kernel does with one that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    value: Any
    """What its function returned."""
    error: str
    """Class and text of what it raised; empty if nothing."""
    seconds: float
    """From its start signal to its end."""


def _main(connection: Any, function: Callable[..., Any], name: str, rank: int, n: int) -> None:
    connection.send("here")
    connection.recv()
    start = time.monotonic()
    value, error = None, ""
    try:
        value = function(name, rank, n)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    connection.send(Outcome(value, error, time.monotonic() - start))


def run_ranks(
    function: Callable[[str, int, int], Any], num_ranks: int, time_limit_s: float = 60.0
) -> list[Outcome | None]:
    """Calls function(name of the group, rank, ranks) in a process each; None where one was killed.

    The processes start together, after all of them have imported what they need.
    """
    name = uuid.uuid4().hex
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_main, args=(theirs, function, name, rank, num_ranks))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + time_limit_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: Sequence[Any], deadline: float) -> list[Outcome | None]:
    for pipe in pipes:
        assert pipe.recv() == "here"
    for pipe in pipes:
        pipe.send("go")
    outcomes: list[Outcome | None] = []
    for pipe in pipes:
        assert pipe.poll(max(0.0, deadline - time.monotonic())), "a rank hangs"
        try:
            outcomes.append(pipe.recv())
        except EOFError:
            outcomes.append(None)
    return outcomes
