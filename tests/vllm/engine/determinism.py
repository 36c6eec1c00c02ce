# SPDX-License-Identifier: Apache-2.0
"""Owns what makes a row's result depend on its request alone, so that two runs may differ in batch.

vLLM's batch-invariant mode does it for matrix products and norms. Left are the indexer's choice,
whose order and ties are open, and the decode kernel, which splits its work by the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def install() -> None:
    """Patches vLLM's modules; calling it again changes nothing."""
    from vllm.model_executor.layers import sparse_attn_indexer as indexer
    from vllm.v1.attention.backends.mla.flashmla_sparse import (
        FlashMLASparseBackend,
        FlashMLASparseImpl,
    )
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    if getattr(indexer, "_deterministic", False):
        return
    indexer._deterministic = True
    indexer.ops.top_k_per_row_prefill = _top_k_of_prefill
    indexer.get_indexer_topk = lambda backend: _top_k_of_decode
    # True now: scores are sums over heads alone, and attention is called for each request.
    for backend in (DeepseekV32IndexerBackend, FlashMLASparseBackend):
        backend.supports_batch_invariance = classmethod(lambda cls: True)
    FlashMLASparseImpl._fp8_flash_mla_kernel = _one_by_one(FlashMLASparseImpl._fp8_flash_mla_kernel)


def select(scores: torch.Tensor, lengths: torch.Tensor, top_k: int) -> torch.Tensor:
    """The largest `top_k` of each row's first `lengths` scores, of equals the earlier ones.

    Args:
        scores: `[rows, columns]` float32.
        lengths: `[rows]` integers.
        top_k: entries of a row of the result.

    Returns:
        `[rows, top_k]` int32, columns in ascending order, then -1.
    """
    rows, columns = scores.shape
    column = torch.arange(columns, device=scores.device)
    outside = column >= lengths.reshape(rows, 1)
    order = scores.masked_fill(outside, float("-inf")).sort(dim=1, descending=True, stable=True)
    chosen = order.indices[:, :top_k]
    chosen = chosen.masked_fill(outside.gather(1, chosen), columns).sort(dim=1).values
    selected = torch.full((rows, top_k), -1, dtype=torch.int32, device=scores.device)
    selected[:, : chosen.shape[1]] = chosen.masked_fill(chosen == columns, -1)
    return selected


def _top_k_of_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    indices: torch.Tensor,
    num_rows: int,
    stride_0: int,
    stride_1: int,
    top_k: int,
) -> None:
    del row_starts, stride_0, stride_1
    # Rows are compressed: each begins at column 0. In parts, for the sort keeps 64-bit indices.
    for first in range(0, num_rows, 512):
        part = slice(first, min(first + 512, num_rows))
        indices[part].copy_(select(logits[part], row_ends[part], top_k))


def _top_k_of_decode(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    next_n: int,
    indices: torch.Tensor,
    top_k: int,
    max_seq_len: int,
) -> None:
    lengths = seq_lens.reshape(-1)
    if lengths.numel() != logits.shape[0]:
        # One length per request: its rows end one position after the other.
        last = torch.arange(1 - next_n, 1, device=lengths.device)
        lengths = (lengths.reshape(-1, 1) + last).reshape(-1)
    indices.copy_(select(logits[:, :max_seq_len], lengths, top_k))


def _one_by_one(kernel: Any) -> Any:
    from vllm.v1.attention.ops.flashmla import get_mla_metadata

    # Valid as long as shapes and lengths stay: one request, all of the model's length.
    schedules: dict[tuple[Any, ...], Any] = {}

    def each(
        self: Any,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        kernel_metadata: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (id(type(self)), tuple(q.shape[1:]), topk_indices.shape[-1], q.device)
        outputs = []
        for row in range(q.shape[0]):
            if key not in schedules:
                schedules[key] = get_mla_metadata()[0]
            at = slice(row, row + 1)
            alone = dataclasses.replace(
                kernel_metadata,
                scheduler_metadata=schedules[key],
                dummy_block_table=kernel_metadata.dummy_block_table[at],
                cache_lens=kernel_metadata.cache_lens[at],
            )
            outputs.append(kernel(self, q[at], kv_c_and_k_pe_cache, topk_indices[at], alone))
        return (
            torch.cat([output for output, _ in outputs]),
            torch.cat([lse for _, lse in outputs]),
        )

    return each
