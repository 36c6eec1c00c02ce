# SPDX-License-Identifier: Apache-2.0
"""Owns random resolve workloads: shapes, tables, and steps that hit, miss, pad and go wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from reference import Batch, HotState


@dataclass(frozen=True)
class Shape:
    """Sizes of a workload."""

    num_requests: int = 3
    rows_per_request: int = 1
    top_k: int = 64
    hot_rows: int = 128
    block_size: int = 16
    num_pages: int = 40
    num_layers: int = 2
    row_bytes: int = 32
    interleaved: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of a full batch, one row of padding counted."""
        return self.num_requests * self.rows_per_request + 1

    @property
    def num_state_rows(self) -> int:
        """More state rows than requests, so that they differ."""
        return self.num_requests + 2

    @property
    def layers_per_block(self) -> int:
        """Layers of the KV cache group: one more than the index group has."""
        return self.num_layers + 1

    @property
    def num_gpu_blocks(self) -> int:
        """Null block, hot regions and as many resident pages as hot blocks."""
        return 1 + 2 * self.num_requests * (self.hot_rows // self.block_size)

    @property
    def num_host_blocks(self) -> int:
        """Null block and twice the pages of all requests."""
        return 1 + 2 * self.num_requests * self.num_pages

    @property
    def block_stride_rows(self) -> int:
        """Rows from one GPU block to the next in a layer's view."""
        return self.block_size * self.layers_per_block

    @property
    def num_host_rows(self) -> int:
        """Rows of a layer in the host pool."""
        return self.num_host_blocks * self.block_size

    @property
    def num_physical_rows(self) -> int:
        """Rows of a layer's view up to the end of its last page."""
        return (self.num_gpu_blocks - 1) * self.block_stride_rows + self.block_size


@dataclass(frozen=True)
class Odds:
    """How often something happens in a step."""

    resident_page: float = 0.2
    no_host_page: float = 0.05
    nothing: float = 0.05
    duplicate: float = 0.1
    no_region: float = 0.05
    padding_request: float = 0.1
    uneven: bool = True
    working_set: float = 0.5
    redraw: float = 0.2


PLAIN = Odds(0, 0, 0, 0, 0, 0, uneven=False)


class Workload:
    """Tables of a batch that change a little from step to step."""

    def __init__(self, shape: Shape, seed: int, odds: Odds = Odds()) -> None:
        self.shape, self.odds = shape, odds
        self.rng = np.random.default_rng(seed)
        s, rng = shape, self.rng
        host = rng.permutation(np.arange(1, s.num_host_blocks))
        self.source = host[: s.num_requests * s.num_pages].reshape(s.num_requests, s.num_pages)
        hot_blocks = s.hot_rows // s.block_size
        gpu = rng.permutation(np.arange(1, s.num_gpu_blocks))
        cut = s.num_requests * hot_blocks
        self.hot_blocks, self.resident_blocks = gpu[:cut].reshape(-1, hot_blocks), gpu[cut:]
        self.state_row = rng.permutation(s.num_state_rows)[: s.num_requests]
        positions = s.num_pages * s.block_size
        size = max(s.top_k, int(positions * odds.working_set))
        self.working = np.stack([rng.permutation(positions)[:size] for _ in range(s.num_requests)])

    def _topk(self, request: int) -> np.ndarray:
        s, odds, rng = self.shape, self.odds, self.rng
        positions = s.num_pages * s.block_size
        working = self.working[request]
        redraw = rng.random(len(working)) < odds.redraw * rng.random()
        fresh = np.setdiff1d(np.arange(positions), working)
        fresh = rng.permutation(fresh)[: redraw.sum()]
        working[np.flatnonzero(redraw)[: len(fresh)]] = fresh
        rows = []
        for _ in range(s.rows_per_request):
            row = rng.permutation(working)[: s.top_k]
            if odds.duplicate and rng.random() < odds.duplicate:
                row = row[rng.integers(0, s.top_k, s.top_k)]
            row = np.where(rng.random(s.top_k) < odds.nothing, -1, row)
            rows.append(row)
        return np.stack(rows)

    def step(self) -> Batch:
        """The next batch."""
        s, odds, rng = self.shape, self.odds, self.rng
        residency = np.zeros((s.num_state_rows, s.num_pages), np.int32)
        where = np.argwhere(rng.random(residency.shape) < odds.resident_page)
        where = rng.permutation(where)[: len(self.resident_blocks)]
        residency[tuple(where.T)] = self.resident_blocks[: len(where)]
        source = np.where(rng.random(self.source.shape) < odds.no_host_page, 0, self.source)
        hot = self.hot_blocks.copy()
        hot[rng.random(len(hot)) < odds.no_region, rng.integers(hot.shape[1])] = 0
        state_row = np.where(rng.random(s.num_requests) < odds.padding_request, -1, self.state_row)
        topk = np.full((s.num_rows, s.top_k), -1, np.int32)
        row_request = np.full(s.num_rows, -1, np.int32)
        seq_len = np.zeros(s.num_rows, np.int32)
        at = 0
        order = rng.permutation(s.num_requests) if odds.uneven else range(s.num_requests)
        for request in order:
            n = s.rows_per_request
            if odds.uneven:
                n = int(rng.integers(0, n + 1))
            topk[at : at + n] = self._topk(request)[:n]
            row_request[at : at + n] = request
            tail = rng.integers(0, s.block_size) if odds.uneven else 0
            seq_len[at : at + n] = s.num_pages * s.block_size - tail
            at += n
        num_valid = at if not odds.uneven or rng.random() < 0.7 else int(rng.integers(0, at + 1))
        if odds.uneven and rng.random() < 0.5:
            # As vLLM pads a captured batch: rows past the valid ones claim to be request 0.
            row_request[at:] = 0
        return Batch(
            logical_topk=topk,
            row_request=row_request,
            num_valid_rows=num_valid,
            seq_len=seq_len,
            state_row=state_row.astype(np.int32),
            residency=residency,
            source_block_table=source.astype(np.int32),
            hot_block_table=hot.astype(np.int32),
            block_size=s.block_size,
            block_stride_rows=s.block_stride_rows,
        )


def empty_states(shape: Shape) -> list[HotState]:
    """A state per state row with every hot slot free."""
    return [HotState(shape.hot_rows) for _ in range(shape.num_state_rows)]
