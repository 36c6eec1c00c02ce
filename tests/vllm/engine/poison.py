# SPDX-License-Identifier: Apache-2.0
"""Owns what makes a silent fall-back loud: vLLM's HiSparse raises, its host views hold poison."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from engine.launch import Engine

OPS = (
    "hisparse_resolve_residency",
    "hisparse_gather_compact",
    "hisparse_gather_plan",
    "hisparse_invalidate_written_slots",
    "swap_blocks_batch",
)
WORKER_METHODS = (
    "start_step",
    "prepare_forward",
    "finish_forward",
    "invalidate_blocks",
    "take_transfer_updates",
    "_copy_host_blocks",
    "_enqueue_host_mirror",
    "_enqueue_layer_mirror",
    "_enqueue_row_dma",
    "_enqueue_transfers",
    "_finish_mirror_phase",
    "_finish_previous_step",
    "_restore_pages",
    "_stage_row_mirror_mapping",
    "_submit_dma_descriptors",
    "_submit_transfers",
)
RUNTIME_METHODS = (
    "gather_prefill_cache",
    "invalidate_sorted_slots",
    "invalidate_written_slots",
    "_resolve_and_stage_group",
    "_resolve_residency",
    "_stage_this_layer",
    "_swap_rows",
)
PATTERN = 0xA5


@contextmanager
def raising(spared: Collection[str] = ()) -> Iterator[None]:
    """While it is entered, vLLM's HiSparse ops, worker steps and runtime raise.

    Enter it when the engine is up: vLLM's profiling runs its own.

    Args:
        spared: names that go on working.
    """
    import vllm._custom_ops as custom
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker import (
        HiSparseConnectorWorker,
    )
    from vllm.v1.hisparse.runtime import HiSparseRuntime

    targets: list[tuple[Any, str]] = [(torch.ops._C_cache_ops, name) for name in OPS]
    targets += [(custom, "swap_blocks_batch")]
    targets += [(HiSparseConnectorWorker, name) for name in WORKER_METHODS]
    targets += [(HiSparseRuntime, name) for name in RUNTIME_METHODS]
    saved = [(owner, name, getattr(owner, name)) for owner, name in targets if name not in spared]
    upconvert = custom.cp_gather_and_upconvert_fp8_kv_cache

    def without_host(*arguments: Any, **more: Any) -> Any:
        host = more.get("host_cache", arguments[6] if len(arguments) > 6 else None)
        if host is not None:
            raise AssertionError("vLLM's upconverting gather was given host rows")
        return upconvert(*arguments, **more)

    try:
        for owner, name, _ in saved:
            setattr(owner, name, _raiser(name))
        custom.cp_gather_and_upconvert_fp8_kv_cache = without_host
        yield
    finally:
        custom.cp_gather_and_upconvert_fp8_kv_cache = upconvert
        for owner, name, value in saved:
            setattr(owner, name, value)


def _raiser(name: str) -> Any:
    def raises(*_: Any, **__: Any) -> None:
        raise AssertionError(f"vLLM's {name} ran while serving")

    return raises


class PoisonedViews:
    """Gives vLLM's Python readers of host rows a pinned buffer full of `PATTERN` instead.

    Which views those are: `layer.kv_cache`, the runtimes' `_host_cache` and a worker's
    `host_caches`; a native worker names others with `host_views() -> list[(owner, attribute)]`.
    """

    def __init__(self, engine: Engine) -> None:
        places: list[tuple[Any, str]] = []
        for layer in engine.layers:
            places += [(layer, "kv_cache"), (layer.hisparse_cache.runtime, "_host_cache")]
        if hasattr(engine.worker, "host_views"):
            places += engine.worker.host_views()
        views = [getattr(owner, name) for owner, name in places]
        size = max(_extent(view) for view in views)
        # Pinned: a kernel that reads it must get the pattern and no fault of its own.
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(PATTERN)
        for (owner, name), view in zip(places, views, strict=True):
            setattr(owner, name, self._like(view))
        worker = engine.worker
        if isinstance(getattr(worker, "host_caches", None), tuple):
            worker.host_caches = tuple(self._like(view) for view in worker.host_caches)

    def check_unwritten(self) -> None:
        """Raises AssertionError if somebody wrote through a view."""
        torch.cuda.synchronize()
        assert bool((self._buffer == PATTERN).all()), "somebody wrote through a poisoned view"

    def _like(self, view: torch.Tensor) -> torch.Tensor:
        itemsize = view.element_size()
        whole = self._buffer[: self._buffer.numel() // itemsize * itemsize].view(view.dtype)
        return whole.as_strided(view.shape, view.stride())


def _extent(view: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (last + 1) * view.element_size()
