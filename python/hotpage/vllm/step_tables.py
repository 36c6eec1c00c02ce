# SPDX-License-Identifier: Apache-2.0
"""Owns the device tables that plans change: residency, hot regions, row maps, what is stale in
either pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotpage.errors import ProtocolError
from hotpage.kernels.invalidate import Holders, Invalidate
from hotpage.kernels.mirror_rows import MirrorMask
from hotpage.kernels.reset_states import ResetStates
from hotpage.runtime.streams import current_stream
from hotpage.runtime.upload import upload

if TYPE_CHECKING:
    import torch

    from hotpage._core import StepPlan
    from hotpage.kernels.resolve_and_copy import RowState
    from hotpage.vllm.caches import BoundCaches

Int32 = npt.NDArray[np.int32]

MAX_IDS = 4096
"""Recycled host blocks of one launch: what the kernel holds in one pass."""

_NONE: Int32 = np.empty(0, np.int32)


class HotRegions:
    """GPU blocks of each request's hot region, by state row and by row of the batch.

    They stand in the place of vLLM's block tables of the hot groups, which only grow: those go on
    naming the first region of a request that gave it back and has another one.

    Args:
        caches: vLLM's tables.
    """

    def __init__(self, caches: BoundCaches) -> None:
        import torch

        blocks = caches.groups[0].leader.handle.runtime.region_stride // caches.block_size
        self._shape = (caches.num_kv_groups, blocks)
        shape = (caches.max_requests, *self._shape)
        self._of_state = torch.zeros(shape, dtype=torch.int32, device=caches.device)
        self._of_batch = torch.zeros_like(self._of_state)

    def of_group(self, kv_group: int) -> torch.Tensor:
        """int32 `[max requests][blocks]`: region of each batch request in one hot group, null
        blocks for none; written anew by each `gather`.
        """
        return self._of_batch[:, kv_group]

    def drop(self, state_rows: torch.Tensor) -> None:
        """These state rows have no region; int64, on the device."""
        self._of_state.index_fill_(0, state_rows, 0)

    def put(self, state_rows: torch.Tensor, blocks: torch.Tensor) -> None:
        """These state rows, int64 `[n]`, have the regions `blocks`, int32 `[n][region]`."""
        self._of_state[state_rows] = blocks.view(-1, *self._shape)

    def gather(self, state_rows: torch.Tensor) -> None:
        """Writes the regions of the batch, whose requests have these state rows, int32."""
        import torch

        n = int(state_rows.shape[0])
        torch.index_select(self._of_state, 0, state_rows, out=self._of_batch[:n])


class StepTables:
    """Applies the parts of plans that are no copies, on the current stream, before the forward.

    Args:
        caches: vLLM's tables.
        states: of all index groups.
        regions: that the resolves of these states read.
        holders: marked by every resolve of these states.
        masks: of target and draft layers.
        host_row: int64 `[max tokens]`: host rows that the coming forward writes, vLLM's own table.
    """

    def __init__(
        self,
        caches: BoundCaches,
        states: Sequence[RowState],
        regions: HotRegions,
        holders: Holders,
        masks: Sequence[MirrorMask],
        host_row: torch.Tensor,
    ) -> None:
        import torch

        self._residency, self._device = caches.residency, caches.device
        self._num_groups = caches.num_kv_groups
        self._state_rows, self._regions = caches.request_state_indices, regions
        self._recycled = torch.full((MAX_IDS,), -1, dtype=torch.int32, device=caches.device)
        self._listed = torch.full(
            (caches.max_requests,), -1, dtype=torch.int32, device=caches.device
        )
        self._reset = ResetStates(states, self._listed)
        self.invalidate = Invalidate(
            states,
            caches.block_size,
            caches.num_host_blocks,
            self._recycled,
            host_row,
            holders=holders,
            masks=masks,
        )
        self.num_invalidations = 0
        self.num_resets = 0

    def forget_stale(self, plans: Sequence[StepPlan], num_tokens: int) -> None:
        """Frees hot slots of host blocks that were recycled, and of rows about to be rewritten.

        Args:
            num_tokens: of the coming forward pass.
        """
        parts = [plan.recycled_host_blocks for plan in plans]
        blocks = np.concatenate(parts) if len(parts) > 1 else parts[0]
        while len(blocks) > MAX_IDS:
            self._forget(blocks[:MAX_IDS], 0)
            blocks = blocks[MAX_IDS:]
        if len(blocks) or num_tokens:
            self._forget(blocks, num_tokens)

    def _forget(self, blocks: Int32, num_rewritten: int) -> None:
        if len(blocks):
            (ids,) = upload([np.ascontiguousarray(blocks)], self._device)
            self._recycled[: len(blocks)].copy_(ids)
        self.invalidate(len(blocks), num_rewritten, current_stream(self._device))
        self.num_invalidations += 1

    def set_batch(self, state_rows: torch.Tensor) -> None:
        """Writes which state row each batch request has, `[batch requests]` on the device; the
        rest is padding. Uses the current stream.
        """
        n = int(state_rows.shape[0])
        self._state_rows[n:].fill_(-1)
        self._state_rows[:n].copy_(state_rows)

    def apply(self, plan: StepPlan, batch_row: Mapping[int, int]) -> None:
        """Applies residency and hot regions of one plan, of requests in the batch.

        Args:
            batch_row: dense id -> row of the batch that `set_batch` wrote.

        Raises:
            ProtocolError: the plan names a request that is not in the batch.
        """
        cleared, granted = plan.residency_cleared, plan.hot_region_request
        regionless = np.concatenate((cleared, plan.hot_regions_returned))
        request, page = plan.residency_request, plan.residency_page
        kept = _last_of_each(request, page)
        blocks = plan.residency_blocks.reshape(-1, self._num_groups)[kept]
        on_device = upload(
            [
                _rows(regionless, batch_row),
                _rows(granted, batch_row),
                _rows(request[kept], batch_row),
                page[kept],
                np.ascontiguousarray(blocks.T),
                plan.hot_region_blocks,
            ],
            self._device,
        )
        to_drop, to_reset, rows, pages, values, regions = on_device
        if len(regionless):
            dropped = self._state_rows[to_drop].long()
            self._residency.index_fill_(1, dropped[: len(cleared)], 0)
            self._regions.drop(dropped)
        if len(kept):
            self._residency[:, self._state_rows[rows].long(), pages.long()] = values
        if len(granted):
            reset = self._state_rows[to_reset]
            self._regions.put(reset.long(), regions)
            self._listed[: len(granted)].copy_(reset)
            self._reset(len(granted), current_stream(self._device))
            self.num_resets += 1


def changes_tables(plan: StepPlan) -> bool:
    """Whether `StepTables.apply` has anything to do."""
    return any(
        len(one)
        for one in (
            plan.residency_request,
            plan.residency_cleared,
            plan.hot_region_request,
            plan.hot_regions_returned,
        )
    )


def _rows(requests: Int32, batch_row: Mapping[int, int]) -> Int32:
    if not len(requests):
        return _NONE
    try:
        return np.fromiter(
            (batch_row[request] for request in requests.tolist()), np.int32, len(requests)
        )
    except KeyError as missing:
        raise ProtocolError(f"the plan names request {missing}, which is not scheduled") from None


def _last_of_each(request: Int32, page: Int32) -> npt.NDArray[np.intp]:
    """Indices of the last change of each (request, page), ascending: later changes win."""
    if len(request) < 2:
        return np.arange(len(request))
    key = request.astype(np.int64) << 32 | page
    _, first = np.unique(key[::-1], return_index=True)
    return np.sort(len(key) - 1 - first)
