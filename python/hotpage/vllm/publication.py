# SPDX-License-Identifier: Apache-2.0
"""Owns the publication of durable host pages in vLLM's prefix index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import HiSparseSourceManager
from vllm.v1.request import Request


@dataclass(slots=True)
class Publishable:
    """What vLLM last said about a live request: up to where its tokens are final."""

    request: Request
    num_tokens: int
    retention_interval: int | None
    replay_boundaries: Sequence[int]


@dataclass(slots=True)
class _Detached:
    """A request that ended before all its copies did; its blocks stay leased until they have."""

    request: Request
    blocks: list[KVCacheBlock]
    num_cached: int


@dataclass(slots=True)
class Publisher:
    """Publishes pages of live requests by name, those of ended ones by dense id."""

    source: HiSparseSourceManager
    live: dict[str, Publishable] = field(default_factory=dict)
    num_durable: dict[str, int] = field(default_factory=dict)
    """Leading pages of live requests that the Coordinator has found durable; an import's are
    before vLLM has said which of its tokens are final."""
    _detached: dict[int, _Detached] = field(default_factory=dict)

    def note(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Notes that the first `num_tokens` tokens of a live request are final."""
        request_id = request.request_id
        known = self.live.get(request_id)
        if known is None or known.request is not request:
            known = Publishable(request, num_tokens, retention_interval, replay_boundaries)
            self.live[request_id] = known
        else:
            known.num_tokens = num_tokens
            known.retention_interval = retention_interval
            known.replay_boundaries = replay_boundaries
        if self.source.num_cached_block.get(request_id, 0) < self.num_durable.get(request_id, 0):
            self._publish(known)

    def publish(self, request_id: str, num_pages: int) -> None:
        """The first `num_pages` pages of a live request are durable."""
        self.num_durable[request_id] = num_pages
        known = self.live.get(request_id)
        if known is not None:
            self._publish(known)

    def forget(self, request_id: str) -> None:
        """The request has left; `detach` comes before."""
        self.live.pop(request_id, None)
        self.num_durable.pop(request_id, None)

    def detach(self, request_id: str, dense_id: int) -> None:
        """A request ended while copies of its pages are under way.

        Its published pages are leased with the others: evicted first, they would leave the later
        ones published and unreachable.
        """
        known = self.live.get(request_id)
        if known is None:
            return
        size = self.source.block_size
        blocks = self.source.req_to_blocks[request_id][: known.num_tokens // size]
        num_cached = self.source.num_cached_block.get(request_id, 0)
        self.source.block_pool.touch(blocks)
        self._detached[dense_id] = _Detached(known.request, blocks, num_cached)

    def publish_detached(self, dense_id: int, num_pages: int) -> None:
        """The first `num_pages` pages of an ended request are durable."""
        known = self._detached.get(dense_id)
        if known is None:
            return
        num_pages = min(num_pages, len(known.blocks))
        self.source.block_pool.cache_full_blocks(
            request=known.request,
            blocks=known.blocks,
            num_cached_blocks=known.num_cached,
            num_full_blocks=num_pages,
            block_size=self.source.block_size,
            kv_cache_group_id=self.source.kv_cache_group_id,
        )
        known.num_cached = max(known.num_cached, num_pages)

    def retire(self, dense_id: int) -> None:
        """The last copy of an ended request has ended: its blocks may be evicted."""
        known = self._detached.pop(dense_id, None)
        if known is not None:
            self.source.block_pool.free_blocks(reversed(known.blocks))

    def _publish(self, known: Publishable) -> None:
        size = self.source.block_size
        self.source.publish_blocks(
            known.request,
            min(known.num_tokens, self.num_durable[known.request.request_id] * size),
            retention_interval=known.retention_interval,
            replay_boundaries=known.replay_boundaries,
        )
