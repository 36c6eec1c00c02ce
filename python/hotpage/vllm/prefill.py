# SPDX-License-Identifier: Apache-2.0
"""Owns the staging of prefill contexts inside vLLM: host rows and resident rows into workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotpage.kernels.stage_prefill import StageInputs, StagePrefill
from hotpage.runtime.streams import current_stream

if TYPE_CHECKING:
    import torch

    from hotpage.kernels.layer_table import PoolLayer
    from hotpage.vllm.caches import BoundCaches, BoundLayer

# The attention kernel of one backend reads up to 250 rows whatever the cache's size.
_MIN_STAGED_ROWS = 256


class ChunkStarts:
    """Where each request of a chunk starts in the workspace, kept for all layers of a step."""

    def __init__(self) -> None:
        self._metadata: Any = None
        self._starts: dict[int, torch.Tensor] = {}

    def forget(self) -> None:
        """The next batch has other chunks."""
        self._metadata = None
        self._starts.clear()

    def get(self, metadata: Any, request_start: int, starts: torch.Tensor, end: int) -> Any:
        """int32 `[requests + 1]` on the device: `starts`, then `end`."""
        import torch

        if self._metadata is not metadata:
            self._metadata, self._starts = metadata, {}
        found = self._starts.get(request_start)
        if found is None:
            last = torch.full((1,), end, dtype=torch.int32, device=starts.device)
            found = self._starts[request_start] = torch.cat((starts, last))
        return found


class LayerStaging:
    """stage_prefill of one layer, for batches whose contexts are not all resident.

    Args:
        layer: the layer.
        rows: where its rows lie.
        caches: the tables that all layers share.
        chunks: of the step.
        counters: int64 `[3]` on the device, as in `StageInputs`.
        zeros: int32 `[max requests + 1]` zeros on the device.
    """

    def __init__(
        self,
        layer: BoundLayer,
        rows: PoolLayer,
        caches: BoundCaches,
        chunks: ChunkStarts,
        counters: torch.Tensor,
        zeros: torch.Tensor,
    ) -> None:
        handle = layer.handle
        source, residency = handle.source_block_table, handle.block_table
        assert source is not None
        assert residency is not None
        self._rows, self._chunks = rows, chunks
        self._source = source[:, : residency.shape[1]]
        self._state_rows, self._device = caches.request_state_indices, caches.device
        self._block_size = caches.block_size
        self._inputs = StageInputs(
            row_start=zeros,
            first_position=zeros,
            state_row=self._state_rows,
            residency=residency,
            source_block_table=self._source,
            counters=counters,
        )
        self._ops: dict[tuple[torch.dtype, int], StagePrefill] = {}
        self.num_launches = 0

    def upconvert(
        self, dst: torch.Tensor, starts: torch.Tensor, metadata: Any, request_start: int
    ) -> None:
        """Enqueues the staging of one chunk of prefill requests, whole contexts, as bfloat16.

        Args:
            dst: bfloat16 `[rows of the chunk][576]`.
            starts: int32 `[requests]`: first row of each request.
            metadata: vLLM's metadata of the batch.
            request_start: first of the chunk among the batch's prefill requests.
        """
        num_rows, first = int(dst.shape[0]), int(metadata.num_decodes) + request_start
        row_start = self._chunks.get(metadata, request_start, starts, num_rows)
        self._stage(dst, row_start, first, int(starts.shape[0]), num_rows)

    def pages(self, metadata: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Enqueues the staging of all prefill requests' contexts as pages of this layer's dtype.

        Returns:
            `[staged blocks][block size][row width]`; int32 `[prefill requests][pages]` block table
            into it; int32 `[prefill tokens]` request of each token, from 0.
        """
        import torch

        num_decodes, num_prefills = int(metadata.num_decodes), int(metadata.num_prefills)
        size = self._block_size
        lengths = metadata.seq_lens[num_decodes : num_decodes + num_prefills]
        blocks = torch.div(lengths + (size - 1), size, rounding_mode="floor").to(torch.int32)
        ends = torch.cumsum(blocks, 0, dtype=torch.int32)
        first_block = ends - blocks
        # vLLM's plan has room for one block more than all contexts; the sizes are known there
        # without asking the device.
        capacity = int(metadata.prefill.host_staging_plan.row_ids.shape[1])
        width = int(self._rows.gpu.shape[2])
        shape = (max(capacity, _MIN_STAGED_ROWS), width)
        staged = torch.empty(shape, dtype=self._rows.gpu.dtype, device=self._device)[:capacity]
        row_start = torch.cat((first_block * size, ends[-1:] * size))
        self._stage(staged, row_start, num_decodes, num_prefills, capacity)
        page = torch.arange(self._source.shape[1], dtype=torch.int32, device=self._device)
        # Columns behind a context name a block of somebody else; no top-k entry reaches them.
        table = (first_block[:, None] + page[None, :]).clamp_(max=capacity // size - 1)
        request = metadata.req_id_per_token[metadata.num_decode_tokens :] - num_decodes
        return staged.view(-1, size, width), table, request

    def _stage(
        self, dst: torch.Tensor, row_start: torch.Tensor, first: int, requests: int, num_rows: int
    ) -> None:
        key = (dst.dtype, int(dst.shape[1]))
        op = self._ops.get(key)
        if op is None:
            op = self._ops[key] = StagePrefill([self._rows], [dst], self._inputs)
        op.set_chunk(
            [dst],
            row_start,
            self._state_rows[first : first + requests],
            self._source[first : first + requests],
        )
        op(requests, num_rows, current_stream(self._device))
        self.num_launches += 1
