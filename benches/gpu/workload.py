# SPDX-License-Identifier: Apache-2.0
"""Owns the inputs of the kernel bench: one index group's steps, every one of them fresh.

Both sides of a comparison read the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEVICE = "cuda"
TOP_K = 2048
BLOCK_SIZE = 64
CONTEXT = 131_072
ROW_BYTES = 656
NUM_PAGES = CONTEXT // BLOCK_SIZE
HOT_ROWS = {1: 4096, 4: 10_240}
GB = 1_000_000_000


@dataclass(frozen=True)
class Cell:
    """One point of the bench."""

    requests: int
    rows: int
    """Verification rows of a request."""
    layers: int
    """Layers of the index group."""
    pool_gb: float
    """Host pool bytes of the whole index group."""
    miss_rate: float
    """References of a step that are missing, in the union of a request's rows."""
    resident: bool = False
    """True if every page has a GPU block."""

    @property
    def host_blocks(self) -> int:
        """Blocks of the host pool."""
        return int(self.pool_gb * GB) // (self.layers * BLOCK_SIZE * ROW_BYTES)

    @property
    def hot_rows(self) -> int:
        """Hot rows of a request, as vLLM 0.33 sizes them."""
        return HOT_ROWS[self.rows]

    @property
    def misses_per_request(self) -> int:
        """Misses of a request and step."""
        return round(self.miss_rate * self.rows * TOP_K)


@dataclass(frozen=True)
class Steps:
    """`[steps][requests x rows][k]` top-k, and the tables, constant over the steps. All int32."""

    cell: Cell
    logical_topk: torch.Tensor
    num_warm: int
    """Leading steps that only fill the hot regions."""
    row_request: torch.Tensor
    num_valid_rows: torch.Tensor
    state_row: torch.Tensor
    seq_len: torch.Tensor
    residency: torch.Tensor
    source_block_table: torch.Tensor
    hot_block_table: torch.Tensor
    num_gpu_blocks: int


def _choose(source: torch.Tensor, count: int) -> torch.Tensor:
    """`count` random columns of each row."""
    order = torch.rand(source.shape, device=source.device).argsort(dim=1)[:, :count]
    return source.gather(1, order)


def _topk_steps(cell: Cell, steps: int) -> torch.Tensor:
    """Every step keeps rows of the last one and adds rows that were not read for long.

    A request's rows share what they keep; each fresh position belongs to one of them.
    """
    requests, rows = cell.requests, cell.rows
    fresh = cell.misses_per_request // rows
    kept = TOP_K - fresh
    positions = torch.rand((requests, CONTEXT), device=DEVICE).argsort(dim=1).int()
    first = positions[:, :TOP_K]
    last = first
    used = TOP_K
    out = [first[:, None].expand(requests, rows, TOP_K)]
    for _ in range(steps - 1):
        shared = _choose(last, min(kept, last.shape[1]))
        parts = []
        for _ in range(rows):
            at = torch.arange(used, used + fresh, device=DEVICE) % CONTEXT
            used += fresh
            part = torch.cat([shared[:, :kept], positions[:, at]], dim=1)
            parts.append(_choose(part, TOP_K))
        step = torch.stack(parts, dim=1)
        out.append(step)
        new = [part[:, None] for part in parts]
        # The next step keeps from the whole union: what was shared and what was fresh.
        last = torch.cat(new, dim=1).reshape(requests, -1)
        last = last.sort(dim=1).values
        distinct = torch.ones_like(last, dtype=torch.bool)
        distinct[:, 1:] = last[:, 1:] != last[:, :-1]
        size = int(distinct.sum(dim=1).min())
        order = distinct.int().argsort(dim=1, descending=True, stable=True)
        last = last.gather(1, order[:, :size])
    return torch.stack(out).reshape(steps, requests * rows, TOP_K).contiguous()


def make_steps(cell: Cell, steps: int, seed: int = 0) -> Steps:
    """Steps of a cell: one that fills the hot regions, one that ages them, then `steps` more."""
    torch.manual_seed(seed)
    requests, rows = cell.requests, cell.rows
    num_warm = 2
    hot_blocks = cell.hot_rows // BLOCK_SIZE
    num_hot = requests * hot_blocks
    num_gpu_blocks = 1 + num_hot + (requests * NUM_PAGES if cell.resident else 0)
    blocks = 1 + torch.randperm(num_gpu_blocks - 1, device=DEVICE).int()
    residency = torch.zeros((requests, NUM_PAGES), dtype=torch.int32, device=DEVICE)
    if cell.resident:
        residency = blocks[num_hot:].reshape(requests, NUM_PAGES).contiguous()
    # Pages lie at random in the pool; a block serves a request once, but maybe several requests.
    host = torch.stack(
        [torch.randperm(cell.host_blocks - 1, device=DEVICE)[:NUM_PAGES] for _ in range(requests)]
    )
    owners = torch.arange(requests, dtype=torch.int32, device=DEVICE).repeat_interleave(rows)
    return Steps(
        cell=cell,
        logical_topk=_topk_steps(cell, steps + num_warm),
        num_warm=num_warm,
        row_request=owners,
        num_valid_rows=torch.tensor([requests * rows], dtype=torch.int32, device=DEVICE),
        state_row=torch.randperm(requests, device=DEVICE).int(),
        seq_len=torch.full((requests * rows,), CONTEXT, dtype=torch.int32, device=DEVICE),
        residency=residency,
        source_block_table=(host + 1).int(),
        hot_block_table=blocks[:num_hot].reshape(requests, hot_blocks).contiguous(),
        num_gpu_blocks=num_gpu_blocks,
    )


class CellPools:
    """Host and GPU memory that all cells share, whoever made it; a cell uses a part of each.

    A model's decode step goes from layer to layer, each with a region of its own in the host pool.
    So step n of a cell copies from region n modulo the number of those that fit.

    Args:
        host: uint8, readable by kernels.
        gpu: uint8, on the device.
    """

    def __init__(self, host: torch.Tensor, gpu: torch.Tensor) -> None:
        self.host, self.gpu = host, gpu

    def fill_host(self) -> None:
        """Writes contents that differ from row to row, so that a wrong row shows."""
        size = min(GB, self.gpu.numel())
        chunk = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.gpu.device)
        for first in range(0, self.host.numel(), size):
            part = self.host[first : first + size]
            part.copy_(chunk[: part.numel()].roll(first // size))

    def num_regions(self, cell: Cell) -> int:
        """Index groups of the cell's size that the host memory holds."""
        return self.host.numel() // (cell.host_blocks * BLOCK_SIZE * cell.layers * ROW_BYTES)

    def host_layers(self, cell: Cell, interleaved: bool, region: int) -> list[torch.Tensor]:
        """Per layer `[host rows][row_bytes]`, of one of the index groups."""
        rows = cell.host_blocks * BLOCK_SIZE
        num_bytes = rows * cell.layers * ROW_BYTES
        pool = self.host[region * num_bytes : (region + 1) * num_bytes]
        if interleaved:
            grouped = pool.view(rows, cell.layers, ROW_BYTES)
            return [grouped[:, i] for i in range(cell.layers)]
        return list(pool.view(cell.layers, rows, ROW_BYTES))

    def gpu_layers(self, cell: Cell, num_gpu_blocks: int) -> list[torch.Tensor]:
        """Per layer `[blocks][block_size][row_bytes]`; a block holds the layers' pages in turn."""
        page = BLOCK_SIZE * ROW_BYTES
        shape, strides = (num_gpu_blocks, BLOCK_SIZE, ROW_BYTES), (page * cell.layers, ROW_BYTES, 1)
        return [torch.as_strided(self.gpu, shape, strides, i * page) for i in range(cell.layers)]


class Pools(CellPools):
    """Pools of this process alone."""

    def __init__(self, host_gb: float, gpu_bytes: int) -> None:
        host = torch.empty(int(host_gb * GB) + 4096, dtype=torch.uint8, pin_memory=True)
        super().__init__(host, torch.empty(gpu_bytes, dtype=torch.uint8, device=DEVICE))
        self.fill_host()
