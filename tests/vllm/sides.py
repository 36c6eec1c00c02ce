# SPDX-License-Identifier: Apache-2.0
"""Owns the two sides of a comparison: vLLM's coordinator and ours, each on its own cache manager.

A side goes through the calls that vLLM's scheduler makes; workers are played by acknowledgements.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

# Before anything asks vLLM for the platform: this host has no GPU, and nothing here needs one.
vllm.platforms._current_platform = CpuPlatform()

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (  # noqa: E402
    HiSparseConnectorScheduler,
    HiSparseConnectorWorkerMetadata,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    BlockHash,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from hotpage.vllm.scheduler import NativeConnectorScheduler  # noqa: E402
from hotpage.vllm.wiring import CoordinatorSettings  # noqa: E402

init_none_hash(sha256)

VLLM = "vllm"
HOTPAGE = "hotpage"


@dataclass(frozen=True)
class Shape:
    """Cache groups and pools of a comparison.

    Args:
        num_groups: resident groups, and as many hot groups.
        block_size: tokens of a block.
        hot_blocks: blocks of a hot region in one group.
        num_blocks: GPU blocks, the null block counted.
        host_blocks: host blocks, the null block counted.
        max_model_len: longest request in tokens.
        max_in_flight_tokens: tokens that may be scheduled and not settled.
        num_speculative_tokens: drafts of a decode step.
    """

    num_groups: int
    block_size: int
    hot_blocks: int
    num_blocks: int
    host_blocks: int
    max_model_len: int
    max_in_flight_tokens: int
    num_speculative_tokens: int = 0

    def cache_config(self) -> KVCacheConfig:
        """The groups in vLLM's order: source, indexer, resident, hot."""
        rows = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        resident = HiSparseResidentSpec(block_size=self.block_size, page_size=256)
        hot = HiSparseHotSpec(
            block_size=self.block_size, page_size=256, blocks_per_request=self.hot_blocks
        )
        groups = [
            KVCacheGroupSpec(
                ["source"], rows, role=KVCacheGroupRole.HISPARSE_SOURCE, host_resident=True
            ),
            KVCacheGroupSpec(["indexer"], rows, role=KVCacheGroupRole.HISPARSE_INDEXER),
        ]
        for name, spec in (("resident", resident), ("hot", hot)):
            groups += [
                KVCacheGroupSpec([f"{name}{at}"], spec, enable_kv_transfer=False)
                for at in range(self.num_groups)
            ]
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            hisparse_host_num_blocks=self.host_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
        )


@dataclass
class Side:
    """One coordinator with its cache manager and connector scheduler."""

    name: str
    shape: Shape
    manager: KVCacheManager
    scheduler: Any
    requests: dict[str, Request] = field(default_factory=dict)

    @property
    def coordinator(self) -> Any:
        """The coordinator under test."""
        return self.scheduler.coordinator

    def admit(self, request: Request) -> None:
        """Makes a request known to the connector, as an allocation does."""
        self.requests[request.request_id] = request
        self.scheduler.requests[request.request_id] = request

    def plan(
        self,
        batch: Sequence[tuple[str, int]],
        drafts: dict[str, list[int]] | None = None,
        new_blocks: Sequence[Any] = (),
    ) -> Any:
        """Builds the metadata of a step of `(request, tokens)`."""
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _ in batch],
                num_computed_tokens=[self.requests[name].num_computed_tokens for name, _ in batch],
                new_block_ids=list(new_blocks) or [None] * len(batch),
            ),
            num_scheduled_tokens=dict(batch),
            scheduled_spec_decode_tokens=drafts or {},
        )
        return self.scheduler.build_connector_meta(output)

    def transfers(self, metadata: Any) -> list[int]:
        """Ids of the transfers in a step's metadata."""
        if self.name == VLLM:
            return [transfer.transfer_id for transfer in metadata.command.page_transfers]
        return [int(id) for plan in metadata.plans for id in plan.transfer_id.tolist()]

    def report(self, enqueued: Sequence[int], completed: Sequence[int], **outcome: Any) -> None:
        """Plays the workers' output after a step."""
        acks = HiSparseConnectorWorkerMetadata(
            dict.fromkeys(enqueued, 1), dict.fromkeys(completed, 1)
        )
        self.scheduler.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=acks, **outcome)
        )


def make_side(
    name: str,
    shape: Shape,
    *,
    fast_path: bool = False,
    hot_return_steps: int = 512,
    kv_events: bool = False,
    num_ranks: int = 1,
    num_host_writers: int = 1,
) -> Side:
    """A fresh side without requests; all options but `kv_events` are ours alone."""
    manager = KVCacheManager(
        shape.cache_config(),
        max_model_len=shape.max_model_len,
        scheduler_block_size=shape.block_size,
        hash_block_size=shape.block_size,
        max_in_flight_tokens=shape.max_in_flight_tokens,
        enable_caching=True,
        enable_kv_cache_events=kv_events,
    )
    if name == VLLM:
        scheduler: Any = HiSparseConnectorScheduler(
            async_speculative=bool(shape.num_speculative_tokens),
            draft_kv_lookahead=shape.num_speculative_tokens,
        )
        scheduler.bind_coordinator(get_hisparse_coordinator(manager))
    else:
        rows = 1 + shape.num_speculative_tokens
        settings = CoordinatorSettings(
            num_ranks=num_ranks,
            num_host_writers=num_host_writers,
            top_k=shape.hot_blocks * shape.block_size // rows,
            verification_rows=rows,
            hot_return_steps=hot_return_steps,
        )
        scheduler = NativeConnectorScheduler(settings=settings, allocate_fast_path=fast_path)
        scheduler.bind_kv_cache_manager(manager)
    return Side(name, shape, manager, scheduler)


def make_request(
    name: str, tokens: list[int], block_size: int, *, cheap_hashes: bool = False
) -> Request:
    """A running request with these prompt tokens.

    `cheap_hashes` names blocks by request and position: for requests that share no prefix.
    """
    params = SamplingParams(max_tokens=100_000)
    params.update_from_generation_config({}, eos_token_id=-1)
    hasher = (
        _cheap_hasher(block_size) if cheap_hashes else get_request_block_hasher(block_size, sha256)
    )
    request = Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
    )
    request.status = RequestStatus.RUNNING
    return request


def pickled(metadata: Any) -> bytes:
    """What the executor sends to the workers."""
    return pickle.dumps(metadata, protocol=5)


def _cheap_hasher(block_size: int) -> Callable[[Request], list[BlockHash]]:
    def hashes(request: Request) -> list[BlockHash]:
        first, last = len(request.block_hashes), request.num_tokens // block_size
        return [BlockHash(f"{request.request_id}:{at}".encode()) for at in range(first, last)]

    return hashes
