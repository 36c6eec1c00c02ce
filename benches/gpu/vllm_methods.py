# SPDX-License-Identifier: Apache-2.0
"""Owns how a bench runs vLLM's own invalidation: its two methods, from its source, on stand-ins.

The engine around them (configuration, process groups, workers) is not started: the methods are
taken out of their modules as they are and get objects with the attributes that they read.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

RUNTIME = "v1/hisparse/runtime.py"
WORKER = "distributed/kv_transfer/kv_connector/v1/hisparse/worker.py"


def find_sources(named: Path | None) -> Path | None:
    """Folder of the vllm package: the one named, else the installed one; None without both."""
    if named is not None:
        return named
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _method(source: Path, name: str) -> Callable[..., Any]:
    """The one function of that name in a source file, compiled by itself."""
    tree = ast.parse(source.read_text())
    (found,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == name and not node.decorator_list
    )
    module = ast.parse("from __future__ import annotations")
    module.body.append(found)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(module, str(source), "exec"), names)
    return names[name]


class VllmInvalidation:
    """vLLM 0.33's invalidation of recycled blocks over the row maps of some leaders."""

    def __init__(self, sources: Path, row_maps: Sequence[torch.Tensor], block_size: int) -> None:
        drop = _method(sources / RUNTIME, "invalidate_sorted_slots")
        self._invalidate_blocks = _method(sources / WORKER, "invalidate_blocks")
        runtimes = []
        for row_map in row_maps:
            runtime = SimpleNamespace(
                device=row_map.device, index_group=SimpleNamespace(device_global_indices=row_map)
            )
            runtime.invalidate_sorted_slots = drop.__get__(runtime)
            runtimes.append(runtime)
        self._worker = SimpleNamespace(
            cache_handles=[SimpleNamespace(runtime=runtimes[0])],
            kernel_block_size=block_size,
            leader_runtimes=runtimes,
        )

    def by_blocks(self, block_ids: list[int], state_rows: torch.Tensor) -> None:
        """The worker's method, eager: ids in Python, as the scheduler sends them."""
        self._invalidate_blocks(self._worker, block_ids, state_rows)

    def by_slots(self, blocks: torch.Tensor, state_rows: torch.Tensor) -> None:
        """The same launches with the ids on the device, capturable."""
        size = self._worker.kernel_block_size
        offsets = torch.arange(size, dtype=torch.int32, device=blocks.device)
        slots = torch.sort((blocks[:, None] * size + offsets).flatten()).values
        for runtime in self._worker.leader_runtimes:
            runtime.invalidate_sorted_slots(slots, state_rows)
