# SPDX-License-Identifier: Apache-2.0
"""Owns the inputs of the pool kernels' tests: pools, tokens, pages and contexts, by numpy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from reference import Pools, filled_bytes

PACKINGS = {
    "one layer": [[1]],
    "pairs": [[2], [2]],
    "threes": [[3]],
    "mixed": [[1, 4], [2, 8], [5]],
    "many groups": [[1, 2]] * 37,
}

SPANS = {
    "one row": [(37, 38)],
    "whole contexts": [(0, 190), (0, 1), (0, 64)],
    "chunks": [(33, 97), (5, 5), (150, 192), (1, 3)],
    "beyond the table": [(180, 200)],
}

PAGES = 12
"""Pages of a context's tables."""

Page = tuple[int, list[int], int]
"""Host block, GPU block of each KV cache group, rows."""


def hash_of(*parts: object) -> int:
    """A seed that does not depend on the process."""
    return sum(ord(c) * (i + 1) for i, c in enumerate(repr(parts)))


def filled_pools(
    packing: list[list[int]],
    *,
    block_size: int = 16,
    row_bytes: int = 656,
    gpu_blocks: int = 24,
    host_blocks: int = 24,
    host_layout: str = "row_interleaved",
) -> Pools:
    """Reference pools whose every byte says where it is."""
    pools = Pools(packing, block_size, row_bytes, gpu_blocks, host_blocks, host_layout)
    pools.gpu[:] = filled_bytes(pools.gpu.size, 1 << 28)
    pools.host[:] = filled_bytes(pools.host.size, 1 << 29)
    return pools


def fill_with_fp8_rows(pools: Pools) -> None:
    """Well-formed fp8_ds_mla rows in both pools: no NaN, scales of many magnitudes."""
    rng = np.random.default_rng(17)
    for pool in (pools.gpu, pools.host):
        rows = pool.reshape(-1, 656)
        values = rng.integers(0, 256, (len(rows), 512), dtype=np.uint8)
        values[(values & 0x7F) == 0x7F] = 0x7E
        rows[:, :512] = values
        scales = np.exp2(rng.integers(-20, 20, (len(rows), 4))) * (1 + rng.random((len(rows), 4)))
        rows[:, 512:528] = scales.astype(np.float32).view(np.uint8)
        # The upper halves of normal floats are bfloat16 numbers.
        rope = rng.standard_normal((len(rows), 64)).astype(np.float32).view(np.uint16)[:, 1::2]
        rows[:, 528:] = np.ascontiguousarray(rope).view(np.uint8)


def random_tokens(
    pools: Pools, num_tokens: int, rng: np.random.Generator, odds_of_fault: float = 0.15
) -> tuple[np.ndarray, np.ndarray]:
    """`[G][tokens]` resident slots and `[tokens]` host rows: distinct rows, some unusable."""
    bs, groups = pools.block_size, len(pools.packing)
    host = rng.permutation(np.arange(bs, pools.host_blocks * bs))[:num_tokens]
    slots = np.stack(
        [rng.permutation(np.arange(bs, pools.gpu_blocks * bs))[:num_tokens] for _ in range(groups)]
    )
    fault = rng.random(num_tokens) < odds_of_fault
    for token in np.flatnonzero(fault):
        kind = rng.integers(5)
        if kind == 0:
            slots[:, token] = -1
        elif kind == 1:
            host[token] = -1
        elif kind == 2:
            host[token] = rng.integers(bs)
        elif kind == 3:
            slots[rng.integers(groups), token] = rng.integers(-1, bs)
        else:
            slots[:, token], host[token] = rng.integers(bs, size=groups), -1
    return slots, host


def random_pages(
    pools: Pools, n: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct host blocks and GPU blocks, whole pages and partial ones."""
    groups, bs = len(pools.packing), pools.block_size
    host = rng.permutation(np.arange(1, pools.host_blocks))[:n]
    blocks = rng.permutation(np.arange(1, pools.gpu_blocks))[: n * groups].reshape(n, groups)
    rows = np.where(rng.random(n) < 0.5, bs, rng.integers(0, bs + 1, n))
    return host, blocks, rows


def malformed_pages() -> tuple[list[Page], list[Page], list[Page]]:
    """Pages of two groups in pools of 20 blocks of 16: good ones, bad ones, and both mixed."""
    bad = [(0, [1, 2], 16), (3, [0, 2], 16), (4, [3, 0], 16), (20, [3, 4], 16), (-1, [3, 4], 16)]
    bad += [(5, [3, 20], 16), (5, [-3, 5], 16), (6, [5, 6], 17), (6, [5, 6], -1)]
    good = [(7, [7, 8], 16), (8, [9, 10], 3), (9, [11, 12], 0)]
    listed = [*bad[:4], good[0], *bad[4:], *good[1:]]
    return good, bad, listed


@dataclass
class Context:
    """Tables of some requests; about a third of the pages is resident, some pages are nowhere."""

    state_row: np.ndarray
    residency: np.ndarray
    source: np.ndarray

    @classmethod
    def random(cls, pools: Pools, requests: int, rng: np.random.Generator) -> Context:
        states = requests + 2
        state_row = rng.permutation(states)[:requests]
        state_row[rng.random(requests) < 0.2] = -1
        residency = rng.integers(1, pools.gpu_blocks, (states, PAGES))
        residency[rng.random(residency.shape) < 0.65] = 0
        source = rng.integers(1, pools.host_blocks, (requests, PAGES))
        source[rng.random(source.shape) < 0.1] = 0
        return cls(state_row, residency, source)

    def blocks(self, request: int, page: int) -> tuple[int, int]:
        """GPU block and host block of a page, 0 for none."""
        state_row = self.state_row[request]
        return int(self.residency[state_row, page] if state_row >= 0 else 0), int(
            self.source[request, page]
        )


def expected_rows(
    pools: Pools, context: Context, spans: list[tuple[int, int]], layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """`[rows][row_bytes]` by numpy, and how many came from GPU, host and nowhere."""
    rows, counts = [], np.zeros(3, np.int64)
    for request, (first, end) in enumerate(spans):
        for position in range(first, end):
            page, offset = divmod(position, pools.block_size)
            gpu, host = context.blocks(request, page) if page < PAGES else (0, 0)
            kind = 0 if gpu else 1 if host else 2
            counts[kind] += 1
            if kind == 2:
                rows.append(np.zeros(pools.row_bytes, np.uint8))
            elif kind == 0:
                rows.append(pools.gpu_layers[layer][gpu, offset])
            else:
                rows.append(pools.host_layers[layer][host, offset])
    return np.array(rows).reshape(-1, pools.row_bytes), counts
