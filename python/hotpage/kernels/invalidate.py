# SPDX-License-Identifier: Apache-2.0
"""Owns the op invalidate: hot slots whose host row was rewritten or recycled become free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._tensors import check_contiguous, check_list, check_tensor
from hotpage.kernels.mirror_rows import MirrorMask
from hotpage.kernels.replay_copy import usable_library
from hotpage.kernels.resolve_and_copy import HOT_ROWS_UNIT, RowState

if TYPE_CHECKING:
    import torch


class Holders:
    """Which state rows may hold a row of each host block in some row map, a bit each.

    Every resolve that writes the row maps of an `Invalidate` must be bound to its holders; then a
    clear bit proves that nothing of the block is held, and only marked state rows are looked at.
    """

    def __init__(
        self, num_host_blocks: int, num_state_rows: int, device: torch.device | str
    ) -> None:
        import torch

        shape = (num_host_blocks, (num_state_rows + 31) // 32)
        self.num_state_rows = num_state_rows
        self.words = torch.zeros(shape, dtype=torch.int32, device=device)
        """int32 `[host blocks][ceil(state rows / 32)]`: bit s % 32 of word s / 32: state row s."""


def build_state_table(states: Sequence[RowState]) -> torch.Tensor:
    """The states of all index groups as the kernels find them.

    Returns:
        int64 `[index groups][4]` on their device: addresses of row map, stamps and epochs, and the
        hot rows.

    Raises:
        ConfigError: no states, or tensors that the kernels do not take.
    """
    import torch

    if not states:
        raise ConfigError("no states were given, expected those of every index group")
    device = states[0].row_map.device
    num_state_rows = int(states[0].row_map.shape[0])
    if num_state_rows > _abi.MAX_STATE_ROWS:
        raise ConfigError(
            f"there are {num_state_rows} state rows, expected at most {_abi.MAX_STATE_ROWS}"
        )
    for i, state in enumerate(states):
        check_tensor(f"row_map {i}", state.row_map, "int32", (num_state_rows, None), device)
        shape = tuple(state.row_map.shape)
        check_tensor(f"last_used {i}", state.last_used, ("int16", "uint16"), shape, device)
        check_tensor(f"epoch {i}", state.epoch, ("int32", "uint32"), shape[:1], device)
        for name in ("row_map", "last_used", "epoch"):
            check_contiguous(f"{name} {i}", getattr(state, name))
        misaligned = state.row_map.data_ptr() % 16 or state.last_used.data_ptr() % 8
        if shape[1] % HOT_ROWS_UNIT or misaligned:
            raise ConfigError(f"row_map {i} is not made of whole 16-byte pieces")
    table = [
        (s.row_map.data_ptr(), s.last_used.data_ptr(), s.epoch.data_ptr(), s.row_map.shape[1])
        for s in states
    ]
    return torch.tensor(table, dtype=torch.int64, device=device)


class Invalidate:
    """invalidate bound to the states of all index groups.

    All checks happen here; a call enqueues one launch, or none without ids. The tensors are kept
    alive. Ids are read 4,096 at a time; each such pass looks at the state rows once.

    Args:
        states: of every index group, all with the same number of state rows.
        block_size: tokens per block.
        num_host_blocks: blocks of the host pool.
        recycled: int32 `[max]`: host blocks that were allocated anew; negative ones are ignored.
        rewritten: int64 `[max]`: host rows that a mirror wrote; negative ones are ignored. The
            `host_row` of the mirror's slot mappings can be bound as it is.
        active: int32 `[max]`: state rows to look at, -1 for none; by default all. Every state row
            with a hot region belongs here, whether its request is in the batch or not.
        holders: narrows the search to marked state rows; excludes `active`.
        masks: mirror masks in which recycled blocks are cleared, at most two.

    Raises:
        ConfigError: a tensor that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(
        self,
        states: Sequence[RowState],
        block_size: int,
        num_host_blocks: int,
        recycled: torch.Tensor,
        rewritten: torch.Tensor,
        *,
        active: torch.Tensor | None = None,
        holders: Holders | None = None,
        masks: Sequence[MirrorMask] = (),
        max_blocks: int = 0,
    ) -> None:
        import torch

        self._table = build_state_table(states)
        device = states[0].row_map.device
        num_state_rows = int(states[0].row_map.shape[0])
        if block_size < 1 or not 1 <= num_host_blocks <= (2**31 - 1) // block_size:
            raise ConfigError(
                f"got {num_host_blocks} host blocks of {block_size} rows, expected up to 2^31 - 1 "
                "rows in all"
            )
        if max_blocks < 0:
            raise ConfigError(f"max_blocks is {max_blocks}, expected 0 (no limit) or more")
        check_list("recycled", recycled, "int32", 0, device)
        check_list("rewritten", rewritten, "int64", 0, device)
        self._scratch = torch.zeros(1, dtype=torch.int32, device=device)
        self.freed = torch.zeros(1, dtype=torch.int64, device=device)
        """int64 `[1]`: hot slots freed; it only grows."""
        self._limits = (int(recycled.shape[0]), int(rewritten.shape[0]))
        self.params = _abi.InvalidateParams(
            num_index_groups=len(states),
            num_state_rows=num_state_rows,
            block_size=block_size,
            max_blocks=max_blocks,
            max_hot_rows=max(int(state.row_map.shape[1]) for state in states),
            num_host_blocks=num_host_blocks,
            states=self._table.data_ptr(),
            recycled_host_block=recycled.data_ptr(),
            rewritten_host_row=rewritten.data_ptr(),
            freed=self.freed.data_ptr(),
            scratch=self._scratch.data_ptr(),
        )
        self._bind_search(active, holders, device)
        self._bind_masks(masks)
        self._library, _ = usable_library(device)
        self.states = tuple(states)
        self._tensors = (recycled, rewritten, active, holders, tuple(masks))

    def _bind_search(
        self, active: torch.Tensor | None, holders: Holders | None, device: torch.device
    ) -> None:
        num_state_rows = self.params.num_state_rows
        if active is not None and holders is not None:
            raise ConfigError("got both active and holders, expected one of them at most")
        if active is not None:
            check_list("active", active, "int32", 0, device)
            if active.shape[0] > num_state_rows:
                raise ConfigError(
                    f"active has {active.shape[0]} entries, expected at most {num_state_rows}"
                )
            self.params.state_row = active.data_ptr()
            self.params.num_active = active.shape[0]
        if holders is not None:
            if holders.num_state_rows != num_state_rows:
                raise ConfigError(
                    f"holders are of {holders.num_state_rows} state rows, expected {num_state_rows}"
                )
            shape = (self.params.num_host_blocks, (num_state_rows + 31) // 32)
            check_tensor("holders", holders.words, "int32", shape, device)
            self.params.holders = holders.words.data_ptr()

    def _bind_masks(self, masks: Sequence[MirrorMask]) -> None:
        if len(masks) > len(self.params.mask):
            raise ConfigError(f"got {len(masks)} masks, expected at most {len(self.params.mask)}")
        for i, mask in enumerate(masks):
            sizes = (mask.num_host_blocks, mask.block_size)
            if sizes != (self.params.num_host_blocks, self.params.block_size):
                raise ConfigError(f"mask {i} is of another pool")
            self.params.mask[i] = mask.words.data_ptr()

    def __call__(self, num_recycled: int, num_rewritten: int, stream: int) -> None:
        """Enqueues the invalidation by the first ids of both lists.

        Args:
            stream: address of the CUDA stream (torch's `stream.cuda_stream`), before the step's
                first resolve. May be capturing.

        Raises:
            ConfigError: more ids than the lists hold.
            KernelError: the launch failed.
        """
        if not (0 <= num_recycled <= self._limits[0] and 0 <= num_rewritten <= self._limits[1]):
            raise ConfigError(
                f"got {num_recycled} recycled blocks and {num_rewritten} rewritten rows, expected "
                f"at most {self._limits[0]} and {self._limits[1]}"
            )
        self.params.num_recycled, self.params.num_rewritten = num_recycled, num_rewritten
        self._library.launch("hotpage_invalidate", self.params, stream)
