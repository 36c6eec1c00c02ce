# SPDX-License-Identifier: Apache-2.0
"""Owns the short cut through vLLM's allocation for requests that need no new block.

vLLM asks every cache manager four times per request and step, 2 G + 2 of them. Most decode steps
allocate nothing; here that is found out from one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    HiSparseHotManager,
    HiSparseResidentManager,
    HiSparseSourceManager,
)
from vllm.v1.request import Request

from hotpage.errors import ConfigError
from hotpage.vllm.coordinator import NativeCoordinator


def install_fast_path(coordinator: KVCacheCoordinator) -> None:
    """Shadows four methods on this one instance; every other case is passed to the class.

    OK because the answer is the managers' own: with a table that reaches `num_tokens` each of
    them allocates nothing, a source, indexer, resident or hot manager skips no blocks, and a
    block is hashed only when a page fills up.

    Raises:
        ConfigError: a cache group whose manager does more than that.
    """
    managers = coordinator.single_type_managers
    source = managers[0]
    tables = []
    hot = None
    for manager in managers:
        if isinstance(manager, HiSparseHotManager):
            hot = manager
        elif isinstance(manager, (HiSparseSourceManager, HiSparseResidentManager)) or (
            type(manager) is FullAttentionManager
        ):
            if manager.block_size != source.block_size:
                raise ConfigError(
                    "allocate_fast_path needs one block size in all cache groups; switch it off"
                )
            if not isinstance(manager, HiSparseResidentManager):
                tables.append(manager.req_to_blocks)
        else:
            raise ConfigError(
                f"allocate_fast_path does not know {type(manager).__name__}; switch it off"
            )
    if not isinstance(source, HiSparseSourceManager) or hot is None:
        raise ConfigError("allocate_fast_path needs HiSparse cache groups; switch it off")
    _Shadow(coordinator, source, hot, tables).install()


class _Shadow:
    """The four methods and what they look at.

    Tables of the resident groups need no look: they grow with the source table, by the same
    calls.
    """

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        source: HiSparseSourceManager,
        hot: HiSparseHotManager,
        tables: list[dict[str, list[KVCacheBlock]]],
    ) -> None:
        self._coordinator = coordinator
        self._source = source
        self._tables = tables
        self._block_size = source.block_size
        self._hot_required = hot.hot_required
        self._hot_tables = hot.req_to_blocks
        assert isinstance(source.coordinator, NativeCoordinator)
        self._publishable = source.coordinator.publisher.live
        self._caches = source.enable_caching
        self._empty: tuple[Sequence[KVCacheBlock], ...] | None = None
        self._partial_hits = source._partial_hit_reqs
        self._nothing: tuple[list[KVCacheBlock], ...] = tuple(
            [] for _ in coordinator.single_type_managers
        )
        # Hash bookkeeping of groups that hash their own pages.
        self._hashed = [
            manager
            for manager in coordinator.single_type_managers
            if type(manager) is FullAttentionManager and manager.enable_caching
        ]
        self._classic_count = coordinator.get_num_blocks_to_allocate
        self._classic_allocate = coordinator.allocate_new_blocks
        self._classic_cache = coordinator.cache_blocks

    def install(self) -> None:
        """Puts the methods onto the instance."""
        instance: Any = self._coordinator
        instance.get_num_blocks_to_allocate = self.get_num_blocks_to_allocate
        instance.allocate_new_blocks = self.allocate_new_blocks
        instance.remove_skipped_blocks = self.remove_skipped_blocks
        instance.cache_blocks = self.cache_blocks

    def _is_settled(self, request_id: str, num_tokens: int) -> bool:
        """True if the request's tables reach `num_tokens` and no hot region is due."""
        for tables in self._tables:
            table = tables.get(request_id)
            if table is None or len(table) * self._block_size < num_tokens:
                return False
        if request_id in self._hot_required and not self._hot_tables.get(request_id):
            return False
        return request_id not in self._partial_hits

    def _is_empty(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> bool:
        # vLLM passes one and the same tuple for every running request.
        if blocks is self._empty:
            return True
        if any(blocks):
            return False
        self._empty = blocks
        return True

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """As the class's; 0 at once for a settled request."""
        if (
            total_computed_tokens == num_local_computed_tokens
            and self._is_settled(request_id, num_tokens)
            and self._is_empty(new_computed_blocks)
        ):
            return 0
        return self._classic_count(
            request_id,
            num_tokens,
            new_computed_blocks,
            num_encoder_tokens,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap=apply_admission_cap,
            prefill_end=prefill_end,
        )

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> tuple[list[KVCacheBlock], ...]:
        """As the class's; empty lists at once for a settled request."""
        if self._is_settled(request_id, num_tokens):
            return self._nothing
        return self._classic_allocate(
            request_id, num_tokens, num_tokens_main_model, num_encoder_tokens
        )

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Nothing: full attention reads every block to the end."""

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """As the class's; nothing where no page has filled up since the last call."""
        if not self._caches:
            return
        request_id = request.request_id
        known = self._publishable.get(request_id)
        if known is not None and known.request is request:
            num_tokens = self._coordinator.get_num_cacheable_tokens(num_computed_tokens, 0)
            num_pages = num_tokens // self._block_size
            if known.num_tokens // self._block_size == num_pages and all(
                manager.num_cached_block.get(request_id, 0) >= num_pages for manager in self._hashed
            ):
                return
        self._classic_cache(request, num_computed_tokens)
