# SPDX-License-Identifier: Apache-2.0
"""Owns what devices of several processes have in common on a CPU: events, and memory that others
reach.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_streams import FakeStream, Streams

from hotpage.runtime import events
from hotpage.runtime._ipc import IpcError

STUCK_S = 30.0
"""Seconds after which nobody comes any more."""


class DeviceEvents:
    """Events between devices, in words that all ranks map; a wait is for the record that the event
    had at the moment of the host call.

    The computing stream does everything at once, so it waits at once. Another rank that waits makes
    a side stream run, up to the record and no further.
    """

    def __init__(self, path: Path, rank: int, streams: Streams) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
        self._rank, self._streams, self._created = rank, streams, 0
        self._records: dict[int, tuple[FakeStream, int, int]] = {}

    def create_event(self) -> tuple[int, bytes]:
        """As the protocol has it."""
        event = self._rank * events.NUM_EVENTS + self._created
        self._created += 1
        return event, bytes([event])

    def open_event(self, handle: bytes) -> int:
        """As the protocol has it."""
        return handle[0]

    def destroy_event(self, event: int) -> None:
        """As the protocol has it."""

    def record_event(self, event: int, stream: int) -> None:
        """As the protocol has it."""
        number, on = self._words[3 * event] + 1, self._streams.at(stream)
        self._enqueue(on, lambda: self._words.__setitem__(3 * event + 1, number))
        self._records[event] = (on, on.num_put, number)
        self._words[3 * event] = number

    def wait_event(self, event: int, stream: int) -> None:
        """As the protocol has it."""
        number, on = self._words[3 * event], self._streams.at(stream)
        self._enqueue(on, lambda: self._wait(event, number, on))

    def _enqueue(self, stream: FakeStream, work: Callable[[], Any]) -> None:
        if stream is self._streams.computing:
            stream.put(work)
        else:
            # OK because it touches no tensor, whatever the computing stream has done since.
            stream.queue.append(work)
            stream.num_put += 1
            if not self._streams.late:
                stream.run()

    def _wait(self, event: int, number: int, stream: FakeStream) -> None:
        self._words[3 * event + 2] = max(self._words[3 * event + 2], number)
        deadline = time.monotonic() + STUCK_S
        while self._words[3 * event + 1] < number:
            if stream is self._streams.computing:
                self.go_on()
            time.sleep(0.0002)
            assert time.monotonic() < deadline, f"event {event} never came to {number}"

    def go_on(self) -> None:
        """Runs what other ranks wait for."""
        for event, (stream, position, number) in self._records.items():
            if self._words[3 * event + 2] >= number > self._words[3 * event + 1]:
                stream.run(position)


class PeerMemory:
    """Devices' memory as other processes see it: tensors that lie in memory without a name.

    Args:
        rank: of this process.
        reachable: False is a device that no other one reaches.
    """

    def __init__(self, rank: int, *, reachable: bool) -> None:
        self._rank, self._reachable = rank, reachable
        self._shared: list[tuple[int, int, int]] = []
        self._opened: dict[int, mmap.mmap] = {}

    def share(self, tensor: torch.Tensor) -> None:
        """Moves the storage of a tensor, and so of all its views, to where it can be shared."""
        storage = tensor.untyped_storage()
        fd, size = storage._share_fd_cpu_()
        self._shared.append((storage.data_ptr(), size, fd))

    def pci_bus_id(self) -> str | None:
        """As the protocol has it."""
        return f"0000:{self._rank:02x}:00.0" if self._reachable else None

    def why_no_access(self, pci_bus_id: str) -> str | None:
        """As the protocol has it."""
        return None

    def export_memory(self, address: int) -> tuple[bytes, int]:
        """As the protocol has it."""
        for start, size, fd in self._shared:
            if start <= address < start + size:
                return f"{os.getpid()} {fd} {size}".encode(), address - start
        raise IpcError(f"memory at {address:#x} cannot be shared")

    def open_memory(self, handle: bytes) -> int:
        """As the protocol has it."""
        process, fd, size = map(int, handle.split())
        with Path(f"/proc/{process}/fd/{fd}").open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._opened[address] = mapping
        return address

    def close_memory(self, address: int) -> None:
        """As the protocol has it."""
        del self._opened[address]
