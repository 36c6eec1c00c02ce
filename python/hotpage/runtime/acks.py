# SPDX-License-Identifier: Apache-2.0
"""Owns transfers that are enqueued and not reported complete: what each waits for, in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hotpage.kernels.mirror_rows import MirrorMask, ReportMirrored
from hotpage.runtime.pages import MAX_PAGES, Pages
from hotpage.runtime.streams import current_stream, mark
from hotpage.runtime.upload import pinned_zeros, upload

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TransferIds = tuple[int, ...]


class _Report:
    """The question how many rows of up to MAX_PAGES host blocks have not landed, and its answer."""

    def __init__(self, masks: Sequence[MirrorMask]) -> None:
        import torch

        device = masks[0].words.device
        self._device = device
        self._host_block = torch.zeros(MAX_PAGES, dtype=torch.int32, device=device)
        self._missing = pinned_zeros((len(masks), MAX_PAGES), torch.int32)
        self._ops = [
            ReportMirrored(mask, self._host_block, missing)
            for mask, missing in zip(masks, self._missing, strict=True)
        ]

    def ask(self, pages: Pages) -> None:
        """Enqueues the question on the current stream."""
        (blocks,) = upload([pages.host_block], self._device)
        self._host_block[: len(pages)].copy_(blocks)
        for op in self._ops:
            op(len(pages), current_stream(self._device))

    def incomplete(self, num_pages: int) -> np.ndarray:
        """Indices of pages that miss rows; valid once the stream is past the question."""
        return np.flatnonzero(self._missing[:, :num_pages].numpy().any(axis=0))


@dataclass
class _Waiting:
    event: torch.cuda.Event
    ids: TransferIds
    pages: Pages | None = None
    report: _Report | None = None


class AckQueue:
    """First in, first out: a transfer is reported complete after all that were enqueued before it.

    A page whose rows were mirrored step by step is asked about: it is complete only if every row
    has landed. One that misses rows is copied whole, from GPU blocks that the scheduler holds until
    it hears of completion, and reported when that copy has run.

    Args:
        masks: mirror masks of all layers, those of draft layers apart.
        spill: enqueues the whole copy of pages on the current stream.
        on_side: runs a function with the side stream of the mirrors as the current one.
    """

    def __init__(
        self,
        masks: Sequence[MirrorMask],
        spill: Callable[[Pages], None],
        on_side: Callable[[Callable[[], None]], None],
    ) -> None:
        self._masks, self._spill, self._on_side = tuple(masks), spill, on_side
        self._waiting: deque[_Waiting] = deque()
        self._free: list[_Report] = []
        self._enqueued: list[int] = []
        self.num_repaired = 0
        """Pages that missed rows and were copied whole."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ids: Sequence[int]) -> None:
        """Transfers whose copies are on the current stream."""
        if ids:
            self._waiting.append(_Waiting(mark(), tuple(ids)))
            self._enqueued.extend(ids)

    def add_mirrored(self, ids: Sequence[int], pages: Pages) -> None:
        """Pages whose rows were mirrored on the current stream, in this or earlier steps."""
        for start in range(0, len(pages), MAX_PAGES):
            part = pages.take(slice(start, start + MAX_PAGES))
            report = self._free.pop() if self._free else _Report(self._masks)
            report.ask(part)
            chosen = tuple(ids[start : start + MAX_PAGES])
            self._waiting.append(_Waiting(mark(), chosen, part, report))
            self._enqueued.extend(chosen)

    def take(self) -> tuple[list[int], list[int]]:
        """Drains `(enqueued, completed)` transfer ids; asks events, waits for none."""
        enqueued, self._enqueued = self._enqueued, []
        completed: list[int] = []
        while self._waiting and self._waiting[0].event.query():
            head = self._waiting.popleft()
            bad = self._close(head)
            completed.extend(id for i, id in enumerate(head.ids) if i not in bad)
        return enqueued, completed

    def _close(self, head: _Waiting) -> frozenset[int]:
        if head.report is None or head.pages is None:
            return frozenset()
        bad = head.report.incomplete(len(head.pages))
        self._free.append(head.report)
        if len(bad):
            self._repair(head.pages.take(bad), tuple(head.ids[i] for i in bad))
        return frozenset(bad.tolist())

    def _repair(self, pages: Pages, ids: TransferIds) -> None:
        self.num_repaired += len(pages)
        logger.warning(
            "%d pages have rows that no mirror brought to the host pool (host block %d is one); "
            "they are copied whole",
            len(pages),
            int(pages.host_block[0]),
        )

        def copy() -> None:
            self._spill(pages)
            # Not reported enqueued again: that was done with the mirrors.
            self._waiting.append(_Waiting(mark(), ids))

        self._on_side(copy)
