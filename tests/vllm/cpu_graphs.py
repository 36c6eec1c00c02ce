# SPDX-License-Identifier: Apache-2.0
"""Owns captured graphs on a CPU: what a forward pass enqueues, recorded once and run again.

A capture runs no work. It keeps every launch with its parameters as they are, and every operation
of torch with its tensors; a replay runs them, without any Python of a layer or of hotpage. Tensors
that torch made inside the capture hold poison before and after each replay, as a pool's memory
that other graphs share may.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cpu_streams import Streams
from torch.utils._python_dispatch import TorchDispatchMode

SPOILT = 0x2A2A2A2A
"""In buffers whose contents no one may read."""

_READS_BACK = ("aten::_local_scalar_dense", "aten::item", "aten::lift_fresh", "aten::nonzero")
"""What waits for the device, or copies from memory that a replay would not find."""


class Graph:
    """Work of the computing stream, in its order."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.works: list[Callable[[], Any]] = []
        self.made: list[torch.Tensor] = []
        """Tensors that torch made inside the capture."""

    def replay(self) -> None:
        """Enqueues the whole graph on the computing stream."""
        self._streams.compute(self._run)

    def spoil(self) -> None:
        """Overwrites what was made inside the capture."""
        for tensor in self.made:
            tensor.fill_(SPOILT % 251 if tensor.element_size() < 4 else SPOILT)

    def _run(self) -> None:
        self.spoil()
        for work in self.works:
            work()
        self.spoil()


class _Record(TorchDispatchMode):
    """Keeps what torch would run for a replay, and makes its tensors, but runs nothing."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        assert schema.name not in _READS_BACK, f"{schema.name} inside a capture"
        if schema.is_mutable:
            self._graph.works.append(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        if any(one.alias_info is not None for one in schema.returns):
            return func(*args, **kwargs)
        # Run for the shape of what it makes, on whatever its inputs hold.
        made = func(*args, **kwargs)
        assert isinstance(made, torch.Tensor), f"{schema.name} inside a capture"

        def again() -> None:
            made.copy_(func(*args, **kwargs))

        self._graph.works.append(again)
        self._graph.made.append(made)
        self._graph.spoil()
        return made


class GraphStreams(Streams):
    """Streams of a device whose computing stream can be captured."""

    def __init__(self, **chances: Any) -> None:
        self._graph: Graph | None = None
        super().__init__(**chances)

    def compute(self, work: Callable[[], Any]) -> None:
        """Keeps the work instead, inside a capture."""
        if self._graph is None:
            super().compute(work)
        else:
            self._graph.works.append(work)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Captures what is enqueued, which must be on the computing stream alone."""
        assert self.current is self.computing
        before = self._beside()
        graph = self._graph = Graph(self)
        try:
            with _Record(graph):
                yield graph
        finally:
            self._graph = None
        assert self._beside() == before, "a capture uses, or waits for, another stream"

    def _beside(self) -> list[tuple[int, int, int]]:
        return [(one.num_put, one.num_run, one.num_waits) for one in self._all.values()]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """As Streams', and torch says when a capture is on."""
        super().install(patch)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self._graph is not None)
