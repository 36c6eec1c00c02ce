# SPDX-License-Identifier: Apache-2.0
"""Owns attention on a CPU: vLLM's own call order around kernels that gather rows and no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

# First of all: it tells vLLM that this host has no GPU.
import sides  # noqa: F401
import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.v1.hisparse.runtime import build_hisparse_prefill_staging_plan
from worker_on_cpu import BLOCK, CpuWorker, as_bfloat16, row_bytes


@dataclass
class Part:
    """One request of a batch.

    Args:
        name: of the request.
        values: a value for each position up to the last one scheduled.
        start: tokens computed before.
        state_row: its row of the persistent tables.
        blocks: of each KV cache group, block ids by page; hot groups have their regions.
    """

    name: str
    values: list[int]
    start: int
    state_row: int
    blocks: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.values) - self.start


class Batch:
    """What vLLM's runner and metadata builders make of a step: decode requests come first."""

    def __init__(self, cpu: CpuWorker, parts: list[Part]) -> None:
        self.cpu, self.parts = cpu, parts
        self.state_rows = torch.tensor([part.state_row for part in parts], dtype=torch.int32)
        self.names = [part.name for part in parts]
        self.num_tokens = sum(part.num_tokens for part in parts)
        rows = cpu.model.verification_rows
        self.num_decodes = sum(part.num_tokens <= rows for part in parts)
        decodes = parts[: self.num_decodes]
        assert all(part.num_tokens <= rows for part in decodes), "decode requests come first"
        self.num_decode_tokens = sum(part.num_tokens for part in decodes)
        self._write_tables()

    def _write_tables(self) -> None:
        """Writes block tables and slot mappings of the batch; what lies behind stays."""
        tables = self.cpu.tables
        for group, table in enumerate(tables.input_block_tables):
            for row, part in enumerate(self.parts):
                blocks = part.blocks[group]
                # A request without a hot region has a row of null blocks.
                is_hot = "Hot" in type(self._spec(group)).__name__
                if is_hot:
                    table[row].zero_()
                table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            slots = [
                part.blocks[group][position // BLOCK] * BLOCK + position % BLOCK
                for part in self.parts
                for position in range(part.start, len(part.values))
                if not is_hot
            ]
            if slots:
                tables.slot_mappings[group, : len(slots)] = torch.tensor(slots)

    def _spec(self, group: int) -> Any:
        return self.cpu.cache_config.kv_cache_groups[group].kv_cache_spec

    def metadata(self) -> Any:
        """vLLM's sparse-MLA metadata, as far as index groups look at it."""
        lengths = torch.tensor([len(part.values) for part in self.parts], dtype=torch.int32)
        counts = [part.num_tokens for part in self.parts]
        starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        (source,) = self.cpu.cache_config.host_group_ids
        block_table = self.cpu.tables.input_block_tables[source][: len(self.parts)]
        num_prefills = len(self.parts) - self.num_decodes
        prefill = None
        if num_prefills:
            past = lengths[self.num_decodes :]
            capacity = int(((past + BLOCK - 1) // BLOCK).sum())
            plan = build_hisparse_prefill_staging_plan(
                block_table[self.num_decodes :], past, BLOCK, capacity
            )
            prefill = SimpleNamespace(host_staging_plan=plan)
        return SimpleNamespace(
            num_reqs=len(self.parts),
            num_actual_tokens=self.num_tokens,
            max_query_len=max(counts),
            num_decodes=self.num_decodes,
            num_decode_tokens=self.num_decode_tokens,
            num_prefills=num_prefills,
            req_id_per_token=torch.repeat_interleave(
                torch.arange(len(self.parts), dtype=torch.int32), torch.tensor(counts)
            ),
            seq_lens=lengths,
            query_start_loc=starts,
            block_table=block_table,
            block_size=BLOCK,
            prefill=prefill,
        )

    def draw_topk(self, rng: np.random.Generator) -> list[list[int]]:
        """Positions for each token of the step: some it sees, itself often, with holes."""
        top_k = self.cpu.model.top_k
        chosen = []
        for part in self.parts:
            for position in range(part.start, len(part.values)):
                n = min(position + 1, top_k)
                ids = rng.permutation(position + 1)[:n].tolist()
                ids += [-1] * (top_k - n)
                if rng.random() < 0.3:
                    ids[int(rng.integers(top_k))] = -1
                chosen.append(ids)
        return chosen

    def expected(self, topk: list[list[int]], layer: int, width: int) -> list[torch.Tensor]:
        """uint8 `[entries][width]` of each token: rows of its positions, in their order."""
        values = [part.values for part in self.parts for _ in range(part.num_tokens)]
        flat = [
            of[position]
            for of, ids in zip(values, topk, strict=True)
            for position in ids
            if position >= 0
        ]
        rows = row_bytes(flat, layer, width)
        return list(rows.split([sum(p >= 0 for p in ids) for ids in topk]))


class GatheringImpl(SparseMLACommonImpl):
    """vLLM's backend that stages pages; its kernel gathers the rows that it is told of."""

    def __init__(self, cpu: CpuWorker, attention: Any) -> None:
        self.topk_indices_buffer = cpu.topk
        self.index_group = attention.impl.index_group
        self.index_group_index = attention.impl.index_group_index
        self.dcp_world_size = 1

    def _forward_mqa_kernel(
        self,
        q: Any,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, None]:
        return gather(kv_cache, topk_indices, valid_counts), None


def gather(cache: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """uint8 `[tokens][top-k][row bytes]`: rows of a cache by physical row, zeros for none."""
    valid = rows >= 0
    assert torch.equal(valid.sum(1), counts.long()), "valid counts"
    assert not (valid[:, 1:] & ~valid[:, :-1]).any(), "valid rows come first"
    at = rows.clamp(min=0).long()
    found = cache[at // cache.shape[1], at % cache.shape[1]]
    return torch.where(valid[:, :, None], found.view(torch.uint8), 0)


class Attention:
    """Forward passes of all layers of a batch, each byte that they read compared.

    Args:
        cpu: the worker and its caches.
        seed: of the positions that are read.
    """

    def __init__(self, cpu: CpuWorker, seed: int) -> None:
        self.cpu, self._rng = cpu, np.random.default_rng(seed)
        layers = cpu.worker.caches.layers
        self.width = layers[0].attention.hisparse_cache.runtime.row_width
        self.width *= layers[0].attention.hisparse_cache.runtime.kv_dtype.itemsize
        order = {name: at for at, (name, _, _) in enumerate(cpu.model.layers())}
        self.layers = [
            (order[layer.name], layer, GatheringImpl(cpu, layer.attention)) for layer in layers
        ]
        self.num_rows = 0
        """Rows read and compared."""

    def run(self, batch: Batch, metadata: Any, *, drafts: bool, pages: bool) -> None:
        """Writes the batch's rows and reads contexts, layer by layer.

        Args:
            metadata: of the batch.
            drafts: of the draft layers instead of the target's.
            pages: the backend that stages pages, otherwise the one that converts to bfloat16.
        """
        topk: list[list[int]] = []
        for number, layer, impl in self.layers:
            if layer.is_draft != drafts:
                continue
            group, at = impl.index_group, impl.index_group_index
            if at == 0:
                topk = batch.draw_topk(self._rng)
                self._write_topk(topk)
                group.set_logical_topk_ready(at)
            group.prepare_for_batch(at, metadata)
            self._write_rows(batch, number, layer)
            expected = batch.expected(topk, number, self.width)
            where = f"layer {number}, {'pages' if pages else 'bfloat16'}"
            if pages:
                self._read_pages(batch, impl, layer, metadata, expected, where)
            else:
                self._read_bfloat16(batch, impl, layer, metadata, expected, number, where)

    def _write_topk(self, topk: list[list[int]]) -> None:
        self.cpu.streams.computing.put(
            lambda: self.cpu.topk[: len(topk)].copy_(torch.tensor(topk, dtype=torch.int32))
        )

    def _write_rows(self, batch: Batch, number: int, layer: Any) -> None:
        cache, slots, n = layer.handle.write_target(batch.num_tokens, batch.num_tokens)
        assert n == batch.num_tokens
        values = [value for part in batch.parts for value in part.values[part.start :]]
        rows = row_bytes(values, number, self.width).view(cache.dtype)
        cache[slots // BLOCK, slots % BLOCK] = rows

    def _read_pages(
        self, batch: Batch, impl: Any, layer: Any, metadata: Any, expected: Any, where: str
    ) -> None:
        q = torch.empty((batch.num_tokens, 1))
        got, _ = impl.forward_mqa(q, layer.attention.kv_cache, metadata, None)
        self._compare(got, expected, batch, where)

    def _read_bfloat16(
        self,
        batch: Batch,
        impl: Any,
        layer: Any,
        metadata: Any,
        expected: list[torch.Tensor],
        number: int,
        where: str,
    ) -> None:
        group, at = impl.index_group, impl.index_group_index
        n = batch.num_decode_tokens
        if n:
            rows, counts = group.convert_logical_to_physical_topk(
                at, self.cpu.topk[:n], metadata, block_stride_rows=None, return_valid_counts=True
            )
            got = gather(group.physical_kv_cache(at), rows, counts)
            self._compare(got, expected[:n], batch, where)
        prefills = batch.parts[batch.num_decodes :]
        # vLLM's chunks are as long as its workspace; here they have up to two requests.
        for first in range(0, len(prefills), 2):
            chunk = prefills[first : first + 2]
            lengths = [len(part.values) for part in chunk]
            starts = torch.tensor(np.cumsum([0, *lengths])[:-1], dtype=torch.int32)
            workspace = torch.full((sum(lengths) + 3, 576), 7, dtype=torch.bfloat16)
            table = metadata.block_table[batch.num_decodes + first :][: len(chunk)]
            ready = group.gather_fp8_prefill(
                at, layer.attention.kv_cache, workspace[: sum(lengths)], table, starts,
                len(chunk), metadata, first,
            )  # fmt: skip
            ready.wait()
            values = [value for part in chunk for value in part.values]
            wanted = as_bfloat16(row_bytes(values, number, self.width)).view(torch.int16)
            same = (workspace[:-3].view(torch.int16) == wanted).all(1)
            names = [part.name for part in chunk]
            assert same.all(), f"{where}: staged row {int((~same).nonzero()[0])} of {names}"
            assert (workspace[-3:] == 7).all(), f"{where}: rows behind the chunk"
            self.num_rows += len(values)

    def _compare(
        self, got: torch.Tensor, expected: list[torch.Tensor], batch: Batch, where: str
    ) -> None:
        owners = [part.name for part in batch.parts for _ in range(part.num_tokens)]
        for token, (rows, wanted) in enumerate(zip(got, expected, strict=True)):
            n = len(wanted)
            same = (rows[:n] == wanted).all(1)
            assert same.all(), (
                f"{where}: token {token} of {owners[token]} reads a wrong row as entry "
                f"{int((~same).nonzero()[0])}"
            )
            assert not rows[n:].any(), f"{where}: token {token} reads more than it selected"
            self.num_rows += n
