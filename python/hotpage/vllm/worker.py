# SPDX-License-Identifier: Apache-2.0
"""Owns the connector's worker side under `engine: native`: one step's plans become launches.

No call here waits for the device, and nothing is read back to decide what to launch. Where ranks
share the host pool, a call waits for another rank's call that it would otherwise come before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from hotpage.kernels.invalidate import Holders
from hotpage.kernels.layer_table import LayerTable, PoolLayer
from hotpage.runtime.events import WriteOrder
from hotpage.runtime.streams import wait_for_current_stream, wait_for_device
from hotpage.vllm import host_pool
from hotpage.vllm.attention import GroupOps, retype
from hotpage.vllm.caches import BoundCaches, pool_layers
from hotpage.vllm.cooperation import Cooperation
from hotpage.vllm.counters import DeviceCounters
from hotpage.vllm.prefill import ChunkStarts, LayerStaging
from hotpage.vllm.resolver import GroupResolver, RowLengths
from hotpage.vllm.step_tables import HotRegions, StepTables, changes_tables
from hotpage.vllm.transfers import HostReader, HostWriter

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.stats import (
        HiSparseKVConnectorStats,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from hotpage.vllm.host_pool import NativeHostPool
    from hotpage.vllm.metadata import HotPageConnectorMetadata
    from hotpage.vllm.options import Options


logger = logging.getLogger(__name__)

_OTHERS_S = 600.0
"""Seconds that a step waits for another rank's call: one that compiles late, say."""


class NativeConnectorWorker:
    """Worker side of one rank.

    Args:
        vllm_config: of this worker.
        kv_cache_config: of this worker.
        options: of this connector.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
    ) -> None:
        self._config, self._kv_cache_config, self._options = vllm_config, kv_cache_config, options
        self._names: dict[int, str] = {}
        self._num_tokens = 0
        self._is_open = False
        self._made = ExitStack()
        """Ends what orders and connects the ranks, in the reverse order."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Binds everything to vLLM's caches and puts hotpage's ops behind its attention layers.

        Raises:
            ConfigError: caches that are bound otherwise than expected.
            KernelUnavailableError: no kernels for this device.
            RankError: another rank that shares the pool failed.
        """
        context = self._config.compilation_config.static_forward_context
        try:
            caches = BoundCaches.collect(self._kv_cache_config, context)
            native = host_pool.host_pool_of(self._config)
            with native.telling():
                self._bind(native, caches, kv_caches)
        except Exception:
            self._made.close()
            host_pool.release(self._config)
            raise
        self._is_open = True

    def _bind(
        self, native: NativeHostPool, caches: BoundCaches, kv_caches: dict[str, torch.Tensor]
    ) -> None:
        self.caches, self.host_pool = caches, native
        if native.pool.layout.row_interleaved:
            host_pool.rebind(caches, kv_caches, native.layer_rows())
        self.layers = pool_layers(caches)
        self._handles = [layer.handle for layer in caches.layers]
        table = LayerTable(self.layers, num_kv_groups=caches.num_kv_groups)
        holders = Holders(caches.num_host_blocks, caches.max_requests, caches.device)
        self._side = self._make_side(native, table)
        self._mirrors, self._acks = self._side.mirrors, self._side.acks
        self._regions = HotRegions(caches)
        self._cooperation = None
        if self._options.cooperative_copy == "auto":
            self._cooperation = Cooperation.connect(native.ranks, caches.device)
        if self._cooperation is not None:
            self._made.callback(self._cooperation.close)
        self._retype(caches, holders)
        self.states = [resolver.state for resolver in self._resolvers]
        self._tables = StepTables(
            caches,
            self.states,
            self._regions,
            holders,
            self._side.masks,
            caches.slots.host_row,
        )
        row_bytes = [len(group.layers) * table.row_bytes for group in caches.groups]
        self._counters = DeviceCounters(
            [state.counters for state in self.states], row_bytes, self._options.metrics_interval
        )
        wait_for_current_stream(caches.device)

    def _make_side(self, native: NativeHostPool, table: LayerTable) -> HostReader:
        order = None
        if native.ranks is not None:
            device = self.caches.device.index or 0
            order = WriteOrder(native.ranks, device=device, time_limit_s=_OTHERS_S)
            self._made.callback(order.close)
        if not native.is_writer:
            return HostReader(table, order)
        drafts = [layer.is_draft for layer in self.caches.layers]
        return HostWriter(self.layers, drafts, self.caches.slots, table, order)

    def _retype(self, caches: BoundCaches, holders: Holders) -> None:
        import torch

        leader = caches.groups[0].leader.handle.runtime
        lengths = RowLengths(leader.max_swap_rows, caches.device)
        chunks = ChunkStarts()
        zeros = torch.zeros(caches.max_requests + 1, dtype=torch.int32, device=caches.device)
        staged = torch.zeros(3, dtype=torch.int64, device=caches.device)
        self._lengths, self._chunks, self.staged_counters = lengths, chunks, staged
        self._resolvers, self._staging, at = [], [], 0
        for group in caches.groups:
            rows: list[PoolLayer] = self.layers[at : at + len(group.layers)]
            at += len(group.layers)
            resolver = GroupResolver(
                group, caches, rows, self._regions, lengths, holders, self._cooperation
            )
            staging = tuple(
                LayerStaging(layer, one, caches, chunks, staged, zeros)
                for layer, one in zip(group.layers, rows, strict=True)
            )
            retype(group.index_group, GroupOps(resolver, staging))
            self._resolvers.append(resolver)
            self._staging.extend(staging)

    def start_step(
        self,
        metadata: HotPageConnectorMetadata,
        request_state_indices: torch.Tensor | None,
        request_ids: Sequence[str] | None = None,
        num_tokens: int = 0,
    ) -> None:
        """Enqueues what must come before the forward pass, on the computing stream.

        Args:
            metadata: of the step.
            request_state_indices: int32 `[batch]` on the device: state row of each batch request.
            request_ids: the batch, in the runner's order.
            num_tokens: tokens of the forward pass, 0 if there is none.

        Raises:
            ProtocolError: plans that contradict the batch.
            KernelError: a launch failed.
            RankError: another rank that shares the pool has ended.
        """
        # Here and below: a rank that fails lives on, and the others are not to wait for its calls.
        with self.host_pool.telling():
            self._start_step(metadata, request_state_indices, request_ids or (), num_tokens)

    def _start_step(
        self,
        metadata: HotPageConnectorMetadata,
        request_state_indices: torch.Tensor | None,
        request_ids: Sequence[str],
        num_tokens: int,
    ) -> None:
        self._lengths.forget()
        self._chunks.forget()
        self._side.begin_step()
        if self._cooperation is not None:
            self._cooperation.begin_step()
        self._num_tokens = num_tokens
        for id in metadata.retired:
            self._names.pop(id, None)
        self._names.update(metadata.started)
        resident = metadata.all_context_pages_resident
        for handle in self._handles:
            handle.all_context_pages_resident = resident
        self._tables.forget_stale(metadata.plans, num_tokens)
        self._side.transfer(metadata)
        if request_state_indices is not None:
            self._tables.set_batch(request_state_indices)
        self._apply_tables(metadata, request_ids)
        if request_state_indices is not None:
            self._regions.gather(request_state_indices)

    def _apply_tables(self, metadata: HotPageConnectorMetadata, request_ids: Sequence[str]) -> None:
        changed = [plan for plan in metadata.plans if changes_tables(plan)]
        if not changed:
            return
        rows = {name: row for row, name in enumerate(request_ids)}
        scheduled = np.frombuffer(metadata.batch, np.int32).tolist()
        names = [self._names.get(id, "") for id in scheduled]
        batch_row = {
            id: rows[name] for id, name in zip(scheduled, names, strict=True) if name in rows
        }
        for plan in changed:
            self._tables.apply(plan, batch_row)

    def prepare_forward(self, attn_metadata: dict[str, Any] | None) -> None:
        """Tells the layers of their batch where a captured graph will run instead of them."""
        if attn_metadata is None:
            return
        for group in self.caches.groups:
            metadata = attn_metadata.get(group.leader.name)
            if metadata is not None:
                group.leader.handle.prepare_group_for_batch(metadata)

    def finish_forward(self) -> None:
        """Enqueues the mirror of the rows that the forward pass wrote; sampling does not wait,
        unless a sibling uses host rows.

        Raises:
            KernelError: a launch failed.
            RankError: another rank that shares the pool has ended.
        """
        with self.host_pool.telling():
            self._side.finish_forward(self._num_tokens, joins=self._options.shares_host_rows)

    def take_transfer_updates(self) -> tuple[list[int], list[int]]:
        """Drains `(enqueued, completed)` transfer ids; copies pages again whose rows are missing.

        Raises:
            KernelError: a launch failed.
            RankError: another rank that shares the pool has ended.
        """
        with self.host_pool.telling():
            return self._acks.take()

    def take_completed_host_copies(self) -> list[int]:
        """Drains destinations of host block copies that have run."""
        return self._side.take_completed_host_copies()

    def get_kv_connector_stats(self) -> HiSparseKVConnectorStats | None:
        """Hits and misses since the last reading, if one has come in."""
        return self._counters.poll()

    def reset_hot_state(self) -> None:
        """Empties all row maps: capture runs have filled them."""
        for state in self.states:
            state.reset()

    def launch_counts(self) -> dict[str, int]:
        """Launches of each op so far, by name."""
        return {
            "resolve_and_copy": sum(r.num_launches for r in self._resolvers),
            "stage_prefill": sum(s.num_launches for s in self._staging),
            "mirror_rows": self._mirrors.num_launches if self._mirrors else 0,
            "spill_pages": self._side.spill.num_launches if self._side.spill else 0,
            "restore_pages": self._side.restore.num_launches,
            "invalidate": self._tables.num_invalidations,
            "reset_states": self._tables.num_resets,
        }

    @property
    def num_repaired_pages(self) -> int:
        """Pages that missed mirrored rows and were copied whole instead."""
        return self._acks.num_repaired

    def shutdown(self) -> None:
        """Waits for what is enqueued, then unpins and frees the pool. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            wait_for_device(self.caches.device)
        except RuntimeError as error:
            # The pool survives a dead context: it then unmaps without unpinning.
            logger.warning("the CUDA context is gone at the end (%s)", error)
        for handle in self._handles:
            # Views keep the pool's memory.
            handle.runtime.__dict__.pop("_host_cache", None)
        self._made.close()
        host_pool.release(self._config)
