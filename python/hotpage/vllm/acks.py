# SPDX-License-Identifier: Apache-2.0
"""Owns the count of ranks that still have to complete each transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotpage._core import TRANSFER_RESTORE
from hotpage.vllm.events import Int32, int32, int64

AckArrays = tuple[Any, Int32]


class TransferAcks:
    """Turns vLLM's aggregated counts into the Coordinator's acknowledgements.

    vLLM reports counts summed over ranks and may repeat itself after a transfer has ended; the
    Coordinator refuses both unknown ids and surplus counts. Where the number of ranks is not
    known, vLLM's rule holds: the first count of enqueued copies is the number of ranks, and the
    Coordinator, which then knows of one rank, hears of a transfer once.

    Args:
        num_ranks: ranks that make restores; None where it is not known.
        num_host_writers: ranks that write the host pool.
    """

    def __init__(self, num_ranks: int | None, num_host_writers: int | None) -> None:
        self._num_ranks = num_ranks
        self._num_host_writers = num_host_writers
        self.pending: dict[int, int] = {}
        """Transfer id -> ranks to complete it, 0 where their number is not known yet."""

    def expect(self, transfers: list[int], kinds: list[int]) -> None:
        """Notes the transfers of a plan."""
        for transfer, kind in zip(transfers, kinds, strict=True):
            ranks = self._num_ranks if kind == TRANSFER_RESTORE else self._num_host_writers
            self.pending[transfer] = ranks or 0

    def translate(
        self, enqueued: Mapping[int, int], completed: Mapping[int, int]
    ) -> tuple[AckArrays, AckArrays]:
        """Acknowledgements for the Coordinator: `(ids, counts)` enqueued, then completed."""
        pending = self.pending
        known = self._num_ranks is not None
        started: dict[int, int] = {}
        for transfer, count in enqueued.items():
            if known and transfer in pending:
                started[transfer] = count
            elif pending.get(transfer) == 0 and count:
                pending[transfer] = count
                started[transfer] = 1
        ended: dict[int, int] = {}
        for transfer, count in completed.items():
            left = pending.get(transfer, 0)
            if not left:
                continue
            pending[transfer] = max(left - count, 0)
            if not pending[transfer]:
                del pending[transfer]
            if known:
                ended[transfer] = min(count, left)
            elif transfer not in pending:
                ended[transfer] = 1
        return _arrays(started), _arrays(ended)


def _arrays(counts: Mapping[int, int]) -> AckArrays:
    return int64(counts), int32(counts.values())
