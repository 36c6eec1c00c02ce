# SPDX-License-Identifier: Apache-2.0
"""Owns the op reset_states: state rows that get a hot region start with an empty row map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._tensors import check_list
from hotpage.kernels.invalidate import build_state_table
from hotpage.kernels.replay_copy import usable_library
from hotpage.kernels.resolve_and_copy import RowState

if TYPE_CHECKING:
    import torch


class ResetStates:
    """reset_states bound to the states of all index groups.

    All checks happen here; a call enqueues one launch, or none without rows. The tensors are kept
    alive.

    Args:
        states: of every index group, all with the same number of state rows.
        state_row: int32 `[max]` on the device: state rows; negative ones are ignored.

    Raises:
        ConfigError: a tensor that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(self, states: Sequence[RowState], state_row: torch.Tensor) -> None:
        self._table = build_state_table(states)
        check_list("state_row", state_row, "int32", 0, self._table.device)
        self._limit = int(state_row.shape[0])
        self._library, _ = usable_library(self._table.device)
        self._tensors = (tuple(states), state_row)
        self.params = _abi.ResetStatesParams(
            num_index_groups=len(states),
            num_state_rows=int(states[0].row_map.shape[0]),
            states=self._table.data_ptr(),
            state_row=state_row.data_ptr(),
        )

    def __call__(self, num_rows: int, stream: int) -> None:
        """Enqueues the reset of the first `num_rows` state rows of the list.

        Args:
            stream: address of the CUDA stream (torch's `stream.cuda_stream`), before the first
                resolve that reads them. May be capturing.

        Raises:
            ConfigError: more rows than the list holds.
            KernelError: the launch failed.
        """
        if not 0 <= num_rows <= self._limit:
            raise ConfigError(f"num_rows is {num_rows}, expected 0 to {self._limit}")
        self.params.num_listed = num_rows
        self._library.launch("hotpage_reset_states", self.params, stream)
