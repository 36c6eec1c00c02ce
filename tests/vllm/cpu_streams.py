# SPDX-License-Identifier: Apache-2.0
"""Owns CUDA streams and events on a CPU: the computing stream runs at once, others when it matters.

Work beside the computing stream is put off as long as CUDA could put it off: until somebody waits
for it, or asks an event whether it has run and a drawn number says so. A wait that is missing
therefore shows as bytes that came too late, or that were overwritten before they were read. Work
that is enqueued without waiting for what the computing stream did before it is an error at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FakeStream:
    """One stream; its address is a number that launches name."""

    def __init__(self, streams: Streams, address: int) -> None:
        self.streams, self.cuda_stream = streams, address
        self.queue: deque[Callable[[], Any]] = deque()
        self.num_put, self.num_run = 0, 0
        self.num_waits = 0
        """Times that the calling thread waited for all that was here."""
        self.seen = 0
        """Marks of the computing stream that it waits behind."""
        self._contexts: list[Any] = []

    def put(self, work: Callable[[], Any]) -> None:
        """Enqueues work."""
        if self is self.streams.computing:
            self.streams.compute(work)
            return
        assert self.seen == self.streams.clock, "work beside the stream that it must come behind"
        self.queue.append(work)
        self.num_put += 1
        if not self.streams.late:
            self.run()

    def run(self, up_to: int | None = None) -> None:
        """Runs what is enqueued, up to a position."""
        while self.queue and (up_to is None or self.num_run < up_to):
            self.num_run += 1
            self.queue.popleft()()

    def wait_event(self, event: FakeEvent) -> None:
        """What comes next is behind the event."""
        if event.stream is None:
            return
        if event.stream is self.streams.computing:
            self.seen = max(self.seen, event.position)
        elif event.stream is not self:
            # A queue that is run now was run behind it, whatever waits.
            event.stream.run(event.position)

    def wait_stream(self, other: FakeStream) -> None:
        """What comes next is behind all that the other has."""
        self.wait_event(other.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """An event behind all that is here."""
        event = event or FakeEvent(self.streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The calling thread waits for all that is here."""
        self.num_waits += 1
        self.run()

    def __enter__(self) -> FakeStream:
        self._contexts.append(self.streams.on(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)


class FakeEvent:
    """A place in one stream."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.stream: FakeStream | None = None
        self.position = 0

    def record(self, stream: FakeStream | None = None) -> None:
        """Puts it behind all that the stream has."""
        self.stream = stream or self.streams.current
        computes = self.stream is self.streams.computing
        self.position = self.streams.clock if computes else self.stream.num_put

    def wait(self, stream: FakeStream | None = None) -> None:
        """A stream waits for it."""
        (stream or self.streams.current).wait_event(self)

    def query(self) -> bool:
        """Whether the stream has passed it; a stream that runs late may not have."""
        if self.stream is None:
            return True
        if self.stream is not self.streams.computing and self.stream.num_run < self.position:
            if not self.streams.chance(self.streams.haste):
                return False
            self.stream.run(self.position)
        return True

    def synchronize(self) -> None:
        """The caller waits for it."""
        if self.stream is not None and self.stream is not self.streams.computing:
            self.stream.run(self.position)


class _PutOff(TorchDispatchMode):
    """Enqueues what torch writes, instead of writing it."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        self._stream.put(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])


class Streams:
    """All streams of a device that is none.

    Args:
        late: side streams run when somebody waits for them; otherwise at once.
        haste: chance in percent that asking an event lets its stream run that far.
        seed: of these chances.
    """

    def __init__(self, *, late: bool = True, haste: int = 0, seed: int = 0) -> None:
        self.late, self.haste = late, haste
        self._rng = np.random.default_rng(seed)
        self.clock = 0
        """Changes that the computing stream has made."""
        self._all: dict[int, FakeStream] = {}
        self.computing = self.make()
        self.current = self.computing

    def make(self, *_: Any, **__: Any) -> FakeStream:
        """A stream; takes the arguments of torch's constructors."""
        stream = FakeStream(self, 16 * (1 + len(self._all)))
        self._all[stream.cuda_stream] = stream
        return stream

    def make_event(self, *_: Any, **__: Any) -> FakeEvent:
        """An event; takes the arguments of torch's constructors."""
        return FakeEvent(self)

    def at(self, address: int) -> FakeStream:
        """The stream that a launch names."""
        return self._all[address]

    def chance(self, percent: int) -> bool:
        """True in `percent` of all cases."""
        return bool(self._rng.integers(100) < percent)

    def compute(self, work: Callable[[], Any]) -> None:
        """Runs work of the computing stream."""
        self.clock += 1
        work()

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Makes a stream the current one."""
        before, self.current = self.current, stream
        mode = contextlib.nullcontext() if stream is self.computing else _PutOff(stream)
        try:
            with mode:
                yield
        finally:
            self.current = before

    def synchronize(self, *_: Any) -> None:
        """Runs everything."""
        for stream in self._all.values():
            stream.run()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts the streams in torch's place, for hotpage and for vLLM's index groups."""
        from vllm.v1.attention.backends.mla import index_group
        from vllm.v1.hisparse import runtime

        patch.setattr(torch.cuda, "Stream", self.make)
        patch.setattr(torch.cuda, "Event", self.make_event)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(index_group, "_create_side_stream", self.make)
        patch.setattr(index_group, "_create_event", self.make_event)
        patch.setattr(index_group, "current_stream", lambda: self.current)
        patch.setattr(runtime, "_create_copy_stream", self.make)
