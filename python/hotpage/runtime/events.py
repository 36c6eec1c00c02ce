# SPDX-License-Identifier: Apache-2.0
"""Owns the order between the writer of the shared host pool and its readers, step by step.

Rank 0 records an interprocess event after its writes of a step; the streams of all ranks wait for
it before they read. An event says two things only at the moment of the host call: a wait that comes
before the record waits for an older one, and a record that comes before the wait replaces what the
wait was for. So each rank publishes how many steps it has recorded or waited for, in a page of
memory that all map, and a host call that would come too early waits for the other rank's. A step
without a forward is no special case, and nobody needs a collective for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

from hotpage.errors import RankError
from hotpage.runtime._ipc import CudaIpc, EventDriver, IpcError
from hotpage.runtime.rendezvous import Rendezvous

NUM_EVENTS = 2
"""Steps that rank 0 may be ahead of the slowest rank before it waits for it."""

_LINE_BYTES = 64
_LOOK_S = 0.05
"""How often a wait looks whether the other process has ended."""


class WriteOrder:
    """Orders rank 0's writes of a step before what every rank enqueues after `wait`.

    Each step, in this order: rank 0 calls `record` on the stream of its writes, then every rank,
    rank 0 included, calls `wait` on the stream of its reads; also in steps that write nothing.
    `wait` may come a step later, in front of the reads. Neither waits for the GPU; a call waits for
    another rank's call only where it came too early.

    Args:
        rendezvous: of the ranks; all make this object at the same time.
        device: CUDA ordinal.
        driver: the CUDA driver, by default this process's own.
        time_limit_s: seconds to wait for another rank's call.

    Raises:
        RankError: a rank failed meanwhile.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        device: int = 0,
        driver: EventDriver | None = None,
        time_limit_s: float = 60.0,
    ) -> None:
        self._rendezvous, self._time_limit_s = rendezvous, time_limit_s
        self.recorded = self.waited = 0
        """Steps that this rank has recorded and waited for."""
        self._page = _map_page(rendezvous)
        self._words = [
            ctypes.c_uint64.from_buffer(self._page, _LINE_BYTES * i)
            for i in range(rendezvous.num_ranks + 1)
        ]
        self._events: list[int] = []
        self._driver = driver if driver is not None else CudaIpc(device)
        try:
            self._make_events()
        except BaseException as error:
            rendezvous.fail(str(error))
            self.close()
            raise

    def _make_events(self) -> None:
        rendezvous = self._rendezvous
        handles: list[str] = []
        try:
            if rendezvous.rank == 0:
                for _ in range(NUM_EVENTS):
                    event, handle = self._driver.create_event()
                    self._events.append(event)
                    handles.append(handle.hex())
            handles = rendezvous.all_gather(handles)[0]
            if rendezvous.rank != 0:
                self._events += [self._driver.open_event(bytes.fromhex(h)) for h in handles]
        except IpcError as error:
            raise RankError(f"an event between the ranks cannot be made: {error}") from error
        rendezvous.barrier()

    def _await(self, ready: Any, what: str) -> None:
        deadline = time.monotonic() + self._time_limit_s
        look = time.monotonic() + _LOOK_S
        while not ready():
            now = time.monotonic()
            if now > deadline:
                raise RankError(f"{what} within {self._time_limit_s:g} s")
            if now > look:
                ended = self._rendezvous.ended_rank()
                if ended is not None and not ready():
                    raise RankError(f"{what}: rank {ended} has ended")
                look = now + _LOOK_S
            time.sleep(0)

    def record(self, stream: int) -> None:
        """Rank 0: everything enqueued on the stream so far is what this step wrote.

        Raises:
            RankError: a rank did not wait for the step whose event this one uses, or has ended.
        """
        step = self.recorded + 1
        # The event was last recorded NUM_EVENTS steps ago, and everybody waits for that record.
        oldest = step - NUM_EVENTS
        readers = self._words[1:]
        self._await(
            lambda: all(word.value >= oldest for word in readers),
            f"not every rank waited for the writes of step {oldest}",
        )
        self._driver.record_event(self._events[step % NUM_EVENTS], stream)
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
        self._driver.wait_event(self._events[step % NUM_EVENTS], stream)
        self.waited = step
        self._words[1 + self._rendezvous.rank].value = step

    def close(self) -> None:
        """Ends the events. May be called again."""
        while self._events:
            try:
                self._driver.destroy_event(self._events.pop())
            except IpcError:
                # The context is gone, and its events with it.
                continue
        self._words.clear()
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
