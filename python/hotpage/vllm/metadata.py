# SPDX-License-Identifier: Apache-2.0
"""Owns what the scheduler sends to the workers each step: plans as flat arrays, and names."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.hisparse.types import SparseKVResidencyUpdate

from hotpage._core import (
    TRANSFER_HOST_COPY,
    TRANSFER_MIRRORED,
    TRANSFER_RESTORE,
    TRANSFER_SPILL,
    StepPlan,
)
from hotpage.vllm.views import residency_updates

# The worker side reads plans and knows nothing else of the core.
__all__ = [
    "TRANSFER_HOST_COPY",
    "TRANSFER_MIRRORED",
    "TRANSFER_RESTORE",
    "TRANSFER_SPILL",
    "HotPageConnectorMetadata",
    "StepPlan",
]


@dataclass
class HotPageConnectorMetadata(KVConnectorMetadata):
    """One step's work for every worker; picklable, opaque to everybody else.

    Args:
        plans: plans in the order in which they must be carried out; the last one is the step's.
        batch: int32 dense ids of the scheduled requests, in schedule order, little-endian.
        retired: dense ids whose requests no plan names any more; comes before `started`, which
            may use them again.
        started: `(dense id, request id)` of requests that the workers have not heard of.
        host_copies: `(source, destination)` host blocks to copy before the step.
    """

    plans: tuple[StepPlan, ...]
    batch: bytes
    retired: tuple[int, ...] = ()
    started: tuple[tuple[int, str], ...] = ()
    host_copies: tuple[tuple[int, int], ...] = ()

    @property
    def all_context_pages_resident(self) -> bool:
        """True if no scheduled request reads a host-only page."""
        return self.plans[-1].all_context_resident

    @property
    def host_block_copies(self) -> tuple[KVCacheBlockCopy, ...]:
        """`host_copies` as vLLM's type."""
        return tuple(KVCacheBlockCopy(src_block_id=s, dst_block_id=d) for s, d in self.host_copies)

    @property
    def residency_updates(self) -> dict[str, SparseKVResidencyUpdate]:
        """Residency of requests that `started` names, as vLLM's type; for tests and debugging."""
        return residency_updates(self.plans, dict(self.started))
