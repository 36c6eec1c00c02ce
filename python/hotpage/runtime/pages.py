# SPDX-License-Identifier: Apache-2.0
"""Owns page copies between the pools: any number of pages, uploaded and enqueued without a wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotpage.kernels.copy_pages import PageList, RestorePages, SpillPages
from hotpage.runtime.streams import current_stream
from hotpage.runtime.upload import upload

if TYPE_CHECKING:
    from hotpage.kernels.layer_table import LayerTable

MAX_PAGES = 256
"""Pages of one launch."""


@dataclass(frozen=True)
class Pages:
    """Pages to copy, as a plan names them. All int32."""

    host_block: npt.NDArray[np.int32]
    """`[n]`."""
    resident_blocks: npt.NDArray[np.int32]
    """`[n, KV cache groups]`."""
    num_rows: npt.NDArray[np.int32]
    """`[n]` rows from the page's start."""

    def __len__(self) -> int:
        return len(self.host_block)

    def take(self, chosen: npt.NDArray[np.intp] | slice) -> Pages:
        """Some of the pages."""
        return Pages(self.host_block[chosen], self.resident_blocks[chosen], self.num_rows[chosen])


class PageCopier:
    """spill_pages or restore_pages for pages that the CPU names.

    Use one on one stream only: its list on the device is written again by each launch.

    Args:
        op: `SpillPages` or `RestorePages`.
        table: the layers.
    """

    def __init__(self, op: type[SpillPages] | type[RestorePages], table: LayerTable) -> None:
        self._device = table.device
        self._list = PageList.allocate(MAX_PAGES, table.num_kv_groups, table.device)
        self._copy = op(table, self._list)
        self.num_launches = 0

    def __call__(self, pages: Pages) -> None:
        """Enqueues the copies on the current stream.

        Raises:
            KernelError: a launch failed.
        """
        for start in range(0, len(pages), MAX_PAGES):
            part = pages.take(slice(start, start + MAX_PAGES))
            n = len(part)
            sources = upload([part.host_block, part.resident_blocks, part.num_rows], self._device)
            targets = (self._list.host_block, self._list.resident_blocks, self._list.num_rows)
            for target, source in zip(targets, sources, strict=True):
                target[:n].copy_(source)
            self._copy(n, current_stream(self._device))
            self.num_launches += 1
