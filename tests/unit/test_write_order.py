# SPDX-License-Identifier: Apache-2.0
"""Owns the order of the shared pool's writer and readers: processes with stand-in events.

A stand-in event is a word in a file: a record stores the step, a wait reads what a stream would
wait for at that moment. The "stream" of a call is the step that the test expects.
"""

from __future__ import annotations

import functools
import mmap
import random
import time
from pathlib import Path

import pytest
from ranks import die, run_ranks

from hotpage.errors import RankError
from hotpage.runtime._ipc import IpcError
from hotpage.runtime.events import NUM_EVENTS, WriteOrder
from hotpage.runtime.rendezvous import Rendezvous

SOON_S = 1.0


class FileEvents:
    """Events in a file of 8-byte words that all ranks map."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), 4096)
        self.created = 0
        self.wrong: list[tuple[int, int]] = []
        self.live: set[int] = set()

    def create_event(self) -> tuple[int, bytes]:
        self.created += 1
        return self._opened(self.created), bytes([self.created])

    def open_event(self, handle: bytes) -> int:
        return self._opened(handle[0])

    def _opened(self, event: int) -> int:
        self.live.add(event)
        return event

    def record_event(self, event: int, stream: int) -> None:
        self._words[8 * event : 8 * event + 8] = stream.to_bytes(8, "little")

    def wait_event(self, event: int, stream: int) -> None:
        found = int.from_bytes(self._words[8 * event : 8 * event + 8], "little")
        if found != stream:
            self.wrong.append((found, stream))

    def destroy_event(self, event: int) -> None:
        self.live.remove(event)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """An empty file of words."""
    path = tmp_path / "words"
    path.write_bytes(bytes(4096))
    return path


def _steps(path: Path, late: int, name: str, rank: int, n: int) -> list:
    """Steps in which one rank now and then comes late by some of them, and so does rank 0."""
    chance = random.Random(rank)
    driver = FileEvents(path)
    with Rendezvous(name, rank, n) as ranks:
        order = WriteOrder(ranks, driver=driver)
        for step in range(1, 1001):
            if rank in (0, late) and chance.random() < 0.02:
                time.sleep(0.005)
            if rank == 0:
                order.record(step)
            order.wait(step)
        ranks.barrier()
        wrong = driver.wrong
        order.close()
        order.close()
        return [wrong, order.waited, sorted(driver.live), driver.created]


def test_every_wait_is_for_its_own_step_whoever_is_late_over_a_thousand_steps(
    words: Path,
) -> None:
    outcomes = run_ranks(functools.partial(_steps, words, 3), 4)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == ""
        created = NUM_EVENTS if rank == 0 else 0
        assert outcome.value == [[], 1000, [], created]


def _idle_steps(path: Path, name: str, rank: int, n: int) -> list:
    """Nothing but steps without a forward, in which no collective holds rank 0 back."""
    driver = FileEvents(path)
    with Rendezvous(name, rank, n) as ranks:
        order = WriteOrder(ranks, driver=driver)
        ahead = []
        for step in range(1, 7):
            if rank == 3:
                time.sleep(0.1)
            if rank == 0:
                order.record(step)
                ahead.append(step - min(word.value for word in order._words[1:]))
            order.wait(step)
        return [driver.wrong, ahead]


def test_a_rank_that_is_late_by_two_idle_steps_still_waits_for_what_it_has_to(
    words: Path,
) -> None:
    outcomes = run_ranks(functools.partial(_idle_steps, words), 4)
    assert [outcome.error for outcome in outcomes] == [""] * 4
    assert all(outcome.value[0] == [] for outcome in outcomes)
    ahead = outcomes[0].value[1]
    assert max(ahead) == NUM_EVENTS, "rank 0 was held back, and not before it had to be"


def _one_dies(path: Path, dying: int, name: str, rank: int, n: int) -> None:
    with Rendezvous(name, rank, n) as ranks:
        order = WriteOrder(ranks, driver=FileEvents(path))
        for step in range(1, 100):
            if rank == dying and step == 4:
                die()
            if rank == 0:
                order.record(step)
            order.wait(step)


@pytest.mark.parametrize("dying", [0, 1])
def test_nobody_waits_for_the_call_of_a_rank_that_died(words: Path, dying: int) -> None:
    outcomes = run_ranks(functools.partial(_one_dies, words, dying), 2)
    assert outcomes[dying] is None
    assert f"rank {dying} has ended" in outcomes[1 - dying].error
    assert outcomes[1 - dying].seconds < SOON_S


def _no_events(name: str, rank: int, n: int) -> None:
    class Refusing(FileEvents):
        def __init__(self) -> None:
            pass

        def create_event(self) -> tuple[int, bytes]:
            raise IpcError("cuIpcGetEventHandle: not supported")

    with Rendezvous(name, rank, n) as ranks:
        WriteOrder(ranks, driver=Refusing())


def test_events_that_cannot_be_shared_are_an_error_on_all_ranks() -> None:
    for outcome in run_ranks(_no_events, 2):
        assert outcome.error.startswith("RankError")
        assert "cuIpcGetEventHandle: not supported" in outcome.error


def test_a_single_rank_orders_itself(words: Path) -> None:
    with Rendezvous("alone", 0, 1) as ranks:
        order = WriteOrder(ranks, driver=FileEvents(words), time_limit_s=0.05)
        for step in range(1, 40):
            order.record(step)
            order.wait(step)
        with pytest.raises(RankError, match="did not record the writes of step 40 within"):
            order.wait(40)
        order.record(40)
        order.record(41)
        with pytest.raises(RankError, match="not every rank waited for the writes of step 40"):
            order.record(42)
        order.close()
