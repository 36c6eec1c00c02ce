# SPDX-License-Identifier: Apache-2.0
"""Owns the two vLLM managers whose tables the Rust Coordinator reads or changes.

Instances that vLLM has built change their class, so that its registry and isinstance checks hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import HiSparseHotManager, HiSparseResidentManager

if TYPE_CHECKING:
    from hotpage.vllm.coordinator import NativeCoordinator


class NativeResidentManager(HiSparseResidentManager):
    """Asks the Coordinator where a page is; the block table itself stays append-only."""

    coordinator: NativeCoordinator
    resident_index: int

    @classmethod
    def adopt(cls, manager: HiSparseResidentManager, index: int) -> NativeResidentManager:
        """Makes `manager` the one of resident group `index`."""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.resident_index = index
        return manager

    def get_residency_row(self, request_id: str, start: int = 0) -> list[KVCacheBlock]:
        """Block of each page from `start` on, the null block where it is host-only."""
        row = self.coordinator.residency_row(request_id, self.resident_index)
        table = self.req_to_blocks.get(request_id, [])
        return row[start:] + table[max(start, len(row)) :]

    def get_resident_page(self, request_id: str, block_idx: int) -> KVCacheBlock | None:
        """Block that a page is read from, None if it is host-only or not there."""
        row = self.get_residency_row(request_id)
        if block_idx >= len(row) or row[block_idx].is_null:
            return None
        return row[block_idx]


class NativeHotManager(HiSparseHotManager):
    """Tells the Coordinator when a request holds its region, and keeps a second one off the
    workers' block tables, which only grow: they get it with the plan.
    """

    coordinator: NativeCoordinator
    is_last: bool

    @classmethod
    def adopt(cls, manager: HiSparseHotManager, is_last: bool) -> NativeHotManager:
        """Makes `manager` one of the hot groups; the last of them reports grants."""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.is_last = is_last
        return manager

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """As vLLM's; a region that replaces one given back is not reported to block tables."""
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        if not blocks:
            return blocks
        if self.is_last:
            self.coordinator.hot_granted.append(request_id)
        return [] if self.coordinator.gave_region_back(request_id) else blocks
