# SPDX-License-Identifier: Apache-2.0
"""Owns copy lists of several ranks, what a cooperative copy does with them, and its digests.

A host row's bytes say which rank's host pool they come from, so it shows who fetched what.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of a cooperative copy, the same on all ranks."""

    ranks: int = 2
    requests: int = 5
    length: int = 24
    layers: int = 4
    row_bytes: int = 32
    block_size: int = 8
    host_rows: int = 400
    interleaved: bool = True
    hot_blocks: int = 40

    @property
    def block_stride_rows(self) -> int:
        """A GPU block holds one layer more than the index group has."""
        return self.block_size * (self.layers + 1)


@dataclass
class RankCase:
    """One rank's pools and copy list."""

    host: np.ndarray
    """uint8 `[host rows][layers][row_bytes]`, or `[layers][host rows][row_bytes]`."""
    gpu: np.ndarray
    """uint8 `[blocks][layers + 1][block_size][row_bytes]`."""
    host_row: np.ndarray
    hot_row: np.ndarray
    count: np.ndarray

    def host_layer(self, layer: int, sizes: Sizes) -> np.ndarray:
        """`[host rows][row_bytes]` of a layer."""
        return self.host[:, layer] if sizes.interleaved else self.host[layer]


def _list(sizes: Sizes, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Host rows and counts of a list."""
    host_row = np.full((sizes.requests, sizes.length), -7, np.int32)
    count = rng.integers(0, sizes.length + 1, sizes.requests).astype(np.int32)
    for request, n in enumerate(count):
        host_row[request, :n] = np.sort(rng.permutation(sizes.host_rows)[:n])
    return host_row, count


def _hot_rows(sizes: Sizes, count: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Distinct hot rows for every copy, on this rank."""
    hot_row = np.full((sizes.requests, sizes.length), -7, np.int32)
    places = rng.permutation(sizes.hot_blocks * sizes.block_size)
    for request, n in enumerate(count):
        taken, places = places[:n], places[n:]
        block, token = taken // sizes.block_size, taken % sizes.block_size
        hot_row[request, :n] = block * sizes.block_stride_rows + token
    return hot_row


def make_ranks(
    sizes: Sizes,
    rng: np.random.Generator,
    *,
    different: tuple[int, ...] = (),
    same_hot: tuple[int, ...] = (),
) -> list[RankCase]:
    """Ranks with equal lists, except that the last rank has other rows for some requests.

    Host pools differ in their first byte of each row, which is the rank. Hot rows differ, too, but
    for the first of the requests `same_hot`.
    """
    shape = (sizes.host_rows, sizes.layers, sizes.row_bytes)
    if not sizes.interleaved:
        shape = (sizes.layers, sizes.host_rows, sizes.row_bytes)
    host = rng.integers(0, 256, shape, np.uint8)
    gpu_shape = (sizes.hot_blocks, sizes.layers + 1, sizes.block_size, sizes.row_bytes)
    host_row, count = _list(sizes, rng)
    ranks = []
    for rank in range(sizes.ranks):
        own, own_row, own_count = host.copy(), host_row.copy(), count.copy()
        own[..., 0] = rank
        if rank == sizes.ranks - 1:
            other_row, other_count = _list(sizes, rng)
            for request in different:
                own_row[request], own_count[request] = other_row[request], other_count[request]
        gpu = rng.integers(0, 256, gpu_shape, np.uint8)
        hot_row = _hot_rows(sizes, own_count, rng)
        if ranks and same_hot:
            # As after a tie that ranks broke differently: some requests are where they were.
            hot_row = _with_same_hot(sizes, own_count, same_hot, ranks[0], rng)
        ranks.append(RankCase(own, gpu, own_row, hot_row, own_count))
    return ranks


def _with_same_hot(
    sizes: Sizes,
    count: np.ndarray,
    same: tuple[int, ...],
    first: RankCase,
    rng: np.random.Generator,
) -> np.ndarray:
    """Hot rows of a rank that has those of the first rank for some requests."""
    taken = [first.hot_row[r, : first.count[r]] for r in same if count[r] == first.count[r]]
    block = np.arange(sizes.hot_blocks)[:, None] * sizes.block_stride_rows
    free = np.setdiff1d(block + np.arange(sizes.block_size), np.concatenate(taken))
    free = rng.permutation(free).astype(np.int32)
    hot_row = np.full((sizes.requests, sizes.length), -7, np.int32)
    for request, n in enumerate(count):
        if request in same and n == first.count[request]:
            hot_row[request, :n] = first.hot_row[request, :n]
        else:
            hot_row[request, :n], free = free[:n], free[n:]
    return hot_row


def agreed_requests(ranks: list[RankCase]) -> list[bool]:
    """Requests for which all ranks list the same host rows."""
    first = ranks[0]
    return [
        all(
            np.array_equal(first.host_row[r, : first.count[r]], other.host_row[r, : other.count[r]])
            for other in ranks
        )
        for r in range(len(first.count))
    ]


def expected_gpu(
    sizes: Sizes, ranks: list[RankCase], rank: int, *, alone: bool = False
) -> np.ndarray:
    """The rank's GPU pool after the copy: index plus request modulo the ranks tells who fetches."""
    case, agreed = ranks[rank], agreed_requests(ranks)
    gpu = case.gpu.copy()
    for request, n in enumerate(case.count):
        for i in range(n):
            shared = agreed[request] and not alone
            fetcher = ranks[(i + request) % sizes.ranks] if shared else case
            block = case.hot_row[request, i] // sizes.block_stride_rows
            token = case.hot_row[request, i] % sizes.block_stride_rows
            for layer in range(sizes.layers):
                row = fetcher.host_layer(layer, sizes)[case.host_row[request, i]]
                gpu[block, layer, token] = row
    return gpu


def shared_rows(sizes: Sizes, ranks: list[RankCase], rank: int) -> int:
    """Rows that a rank fetches for all."""
    agreed = agreed_requests(ranks)
    return sum(
        (i + request) % sizes.ranks == rank and agreed[request]
        for request, n in enumerate(ranks[rank].count)
        for i in range(n)
    )


def mix_bits(word: int) -> int:
    """The finaliser of splitmix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def digest_of_rows(rows: np.ndarray, salt: int) -> int:
    """Digest of one request's host rows."""
    total = sum(mix_bits((i + 1) << 32 | int(row)) for i, row in enumerate(rows))
    return mix_bits(total + mix_bits(salt << 32 | len(rows)) & WORD)


def append_list(so_far: int, case: RankCase, salt: int) -> int:
    """Digest of all lists after one more."""
    total = 0
    for request, n in enumerate(case.count):
        digest = digest_of_rows(case.host_row[request, :n], salt)
        total += mix_bits(digest + mix_bits(request + 1) & WORD)
    return mix_bits(so_far) + total & WORD
