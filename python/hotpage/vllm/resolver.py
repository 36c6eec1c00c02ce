# SPDX-License-Identifier: Apache-2.0
"""Owns the resolve of one index group inside vLLM: its bound ops, and the buffers of vLLM it uses.

Everything here runs on the computing stream, so a hot row is never overwritten while attention of
an earlier layer or step still reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotpage.errors import ConfigError
from hotpage.kernels.cooperative_copy import HolderWords
from hotpage.kernels.replay_copy import CopyList, LayerRows
from hotpage.kernels.resolve_and_copy import (
    ResolveAndCopy,
    ResolveInputs,
    ResolveOutputs,
    ResolveShape,
    RowState,
)
from hotpage.runtime.streams import current_stream
from hotpage.vllm.row_views import flat_rows, rows_as

if TYPE_CHECKING:
    import torch

    from hotpage.kernels.invalidate import Holders
    from hotpage.kernels.layer_table import PoolLayer
    from hotpage.vllm.caches import BoundCaches, BoundGroup
    from hotpage.vllm.cooperation import Cooperation
    from hotpage.vllm.step_tables import HotRegions


class RowLengths:
    """Tokens whose rows exist for each verification row: what the indexer may select below.

    A row at offset r of its request's query sees sequence length - query length + r + 1 tokens.
    Worked out once a step for all index groups, on the current stream.

    Args:
        max_rows: verification rows of a batch at most.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        import torch

        self.buffer = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """int32 `[max rows]`."""
        # One more than the row, which is itself among the tokens that it sees.
        self._row = torch.arange(1, max_rows + 1, dtype=torch.int32, device=device)
        self._metadata: Any = None
        self._num_rows = 0
        self._captured = False
        self._served: set[object] = set()

    def forget(self) -> None:
        """The next batch has other lengths."""
        self._metadata = None

    def update(self, metadata: Any, num_rows: int, group: object) -> None:
        """Fills the buffer for a batch, unless this very batch was the last one.

        Args:
            metadata: vLLM's sparse-MLA metadata of the batch.
            group: who asks. Asking a second time it is in another forward pass: a drafter's passes
                share their metadata, in which the lengths change.
        """
        import torch

        # A graph must hold the work that its replays need, once for all index groups.
        capturing = torch.cuda.is_current_stream_capturing()
        known = (
            self._metadata is metadata
            and self._num_rows >= num_rows
            and self._captured == capturing
        )
        if known and group not in self._served:
            self._served.add(group)
            return
        request = metadata.req_id_per_token[:num_rows]
        past = metadata.seq_lens - metadata.query_start_loc[1:]
        torch.add(
            torch.index_select(past, 0, request),
            self._row[:num_rows],
            out=self.buffer[:num_rows],
        )
        self._metadata, self._num_rows = metadata, num_rows
        self._captured, self._served = capturing, {group}


class GroupResolver:
    """resolve_and_copy of one index group, bound to the buffers that vLLM has allocated for it.

    Args:
        group: the layers.
        caches: the tables that all groups share.
        rows: where the group's rows lie, leader first.
        regions: of the batch's requests.
        lengths: of the batch's rows.
        holders: words that every resolve marks, for the invalidation.
        cooperation: with the ranks that fetch misses for each other; None if each fetches its own.

    Raises:
        ConfigError: a size that the kernels do not take, or other sizes on other ranks.
        RankError: another rank failed.
    """

    def __init__(
        self,
        group: BoundGroup,
        caches: BoundCaches,
        rows: list[PoolLayer],
        regions: HotRegions,
        lengths: RowLengths,
        holders: Holders,
        cooperation: Cooperation | None = None,
    ) -> None:
        import torch

        handle = group.leader.handle
        runtime, shared = handle.runtime, handle.runtime.index_group.shared_topk
        max_requests = caches.max_requests
        self.max_rows, top_k = (int(size) for size in shared.physical_topk_indices.shape)
        self.rows_per_request = runtime.max_union_rows // top_k
        if self.max_rows != max_requests * self.rows_per_request:
            raise ConfigError(
                f"max_num_batched_tokens is less than the {max_requests * self.rows_per_request} "
                "verification rows of max_num_seqs requests; raise it or lower max_num_seqs"
            )
        # vLLM's LRU order and host rows of hot slots become stamps and the row map.
        self.state = RowState(
            row_map=runtime.index_group.device_global_indices,
            last_used=runtime.index_group.lru_slots,
            epoch=torch.zeros(max_requests, dtype=torch.int32, device=caches.device),
            counters=torch.zeros(3, dtype=torch.int64, device=caches.device),
        )
        self.state.reset()
        union = self.rows_per_request * top_k
        self.copies = CopyList(
            host_row=shared.swap_host_physical_rows.view(max_requests, union),
            hot_row=shared.swap_device_physical_rows.view(max_requests, union),
            count=shared.swap_counts[:max_requests],
        )
        self._outputs = (shared.physical_topk_indices, shared.valid_topk_counts)
        self._lengths, self._device = lengths, caches.device
        self.num_launches = 0
        view, source = handle.view, handle.source_block_table
        assert view is not None
        assert source is not None
        assert handle.block_table is not None
        request = runtime.index_group.request_ids
        layers = _layer_rows(rows, view.attention_block_stride)
        self._copy = None
        if cooperation is not None:
            state_rows = caches.request_state_indices
            words = HolderWords(holders.words, state_rows, holders.num_state_rows)
            self._copy = cooperation.bind(self.copies, layers, words)
        fetches = self._copy is None
        self._op = ResolveAndCopy(
            ResolveInputs(
                # Only shapes count here: each batch brings its own top-k, rows and length.
                logical_topk=shared.device_topk_rows,
                row_request=request[: self.max_rows],
                num_valid_rows=request[:1],
                state_row=caches.request_state_indices,
                seq_len=lengths.buffer[: self.max_rows],
                residency=handle.block_table,
                source_block_table=source[:, : handle.block_table.shape[1]],
                hot_block_table=regions.of_group(group.leader.kv_group),
            ),
            self.state,
            ResolveOutputs(*self._outputs, self.copies),
            ResolveShape(
                max_rows_per_request=self.rows_per_request,
                block_size=caches.block_size,
                block_stride_rows=view.attention_block_stride,
                num_host_blocks=caches.num_host_blocks,
                num_gpu_blocks=int(view.cache.shape[0]),
            ),
            layers if fetches else None,
            holders=holders.words if fetches else None,
        )

    def resolve(
        self, logical_topk: torch.Tensor, metadata: Any, num_requests: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueues the resolve of a batch and the copy of its misses for all layers of the group.

        Args:
            logical_topk: int32 `[rows][top_k]`: the batch's verification rows.
            metadata: vLLM's sparse-MLA metadata of the batch.
            num_requests: requests that the rows belong to.

        Returns:
            `physical_topk [rows][top_k]` and `valid_counts [rows]`, both int32; the next resolve of
            the group writes them again.
        """
        num_rows = int(logical_topk.shape[0])
        self._lengths.update(metadata, num_rows, self)
        request = metadata.req_id_per_token[:num_rows]
        self._op.set_batch(logical_topk, request, metadata.query_start_loc[-1:], num_requests)
        stream = current_stream(self._device)
        self._op(stream)
        if self._copy is not None:
            self._copy.set_batch(num_requests)
            self._copy(stream)
        self.num_launches += 1
        return self._outputs[0][:num_rows], self._outputs[1][:num_rows]

    def last(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last resolve gave, for the followers."""
        return self._outputs[0][:num_rows], self._outputs[1][:num_rows]


def _layer_rows(rows: list[PoolLayer], block_stride_rows: int) -> LayerRows:
    """The group's rows as bytes."""
    import torch

    return LayerRows(
        host=[rows_as(flat_rows(layer.host), torch.uint8) for layer in rows],
        gpu=[rows_as(layer.gpu, torch.uint8) for layer in rows],
        block_stride_rows=block_stride_rows,
    )
