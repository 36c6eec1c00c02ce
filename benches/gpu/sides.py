# SPDX-License-Identifier: Apache-2.0
"""Owns both sides of the kernel bench: hotpage's ops and vLLM 0.33's, on the same steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from workload import BLOCK_SIZE, DEVICE, TOP_K, CellPools, Steps

from hotpage.kernels.replay_copy import CopyList, LayerRows, ReplayCopy
from hotpage.kernels.resolve_and_copy import (
    ResolveAndCopy,
    ResolveInputs,
    ResolveOutputs,
    ResolveShape,
    RowState,
)


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=DEVICE)


class HotpageSide:
    """hotpage's ops, one bound op and one copy list per step."""

    name = "hotpage"

    def __init__(
        self, steps: Steps, pools: CellPools, *, interleaved: bool = True, max_copy_blocks: int = 0
    ) -> None:
        cell = steps.cell
        self.steps, self.max_copy_blocks = steps, max_copy_blocks
        regions = range(pools.num_regions(cell))
        self.host = [pools.host_layers(cell, interleaved, region) for region in regions]
        self.gpu = pools.gpu_layers(cell, steps.num_gpu_blocks)
        self.state = RowState.allocate(cell.requests, cell.hot_rows, DEVICE)
        self.copies: list[CopyList] = []
        self.outputs: list[ResolveOutputs] = []
        for _ in steps.logical_topk:
            copies = CopyList.allocate(cell.requests, cell.rows * TOP_K, DEVICE)
            rows = cell.requests * cell.rows
            self.copies.append(copies)
            self.outputs.append(ResolveOutputs(_ints(rows, TOP_K), _ints(rows), copies))
        self._bound: dict[tuple[int, tuple[int, ...]], ResolveAndCopy] = {}
        self._replays: dict[tuple[int, tuple[int, ...]], ReplayCopy] = {}

    def _host_of(self, step: int) -> list[torch.Tensor]:
        return self.host[step % len(self.host)]

    def _layers(self, step: int, layers: Sequence[int]) -> LayerRows:
        host, gpu = [self._host_of(step)[i] for i in layers], [self.gpu[i] for i in layers]
        return LayerRows(host, gpu, BLOCK_SIZE * self.steps.cell.layers)

    def bind(self, step: int, layers: Sequence[int]) -> ResolveAndCopy:
        """The op of a step that copies `layers` in its own call."""
        key = (step, tuple(layers))
        if key not in self._bound:
            s, cell = self.steps, self.steps.cell
            inputs = ResolveInputs(
                s.logical_topk[step],
                s.row_request,
                s.num_valid_rows,
                s.state_row,
                s.seq_len,
                s.residency,
                s.source_block_table,
                s.hot_block_table,
            )
            shape = ResolveShape(
                cell.rows,
                BLOCK_SIZE,
                BLOCK_SIZE * cell.layers,
                cell.host_blocks,
                self.steps.num_gpu_blocks,
            )
            self._bound[key] = ResolveAndCopy(
                inputs,
                self.state,
                self.outputs[step],
                shape,
                self._layers(step, layers) if layers else None,
                max_copy_blocks=self.max_copy_blocks,
            )
        return self._bound[key]

    def resolve(self, step: int, copy_layers: Sequence[int] = ()) -> None:
        """Resolves a step and copies some layers on the current stream."""
        self.bind(step, copy_layers)(torch.cuda.current_stream().cuda_stream)

    def bind_copy(self, step: int, layers: Sequence[int]) -> ReplayCopy:
        """The copy of some layers of a step."""
        key = (step, tuple(layers))
        if key not in self._replays:
            self._replays[key] = ReplayCopy(
                self.copies[step], self._layers(step, layers), max_copy_blocks=self.max_copy_blocks
            )
        return self._replays[key]

    def copy(self, step: int, layers: Sequence[int]) -> None:
        """Copies layers of a step that was resolved."""
        self.bind_copy(step, layers)(torch.cuda.current_stream().cuda_stream)

    def prepare(self, steps: Sequence[int], copy_layers: Sequence[int] = ()) -> None:
        """Binds ahead of a capture."""
        for step in steps:
            self.bind(step, copy_layers)

    def reset(self) -> None:
        """Frees every hot slot."""
        self.state.reset()

    def misses(self, step: int) -> int:
        """Misses that a step copied."""
        return int(self.copies[step].count.sum())

    def check(self, step: int, layers: Sequence[int]) -> None:
        """Raises AssertionError unless every row of the step's copy list arrived."""
        copies = self.copies[step]
        stride = BLOCK_SIZE * self.steps.cell.layers
        for request, n in enumerate(copies.count.tolist()):
            host, hot = (
                copies.host_row[request, :n].cpu().long(),
                copies.hot_row[request, :n].long(),
            )
            for layer in layers:
                got = self.gpu[layer][hot // stride, hot % stride].cpu()
                assert torch.equal(got, self._host_of(step)[layer][host]), f"layer {layer}"


class VllmSide:
    """vLLM 0.33's ops, called as its runtime calls them, on the layout that it uses."""

    name = "vllm"

    def __init__(self, steps: Steps, pools: CellPools) -> None:
        cell = steps.cell
        self.steps = steps
        self.ops = torch.ops._C_cache_ops
        regions = range(pools.num_regions(cell))
        self.host = [pools.host_layers(cell, False, region) for region in regions]
        self.gpu = pools.gpu_layers(cell, steps.num_gpu_blocks)
        rows = cell.requests * cell.rows
        self.row_map = torch.full(
            (cell.requests, cell.hot_rows), -1, dtype=torch.int32, device=DEVICE
        )
        order = torch.arange(cell.hot_rows, dtype=torch.int16, device=DEVICE)
        self.order = order.repeat(cell.requests, 1).contiguous()
        self.hot_indices, self.physical = _ints(rows, TOP_K), _ints(rows, TOP_K)
        self.valid_counts = _ints(rows)
        self.stats = torch.zeros(2, dtype=torch.uint64, device=DEVICE)
        self.lists = [
            (_ints(rows, TOP_K), _ints(rows, TOP_K), _ints(rows)) for _ in steps.logical_topk
        ]

    def prepare(self, steps: Sequence[int], copy_layers: Sequence[int] = ()) -> None:
        """Nothing to bind."""

    def bind_copy(self, step: int, layers: Sequence[int]) -> None:
        """Nothing to bind."""

    def reset(self) -> None:
        """Frees every hot slot."""
        self.row_map.fill_(-1)

    def resolve(self, step: int, copy_layers: Sequence[int] = ()) -> None:
        """Resolves a step and gathers some layers on the current stream."""
        s, cell = self.steps, self.steps.cell
        host_rows, device_rows, counts = self.lists[step]
        self.ops.hisparse_resolve_residency(
            self.host[0][0],
            self.gpu[0],
            s.hot_block_table,
            s.logical_topk[step],
            self.hot_indices,
            self.row_map,
            self.order,
            s.state_row,
            cell.hot_rows,
            cell.rows * TOP_K,
            None,
            self.stats,
            self.physical,
            BLOCK_SIZE * cell.layers,
            s.row_request,
            s.source_block_table,
            BLOCK_SIZE,
            None,
            self.valid_counts,
            host_rows,
            device_rows,
            counts,
            s.residency,
            BLOCK_SIZE,
            0,
        )
        self.copy(step, copy_layers)

    def copy(self, step: int, layers: Sequence[int]) -> None:
        """Gathers layers of a step that was resolved, one launch each."""
        host = self.host[step % len(self.host)]
        for layer in layers:
            self.ops.hisparse_gather_compact(host[layer], self.gpu[layer], *self.lists[step])

    def misses(self, step: int) -> int:
        """Misses that a step copied."""
        return int(self.lists[step][2].sum())
