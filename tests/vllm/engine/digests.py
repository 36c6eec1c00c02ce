# SPDX-License-Identifier: Apache-2.0
"""Owns the 64-bit digests of rows and of lists, in integer tensor operations on any device.

Multilinear hashes with random odd weights modulo 2^64: two different inputs collide with a chance
of 2^-63 at most, and a list's digest depends on its order.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def weights(length: int, salt: int, device: torch.device) -> torch.Tensor:
    """`[length]` random odd int64, equal in every run."""
    generator = torch.Generator().manual_seed(0x5EED + salt)
    low, high = -(2**63), 2**63 - 1
    drawn = torch.randint(low, high, (length,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)


def of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Digests of byte rows.

    Args:
        rows: `[..., row_bytes]` uint8; row_bytes a multiple of four.

    Returns:
        `[...]` int64.
    """
    words = rows.contiguous().view(torch.int32).to(torch.int64) + 1
    return (words * weights(words.shape[-1], 1, rows.device)).sum(dim=-1)


def of_lists(digests: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Digests of the valid entries of lists, with their places.

    Args:
        digests: `[rows, length]` int64.
        valid: `[rows, length]` bool.

    Returns:
        `[rows]` int64.
    """
    weighted = (digests + 1) * weights(digests.shape[-1], 2, digests.device)
    return weighted.masked_fill(~valid, 0).sum(dim=-1)
