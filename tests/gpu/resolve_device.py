# SPDX-License-Identifier: Apache-2.0
"""Owns a resolve's buffers on the device, and their bitwise comparison with the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from reference import Batch, HotState, Resolved
from resolve_cases import Shape

from hotpage.kernels.replay_copy import CopyList, LayerRows, ReplayCopy
from hotpage.kernels.resolve_and_copy import (
    ResolveAndCopy,
    ResolveInputs,
    ResolveOutputs,
    ResolveShape,
    RowState,
)

DEVICE = "cuda"
POISON = -123456789


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


class DeviceResolve:
    """Persistent buffers of one index group and the bound op.

    Args:
        copy: "group" lets the resolve copy all layers, "leader" the first one with the others
            replayed one by one, "none" nothing.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        copy: str = "group",
        max_copy_blocks: int = 0,
        with_bytes: bool = True,
        holders: torch.Tensor | None = None,
    ) -> None:
        s = shape
        self.shape = shape
        self.inputs = ResolveInputs(
            _ints(s.num_rows, s.top_k),
            _ints(s.num_rows),
            _ints(1),
            _ints(s.num_requests),
            _ints(s.num_rows),
            _ints(s.num_state_rows, s.num_pages),
            _ints(s.num_requests, s.num_pages),
            _ints(s.num_requests, s.hot_rows // s.block_size),
        )
        self.counters = np.zeros(3, np.int64)
        self.state = RowState.allocate(s.num_state_rows, s.hot_rows, DEVICE)
        # One row and one entry more than the op is told of: guards.
        self.physical = _ints(s.num_rows + 1, s.top_k + 1)
        self.counts = _ints(s.num_rows + 1)
        union = s.rows_per_request * s.top_k
        self.copies = CopyList.allocate(s.num_requests, union, DEVICE)
        outputs = ResolveOutputs(self.physical[:-1, :-1], self.counts[:-1], self.copies)
        self.layers = self._layers() if with_bytes else None
        leader = self._some(0, 1) if self.layers else None
        sizes = ResolveShape(
            s.rows_per_request,
            s.block_size,
            s.block_stride_rows,
            s.num_host_blocks,
            s.num_gpu_blocks,
        )
        bound = {"group": self.layers, "leader": leader, "none": None}[copy]
        self.resolve = ResolveAndCopy(
            self.inputs,
            self.state,
            outputs,
            sizes,
            bound,
            max_copy_blocks=max_copy_blocks,
            holders=holders,
        )
        self.replays: list[ReplayCopy] = []
        if copy == "leader" and self.layers is not None:
            for i in range(1, s.num_layers):
                layer = self._some(i, i + 1)
                self.replays.append(ReplayCopy(self.copies, layer, max_copy_blocks=max_copy_blocks))

    def _layers(self) -> LayerRows:
        s, rb = self.shape, self.shape.row_bytes
        host_rows = s.num_host_rows
        pool = torch.randint(0, 256, (host_rows * s.num_layers, rb), dtype=torch.uint8)
        pool = pool.pin_memory()
        if s.interleaved:
            grouped = pool.view(host_rows, s.num_layers, rb)
            host = [grouped[:, i] for i in range(s.num_layers)]
        else:
            host = list(pool.view(s.num_layers, host_rows, rb))
        page = s.block_size * rb
        stride = s.layers_per_block * page
        # Guard bytes lie behind the last block.
        self.gpu_pool = torch.randint(
            0, 256, (s.num_gpu_blocks * stride + 64,), dtype=torch.uint8, device=DEVICE
        )
        self.expected_pool = self.gpu_pool.clone()
        self.host_copy = pool.to(DEVICE)
        # The index group's layers are the last ones of the KV cache group.
        first = s.layers_per_block - s.num_layers
        shape = (s.num_gpu_blocks, s.block_size, rb)
        gpu = [
            self.gpu_pool.as_strided(shape, (stride, rb, 1), (first + i) * page)
            for i in range(s.num_layers)
        ]
        return LayerRows(host, gpu, s.block_stride_rows)

    def _some(self, first: int, end: int) -> LayerRows:
        assert self.layers is not None
        host, gpu = self.layers.host[first:end], self.layers.gpu[first:end]
        return LayerRows(host, gpu, self.layers.block_stride_rows)

    def load(self, batch: Batch) -> None:
        """Writes a step's inputs into the persistent buffers and poisons the outputs."""
        i = self.inputs
        for tensor, array in (
            (i.logical_topk, batch.logical_topk),
            (i.row_request, batch.row_request),
            (i.num_valid_rows, np.array([batch.num_valid_rows], np.int32)),
            (i.state_row, batch.state_row),
            (i.seq_len, batch.seq_len),
            (i.residency, batch.residency),
            (i.source_block_table, batch.source_block_table),
            (i.hot_block_table, batch.hot_block_table),
        ):
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(array, np.int32)))
        for tensor in (self.physical, self.counts, self.copies.host_row, self.copies.hot_row):
            tensor.fill_(POISON)
        self.copies.count.fill_(POISON)

    def run(self) -> None:
        """Enqueues resolve and copies on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self.resolve(stream)
        for replay in self.replays:
            replay(stream)

    def check(self, expected: Resolved, states: Sequence[HotState], where: str) -> None:
        """Compares every output, the state and the bytes of the GPU pool with the reference."""
        torch.cuda.synchronize()
        physical = self.physical.cpu().numpy()
        same(physical[:-1, :-1], expected.physical_topk, f"{where}: physical_topk (row, k)")
        guards = np.append(physical[-1], physical[:, -1])
        same(guards, np.full(guards.shape, POISON), f"{where}: guards of physical_topk")
        counts = np.append(expected.valid_counts, POISON)
        same(self.counts.cpu().numpy(), counts, f"{where}: valid_counts and guard (row)")
        self.check_copies(expected, where)
        row_map = np.stack([state.row_map for state in states])
        same(self.state.row_map.cpu().numpy(), row_map, f"{where}: row_map (state row, slot)")
        ages = age_order(np.stack([state.last_used for state in states]))
        same(age_order(self.stamps()), ages, f"{where}: LRU order (state row, slot)")
        self.counters += [expected.hits, expected.misses, expected.overflow]
        same(self.state.counters.cpu().numpy(), self.counters, f"{where}: counters")

    def stamps(self) -> np.ndarray:
        """`[state rows][hot rows]` stamps of the last use."""
        return self.state.last_used.cpu().numpy().view(np.uint16).astype(np.int64)

    def check_copies(self, expected: Resolved, where: str) -> None:
        """Compares the copy lists of the resolved requests, and the bytes that they moved."""
        num = self.copies.count.cpu().numpy()[: len(expected.copy_host_row)]
        host, hot = self.copies.host_row.cpu().numpy(), self.copies.hot_row.cpu().numpy()
        lengths = np.array([len(rows) for rows in expected.copy_host_row])
        same(num, lengths, f"{where}: copy_count (request)")
        both = zip(expected.copy_host_row, expected.copy_hot_row, strict=True)
        for request, (host_rows, hot_rows) in enumerate(both):
            n = len(host_rows)
            same(host[request, :n], host_rows, f"{where}: copy_host_row of request {request}")
            same(hot[request, :n], hot_rows, f"{where}: copy_hot_row of request {request}")
        if self.layers is not None and self.resolve.params.copy.num_layers:
            self._check_bytes(expected, where)

    def _check_bytes(self, expected: Resolved, where: str) -> None:
        s, rb = self.shape, self.shape.row_bytes
        page, first = s.block_size * rb, s.layers_per_block - s.num_layers
        host_rows = np.concatenate(expected.copy_host_row)
        hot_rows = np.concatenate(expected.copy_hot_row)
        source, target = torch.from_numpy(host_rows).to(DEVICE), torch.from_numpy(hot_rows)
        target = target.to(DEVICE)
        num_host = s.num_host_rows
        for layer in range(s.num_layers):
            rows = self.expected_pool[(first + layer) * page :]
            rows = rows[: s.num_physical_rows * rb].view(-1, rb)
            at = source * s.num_layers + layer if s.interleaved else source + layer * num_host
            rows[target] = self.host_copy[at]
        assert torch.equal(self.gpu_pool, self.expected_pool), f"{where}: bytes of the GPU pool"


def age_order(last_used: np.ndarray) -> np.ndarray:
    """Stamps of each state row replaced by their rank; 0 stays 0. Equal for equal LRU orders."""
    ranked = [np.unique(np.append(0, stamps), return_inverse=True)[1][1:] for stamps in last_used]
    return np.stack(ranked)


def same(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Raises AssertionError naming the first place where two arrays differ."""
    if np.array_equal(got, expected):
        return
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    at = tuple(int(i) for i in np.argwhere(got != expected)[0])
    raise AssertionError(f"{what}: first difference at {at}: {got[at]}, expected {expected[at]}")
