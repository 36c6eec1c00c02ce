# SPDX-License-Identifier: Apache-2.0
"""Owns the checks of tensors before their addresses reach a parameter block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError, KernelUnavailableError
from hotpage.kernels._library import load

if TYPE_CHECKING:
    import torch

ROW_UNIT_BYTES = 16


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: str | tuple[str, ...],
    shape: Sequence[int | None],
    device: torch.device,
) -> None:
    """Checks one array that a kernel reads or writes.

    Args:
        name: what the error text calls it.
        dtypes: allowed dtypes, "int32" say.
        shape: expected sizes; None admits any.
        device: where it must lie.

    Raises:
        ConfigError: another dtype, shape or device, or elements of its last dimension that are
            not adjacent.
    """
    allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
    got_dtype = str(tensor.dtype).removeprefix("torch.")
    if got_dtype not in allowed:
        raise ConfigError(f"{name} has dtype {got_dtype}, expected {' or '.join(allowed)}")
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(
        size is not None and size != have for size, have in zip(shape, got, strict=True)
    ):
        text = ", ".join("any" if size is None else str(size) for size in shape)
        raise ConfigError(f"{name} has shape {got}, expected ({text})")
    if tensor.device != device:
        raise ConfigError(f"{name} is on {tensor.device}, expected {device}")
    if got and got[-1] > 1 and tensor.stride(-1) != 1:
        raise ConfigError(f"{name} has stride {tensor.stride(-1)} along its last dimension, not 1")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raises ConfigError if the tensor has gaps."""
    if not tensor.is_contiguous():
        raise ConfigError(f"{name} is not contiguous; pass the whole buffer, not a view of it")


def check_host_rows(name: str, rows: torch.Tensor, row_bytes: int, stride: int | None) -> int:
    """Checks one layer's host rows, `[rows][row_bytes]` uint8; returns the bytes between two.

    Raises:
        ConfigError: not pinned uint8, another width, rows that are not 16-byte aligned, or a
            distance between rows other than `stride` where that is given.
    """
    _check_bytes(name, rows, (None, row_bytes))
    got = int(rows.stride(0))
    if got < row_bytes or (stride is not None and got != stride):
        expected = f"at least {row_bytes}" if stride is None else str(stride)
        raise ConfigError(f"{name} has {got} bytes between rows, expected {expected}")
    if rows.device.type != "cpu" or not is_pinned(rows):
        raise ConfigError(f"{name} is not pinned host memory")
    return got


def check_gpu_blocks(name: str, blocks: torch.Tensor, shape: tuple[int, int, int]) -> int:
    """Checks one layer's GPU blocks, `[blocks][block_size][row_bytes]` uint8, rows adjacent;
    returns the bytes between two blocks.

    Raises:
        ConfigError: another dtype or shape, or blocks that are not 16-byte aligned.
    """
    _check_bytes(name, blocks, shape)
    if blocks.stride(1) != shape[2] or blocks.stride(0) < shape[1] * shape[2]:
        raise ConfigError(f"{name} has strides {blocks.stride()}, its rows must be adjacent")
    return int(blocks.stride(0))


def _check_bytes(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    check_tensor(name, tensor, "uint8", shape, tensor.device)
    if tensor.data_ptr() % ROW_UNIT_BYTES or any(s % ROW_UNIT_BYTES for s in tensor.stride()[:-1]):
        raise ConfigError(f"{name} has rows that are not aligned to {ROW_UNIT_BYTES} bytes")


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether kernels can read and write a host tensor at its host address.

    torch's own answer knows only memory that torch pinned. Without the library there is no other.
    """
    if tensor.is_pinned():
        return True
    try:
        library = load()
    except KernelUnavailableError:
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in steps) + 1
    return library.is_pinned(tensor.data_ptr(), reach * tensor.element_size())


def check_list(name: str, ids: torch.Tensor, dtype: str, length: int, device: torch.device) -> None:
    """Checks `[n]` ids of a list that may be longer than what is used of it.

    Raises:
        ConfigError: another dtype or device, more than one dimension, gaps, or too short.
    """
    check_tensor(name, ids, dtype, (None,), device)
    if ids.shape[0] < length:
        raise ConfigError(f"{name} has {ids.shape[0]} entries, expected at least {length}")
