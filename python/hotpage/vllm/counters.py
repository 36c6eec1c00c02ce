# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of the device counters: now and then, and never by waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotpage.runtime.streams import mark
from hotpage.runtime.upload import pinned_zeros

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.stats import (
        HiSparseKVConnectorStats,
    )


class DeviceCounters:
    """Hits and misses of all index groups.

    Args:
        counters: int64 `[3]` of each index group, which only grow.
        row_bytes: bytes that a miss of the group moves, all its layers together.
        interval: calls of `poll` between two readings.
    """

    def __init__(
        self, counters: Sequence[torch.Tensor], row_bytes: Sequence[int], interval: int
    ) -> None:
        import torch

        self._counters, self._row_bytes = list(counters), list(row_bytes)
        self._interval, self._calls = interval, 0
        self._host = pinned_zeros((len(counters), 3), torch.int64)
        self._seen = [(0, 0)] * len(self._counters)
        self._event: torch.cuda.Event | None = None

    def poll(self) -> HiSparseKVConnectorStats | None:
        """What came in since the last reading; every `interval` calls the next is enqueued."""
        import torch

        stats = self._collect() if self._event is not None and self._event.query() else None
        self._calls += 1
        due = self._event is None and self._calls >= self._interval
        if due and not torch.cuda.is_current_stream_capturing():
            self._calls = 0
            self._host.copy_(torch.stack(self._counters), non_blocking=True)
            self._event = mark()
        return stats

    def _collect(self) -> HiSparseKVConnectorStats | None:
        from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.stats import (
            HiSparseKVConnectorStats,
        )

        self._event = None
        stats = HiSparseKVConnectorStats()
        for at, (hits, misses, _) in enumerate(self._host.tolist()):
            new_hits, new_misses = hits - self._seen[at][0], misses - self._seen[at][1]
            self._seen[at] = (hits, misses)
            if new_hits or new_misses:
                stats.record_snapshot(new_hits, new_misses, new_misses * self._row_bytes[at])
        return None if stats.is_empty() else stats
