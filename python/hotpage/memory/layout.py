# SPDX-License-Identifier: Apache-2.0
"""Owns where rows lie in the host pool and where its registration may be cut.

The byte offsets are those of `Geometry::host_row_offset` in the Rust core; the golden vectors of
mirror_rows and of the page copies hold both to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from hotpage.errors import ConfigError

PAGE_BYTES = 4096
"""What the driver locks at once; two registrations must not share one."""

ROW_UNIT_BYTES = 16


@dataclass(frozen=True)
class RowPlace:
    """Where a layer's rows lie in the pool."""

    offset: int
    """Bytes from the start of the pool to host row 0."""
    row_stride: int
    """Bytes from a host row to the next."""


@dataclass(frozen=True)
class PoolLayout:
    """Sizes that fix every offset of the host pool.

    Attributes:
        index_groups: layers of each index group, in the order of the model.
        block_size: tokens per block.
        row_bytes: bytes of one token in one layer, a multiple of 16.
        num_host_blocks: blocks of the pool, the null block counted.
        row_interleaved: rows of an index group side by side, `[index group][block][token][layer]`;
            otherwise `[layer][block][token]`.

    Raises:
        ConfigError: a size is not positive or the row width is no multiple of 16.
    """

    index_groups: tuple[int, ...]
    block_size: int
    row_bytes: int
    num_host_blocks: int
    row_interleaved: bool = True

    def __post_init__(self) -> None:
        if not self.index_groups or min(self.index_groups) < 1:
            raise ConfigError(f"index_groups is {self.index_groups}, expected positive sizes")
        for name in ("block_size", "row_bytes", "num_host_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.row_bytes % ROW_UNIT_BYTES:
            raise ConfigError(
                f"row_bytes is {self.row_bytes}, expected a multiple of 16; pad the row"
            )

    @property
    def num_layers(self) -> int:
        """Layers of all index groups."""
        return sum(self.index_groups)

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one host block over all layers."""
        return self.num_layers * self.block_size * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_host_blocks * self.host_block_bytes

    def place(self, layer: int) -> RowPlace:
        """Where the rows of a layer lie; layers are numbered group after group.

        Raises:
            ConfigError: there is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer is {layer}, expected 0 to {self.num_layers - 1}")
        layer_bytes = self.num_host_blocks * self.block_size * self.row_bytes
        if not self.row_interleaved:
            return RowPlace(layer * layer_bytes, self.row_bytes)
        ends = list(accumulate(self.index_groups))
        group = next(i for i, end in enumerate(ends) if layer < end)
        first = ends[group] - self.index_groups[group]
        offset = first * layer_bytes + (layer - first) * self.row_bytes
        return RowPlace(offset, self.index_groups[group] * self.row_bytes)

    def _regions(self) -> Iterator[tuple[int, int]]:
        """Start of each region in which host blocks lie in a row, and a block's bytes in it."""
        sizes = self.index_groups if self.row_interleaved else (1,) * self.num_layers
        start = 0
        for layers in sizes:
            piece = layers * self.block_size * self.row_bytes
            yield start, piece
            start += self.num_host_blocks * piece

    def chunks(self, chunk_bytes: int) -> list[tuple[int, int]]:
        """Cuts the pool into ranges of about `chunk_bytes`, none of which ends inside a host block.

        A range starts at a multiple of 4,096 bytes. One is larger than asked for only where the
        next place to cut is further away.

        Returns:
            (start, end) of each range, in bytes; they cover the pool.
        """
        if chunk_bytes < PAGE_BYTES:
            raise ConfigError(f"chunk_bytes is {chunk_bytes}, expected at least {PAGE_BYTES}")
        chunks, start = [], 0
        while self.num_bytes - start > chunk_bytes:
            end = self._last_cut(start, start + chunk_bytes)
            if end is None:
                end = self._first_cut(start + chunk_bytes)
            if end is None:
                break
            chunks.append((start, end))
            start = end
        chunks.append((start, self.num_bytes))
        return chunks

    def _cuts(self, region: int, piece: int) -> tuple[int, int] | None:
        """First cut of a region and the distance between its cuts, if it has any."""
        step = math.lcm(piece, PAGE_BYTES)
        for first in range(region, region + step, piece):
            if first % PAGE_BYTES == 0:
                return first, step
        return None

    def _last_cut(self, after: int, limit: int) -> int | None:
        best = None
        for region, piece in self._regions():
            end = region + self.num_host_blocks * piece
            found = self._cuts(region, piece)
            if region > limit or found is None:
                continue
            first, step = found
            # The end of a region is the start of the next, or of the pool's end, which is no cut.
            at = first + (min(limit, end - 1) - first) // step * step
            if first <= at and at > after:
                best = at
        return best

    def _first_cut(self, limit: int) -> int | None:
        for region, piece in self._regions():
            end = region + self.num_host_blocks * piece
            found = self._cuts(region, piece)
            if end <= limit or found is None:
                continue
            first, step = found
            at = first if first >= limit else first + -(-(limit - first) // step) * step
            if at < end:
                return at
        return None
