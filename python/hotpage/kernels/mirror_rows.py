# SPDX-License-Identifier: Apache-2.0
"""Owns the ops mirror_rows and report_mirrored: a step's rows to the host pool, and what landed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._tensors import check_contiguous, check_list, check_tensor, is_pinned
from hotpage.kernels.layer_table import LayerTable
from hotpage.kernels.replay_copy import usable_library

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SlotMappings:
    """Where a step's tokens lie in both pools: persistent buffers that every step writes anew."""

    resident_slot: torch.Tensor
    """int64 `[rows][max tokens]`: GPU block x block size + offset; -1 is padding."""
    host_row: torch.Tensor
    """int64 `[max tokens]`: host block x block size + offset; -1 is padding."""
    slot_rows: Sequence[int]
    """Row of `resident_slot` of each resident KV cache group, in the order of the groups."""

    @property
    def max_tokens(self) -> int:
        """Tokens of a step at most."""
        return int(self.host_row.shape[0])

    def snapshot(self) -> SlotMappings:
        """Buffers of their own, all padding; `take` fills them."""
        rows = self.resident_slot.new_full((len(self.slot_rows), self.max_tokens), -1)
        return SlotMappings(
            rows, self.host_row.new_full((self.max_tokens,), -1), range(len(self.slot_rows))
        )

    def take(self, source: SlotMappings, num_tokens: int) -> None:
        """Copies another's first tokens on the current stream and pads the rest; capturable.

        A drafter overwrites the slot mappings that the target's forward used; whoever mirrors
        after it reads a snapshot taken before, on the stream of both.
        """
        for row, source_row in zip(self.slot_rows, source.slot_rows, strict=True):
            self.resident_slot[row, :num_tokens].copy_(
                source.resident_slot[source_row, :num_tokens], non_blocking=True
            )
            self.resident_slot[row, num_tokens:].fill_(-1)
        self.host_row[:num_tokens].copy_(source.host_row[:num_tokens], non_blocking=True)
        self.host_row[num_tokens:].fill_(-1)


class MirrorMask:
    """Which rows of each host block have landed, for one set of layers, and the counters.

    `Invalidate` clears the words of recycled blocks in its own launch.
    """

    def __init__(self, num_host_blocks: int, block_size: int, device: torch.device | str) -> None:
        import torch

        self.num_host_blocks, self.block_size = num_host_blocks, block_size
        words = (block_size + 63) // 64
        self.words = torch.zeros((num_host_blocks, words), dtype=torch.int64, device=device)
        """int64 `[host blocks][ceil(block size / 64)]`: bit r % 64 of word r / 64 is row r."""
        self.counters = torch.zeros(_abi.NUM_MIRROR_COUNTERS, dtype=torch.int64, device=device)
        """int64 `[3]`: tokens copied, skipped as padding, lost; they only grow."""


class MirrorRows:
    """mirror_rows bound to some layers, slot mappings and a mask.

    All checks happen here; a call enqueues one launch. The tensors are kept alive.

    Args:
        table: the layers; draft layers have a table, a mask and slot mappings of their own.
        slots: read by every call.
        mask: written by every call. A row whose mirror did not run is missing in it for ever.

    Raises:
        ConfigError: a tensor that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(self, table: LayerTable, slots: SlotMappings, mask: MirrorMask) -> None:
        import torch

        device = table.device
        check_tensor("resident_slot", slots.resident_slot, "int64", (None, None), device)
        check_tensor("host_row", slots.host_row, "int64", (None,), device)
        num_rows, max_tokens = slots.resident_slot.shape
        if max_tokens < slots.max_tokens:
            raise ConfigError(
                f"resident_slot has {max_tokens} tokens, expected at least {slots.max_tokens}"
            )
        if len(slots.slot_rows) != table.num_kv_groups or not all(
            0 <= row < num_rows for row in slots.slot_rows
        ):
            raise ConfigError(
                f"slot_rows is {list(slots.slot_rows)}, expected {table.num_kv_groups} rows below "
                f"{num_rows}"
            )
        if (mask.num_host_blocks, mask.block_size) != (table.num_host_blocks, table.block_size):
            raise ConfigError(
                f"the mask is of {mask.num_host_blocks} blocks of {mask.block_size} rows, expected "
                f"{table.num_host_blocks} of {table.block_size}"
            )
        if mask.words.device != device:
            raise ConfigError(f"the mask is on {mask.words.device}, expected {device}")
        self._library, _ = usable_library(device)
        slot_row = torch.tensor(list(slots.slot_rows), dtype=torch.int32, device=device)
        self.table = table
        self._tensors = (slots, mask, slot_row)
        self._max_tokens = slots.max_tokens
        self.params = _abi.MirrorRowsParams(
            resident_slot_stride=slots.resident_slot.stride(0),
            resident_slot=slots.resident_slot.data_ptr(),
            slot_row=slot_row.data_ptr(),
            host_row=slots.host_row.data_ptr(),
            mask=mask.words.data_ptr(),
            counters=mask.counters.data_ptr(),
            pools=table.params,
        )

    def __call__(self, num_tokens: int, stream: int) -> None:
        """Enqueues the mirror of the first `num_tokens` tokens, padding among them allowed.

        Args:
            stream: address of the CUDA stream (torch's `stream.cuda_stream`), behind the writes of
                the rows. May be capturing.

        Raises:
            ConfigError: more tokens than the slot mappings hold.
            KernelError: the launch failed.
        """
        if not 0 <= num_tokens <= self._max_tokens:
            raise ConfigError(f"num_tokens is {num_tokens}, expected 0 to {self._max_tokens}")
        self.params.num_tokens = num_tokens
        self._library.launch("hotpage_mirror_rows", self.params, stream)


class ReportMirrored:
    """report_mirrored bound to a mask: how many rows of some host blocks have not landed.

    A page may be called clean, and published, only if it misses none. Missing rows are counted as
    lost, so ask only about blocks whose every row should have landed.

    Args:
        host_block: int32 `[max blocks]`, on the device or pinned.
        missing_rows: int32 `[max blocks]`, on the device or pinned; valid once the stream is past
            the launch.

    Raises:
        ConfigError: a tensor that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(
        self, mask: MirrorMask, host_block: torch.Tensor, missing_rows: torch.Tensor
    ) -> None:
        device = mask.words.device
        self._max_blocks = int(host_block.shape[0])
        for name, tensor in (("host_block", host_block), ("missing_rows", missing_rows)):
            where = device
            if tensor.device.type == "cpu" and is_pinned(tensor):
                where = tensor.device
            check_list(name, tensor, "int32", self._max_blocks, where)
            check_contiguous(name, tensor)
        self._library, _ = usable_library(device)
        self._tensors = (mask, host_block, missing_rows)
        self.params = _abi.ReportMirroredParams(
            block_size=mask.block_size,
            num_host_blocks=mask.num_host_blocks,
            host_block=host_block.data_ptr(),
            mask=mask.words.data_ptr(),
            missing_rows=missing_rows.data_ptr(),
            counters=mask.counters.data_ptr(),
        )

    def __call__(self, num_blocks: int, stream: int) -> None:
        """Enqueues the question about the first `num_blocks` blocks.

        Args:
            stream: address of the CUDA stream. May be capturing.

        Raises:
            ConfigError: more blocks than the lists hold.
            KernelError: the launch failed.
        """
        if not 0 <= num_blocks <= self._max_blocks:
            raise ConfigError(f"num_blocks is {num_blocks}, expected 0 to {self._max_blocks}")
        self.params.num_blocks = num_blocks
        self._library.launch("hotpage_report_mirrored", self.params, stream)
