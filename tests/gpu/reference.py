# SPDX-License-Identifier: Apache-2.0
"""Owns the numpy reference of the data plane, written from the contract in tests/vectors/README.md.

Shares no structure with the Rust data plane: sets come from `np.unique`, the LRU order from
`np.lexsort`, and rows are found through strided views of the pools instead of byte offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


class HotState:
    """Row map and row LRU of one (state row, index group): `[hot_rows]` int64 each."""

    def __init__(self, hot_rows: int) -> None:
        self.row_map: IntArray = np.full(hot_rows, -1, np.int64)
        self.last_used: IntArray = np.zeros(hot_rows, np.int64)
        self.epoch = 0

    def reset(self) -> None:
        """Empties the map."""
        self.row_map[:] = -1
        self.last_used[:] = 0
        self.epoch = 0


@dataclass
class Resolved:
    """What one resolve of a batch returns; shapes as in tests/vectors/README.md."""

    physical_topk: IntArray
    valid_counts: IntArray
    copy_host_row: list[IntArray]
    copy_hot_row: list[IntArray]
    hits: int = 0
    misses: int = 0
    overflow: int = 0


@dataclass
class Batch:
    """Inputs of one resolve; shapes as in tests/vectors/README.md, any integer dtype."""

    logical_topk: npt.ArrayLike
    row_request: npt.ArrayLike
    num_valid_rows: int
    seq_len: npt.ArrayLike
    state_row: npt.ArrayLike
    residency: npt.ArrayLike
    source_block_table: npt.ArrayLike
    hot_block_table: npt.ArrayLike
    block_size: int
    block_stride_rows: int


def resolve_batch(batch: Batch, states: Sequence[HotState]) -> Resolved:
    """Resolves a batch against `states` (by state row), which it updates."""
    topk = np.asarray(batch.logical_topk, np.int64)
    row_request = np.asarray(batch.row_request, np.int64)
    state_rows = np.asarray(batch.state_row, np.int64)
    none = np.empty(0, np.int64)
    out = Resolved(
        physical_topk=np.full(topk.shape, -1, np.int64),
        valid_counts=np.zeros(len(topk), np.int64),
        copy_host_row=[none] * len(state_rows),
        copy_hot_row=[none] * len(state_rows),
    )
    for request, state_row in enumerate(state_rows):
        rows = np.flatnonzero(row_request[: batch.num_valid_rows] == request)
        if state_row >= 0 and len(rows):
            _resolve_request(batch, request, rows, topk[rows], states[state_row], out)
    return out


def _locate(
    batch: Batch, request: int, rows: IntArray, topk: IntArray
) -> tuple[IntArray, IntArray]:
    """Returns `[rows][k]` resident physical rows and `[rows][k]` host rows, -1 where neither."""
    state_row = np.asarray(batch.state_row)[request]
    resident = np.asarray(batch.residency, np.int64)[state_row]
    host = np.asarray(batch.source_block_table, np.int64)[request]
    seq_len = np.asarray(batch.seq_len, np.int64)[rows][:, None]
    page, offset = np.divmod(topk, batch.block_size)
    known = (topk >= 0) & (topk < seq_len) & (page < len(resident))
    page = np.where(known, page, 0)
    resident_block = np.where(known, resident[page], 0)
    host_block = np.where(known & (resident_block == 0), host[page], 0)
    limit = 2**31
    physical = resident_block * batch.block_stride_rows + offset
    physical = np.where((resident_block > 0) & (physical < limit), physical, -1)
    host_row = host_block * batch.block_size + offset
    return physical, np.where((host_block > 0) & (host_row < limit), host_row, -1)


def _resolve_request(
    batch: Batch, request: int, rows: IntArray, topk: IntArray, state: HotState, out: Resolved
) -> None:
    physical, host_row = _locate(batch, request, rows, topk)
    hot_blocks = np.asarray(batch.hot_block_table, np.int64)[request]
    hot_slots = np.arange(len(state.row_map))
    block, offset = np.divmod(hot_slots, batch.block_size)
    union = np.unique(host_row[host_row >= 0])
    assigned = 0
    if len(union) and len(hot_blocks) and (hot_blocks != 0).all():
        hot_rows = hot_blocks[block] * batch.block_stride_rows + offset
        state.epoch += 1
        is_hit = np.isin(state.row_map, union)
        misses = np.setdiff1d(union, state.row_map)
        order = np.lexsort((hot_slots, state.last_used))
        victims = order[~is_hit[order]][: len(misses)]
        misses = misses[: len(victims)]
        assigned = len(misses)
        state.row_map[victims] = misses
        state.last_used[is_hit] = state.epoch
        state.last_used[victims] = state.epoch
        out.copy_host_row[request], out.copy_hot_row[request] = misses, hot_rows[victims]
        by_row = np.argsort(state.row_map)
        held = state.row_map[by_row]
        at = np.minimum(np.searchsorted(held, host_row), len(held) - 1)
        found = (host_row >= 0) & (held[at] == host_row)
        physical[found] = hot_rows[by_row][at[found]]
        out.hits += int(is_hit.sum())
        out.misses += len(union) - int(is_hit.sum())
        out.overflow += len(union) - int(is_hit.sum()) - assigned
    else:
        out.misses += len(union)
        out.overflow += len(union)
    for row, values in zip(rows, physical, strict=True):
        valid = values[values >= 0]
        out.physical_topk[row, : len(valid)] = valid
        out.valid_counts[row] = len(valid)


def invalidate(
    states: Iterable[HotState],
    rewritten_host_rows: npt.ArrayLike,
    recycled_host_blocks: npt.ArrayLike,
    block_size: int,
) -> int:
    """Frees the hot slots whose host row was rewritten or recycled; returns how many."""
    rows = np.asarray(rewritten_host_rows, np.int64)
    blocks = np.asarray(recycled_host_blocks, np.int64)
    freed = 0
    for state in states:
        gone = np.isin(state.row_map, rows) | np.isin(state.row_map // block_size, blocks)
        gone &= state.row_map >= 0
        state.row_map[gone] = -1
        state.last_used[gone] = 0
        freed += int(gone.sum())
    return freed


def filled_bytes(num_bytes: int, salt: int) -> ByteArray:
    """`[num_bytes]` uint8 of a pool before the first operation (MurmurHash3's finaliser)."""
    x = np.arange(num_bytes, dtype=np.uint32) + np.uint32(salt)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (x ^ (x >> np.uint32(16))).astype(np.uint8)


@dataclass
class Pools:
    """Both pools of one rank, and views `[layer] -> [block][token][row_bytes]` of each layer."""

    packing: list[list[int]]
    block_size: int
    row_bytes: int
    gpu_blocks: int
    host_blocks: int
    host_layout: str
    gpu: ByteArray = field(init=False)
    host: ByteArray = field(init=False)
    gpu_layers: list[ByteArray] = field(init=False, default_factory=list)
    host_layers: list[ByteArray] = field(init=False, default_factory=list)
    kv_group_of_layer: list[int] = field(init=False, default_factory=list)
    layers_of_index_group: list[list[int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        row = (self.block_size, self.row_bytes)
        widest = max(sum(groups) for groups in self.packing)
        num_layers = sum(sum(groups) for groups in self.packing)
        gpu = np.zeros((self.gpu_blocks, widest, *row), np.uint8)
        host = np.zeros((num_layers, self.host_blocks, *row), np.uint8)
        self.gpu, self.host = gpu.reshape(-1), host.reshape(-1)
        first = 0
        for kv_group, groups in enumerate(self.packing):
            in_block = 0
            for size in groups:
                shape = (self.host_blocks, self.block_size, size, self.row_bytes)
                interleaved = host[first : first + size].reshape(shape)
                for i in range(size):
                    self.gpu_layers.append(gpu[:, in_block + i])
                    layer_major = self.host_layout == "layer_major"
                    view = host[first + i] if layer_major else interleaved[:, :, i]
                    self.host_layers.append(view)
                    self.kv_group_of_layer.append(kv_group)
                self.layers_of_index_group.append(list(range(first, first + size)))
                first += size
                in_block += size
        self.mask = np.zeros((self.host_blocks, self.block_size), bool)

    def copy_misses(
        self,
        layers: Iterable[int],
        host_rows: npt.ArrayLike,
        hot_rows: npt.ArrayLike,
        block_stride_rows: int,
    ) -> int:
        """Copies host rows to physical rows in each layer; returns the bytes copied."""
        host_block, host_token = np.divmod(np.asarray(host_rows, np.int64), self.block_size)
        gpu_block, gpu_token = np.divmod(np.asarray(hot_rows, np.int64), block_stride_rows)
        copied = 0
        for layer in layers:
            rows = self.host_layers[layer][host_block, host_token]
            self.gpu_layers[layer][gpu_block, gpu_token] = rows
            copied += rows.nbytes
        return copied

    def mirror_rows(
        self, layers: Iterable[int], resident_slot: npt.ArrayLike, host_row: npt.ArrayLike
    ) -> tuple[int, int, int]:
        """Copies `[G][tokens]` resident rows to `[tokens]` host rows: (copied, skipped, lost)."""
        slots = np.asarray(resident_slot, np.int64)
        host = np.asarray(host_row, np.int64)
        real = slots >= self.block_size
        ok = real.all(axis=0) & (host >= self.block_size)
        skipped = ~real.any(axis=0)
        host_block, host_token = np.divmod(host[ok], self.block_size)
        for layer in layers:
            block, token = np.divmod(slots[self.kv_group_of_layer[layer]][ok], self.block_size)
            self.host_layers[layer][host_block, host_token] = self.gpu_layers[layer][block, token]
        self.mask[host_block, host_token] = True
        return int(ok.sum()), int(skipped.sum()), int((~ok & ~skipped).sum())

    def spill_page(self, host_block: int, resident_blocks: Sequence[int], num_rows: int) -> int:
        """Copies the first rows of a page of every layer to the host; returns the bytes."""
        for layer, kv_group in enumerate(self.kv_group_of_layer):
            page = self.gpu_layers[layer][resident_blocks[kv_group], :num_rows]
            self.host_layers[layer][host_block, :num_rows] = page
        return len(self.gpu_layers) * num_rows * self.row_bytes

    def restore_page(self, host_block: int, resident_blocks: Sequence[int], num_rows: int) -> int:
        """Copies the first rows of a page of every layer to the GPU; returns the bytes."""
        for layer, kv_group in enumerate(self.kv_group_of_layer):
            page = self.host_layers[layer][host_block, :num_rows]
            self.gpu_layers[layer][resident_blocks[kv_group], :num_rows] = page
        return len(self.gpu_layers) * num_rows * self.row_bytes

    def copy_host_page(self, source: int, target: int, num_rows: int) -> int:
        """Copies the first rows of a host page of every layer; returns the bytes."""
        for view in self.host_layers:
            view[target, :num_rows] = view[source, :num_rows]
        return len(self.host_layers) * num_rows * self.row_bytes

    def mask_words(self) -> list[int]:
        """`[host_blocks][ceil(block_size / 64)]` words, flat; row r is bit r % 64 of a word."""
        words = []
        for rows in self.mask:
            for first in range(0, self.block_size, 64):
                bits = rows[first : first + 64]
                words.append(sum(1 << i for i, bit in enumerate(bits) if bit))
        return words

    def full_blocks(self) -> list[int]:
        """Host blocks, the null block excepted, whose every row was mirrored."""
        return [int(b) for b in np.flatnonzero(self.mask.all(axis=1)) if b != 0]
