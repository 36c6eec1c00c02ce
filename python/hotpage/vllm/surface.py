# SPDX-License-Identifier: Apache-2.0
"""Owns the methods by which vLLM's connector and its tests look into a coordinator.

Each is a view of the Rust Coordinator or of plans; our own connector uses none of them in a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, KVCacheBlockCopy
from vllm.v1.hisparse.types import (
    SparseKVOffloadCommand,
    SparseKVResidencyUpdate,
    SparseKVRowMirror,
)

from hotpage._core import PAGE_HOST_ONLY, PAGE_IMPORTING, StepPlan
from hotpage.vllm.events import int32
from hotpage.vllm.views import (
    RequestView,
    as_update,
    page_transfers,
    request_view,
    residency_pages,
    row_mirrors,
)

if TYPE_CHECKING:
    from hotpage.vllm.coordinator import NativeCoordinator


class VllmSurface:
    """Mixed into the coordinator."""

    _looked_at: tuple[StepPlan, ...] = ()
    """Plans whose transfers were shown but whose residency was not."""
    _num_shown: int = 0
    """Plans at the head of `due` whose residency was shown but whose transfers were not."""

    def advance_scheduled(self: NativeCoordinator, requests: Iterable[tuple[str, int]]) -> None:
        """Plans a step that leaves each request with so many tokens; importing ones wait."""
        ready = [
            (request_id, num_tokens)
            for request_id, num_tokens in requests
            if request_id not in self._imports
        ]
        self.tell(self._imports)
        ends = [num_tokens for _, num_tokens in ready]
        none = [0] * len(ready)
        # Only the end is known: nothing is written, everything before it is computed.
        plan, _ = self.plan_step([name for name, _ in ready], ends, none, none, ends)
        self.due.append(plan)

    def plan_prefix_materialization(
        self: NativeCoordinator, request_id: str, num_computed_tokens: int
    ) -> None:
        """Plans the copies of the pages below `num_computed_tokens`."""
        self.advance_scheduled([(request_id, num_computed_tokens)])

    def update_residency(self: NativeCoordinator, request_id: str) -> None:
        """Carries out what is due for a request whose table has changed."""
        self.tell([request_id])
        self._carry_out_due(self.core.build_due_plan())

    def build_offload_command(self: NativeCoordinator) -> SparseKVOffloadCommand:
        """Transfers that were planned since the last call."""
        plans = [*self.due]
        self.due.clear()
        self._looked_at = (*self._looked_at, *plans[self._num_shown :])
        self._num_shown = 0
        return SparseKVOffloadCommand(page_transfers=page_transfers(plans))

    def take_host_block_copies(self: NativeCoordinator) -> tuple[KVCacheBlockCopy, ...]:
        """Host copies to run before the step."""
        return tuple(
            KVCacheBlockCopy(src_block_id=source, dst_block_id=copy)
            for source, copy in self.take_host_copies()
        )

    def build_row_mirrors(
        self: NativeCoordinator, requests: Iterable[tuple[str, int, int]]
    ) -> tuple[SparseKVRowMirror, ...]:
        """Rows that have both a GPU and a host place."""
        return row_mirrors(self, requests)

    def all_context_pages_resident(
        self: NativeCoordinator, requests: Iterable[tuple[str, int, int]]
    ) -> bool:
        """True if the requests read no host-only page."""
        requests = tuple(requests)
        self.tell(request_id for request_id, _, _ in requests)
        for request_id, start, count in requests:
            entry = self._tracked.get(request_id)
            if entry is None or entry.pages * self.block_size < start + count:
                return False
            states = self.core.page_states(entry.id)
            if PAGE_HOST_ONLY in states or PAGE_IMPORTING in states:
                return False
        return True

    def take_residency_updates(
        self: NativeCoordinator, request_ids: Iterable[str]
    ) -> dict[str, SparseKVResidencyUpdate]:
        """Residency changes since the last call, of these requests."""
        request_ids = list(request_ids)
        self.tell(request_ids)
        ids = {
            entry.id: request_id
            for request_id in request_ids
            if (entry := self._tracked.get(request_id)) is not None
        }
        plans = [*self._looked_at, *self.due[self._num_shown :]]
        plans.append(self.core.take_residency(int32(list(ids))))
        self._looked_at = ()
        self._num_shown = len(self.due)
        changes = residency_pages(plans)
        return {ids[id]: as_update(pages) for id, pages in changes.items() if pages and id in ids}

    @property
    def request_states(self: NativeCoordinator) -> dict[str, RequestView]:
        """Page sets of the requests that have pages."""
        return {
            request_id: request_view(self, entry.id)
            for request_id, entry in self._tracked.items()
            if entry.pages
        }

    @property
    def copies(
        self: NativeCoordinator,
    ) -> dict[BlockHashWithGroupId, tuple[KVCacheBlock, ...]]:
        """Published host pages that have a readable GPU copy, by their hash."""
        self._report_reused()
        hashed = [block for block in self.host_pool.blocks if block.block_hash is not None]
        found = self.core.readable_copies(int32([block.block_id for block in hashed]))
        return {
            block.block_hash: tuple(self.gpu_pool.blocks[id] for id in copy)
            for block, copy in zip(hashed, found, strict=True)
            if copy is not None and block.block_hash is not None
        }

    @property
    def spills_to_send(self: NativeCoordinator) -> list[StepPlan]:
        """Plans with transfers that no worker has got."""
        return [plan for plan in self.due if len(plan.transfer_id)]
