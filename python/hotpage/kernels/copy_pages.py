# SPDX-License-Identifier: Apache-2.0
"""Owns the ops spill_pages and restore_pages: pages of all layers between the pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._tensors import check_contiguous, check_tensor
from hotpage.kernels.layer_table import LayerTable
from hotpage.kernels.replay_copy import usable_library

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PageList:
    """Pages of one launch, on the device. No two share a block that is written."""

    host_block: torch.Tensor
    """int32 `[max pages]`."""
    resident_blocks: torch.Tensor
    """int32 `[max pages][KV cache groups]`: GPU blocks."""
    num_rows: torch.Tensor
    """int32 `[max pages]`: rows to copy from the page's start; a partial tail has fewer."""
    counters: torch.Tensor
    """int64 `[2]`: pages copied, and pages left out for a null or unknown block; they only grow."""

    @classmethod
    def allocate(cls, max_pages: int, num_kv_groups: int, device: torch.device | str) -> PageList:
        """A list of null pages."""
        import torch

        return cls(
            torch.zeros(max_pages, dtype=torch.int32, device=device),
            torch.zeros((max_pages, num_kv_groups), dtype=torch.int32, device=device),
            torch.zeros(max_pages, dtype=torch.int32, device=device),
            torch.zeros(_abi.NUM_PAGES_COUNTERS, dtype=torch.int64, device=device),
        )


class _CopyPages:
    """A page list bound to all layers.

    All checks happen here; a call enqueues one launch. The tensors are kept alive.

    Raises:
        ConfigError: a tensor that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    _entry_point: ClassVar[str]

    def __init__(self, table: LayerTable, pages: PageList) -> None:
        device = table.device
        max_pages = int(pages.host_block.shape[0])
        for name, dtype, shape in (
            ("host_block", "int32", (max_pages,)),
            ("resident_blocks", "int32", (max_pages, table.num_kv_groups)),
            ("num_rows", "int32", (max_pages,)),
            ("counters", "int64", (_abi.NUM_PAGES_COUNTERS,)),
        ):
            check_tensor(name, getattr(pages, name), dtype, shape, device)
            check_contiguous(name, getattr(pages, name))
        self._library, _ = usable_library(device)
        self.table = table
        self._pages = pages
        self._max_pages = max_pages
        self.params = _abi.CopyPagesParams(
            host_block=pages.host_block.data_ptr(),
            resident_blocks=pages.resident_blocks.data_ptr(),
            num_rows=pages.num_rows.data_ptr(),
            counters=pages.counters.data_ptr(),
            pools=table.params,
        )

    def __call__(self, num_pages: int, stream: int) -> None:
        """Enqueues the copy of the first `num_pages` pages of the list.

        Args:
            stream: address of the CUDA stream (torch's `stream.cuda_stream`). May be capturing.

        Raises:
            ConfigError: more pages than the list holds.
            KernelError: the launch failed.
        """
        if not 0 <= num_pages <= self._max_pages:
            raise ConfigError(f"num_pages is {num_pages}, expected 0 to {self._max_pages}")
        self.params.num_pages = num_pages
        self._library.launch(self._entry_point, self.params, stream)


class SpillPages(_CopyPages):
    """spill_pages: the rows of a page list, GPU pool to host pool."""

    _entry_point = "hotpage_spill_pages"


class RestorePages(_CopyPages):
    """restore_pages: the rows of a page list, host pool to GPU pool."""

    _entry_point = "hotpage_restore_pages"
