# SPDX-License-Identifier: Apache-2.0
"""Owns the order of the shared pool's writer and readers: processes, some with devices that lag.

A stand-in event is a word in a file: a record stores the step, a wait reads what a stream would
wait for at that moment. The "stream" of a call is the step that the test expects.
"""

from __future__ import annotations

import functools
import mmap
import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import die, run_ranks

from hotpage.errors import ConfigError, ProtocolError, RankError
from hotpage.runtime._ipc import IpcError
from hotpage.runtime.events import NUM_EVENTS, WriteOrder
from hotpage.runtime.rendezvous import Rendezvous

SOON_S = 1.0


class FileEvents:
    """Events in a file of 8-byte words that all ranks map."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), 4096)
        self._first, self.created = 1 + NUM_EVENTS * rank, 0
        self.wrong: list[tuple[int, int]] = []
        self.live: set[int] = set()

    def create_event(self) -> tuple[int, bytes]:
        event = self._first + self.created
        self.created += 1
        return self._opened(event), bytes([event])

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
    driver = FileEvents(path, rank)
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
    for outcome in outcomes:
        assert outcome.error == ""
        assert outcome.value == [[], 1000, [], NUM_EVENTS]


def _idle_steps(path: Path, name: str, rank: int, n: int) -> list:
    """Nothing but steps without a forward, in which no collective holds rank 0 back."""
    driver = FileEvents(path, rank)
    with Rendezvous(name, rank, n) as ranks:
        order = WriteOrder(ranks, driver=driver)
        ahead = []
        for step in range(1, 7):
            if rank == 3:
                time.sleep(0.1)
            if rank == 0:
                order.record(step)
                ahead.append(step - min(word.value for word in order._words[1:5]))
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
        order = WriteOrder(ranks, driver=FileEvents(path, rank))
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


def _go_on(order: WriteOrder, rank: int) -> None:
    for step in range(1, 100):
        if rank == 0:
            order.record(step)
        order.wait(step)


def _one_leaves(path: Path, leaving: int, name: str, rank: int, n: int) -> list:
    with Rendezvous(name, rank, n) as ranks:
        order = WriteOrder(ranks, driver=FileEvents(path, rank))
        if rank == leaving:
            ranks.fail("out of pencils")
            # Its process lives on, longer than the other one may wait.
            time.sleep(2 * SOON_S)
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            _go_on(order, rank)
        seconds = time.monotonic() - start
        # The error is kept, as by a thread that reports it, and with it what the call had at hand.
        order.close()
        return [str(caught.value), seconds]


@pytest.mark.parametrize("leaving", [0, 1])
def test_nobody_waits_for_the_call_of_a_rank_that_said_why_it_left(
    words: Path, leaving: int
) -> None:
    outcomes = run_ranks(functools.partial(_one_leaves, words, leaving), 2)
    for outcome in outcomes:
        assert outcome.error == ""
        text, seconds = outcome.value
        assert f"rank {leaving}: out of pencils" in text
        assert seconds < SOON_S


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
        order = WriteOrder(ranks, driver=FileEvents(words, 0), time_limit_s=0.05)
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


# Both directions, with devices that lag behind their hosts.


class Device:
    """A stream that a thread works off, and events as CUDA has them, in words that all ranks map.

    A wait is for the record that the event had at the moment of the host call.
    """

    def __init__(self, path: Path, rank: int, slowness_s: float) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
        self._first, self._created = NUM_EVENTS * rank, 0
        self._chance, self._slowness_s = random.Random(rank), slowness_s
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self.seen: list[int] = []

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._chance.random() * self._slowness_s)
            work()

    def finish(self) -> None:
        """Works off what is left."""
        self._queue.put(None)
        self._thread.join()

    def write(self, step: int) -> None:
        """Overwrites what the step before the last one wrote."""
        self._queue.put(lambda: self._words.__setitem__(256 + step % 2, step))

    def read(self, step: int) -> None:
        """Reads what a step wrote."""
        self._queue.put(lambda: self.seen.append(self._words[256 + step % 2]))

    def create_event(self) -> tuple[int, bytes]:
        event = self._first + self._created
        self._created += 1
        return event, bytes([event])

    def open_event(self, handle: bytes) -> int:
        return handle[0]

    def record_event(self, event: int, stream: int) -> None:
        number = self._words[2 * event] + 1
        self._queue.put(lambda: self._words.__setitem__(2 * event + 1, number))
        self._words[2 * event] = number

    def wait_event(self, event: int, stream: int) -> None:
        number = self._words[2 * event]

        def wait() -> None:
            while self._words[2 * event + 1] < number:
                time.sleep(0)

        self._queue.put(wait)

    def destroy_event(self, event: int) -> None:
        pass


LAGGING_STEPS = 150


def _both_ways(path: Path, slow: int, fault: str, name: str, rank: int, n: int) -> list[int]:
    """Step k reads what step k - 1 wrote, where step k + 1 writes."""
    device = Device(path, rank, 0.004 if rank == slow else 0.0004)
    with Rendezvous(name, rank, n) as ranks:
        order = WriteOrder(ranks, driver=device, time_limit_s=20.0)
        if fault == "no wait for the writes" and rank:
            device.wait_event = lambda event, stream: None
        for step in range(1, LAGGING_STEPS):
            order.begin_step(0)
            if rank == 0:
                order.record(0)
            order.wait(0)
            device.read(step - 1)
            if rank == 0:
                if fault != "no wait for the reads":
                    order.await_reads(0)
                device.write(step)
        device.finish()
        ranks.barrier()
        order.close()
        return device.seen


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_reads_come_between_the_writes_around_them_whichever_device_lags(
    words: Path, slow: int
) -> None:
    outcomes = run_ranks(functools.partial(_both_ways, words, slow, ""), 3)
    for outcome in outcomes:
        assert outcome.error == ""
        assert outcome.value == list(range(LAGGING_STEPS - 1))


@pytest.mark.parametrize(
    ("slow", "fault"), [(0, "no wait for the writes"), (1, "no wait for the reads")]
)
def test_a_wait_that_is_left_out_lets_a_rank_read_what_it_must_not(
    words: Path, slow: int, fault: str
) -> None:
    outcomes = run_ranks(functools.partial(_both_ways, words, slow, fault), 2)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert outcomes[1].value != list(range(LAGGING_STEPS - 1))


def _one_does_not_begin(path: Path, name: str, rank: int, n: int) -> None:
    with Rendezvous(name, rank, n) as ranks:
        order = WriteOrder(ranks, driver=FileEvents(path, rank), time_limit_s=0.2)
        if rank == 0:
            order.begin_step(1)
            order.await_reads(1)
        else:
            time.sleep(0.4)


def test_rank_0_does_not_write_before_every_rank_has_said_what_it_read(words: Path) -> None:
    outcomes = run_ranks(functools.partial(_one_does_not_begin, words), 2)
    assert "not every rank began step 1 within" in outcomes[0].error


def test_a_step_cannot_begin_before_the_last_one_has_waited(words: Path) -> None:
    with Rendezvous("alone twice", 0, 1) as ranks:
        order = WriteOrder(ranks, driver=FileEvents(words, 0))
        order.begin_step(1)
        with pytest.raises(ProtocolError, match="step 2 begins, and nobody waited in step 1"):
            order.begin_step(1)
        order.record(1)
        order.wait(1)
        order.begin_step(2)
        order.await_reads(2)
        order.close()


def test_more_ranks_than_the_page_holds_are_refused() -> None:
    class Many:
        rank, num_ranks = 0, 32

    with pytest.raises(ConfigError, match="32 ranks share the host pool, expected at most 31"):
        WriteOrder(Many(), driver=None)
