# SPDX-License-Identifier: Apache-2.0
"""Owns the registration of the kernels as torch custom ops, `torch.ops.hotpage.*`, with fakes.

For callers that trace or compile: an op call binds anew, checks included. A step that repeats binds
once, with `ResolveAndCopy` and `ReplayCopy`. Importing this module imports torch, not the library.
"""

from __future__ import annotations

from torch import Tensor

from hotpage.kernels._torch_library import register, stream_of
from hotpage.kernels.replay_copy import CopyList, LayerRows, ReplayCopy
from hotpage.kernels.resolve_and_copy import (
    ResolveAndCopy,
    ResolveInputs,
    ResolveOutputs,
    ResolveShape,
    RowState,
)

# NOTE: torch reads the annotations as objects, so the ops below spell them for it by a schema.
_RESOLVE_SCHEMA = (
    "(Tensor logical_topk, Tensor row_request, Tensor num_valid_rows, Tensor state_row, "
    "Tensor seq_len, Tensor residency, Tensor source_block_table, Tensor hot_block_table, "
    "Tensor(a!) row_map, Tensor(b!) last_used, Tensor(c!) epoch, Tensor(d!) counters, "
    "Tensor(e!) physical_topk, Tensor(f!) valid_counts, Tensor(g!) copy_host_row, "
    "Tensor(h!) copy_hot_row, Tensor(i!) copy_count, Tensor[] host_layers, "
    "Tensor(j!)[] gpu_layers, int max_rows_per_request, int block_size, int block_stride_rows, "
    "int num_host_blocks, int num_gpu_blocks, int max_copy_blocks) -> ()"
)
_REPLAY_SCHEMA = (
    "(Tensor copy_host_row, Tensor copy_hot_row, Tensor copy_count, Tensor[] host_layers, "
    "Tensor(a!)[] gpu_layers, int block_stride_rows, int max_copy_blocks) -> ()"
)


def _resolve_and_copy(
    logical_topk: Tensor,
    row_request: Tensor,
    num_valid_rows: Tensor,
    state_row: Tensor,
    seq_len: Tensor,
    residency: Tensor,
    source_block_table: Tensor,
    hot_block_table: Tensor,
    row_map: Tensor,
    last_used: Tensor,
    epoch: Tensor,
    counters: Tensor,
    physical_topk: Tensor,
    valid_counts: Tensor,
    copy_host_row: Tensor,
    copy_hot_row: Tensor,
    copy_count: Tensor,
    host_layers: list[Tensor],
    gpu_layers: list[Tensor],
    max_rows_per_request: int,
    block_size: int,
    block_stride_rows: int,
    num_host_blocks: int,
    num_gpu_blocks: int,
    max_copy_blocks: int,
) -> None:
    inputs = ResolveInputs(
        logical_topk,
        row_request,
        num_valid_rows,
        state_row,
        seq_len,
        residency,
        source_block_table,
        hot_block_table,
    )
    copies = CopyList(copy_host_row, copy_hot_row, copy_count)
    shape = ResolveShape(
        max_rows_per_request, block_size, block_stride_rows, num_host_blocks, num_gpu_blocks
    )
    layers = LayerRows(host_layers, gpu_layers, block_stride_rows) if gpu_layers else None
    bound = ResolveAndCopy(
        inputs,
        RowState(row_map, last_used, epoch, counters),
        ResolveOutputs(physical_topk, valid_counts, copies),
        shape,
        layers,
        max_copy_blocks=max_copy_blocks,
    )
    bound(stream_of(logical_topk))


def _replay_copy(
    copy_host_row: Tensor,
    copy_hot_row: Tensor,
    copy_count: Tensor,
    host_layers: list[Tensor],
    gpu_layers: list[Tensor],
    block_stride_rows: int,
    max_copy_blocks: int,
) -> None:
    copies = CopyList(copy_host_row, copy_hot_row, copy_count)
    layers = LayerRows(host_layers, gpu_layers, block_stride_rows)
    ReplayCopy(copies, layers, max_copy_blocks=max_copy_blocks)(stream_of(copy_count))


for _name, _schema, _call in (
    ("resolve_and_copy", _RESOLVE_SCHEMA, _resolve_and_copy),
    ("replay_copy", _REPLAY_SCHEMA, _replay_copy),
):
    register(_name, _schema, _call)
