# SPDX-License-Identifier: Apache-2.0
"""Owns the way of small arrays to the device: packed, pinned, on the current stream, no wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def upload(arrays: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """Copies int32 arrays in one transfer on the current stream.

    The pinned memory belongs to torch, which does not hand it out again before the copy has run.

    Returns:
        int32 tensors on the device, of the same shapes and order; each starts at a multiple of 16
        bytes.
    """
    import torch

    sizes = [-(-array.size // 4) * 4 for array in arrays]
    packed = pinned_zeros((max(sum(sizes), 1),), torch.int32)
    view, start = packed.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        view[start : start + array.size] = array.reshape(-1)
        start += size
    on_device = packed.to(device, non_blocking=True)
    parts, start = [], 0
    for array, size in zip(arrays, sizes, strict=True):
        parts.append(on_device[start : start + array.size].view(array.shape))
        start += size
    return parts


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pinned host memory of torch's, zeroed."""
    import torch

    return torch.zeros(shape, dtype=dtype, pin_memory=True)
