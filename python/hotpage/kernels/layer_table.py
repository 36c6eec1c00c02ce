# SPDX-License-Identifier: Apache-2.0
"""Owns where the rows of many layers lie in both pools, as tables on the device.

mirror_rows, spill_pages and restore_pages walk all layers in one launch by these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._tensors import ROW_UNIT_BYTES, is_pinned

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PoolLayer:
    """One layer's rows in both pools. Rows may have any dtype; they are moved as bytes."""

    gpu: torch.Tensor
    """`[GPU blocks][block size][row width]`: the layer's view of the pool, null block included.
    Rows of a block are adjacent; blocks lie apart."""
    host: torch.Tensor
    """`[host blocks][block size][row width]`, pinned: the layer's view of the host pool. Rows have
    one distance throughout: the width of all layers of an index group where these lie side by
    side."""
    kv_group: int
    """KV cache group that holds the layer's pages, from 0."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.gpu.shape[2]) * self.gpu.element_size()

    @property
    def host_row_stride(self) -> int:
        """Bytes from a host row to the next."""
        return int(self.host.stride(1)) * self.host.element_size()


def _check_side(name: str, rows: torch.Tensor, like: torch.Tensor) -> None:
    """Checks what both views of a layer have in common."""
    if rows.dim() != 3 or rows.shape[1:] != like.shape[1:]:
        raise ConfigError(
            f"{name} has shape {tuple(rows.shape)}, expected n x {like.shape[1]} x {like.shape[2]}"
        )
    if rows.element_size() != like.element_size():
        raise ConfigError(f"{name} is {rows.dtype}, expected {like.dtype}")
    # A stride along a dimension of one element says nothing.
    strides = [
        stride * rows.element_size()
        for stride, size in zip(rows.stride(), rows.shape, strict=True)
        if size > 1
    ]
    if rows.stride(2) != 1 and rows.shape[2] > 1:
        raise ConfigError(f"{name} has rows with gaps inside")
    if rows.data_ptr() % ROW_UNIT_BYTES or any(s % ROW_UNIT_BYTES for s in strides[:-1]):
        raise ConfigError(f"{name} has rows that are not aligned to {ROW_UNIT_BYTES} bytes")


def check_layer(name: str, layer: PoolLayer, like: PoolLayer) -> None:
    """Checks that a layer's views can be walked by the kernels, and beside those of `like`.

    Raises:
        ConfigError: not so; the text names the layer and what was expected.
    """
    gpu, host = layer.gpu, layer.host
    _check_side(f"{name}'s GPU rows", gpu, like.gpu)
    _check_side(f"{name}'s host rows", host, like.gpu)
    row_bytes, block_size = layer.row_bytes, int(gpu.shape[1])
    if row_bytes % ROW_UNIT_BYTES or not 0 < row_bytes <= _abi.MAX_ROW_BYTES:
        raise ConfigError(
            f"{name} has rows of {row_bytes} bytes, expected a positive multiple of "
            f"{ROW_UNIT_BYTES} up to {_abi.MAX_ROW_BYTES}; pad the row"
        )
    if not 1 <= block_size <= _abi.MAX_BLOCK_SIZE:
        raise ConfigError(f"{name} has blocks of {block_size}, expected 1 to {_abi.MAX_BLOCK_SIZE}")
    if block_size > 1 and gpu.stride(1) * gpu.element_size() != row_bytes:
        raise ConfigError(f"{name}'s GPU rows are not adjacent inside a block")
    if layer.host_row_stride < row_bytes:
        raise ConfigError(f"{name}'s host rows overlap")
    if host.shape[0] > 1 and host.stride(0) != block_size * host.stride(1):
        raise ConfigError(f"{name}'s host blocks are not as far apart as their rows")
    if gpu.shape[0] != like.gpu.shape[0] or host.shape[0] != like.host.shape[0]:
        raise ConfigError(
            f"{name} has {gpu.shape[0]} GPU and {host.shape[0]} host blocks, expected "
            f"{like.gpu.shape[0]} and {like.host.shape[0]}"
        )
    for side, rows in (("GPU", gpu), ("host", host)):
        if rows.shape[0] * block_size > 2**31 - 1:
            raise ConfigError(f"the {side} pool has more than 2^31 - 1 rows a layer")
    if gpu.device != like.gpu.device or gpu.device.type != "cuda":
        raise ConfigError(f"{name}'s GPU rows are on {gpu.device}, expected {like.gpu.device}")
    if host.device.type != "cpu" or not is_pinned(host):
        raise ConfigError(f"{name}'s host rows are not pinned host memory")


def build_chunks(layers: Sequence[tuple[int, int]], row_bytes: int) -> list[tuple[int, ...]]:
    """Chunks that cover a tile of tokens in all layers, each pair of (token, layer) once.

    Layers that lie side by side in the host pool share chunks, one token each; a layer that lies
    alone takes several tokens, which are then adjacent.

    Args:
        layers: host address and host row stride of each layer, in bytes.

    Returns:
        (first layer, layers, first token in the tile, tokens) with at most 4 rows each.
    """
    runs: list[list[int]] = []
    for i, (address, stride) in enumerate(layers):
        beside = (
            i > 0
            and stride == layers[i - 1][1]
            and stride > row_bytes
            and address == layers[i - 1][0] + row_bytes
        )
        if beside and len(runs[-1]) < _abi.CHUNK_ROWS:
            runs[-1].append(i)
        else:
            runs.append([i])
    chunks = []
    for run in runs:
        num_tokens = _abi.CHUNK_ROWS // len(run)
        for token in range(0, _abi.TILE_TOKENS, num_tokens):
            chunks.append((run[0], len(run), token, num_tokens))
    return chunks


class LayerTable:
    """Tables of some layers on the device, and the part of a parameter block that names them.

    Args:
        layers: in the order of the model; layers of an index group follow each other.
        num_kv_groups: KV cache groups of the model; by default as many as the layers name.
        max_blocks: most thread blocks of a launch, 0 for the library's choice.

    Raises:
        ConfigError: views that the kernels do not take.
    """

    def __init__(
        self,
        layers: Sequence[PoolLayer],
        *,
        num_kv_groups: int | None = None,
        max_blocks: int = 0,
    ) -> None:
        import torch

        if not layers:
            raise ConfigError("no layers were given, expected at least one")
        for i, layer in enumerate(layers):
            check_layer(f"layer {i}", layer, layers[0])
        most = 1 + max(layer.kv_group for layer in layers)
        self.num_kv_groups = most if num_kv_groups is None else num_kv_groups
        if min(layer.kv_group for layer in layers) < 0 or self.num_kv_groups < most:
            raise ConfigError(f"num_kv_groups is {self.num_kv_groups}, expected at least {most}")
        if max_blocks < 0:
            raise ConfigError(f"max_blocks is {max_blocks}, expected 0 (no limit) or more")
        first = layers[0]
        self.device = first.gpu.device
        self.block_size = int(first.gpu.shape[1])
        self.row_bytes = first.row_bytes
        self.num_gpu_blocks, self.num_host_blocks = first.gpu.shape[0], first.host.shape[0]
        rows = [
            (
                layer.gpu.data_ptr(),
                layer.gpu.stride(0) * layer.gpu.element_size(),
                layer.host.data_ptr(),
                layer.host_row_stride,
                layer.kv_group,
            )
            for layer in layers
        ]
        chunks = build_chunks([(row[2], row[3]) for row in rows], self.row_bytes)
        self._layers = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self._chunks = torch.tensor(chunks, dtype=torch.int32, device=self.device)
        self.layers = tuple(layers)
        """The layers, kept alive."""
        self.params = _abi.PoolsParams(
            num_layers=len(rows),
            num_chunks=len(chunks),
            num_kv_groups=self.num_kv_groups,
            row_bytes=self.row_bytes,
            block_size=self.block_size,
            max_blocks=max_blocks,
            num_gpu_blocks=self.num_gpu_blocks,
            num_host_blocks=self.num_host_blocks,
            layers=self._layers.data_ptr(),
            chunks=self._chunks.data_ptr(),
        )
