# SPDX-License-Identifier: Apache-2.0
"""Owns the connector's scheduler side: a scheduled step goes in, its metadata comes out."""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.stats import HiSparseKVConnectorStats

from hotpage.errors import ConfigError
from hotpage.vllm.coordinator import NativeCoordinator
from hotpage.vllm.fast_path import install_fast_path
from hotpage.vllm.metadata import HotPageConnectorMetadata
from hotpage.vllm.wiring import CoordinatorSettings

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_NUM_TOKENS = attrgetter("num_tokens")


class NativeConnectorScheduler:
    """Scheduler side under `engine: native`.

    Args:
        async_speculative: vLLM schedules ahead of verification; kept for its call signature, the
            tokens that are certain are read from the requests instead.
        draft_kv_lookahead: rows that the drafter writes beyond the scheduled ones; likewise.
        settings: what the cache managers do not know.
        allocate_fast_path: install the short cut for allocations that need no block.
        metrics_interval: steps between two reports of the host pool.
    """

    def __init__(
        self,
        *,
        async_speculative: bool = False,
        draft_kv_lookahead: int = 0,
        settings: CoordinatorSettings | None = None,
        allocate_fast_path: bool = False,
        metrics_interval: int = 1,
    ) -> None:
        del async_speculative, draft_kv_lookahead
        self.coordinator: NativeCoordinator | None = None
        self.requests: dict[str, Request] = {}
        self._settings = settings or CoordinatorSettings()
        self._allocate_fast_path = allocate_fast_path
        self._metrics_interval = metrics_interval
        self._steps_to_report = 1

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Builds the coordinator of a cache manager that has no request yet, or takes the one
        that it has.

        Raises:
            ConfigError: cache groups or hash granularity that native does not serve.
        """
        managers = tuple(manager.coordinator.single_type_managers)
        bound = [c for m in managers if (c := getattr(m, "coordinator", None)) is not None]
        if bound:
            if not isinstance(bound[0], NativeCoordinator):
                raise ConfigError(
                    "the cache manager has vLLM's own coordinator already; "
                    "list one HiSparseConnector only"
                )
            self.bind_coordinator(bound[0])
        else:
            if manager.coordinator.enable_partial_hash_hits:
                raise ConfigError(
                    "engine native does not serve prefix hits inside a block; "
                    "set the prefix hash block size to --block-size"
                )
            self.bind_coordinator(
                NativeCoordinator(
                    manager.kv_cache_config,
                    managers,
                    manager.max_model_len,
                    num_reprefillable_tokens=manager.coordinator.num_reprefillable_tokens,
                    settings=self._settings,
                )
            )
        if self._allocate_fast_path:
            install_fast_path(manager.coordinator)

    def bind_coordinator(self, coordinator: NativeCoordinator) -> None:
        """Takes the coordinator, once."""
        assert self.coordinator is None
        self.coordinator = coordinator

    def build_connector_meta(self, output: SchedulerOutput) -> HotPageConnectorMetadata:
        """Plans the step that vLLM has scheduled and packages it for the workers.

        Raises:
            ProtocolError: the scheduler contradicts what it said before.
        """
        coordinator = self._bound()
        # The plan rebinds worker state before the forward pass, so it must not be deferred.
        output.has_sync_kv_loads = True
        counts = output.num_scheduled_tokens
        request_ids = list(counts)
        cached = output.scheduled_cached_reqs
        starts = cached.num_computed_tokens
        if cached.req_ids != request_ids:
            computed = dict(zip(cached.req_ids, starts, strict=True))
            for request in output.scheduled_new_reqs:
                computed[request.req_id] = request.num_computed_tokens
            starts = [computed[request_id] for request_id in request_ids]
        drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
        num_drafts = [0] * len(request_ids)
        if drafts:
            num_drafts = list(map(len, map(drafts.get, request_ids, repeat(()))))
        plan, batch = coordinator.plan_step(
            request_ids,
            starts,
            list(counts.values()),
            num_drafts,
            list(map(_NUM_TOKENS, map(self.requests.__getitem__, request_ids))),
        )
        metadata = HotPageConnectorMetadata(
            plans=coordinator.take_plans(plan),
            batch=batch.tobytes(),
            started=tuple(coordinator.started),
            retired=tuple(coordinator.retired),
            host_copies=coordinator.take_host_copies(),
        )
        coordinator.started.clear()
        coordinator.retired.clear()
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Absorbs ended imports and what the workers acknowledge."""
        coordinator = self._bound()
        for request_id in output.finished_recving or ():
            coordinator.finish_host_import(
                request_id, failed=request_id in (output.failed_recving or ())
            )
        metadata = output.kv_connector_worker_meta
        if metadata is None:
            return
        assert isinstance(metadata, HiSparseConnectorWorkerMetadata)
        coordinator.release_completed_host_copies(metadata.completed_host_copy_dst_ids)
        coordinator.update_spills(
            metadata.enqueued_transfer_counts, metadata.completed_transfer_counts
        )

    def get_kv_connector_stats(self) -> HiSparseKVConnectorStats | None:
        """Host pool level and transfers under way, in vLLM's stats class.

        vLLM asks once a step and sends each answer through a queue to another process; None in the
        steps between two reports. Evictions are kept for the next one.
        """
        if self.coordinator is None:
            return None
        self._steps_to_report -= 1
        if self._steps_to_report:
            return None
        self._steps_to_report = self._metrics_interval
        pool = self.coordinator.host_pool
        stats = HiSparseKVConnectorStats()
        stats.record_host_usage(pool.get_usage(), len(self.coordinator.pending_spills))
        if pool.metrics_collector is not None:
            stats.record_host_evictions(pool.metrics_collector.drain_events())
        return stats

    def _bound(self) -> NativeCoordinator:
        assert self.coordinator is not None
        return self.coordinator
