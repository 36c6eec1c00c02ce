# SPDX-License-Identifier: Apache-2.0
"""Owns what vLLM's attention layers call: their index groups, retyped once everything is bound.

The objects stay vLLM's, with all that refers to them; only their class changes. What the native
engine does not run raises, so that nothing falls back in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.hisparse.runtime import HiSparseCacheHandle, HiSparseRuntime

from hotpage.errors import InvariantError
from hotpage.runtime.streams import mark
from hotpage.vllm.prefill import LayerStaging
from hotpage.vllm.resolver import GroupResolver


@dataclass(frozen=True)
class GroupOps:
    """The bound ops of one index group."""

    resolver: GroupResolver
    staging: tuple[LayerStaging, ...]
    """Of each layer, leader first."""


class NativeIndexGroup(HiSparseMLAIndexGroup):
    """An index group whose top-k is resolved, and whose rows are brought, by hotpage's kernels."""

    ops: GroupOps

    def set_logical_topk_ready(self, layer_index: int) -> None:
        """Nothing to do: the resolve runs on the stream that wrote the top-k."""

    def convert_logical_to_physical_topk(
        self,
        layer_index: int,
        logical_topk_indices: torch.Tensor,
        attn_metadata: Any,
        *,
        block_stride_rows: int | None,
        return_valid_counts: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Physical rows of verification rows, hot and resident; the leader's call brings all misses
        of the group. Rows of prefill requests come here only if their contexts are resident.

        Args:
            logical_topk_indices: int32 `[rows][top_k]`.

        Returns:
            int32 `[rows][top_k]`, with the valid entries of each row, int32 `[rows]`, if asked for.

        Raises:
            InvariantError: prefill rows with host-only pages.
        """
        num_rows = int(logical_topk_indices.shape[0])
        if num_rows > attn_metadata.num_decode_tokens:
            return self._convert_resident(
                layer_index, logical_topk_indices, attn_metadata, return_valid_counts
            )
        resolver = self.ops.resolver
        if layer_index == 0:
            rows, counts = resolver.resolve(
                logical_topk_indices, attn_metadata, int(attn_metadata.num_decodes)
            )
        else:
            rows, counts = resolver.last(num_rows)
        return (rows, counts) if return_valid_counts else rows

    def stage_prefill_rows(
        self, layer_index: int, kv_cache: torch.Tensor, attn_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Contexts of all prefill requests as pages of one layer; see `LayerStaging.pages`."""
        return self.ops.staging[layer_index].pages(attn_metadata)

    def gather_fp8_prefill(
        self,
        layer_index: int,
        source_cache: torch.Tensor,
        dst: torch.Tensor,
        block_table: torch.Tensor,
        workspace_starts: torch.Tensor,
        batch_size: int,
        attn_metadata: Any,
        request_start: int,
    ) -> torch.Event:
        """Contexts of one chunk of prefill requests as bfloat16, on the current stream.

        Args:
            dst: bfloat16 `[rows of the chunk][576]`.
            workspace_starts: int32 `[batch_size or more]`: first row of each request.
        """
        self.ops.staging[layer_index].upconvert(
            dst, workspace_starts[:batch_size], attn_metadata, request_start
        )
        return mark()

    def _convert_resident(
        self, layer_index: int, logical_topk: torch.Tensor, metadata: Any, counts: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        leader = self.cache(0)
        if not leader.all_context_pages_resident:
            raise InvariantError("rows of a prefill request with host-only pages were not staged")
        assert leader.view is not None
        assert leader.block_table is not None
        if layer_index == 0:
            # vLLM converts on a stream of its own, behind this event, which only it waits for.
            self.logical_topk_ready.record()
        return self._convert_once(
            layer_index,
            logical_topk,
            metadata.req_id_per_token[: logical_topk.shape[0]],
            leader.block_table,
            leader.view.block_size,
            block_stride_rows=leader.view.attention_block_stride,
            return_valid_counts=counts,
            idx_mapping=leader.runtime.request_state_indices,
        )


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise InvariantError("vLLM's own host-cache path was called under engine native")


class NativeRuntime(HiSparseRuntime):
    """vLLM's per-layer runtime, kept for its views; all that moves rows is hotpage's."""

    swap_in = _refuse
    gather_prefill_cache = _refuse
    invalidate_sorted_slots = _refuse
    invalidate_written_slots = _refuse
    reset_hot_state = _refuse
    _resolve_and_stage_group = _refuse
    _resolve_residency = _refuse
    _stage_this_layer = _refuse
    _swap_rows = _refuse


class NativeCacheHandle(HiSparseCacheHandle):
    """vLLM's handle, kept for where a layer writes its rows."""

    swap_in = _refuse


def retype(index_group: HiSparseMLAIndexGroup, ops: GroupOps) -> None:
    """Makes an index group and its layers' handles and runtimes native."""
    for handle in index_group.caches:
        handle.__class__ = NativeCacheHandle
        handle.runtime.__class__ = NativeRuntime
        handle.submit_layer_mirror = None
    index_group.__class__ = NativeIndexGroup
    assert isinstance(index_group, NativeIndexGroup)
    index_group.ops = ops
