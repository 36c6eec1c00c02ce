# SPDX-License-Identifier: Apache-2.0
"""Owns other views of rows that lie apart in memory, which torch's own `view` does not give."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rows_as(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes as another dtype, `[...][row width]` with any strides but the last's, 1."""
    import torch

    old, new = rows.element_size(), dtype.itemsize
    if old == new:
        return rows.view(dtype)
    whole = torch.empty(0, dtype=dtype, device=rows.device).set_(rows.untyped_storage())
    return whole.as_strided(
        (*rows.shape[:-1], rows.shape[-1] * old // new),
        (*(stride * old // new for stride in rows.stride()[:-1]), 1),
        rows.storage_offset() * old // new,
    )


def flat_rows(blocks: torch.Tensor) -> torch.Tensor:
    """`[blocks][block size][row width]`, rows at one distance all through, as `[rows][width]`."""
    return blocks.as_strided(
        (blocks.shape[0] * blocks.shape[1], blocks.shape[2]),
        (blocks.stride(1), 1),
        blocks.storage_offset(),
    )
