# SPDX-License-Identifier: Apache-2.0
"""Owns the side stream for copies to the host: the only place that records or waits for events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class SideStream:
    """A stream beside the one that computes.

    Work on it comes behind what the computing stream had when it forked, and before what that
    stream gets after it joined. All methods enqueue and return at once, `synchronize` excepted.

    Args:
        device: CUDA device of both streams.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device=device)
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._busy = False

    @property
    def address(self) -> int:
        """Address of the stream."""
        return self._stream.cuda_stream

    @contextlib.contextmanager
    def forked(self) -> Iterator[int]:
        """Makes it the current stream, behind all that the computing stream has so far.

        Yields:
            Address of the stream.
        """
        import torch

        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream
            self._done.record(self._stream)
        self._busy = True

    def join(self) -> None:
        """The current stream waits for all that was put here."""
        import torch

        if self._busy:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._busy = False

    def synchronize(self) -> None:
        """The calling thread waits for all that was put here."""
        self._stream.synchronize()


def mark() -> torch.cuda.Event:
    """An event behind all that the current stream has so far."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return event


def current_stream(device: torch.device) -> int:
    """Address of the current stream."""
    import torch

    return torch.cuda.current_stream(device).cuda_stream


def wait_for_current_stream(device: torch.device) -> None:
    """The calling thread waits for all that the current stream has so far."""
    import torch

    torch.cuda.current_stream(device).synchronize()


def wait_for_device(device: torch.device) -> None:
    """The calling thread waits for all streams.

    Raises:
        RuntimeError: an earlier launch failed, or the context is gone.
    """
    import torch

    torch.cuda.synchronize(device)
