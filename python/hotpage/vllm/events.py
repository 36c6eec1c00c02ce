# SPDX-License-Identifier: Apache-2.0
"""Owns the flat arrays in which block table changes reach the Rust Coordinator."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from hotpage._core import PREFIX_HOST, PREFIX_IMPORT, PREFIX_PARTIAL_IMPORT, Coordinator

Int32 = array | npt.NDArray[np.int32]
"""A buffer of int32; the first kind is made faster from a list."""

# An empty array.array gives a buffer without a place, which the bindings refuse.
_NO_INT32 = np.empty(0, dtype=np.int32)
_NO_INT64 = np.empty(0, dtype=np.int64)


def int32(values: Iterable[int]) -> Int32:
    """`values` as a buffer of int32."""
    return array("i", values) or _NO_INT32


def int64(values: Iterable[int]) -> array | npt.NDArray[np.int64]:
    """`values` as a buffer of int64."""
    return array("q", values) or _NO_INT64


class TableEvents:
    """Admissions, appended pages and hot regions of one step, in the order of their calls."""

    __slots__ = ("_admitted", "_appended", "_host", "_regions", "_rows")

    def __init__(self) -> None:
        self._admitted: list[tuple[int, int, int, int, list[int], list[int]]] = []
        self._appended: list[tuple[int, int, int]] = []
        """Request, first page, host blocks up to and with its own."""
        self._host = array("i")
        self._rows = array("i")
        self._regions: list[tuple[int, list[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._admitted or self._appended or self._regions)

    def admit(self, request: int) -> None:
        """A request that starts without a prefix."""
        self._admitted.append((request, PREFIX_HOST, 0, 0, [], []))

    def admit_host_prefix(self, request: int, host_blocks: list[int]) -> None:
        """A request that starts with published host pages."""
        self._admitted.append((request, PREFIX_HOST, 0, 0, host_blocks, []))

    def admit_import(
        self,
        request: int,
        num_tokens: int,
        host_pages: int,
        host_blocks: list[int],
        tail_blocks: list[int],
    ) -> None:
        """A request that waits for a sibling's import; `tail_blocks` `[G]` hold its last page."""
        kind = PREFIX_PARTIAL_IMPORT if host_pages else PREFIX_IMPORT
        nulls = [0] * (len(tail_blocks) * (len(host_blocks) - 1))
        self._admitted.append(
            (request, kind, num_tokens, host_pages, host_blocks, nulls + tail_blocks)
        )

    def append(
        self, request: int, first_page: int, host_blocks: list[int], rows: list[int]
    ) -> None:
        """Further pages; `rows` `[pages][G]` are their GPU blocks."""
        self._host.fromlist(host_blocks)
        self._rows.fromlist(rows)
        self._appended.append((request, first_page, len(self._host)))

    def grant(self, request: int, blocks: list[int]) -> None:
        """A hot region, `[G][blocks per hot group]`."""
        self._regions.append((request, blocks))

    def arguments(self, num_groups: int) -> dict[str, Any]:
        """Keyword arguments of `Coordinator.step`."""
        found: dict[str, Any] = {}
        if self._admitted:
            found["admitted"] = self._admitted_arrays(num_groups)
            found["prefix_host_pages"] = int32([entry[3] for entry in self._admitted])
        if self._appended:
            requests, first, ends = zip(*self._appended, strict=True)
            offsets = int32((0, *ends))
            found["allocated"] = (int32(requests), int32(first), offsets, self._host, self._rows)
        if self._regions:
            found["hot_regions"] = (
                int32([request for request, _ in self._regions]),
                int32(chain.from_iterable(blocks for _, blocks in self._regions)),
            )
        return found

    def tell(self, core: Coordinator, num_groups: int) -> None:
        """Reports the events outside a step."""
        if self._admitted:
            host_pages = int32([entry[3] for entry in self._admitted])
            core.on_admitted(*self._admitted_arrays(num_groups), prefix_host_pages=host_pages)
        if self._appended:
            core.on_blocks_allocated(*self.arguments(num_groups)["allocated"])
        for request, blocks in self._regions:
            core.on_hot_region_allocated(request, int32(blocks))

    def _admitted_arrays(self, num_groups: int) -> tuple[array, ...]:
        requests, kinds, tokens, _, host, resident = zip(*self._admitted, strict=True)
        # One array serves the whole batch, so requests without GPU blocks carry null blocks.
        if any(resident):
            resident = tuple(
                blocks or [0] * (num_groups * len(hosts))
                for blocks, hosts in zip(resident, host, strict=True)
            )
        return (
            int32(requests),
            array("B", kinds),
            int32(tokens),
            _offsets(host),
            int32(chain.from_iterable(host)),
            int32(chain.from_iterable(resident)),
        )


def _offsets(runs: Sequence[Sequence[int]]) -> Int32:
    return int32(accumulate(map(len, runs), initial=0))
