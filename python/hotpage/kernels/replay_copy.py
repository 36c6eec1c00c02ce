# SPDX-License-Identifier: Apache-2.0
"""Owns the op replay_copy: the rows of a copy list, host pool to hot slots, for some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._library import Library, load
from hotpage.kernels._tensors import (
    ROW_UNIT_BYTES,
    check_contiguous,
    check_gpu_blocks,
    check_host_rows,
    check_tensor,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CopyList:
    """The misses of one resolve, on the device. A resolve writes it, copies read it."""

    host_row: torch.Tensor
    """int32 `[requests][length]`: host rows, ascending in each request."""
    hot_row: torch.Tensor
    """int32 `[requests][length]`: physical rows that they go to."""
    count: torch.Tensor
    """int32 `[requests]`: misses of each request."""

    @classmethod
    def allocate(cls, num_requests: int, length: int, device: torch.device | str) -> CopyList:
        """An empty list.

        Args:
            length: most misses of a request: verification rows x top-k.
        """
        import torch

        shape = (num_requests, length)
        return cls(
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.zeros(num_requests, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class LayerRows:
    """Where the rows of an index group's layers lie, leader first."""

    host: Sequence[torch.Tensor]
    """Per layer uint8 `[host rows][row_bytes]`, pinned. All have the same distance between rows:
    row_bytes x layers where the group's rows are interleaved, row_bytes where they are not."""
    gpu: Sequence[torch.Tensor]
    """Per layer uint8 `[blocks][block_size][row_bytes]`, rows adjacent: the layer's page of every
    GPU block. All have the same strides."""
    block_stride_rows: int
    """Physical rows from one GPU block to the next: row t of block b is physical row
    b x block_stride_rows + t."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.gpu[0].shape[1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in one layer."""
        return int(self.gpu[0].shape[2])


def fill_copy_params(
    params: _abi.CopyParams,
    copies: CopyList,
    layers: LayerRows,
    max_blocks: int,
) -> None:
    """Checks a copy list and its layers and writes them into `params`.

    Raises:
        ConfigError: a dtype, shape, device, alignment or bound that the kernels do not take.
    """
    device = copies.count.device
    num_requests = int(copies.count.shape[0])
    if not 1 <= num_requests <= _abi.MAX_REQUESTS:
        raise ConfigError(f"the copy list has {num_requests} requests, expected 1 to 1,024")
    check_tensor("copies.count", copies.count, "int32", (num_requests,), device)
    check_tensor("copies.host_row", copies.host_row, "int32", (num_requests, None), device)
    check_tensor("copies.hot_row", copies.hot_row, "int32", tuple(copies.host_row.shape), device)
    check_contiguous("copies.host_row", copies.host_row)
    check_contiguous("copies.hot_row", copies.hot_row)
    num_layers = len(layers.gpu)
    if num_layers != len(layers.host) or not 1 <= num_layers <= _abi.MAX_GROUP_LAYERS:
        raise ConfigError(
            f"the copy has {len(layers.host)} host and {num_layers} GPU layers, "
            f"expected the same number of both, 1 to {_abi.MAX_GROUP_LAYERS}"
        )
    row_bytes = layers.row_bytes
    if row_bytes % ROW_UNIT_BYTES or not 0 < row_bytes <= _abi.MAX_ROW_BYTES:
        raise ConfigError(
            f"row_bytes is {row_bytes}, expected a positive multiple of {ROW_UNIT_BYTES} up to "
            f"{_abi.MAX_ROW_BYTES}; pad the row"
        )
    if max_blocks < 0:
        raise ConfigError(f"max_copy_blocks is {max_blocks}, expected 0 (no limit) or more")
    host_stride: int | None = None
    shape = tuple(layers.gpu[0].shape)
    for i, (host, gpu) in enumerate(zip(layers.host, layers.gpu, strict=True)):
        host_stride = check_host_rows(f"host layer {i}", host, row_bytes, host_stride)
        check_gpu_blocks(f"GPU layer {i}", gpu, shape)
        if gpu.device != device or gpu.stride(0) != layers.gpu[0].stride(0):
            raise ConfigError(
                f"GPU layer {i} is on {gpu.device} with {gpu.stride(0)} bytes between blocks, "
                f"expected {device} and {layers.gpu[0].stride(0)}"
            )
        params.host_layer[i] = host.data_ptr()
        params.gpu_layer[i] = gpu.data_ptr()
    params.num_requests = num_requests
    params.num_layers = num_layers
    params.row_bytes = row_bytes
    params.max_blocks = max_blocks
    params.copy_list_stride = int(copies.host_row.shape[1])
    params.block_size = layers.block_size
    params.block_stride_rows = layers.block_stride_rows
    params.host_row_stride = host_stride or row_bytes
    params.gpu_block_stride = layers.gpu[0].stride(0)
    params.copy_host_row = copies.host_row.data_ptr()
    params.copy_hot_row = copies.hot_row.data_ptr()
    params.copy_count = copies.count.data_ptr()


def usable_library(device: torch.device) -> tuple[Library, _abi.DeviceProperties]:
    """The kernel library and what it says of `device`.

    Raises:
        KernelUnavailableError: no library, or none of its images runs on the device.
        ConfigError: no CUDA device, or one that cannot read pinned host memory at its host address.
    """
    import torch

    if device.type != "cuda":
        raise ConfigError(f"the tensors are on {device}, expected a CUDA device")
    library = load()
    index = device.index if device.index is not None else torch.cuda.current_device()
    properties = library.check_device(index)
    if not properties.reads_registered_host_memory:
        raise ConfigError(f"{device} cannot read pinned host memory at its host address")
    return library, properties


class ReplayCopy:
    """replay_copy bound to a copy list and some layers of its index group.

    All checks happen here; a call only enqueues one launch. The tensors are kept alive.

    Args:
        copies: the list that an earlier resolve on the same stream wrote.
        layers: the layers to copy.
        max_copy_blocks: most thread blocks of the launch, 0 for no limit; 16 leave the other
            multiprocessors to work that runs beside it.

    Raises:
        ConfigError: a tensor that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(self, copies: CopyList, layers: LayerRows, *, max_copy_blocks: int = 0) -> None:
        self.params = _abi.CopyParams()
        fill_copy_params(self.params, copies, layers, max_copy_blocks)
        self._library, _ = usable_library(copies.count.device)
        self._tensors = (copies, layers)

    def __call__(self, stream: int) -> None:
        """Enqueues the copy.

        Args:
            stream: address of the CUDA stream (torch's `stream.cuda_stream`). May be capturing.

        Raises:
            KernelError: the launch failed.
        """
        self._library.launch("hotpage_replay_copy", self.params, stream)
