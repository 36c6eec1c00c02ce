# SPDX-License-Identifier: Apache-2.0
"""Owns plans that a test writes by hand, and a worker that carries them out step by step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_attention import Batch, Part, gather
from worker_on_cpu import BLOCK, ONE_EACH, CpuWorker, Model, release_all, row_bytes

from hotpage._core import TRANSFER_SPILL
from hotpage.vllm.metadata import HotPageConnectorMetadata


@dataclass(frozen=True)
class Transfer:
    """One page copy; `blocks` has a GPU block of each KV cache group."""

    id: int
    host_block: int
    blocks: Sequence[int] = ()
    kind: int = TRANSFER_SPILL
    after_forward: bool = False
    num_rows: int = BLOCK
    source_host_block: int = 0


def plan(
    groups: int,
    *,
    transfers: Sequence[Transfer] = (),
    residency: Sequence[tuple[int, int, Sequence[int]]] = (),
    cleared: Sequence[int] = (),
    granted: Sequence[tuple[int, Sequence[int]]] = (),
    returned: Sequence[int] = (),
    recycled: Sequence[int] = (),
    resident: bool = False,
) -> Any:
    """A plan with these lists, in the types of the core's: residency is (request, page, blocks),
    granted (request, blocks of its hot region).
    """

    def ints(values: Any, dtype: Any = np.int32) -> np.ndarray:
        return np.array(list(values), dtype)

    blocks = [list(t.blocks) or [0] * groups for t in transfers]
    return SimpleNamespace(
        num_kv_groups=groups,
        transfer_id=ints((t.id for t in transfers), np.int64),
        transfer_kind=ints((t.kind for t in transfers), np.uint8),
        transfer_after_forward=ints((t.after_forward for t in transfers), np.uint8),
        transfer_host_block=ints(t.host_block for t in transfers),
        transfer_source_host_block=ints(t.source_host_block for t in transfers),
        transfer_num_rows=ints(t.num_rows for t in transfers),
        transfer_resident_blocks=ints(blocks).reshape(-1, groups),
        residency_cleared=ints(cleared),
        residency_request=ints(request for request, _, _ in residency),
        residency_page=ints(page for _, page, _ in residency),
        residency_blocks=ints(b for _, _, b in residency).reshape(-1, groups),
        hot_region_request=ints(request for request, _ in granted),
        hot_region_blocks=ints(b for _, region in granted for b in region),
        hot_regions_returned=ints(returned),
        recycled_host_blocks=ints(recycled),
        all_context_resident=resident,
    )


LAYOUTS = ("row_interleaved", "layer_major")
PAGE = list(range(BLOCK))
"""Values of a page that a test fills by hand."""

_APART = 12
"""GPU blocks of the same page in two KV cache groups; groups share one pool."""


class Steps:
    """A worker whose requests, blocks and plans the test chooses.

    Request number n has the values 1000 x n + position. A GPU block is named by its number in the
    first KV cache group, below 12.
    """

    def __init__(self, cpu: CpuWorker) -> None:
        self.cpu, self.worker = cpu, cpu.worker
        self.groups = len(cpu.worker.caches.residency)
        handle = cpu.worker.caches.layers[0].handle
        self.width = handle.runtime.row_width * handle.runtime.kv_dtype.itemsize
        self._ids: dict[str, int] = {}
        order = {name: at for at, (name, _, _) in enumerate(cpu.model.layers())}
        self.layers = [(order[layer.name], layer) for layer in cpu.worker.caches.layers]

    def blocks(self, block: int) -> list[int]:
        """A block of each KV cache group; the null block has one number for all."""
        return [block and block + _APART * group for group in range(self.groups)]

    def region(self, blocks: Sequence[int]) -> list[int]:
        """A hot region of these blocks, `[G][blocks]`."""
        return [self.blocks(block)[group] for group in range(self.groups) for block in blocks]

    def start(
        self,
        *plans: Any,
        batch: Batch | None = None,
        started: Sequence[tuple[int, str]] = (),
        **fields: Any,
    ) -> None:
        """Starts a step with these plans, an empty one by default."""
        plans = plans or (plan(self.groups),)
        self._ids.update({name: id for id, name in started})
        names = batch.names if batch is not None else []
        # In the scheduler's order, which is not the runner's.
        scheduled = sorted(self._ids[name] for name in names if name in self._ids)
        metadata = HotPageConnectorMetadata(
            plans, np.array(scheduled, np.int32).tobytes(), started=tuple(started), **fields
        )
        if batch is None:
            self.worker.start_step(metadata, None, None, 0)
        else:
            self.worker.start_step(metadata, batch.state_rows, batch.names, batch.num_tokens)

    def batch(self, *parts: Part) -> Batch:
        """A batch of these requests; decodes first."""
        return Batch(self.cpu, list(parts))

    def part(
        self,
        number: int,
        length: int,
        start: int,
        *,
        host: Sequence[int],
        resident: Sequence[int],
        state_row: int = 0,
        hot: Sequence[int] = (),
    ) -> Part:
        """Request `r<number>`, its pages and its hot region."""
        blocks, seen = [], {True: 0, False: 0}
        for group in self.cpu.cache_config.kv_cache_groups:
            kind = type(group.kv_cache_spec).__name__
            if "HiSparse" not in kind:
                blocks.append(list(host))
                continue
            is_hot = "Hot" in kind
            at, seen[is_hot] = seen[is_hot], seen[is_hot] + 1
            blocks.append([self.blocks(block)[at] for block in (hot if is_hot else resident)])
        values = [1000 * number + position for position in range(length)]
        return Part(f"r{number}", values, start, state_row, blocks)

    def write(self, batch: Batch, *, drafts: bool = False) -> None:
        """The forward pass of the target's layers, or of the draft layers: rows, no attention."""
        metadata = batch.metadata()
        values = [value for part in batch.parts for value in part.values[part.start :]]
        for number, layer in self.layers:
            if layer.is_draft != drafts:
                continue
            group = layer.attention.impl
            group.index_group.prepare_for_batch(group.index_group_index, metadata)
            cache, slots, _ = layer.handle.write_target(batch.num_tokens, batch.num_tokens)
            rows = row_bytes(values, number, self.width).view(cache.dtype)
            cache[slots // BLOCK, slots % BLOCK] = rows

    def fill_host(self, host_block: int, values: Sequence[int]) -> None:
        """Writes the rows of a host block on all layers, from its start."""
        for number, layer in self.layers:
            rows = row_bytes(values, number, self.width)
            self.cpu.host_rows(layer.name)[host_block, : len(values)] = rows

    def fill_gpu(self, block: int, values: Sequence[int]) -> None:
        """Writes the rows of a block of all KV cache groups, from its start."""
        for number, layer in self.layers:
            cache = layer.handle.view.cache
            rows = row_bytes(values, number, self.width).view(cache.dtype)
            cache[self.blocks(block)[layer.kv_group], : len(values)] = rows

    def host_holds(self, host_block: int, values: Sequence[int], *, drafts: bool = True) -> bool:
        """Whether a host block starts with these rows, on all layers or on the target's."""
        return all(
            torch.equal(
                self.cpu.host_rows(layer.name)[host_block, : len(values)],
                row_bytes(values, number, self.width),
            )
            for number, layer in self.layers
            if drafts or not layer.is_draft
        )

    def gpu_holds(self, block: int, values: Sequence[int]) -> bool:
        """Whether a block of every KV cache group starts with these rows."""
        return all(
            torch.equal(
                self.gpu_rows(layer, block)[: len(values)], row_bytes(values, number, self.width)
            )
            for number, layer in self.layers
        )

    def gpu_rows(self, layer: Any, block: int) -> torch.Tensor:
        """uint8 `[block size][row bytes]` of a layer in a block."""
        return layer.handle.view.cache[self.blocks(block)[layer.kv_group]].view(torch.uint8)

    def read(self, batch: Batch, positions: Sequence[int]) -> None:
        """Every decode row selects these positions, on every layer; the bytes are compared."""
        metadata = batch.metadata()
        topk = [list(positions) + [-1] * (self.cpu.model.top_k - len(positions))]
        topk *= batch.num_decode_tokens
        self.cpu.streams.computing.put(
            lambda: self.cpu.topk[: len(topk)].copy_(torch.tensor(topk, dtype=torch.int32))
        )
        for number, layer in self.layers:
            impl = layer.attention.impl
            at = impl.index_group_index
            rows, counts = impl.index_group.convert_logical_to_physical_topk(
                at, self.cpu.topk[: len(topk)], metadata,
                block_stride_rows=None, return_valid_counts=True,
            )  # fmt: skip
            got = gather(impl.index_group.physical_kv_cache(at), rows, counts)
            for found, wanted in zip(got, batch.expected(topk, number, self.width), strict=False):
                same = (found[: len(wanted)] == wanted).all(1)
                assert same.all(), f"layer {number} reads a wrong row at {same.tolist()}"

    def counters(self) -> list[int]:
        """Hits, misses and misses without a slot of the first index group."""
        return self.worker.states[0].counters.tolist()


Make = Callable[..., Steps]


def page_of(steps: Steps, number: int, **blocks: Any) -> Any:
    """Request whose first page is computed in one step."""
    chosen = {"host": [3], "resident": [5]} | blocks
    return steps.batch(steps.part(number, BLOCK, 0, **chosen))


def reader(steps: Steps, host: list[int], hot: list[int], state_row: int = 1) -> Any:
    """Decode step of a request whose first page is host-only and whose second is resident."""
    return steps.batch(
        steps.part(1, 70, 69, host=host, resident=[0, 6], hot=hot, state_row=state_row)
    )


def seed_reader(steps: Steps, hot: list[int]) -> Any:
    """The request's rows are where they belong, and its first step is started."""
    values = [1000 + position for position in range(70)]
    steps.fill_host(3, values[:BLOCK])
    steps.fill_gpu(6, values[BLOCK:])
    batch = reader(steps, [3, 4], hot)
    granted = [(0, steps.region(hot))]
    steps.start(
        plan(steps.groups, cleared=[0], residency=[(0, 1, steps.blocks(6))], granted=granted),
        batch=batch,
        started=[(0, "r1")],
    )
    return batch


@contextmanager
def workers(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes workers over pools that hold nothing; copies beside the computing stream run when
    somebody waits.
    """

    def build(model: Model = ONE_EACH, **sizes: Any) -> Steps:
        cpu = CpuWorker(model, kernels, monkeypatch, **sizes)
        cpu.gpu_pool.fill_(0xA5)
        return Steps(cpu)

    yield build
    release_all()
