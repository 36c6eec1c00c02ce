# SPDX-License-Identifier: Apache-2.0
"""Owns the order between the writer of the shared host pool and its readers, step by step.

Rank 0 records an interprocess event after its writes; the streams of all ranks wait for it before
they read. The other ranks record one after their reads; rank 0's stream waits for these before it
writes again. An event says two things only at the moment of the host call: a wait that comes before
the record waits for an older one, and a record that comes before the wait replaces what the wait
was for. So each rank publishes how many calls it has made, in a page of memory that all map, and a
host call that would come too early waits for the other rank's. A step without a forward is no
special case, and nobody needs a collective for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

from hotpage.errors import ConfigError, ProtocolError, RankError
from hotpage.runtime._ipc import CudaIpc, EventDriver, IpcError
from hotpage.runtime.rendezvous import Rendezvous

NUM_EVENTS = 2
"""Steps that rank 0 may be ahead of the slowest rank before it waits for it."""

_LINE_BYTES = 64
_MAX_RANKS = (mmap.PAGESIZE // _LINE_BYTES - 1) // 2
_LOOK_S = 0.05
"""How often a wait looks whether the other process has ended."""


class WriteOrder:
    """Orders rank 0's writes of a step before what every rank enqueues after `wait`, and, where
    ranks call `begin_step`, what they read in a step before rank 0's writes of the next one.

    Each step, in this order: every rank calls `begin_step` on the stream of its reads; rank 0 calls
    `record` on the stream of its writes, then every rank, rank 0 included, calls `wait` on the
    stream of its reads; also in steps that write nothing. Rank 0 calls `await_reads` in a step
    before its first write, which may be behind `record`. `record` and `wait` may come again in the
    same step, on all ranks alike. `wait` may come a step later, in front of the reads, where nobody
    calls `begin_step`.

    No call waits for the GPU; it waits for another rank's call only where it came too early. Two
    events are enough in both directions:

    * Rank 0 records for the nth time only after every rank has waited for the record before the
      last one, whose event this is.
    * Another rank begins step n + 2, and records its event of step n again, only after it has
      waited for step n + 1, which rank 0 records in its own step n + 1. Rank 0 asks for the reads
      before step n in its own step n, so it asked before that or never will.

    Nothing waits for itself. Rank 0's writes of step n wait for reads of steps before n; these wait
    for what rank 0 wrote before it recorded their step, and in collectives for what rank 0 computed
    in their step, both enqueued before step n began.

    Args:
        rendezvous: of the ranks; all make this object at the same time.
        device: CUDA ordinal.
        driver: the CUDA driver, by default this process's own.
        time_limit_s: seconds to wait for another rank's call.

    Raises:
        RankError: a rank failed meanwhile.
        ConfigError: more ranks than the page has room for.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        device: int = 0,
        driver: EventDriver | None = None,
        time_limit_s: float = 60.0,
    ) -> None:
        num_ranks = rendezvous.num_ranks
        if num_ranks > _MAX_RANKS:
            raise ConfigError(
                f"{num_ranks} ranks share the host pool, expected at most {_MAX_RANKS}"
            )
        self._rendezvous, self._time_limit_s = rendezvous, time_limit_s
        self.begun = self.recorded = self.waited = 0
        """Steps that this rank has begun, recorded and waited for."""
        self._page = _map_page(rendezvous)
        self._words = [
            ctypes.c_uint64.from_buffer(self._page, _LINE_BYTES * i)
            for i in range(1 + 2 * num_ranks)
        ]
        """Steps recorded by rank 0, then steps waited for by each rank, then steps begun."""
        self._written: list[int] = []
        """Events of rank 0, of odd and even steps."""
        self._read: list[list[int]] = []
        """On rank 0 events of the other ranks, elsewhere this rank's alone."""
        self._driver = driver if driver is not None else CudaIpc(device)
        try:
            self._make_events()
        except BaseException as error:
            rendezvous.fail(str(error))
            self.close()
            raise

    def _make_events(self) -> None:
        rendezvous = self._rendezvous
        own: list[int] = []
        handles: list[str] = []
        if rendezvous.rank == 0:
            self._written = own
        else:
            self._read.append(own)
        try:
            for _ in range(NUM_EVENTS):
                event, handle = self._driver.create_event()
                own.append(event)
                handles.append(handle.hex())
            all_handles = rendezvous.all_gather(handles)
            if rendezvous.rank == 0:
                for others in all_handles[1:]:
                    self._read.append([])
                    self._open(others, self._read[-1])
            else:
                self._open(all_handles[0], self._written)
        except IpcError as error:
            raise RankError(f"an event between the ranks cannot be made: {error}") from error
        rendezvous.barrier()

    def _open(self, handles: Sequence[str], events: list[int]) -> None:
        for handle in handles:
            events.append(self._driver.open_event(bytes.fromhex(handle)))

    def _await(self, ready: Any, what: str) -> None:
        deadline = time.monotonic() + self._time_limit_s
        look = time.monotonic() + _LOOK_S
        while not ready():
            now = time.monotonic()
            if now > deadline:
                raise RankError(f"{what} within {self._time_limit_s:g} s")
            if now > look:
                ended = self._rendezvous.why_ended()
                if ended is not None and not ready():
                    raise RankError(f"{what}: {ended}")
                look = now + _LOOK_S
            time.sleep(0)

    def begin_step(self, stream: int) -> None:
        """What is enqueued on the stream so far are this rank's reads of earlier steps.

        Raises:
            ProtocolError: this rank did not wait for the writes of the step that ends.
        """
        rank, step = self._rendezvous.rank, self.begun + 1
        if self.waited < self.begun:
            raise ProtocolError(f"step {step} begins, and nobody waited in step {self.begun}")
        if rank != 0:
            self._driver.record_event(self._read[0][step % NUM_EVENTS], stream)
        self.begun = step
        self._words[1 + self._rendezvous.num_ranks + rank].value = step

    def await_reads(self, stream: int) -> None:
        """Rank 0: what is enqueued on the stream from now on comes after the other ranks' reads of
        steps before this one.

        Raises:
            RankError: a rank did not begin this step, or has ended.
        """
        step = self.begun
        readers = self._words[2 + self._rendezvous.num_ranks :]
        self._await(
            lambda: all(word.value >= step for word in readers), f"not every rank began step {step}"
        )
        for events in self._read:
            self._driver.wait_event(events[step % NUM_EVENTS], stream)

    def record(self, stream: int) -> None:
        """Rank 0: everything enqueued on the stream so far is what this step wrote.

        Raises:
            RankError: a rank did not wait for the step whose event this one uses, or has ended.
        """
        step = self.recorded + 1
        # The event was last recorded NUM_EVENTS steps ago, and everybody waits for that record.
        oldest = step - NUM_EVENTS
        readers = self._words[1 : 1 + self._rendezvous.num_ranks]
        self._await(
            lambda: all(word.value >= oldest for word in readers),
            f"not every rank waited for the writes of step {oldest}",
        )
        self._driver.record_event(self._written[step % NUM_EVENTS], stream)
        self.recorded = step
        self._words[0].value = step

    def wait(self, stream: int) -> None:
        """What is enqueued on the stream from now on comes after rank 0's writes of this step.

        Raises:
            RankError: rank 0 did not record the step, or has ended.
        """
        step = self.waited + 1
        written = self._words[0]
        self._await(
            lambda: written.value >= step, f"rank 0 did not record the writes of step {step}"
        )
        self._driver.wait_event(self._written[step % NUM_EVENTS], stream)
        self.waited = step
        self._words[1 + self._rendezvous.rank].value = step

    def close(self) -> None:
        """Ends the events. May be called again."""
        for events in (self._written, *self._read):
            while events:
                # Where the context is gone its events are gone with it.
                with contextlib.suppress(IpcError):
                    self._driver.destroy_event(events.pop())
        self._words.clear()
        # The traceback of a wait that failed may hold words still; the page is freed with them.
        with contextlib.suppress(BufferError):
            self._page.close()


def _map_page(rendezvous: Rendezvous) -> mmap.mmap:
    """A page of memory that all ranks map; it has no name anywhere."""
    fd = None
    if rendezvous.rank == 0:
        fd = os.memfd_create("hotpage-order", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
    fd = rendezvous.share_fd(fd)
    try:
        return mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)
