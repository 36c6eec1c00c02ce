# SPDX-License-Identifier: Apache-2.0
"""Owns what all torch custom ops of the kernels have in common: registration, fake and stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def register(name: str, schema: str, call: Callable[..., None]) -> None:
    """Registers `torch.ops.hotpage.NAME`, which only writes tensors that it is given."""
    torch.library.define(f"hotpage::{name}", schema)
    # Rows lie on the CPU and on the GPU, so dispatch must not depend on a device key.
    torch.library.impl(f"hotpage::{name}", "CompositeExplicitAutograd", call)
    torch.library.register_fake(f"hotpage::{name}", _nothing)


def stream_of(tensor: Tensor) -> int:
    """Address of the current stream of a tensor's device."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def _nothing(*_args: object) -> None:
    """The fake of an op without outputs has nothing to make."""
