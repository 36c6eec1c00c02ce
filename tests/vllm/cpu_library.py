# SPDX-License-Identifier: Apache-2.0
"""Owns the kernel library on a CPU: launches go to the kernels' own bodies, on fake streams."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_streams import Streams

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from emulated import HOPPER_SHARED_BYTES, HolderMarks, launch

from hotpage.errors import ConfigError, KernelError
from hotpage.kernels import (
    _abi,
    _tensors,
    cooperative_copy,
    copy_pages,
    invalidate,
    layer_table,
    mirror_rows,
    replay_copy,
    reset_states,
    resolve_and_copy,
    stage_prefill,
)
from hotpage.vllm import host_pool

_BLOCKS = 2
"""Thread blocks of a launch that leaves their number open: threads are slow here."""

Fault = Callable[[ctypes.Structure], bool]


class CpuLibrary:
    """Stands where `Library` stands.

    Args:
        kernels: the library that `compile_kernels` built.
        streams: where launches are put.
    """

    def __init__(self, kernels: ctypes.CDLL, streams: Streams) -> None:
        self._kernels, self._streams = kernels, streams
        self.launches: Counter[str] = Counter()
        self.faults: dict[str, Fault] = {}
        """Entry point -> called with the parameters; False leaves the launch out."""

    def launch(self, name: str, params: Any, stream: int) -> None:
        """Enqueues one operation; the parameters are read now."""
        self.launches[name] += 1
        # OK because what the parameters point to is read when the work runs, as by a GPU.
        block = type(params).from_buffer_copy(params)
        fault = self.faults.get(name)
        if fault is None or fault(block):
            self._streams.at(stream).put(lambda: self._run(name, block))

    def _run(self, name: str, params: Any) -> None:
        # What is enqueued once may run often: a graph replays it.
        block = type(params).from_buffer_copy(params)
        if name == "hotpage_resolve_and_copy":
            self._resolve(block)
            return
        if name == "hotpage_cooperative_copy":
            self._cooperate(block)
            return
        for sizes in (block, getattr(block, "pools", None)):
            if getattr(sizes, "max_blocks", None) == 0:
                sizes.max_blocks = _BLOCKS
        status = launch(self._kernels, name, block, self.launches.total())
        if status != _abi.OK:
            raise KernelError(name, status, "refused", repr(block))

    def _resolve(self, block: _abi.ResolveAndCopyParams) -> None:
        marks = HolderMarks(block.holders, block.state_row, block.num_state_rows)
        copies = block.copy.num_layers > 0
        if copies:
            block.holders = 0
        seed = self.launches.total()
        assert self._kernels.emulate_resolve(ctypes.byref(block), seed) >= 0
        if copies:
            params, by = ctypes.byref(block.copy), ctypes.byref(marks)
            # A sweep of so few copies goes through the list the same way.
            assert self._kernels.emulate_copy(params, by, _BLOCKS, 0) == 0

    def _cooperate(self, block: _abi.CooperativeCopyParams) -> None:
        """This rank's blocks alone; those of other ranks run in other processes."""
        launches = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        delay_us, held = (ctypes.c_int32 * _BLOCKS)(), (ctypes.c_uint32 * 1)()
        status = self._kernels.emulate_cooperative(
            launches, delay_us, held, 1, 1, _BLOCKS, self.launches.total()
        )
        assert status == 0, "threads wait for each other for ever"

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts the library in the place of the real one, and lets CPU tensors pass for the GPU's
        and for pinned ones.
        """
        properties = SimpleNamespace(max_dynamic_shared_bytes_per_block=HOPPER_SHARED_BYTES)
        for module in (
            cooperative_copy,
            copy_pages,
            invalidate,
            mirror_rows,
            replay_copy,
            reset_states,
            resolve_and_copy,
            stage_prefill,
        ):
            patch.setattr(module, "usable_library", lambda _: (self, properties))
        patch.setattr(host_pool, "usable_library", lambda _: (self, properties))
        for module in (_tensors, layer_table, mirror_rows):
            patch.setattr(module, "is_pinned", lambda _: True)
        for module in (layer_table, stage_prefill):
            patch.setattr(module, "check_layer", _check_layer)
        _install_plain_memory(patch)


_checked = layer_table.check_layer


def _check_layer(name: str, layer: Any, like: Any) -> None:
    """All of `check_layer` but where the GPU's rows lie, which it looks at last."""
    try:
        _checked(name, layer, like)
    except ConfigError as error:
        if "GPU rows are on cpu" not in str(error):
            raise


def _install_plain_memory(patch: pytest.MonkeyPatch) -> None:
    """Pinned memory is any memory, for hotpage and for vLLM's runtimes."""
    from vllm.v1.hisparse import runtime

    from hotpage.runtime import acks, upload
    from hotpage.vllm import cooperation, counters

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    for module in (acks, cooperation, counters, upload):
        patch.setattr(module, "pinned_zeros", zeros)
    patch.setattr(runtime, "_has_hisparse_ops", lambda: True)
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    patch.setattr(torch, "empty", unpinned)
