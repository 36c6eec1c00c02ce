# SPDX-License-Identifier: Apache-2.0
"""Owns the native worker on a CPU: caches laid out, allocated and bound by vLLM's own functions,
and kernels that are the real ones' bodies.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# First of all: it tells vLLM that this host has no GPU.
import sides  # noqa: F401
import torch
from cpu_library import CpuLibrary
from cpu_streams import Streams
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.config.attention import HiSparseConfig
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.v1.attention.backends.mla import index_group
from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroupBuilder
from vllm.v1.hisparse import runtime
from vllm.v1.hisparse.binding import init_hisparse_kv_cache
from vllm.v1.hisparse.layout import get_hisparse_kv_cache_config, get_hisparse_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from hotpage.errors import ConfigError
from hotpage.memory import pool as pool_module
from hotpage.memory import shared
from hotpage.vllm import host_pool, plugin
from hotpage.vllm.options import native_options
from hotpage.vllm.worker import NativeConnectorWorker

BLOCK = 64
POISON = 0x5A

CUDA_ALIKE = SimpleNamespace(is_cuda_alike=lambda: True, device_type="cpu")
"""A platform on which vLLM would share its host pool."""

_instances = itertools.count()


@dataclass(frozen=True)
class Model:
    """Attention layers of a model.

    Args:
        groups: layers of each index group of the target.
        drafts: draft layers, each an index group by itself.
        indexer_bytes: bytes of a token in one indexer. vLLM packs index groups into a KV cache
            group while they fit all indexers together.
        kv_cache_dtype: `fp8_ds_mla`, rows of 656 bytes, `bfloat16`, of 1,152, or `fp8`, of 576.
        top_k: rows that a decode row selects.
        verification_rows: decode rows of a request at most.
        hot_rows: rows of a request's hot region in one layer.
        block_size: tokens of a block.
    """

    groups: tuple[int, ...]
    drafts: int = 0
    indexer_bytes: int = 132
    kv_cache_dtype: str = "fp8_ds_mla"
    top_k: int = 16
    verification_rows: int = 1
    hot_rows: int = 64
    block_size: int = BLOCK

    def specs(self) -> dict[str, KVCacheSpec]:
        """What vLLM's layers say of their caches, in the order of the model."""
        fp8 = self.kv_cache_dtype == "fp8_ds_mla"
        specs: dict[str, KVCacheSpec] = {}
        for name, leads, _ in self.layers():
            specs[name] = MLAAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=1,
                head_size=576,
                dtype=torch.bfloat16 if self.kv_cache_dtype == "bfloat16" else torch.uint8,
                cache_dtype_str=self.kv_cache_dtype,
                state_content_bytes=656 if fp8 else None,
                is_index_group_leader=leads,
            )
            if leads:
                specs[f"{name}.indexer"] = MLAAttentionSpec(
                    block_size=self.block_size,
                    num_kv_heads=1,
                    head_size=self.indexer_bytes,
                    dtype=torch.uint8,
                    cache_role=SparseCacheRole.INDEXER,
                )
        return specs

    def layers(self) -> Iterable[tuple[str, bool, bool]]:
        """Name of each layer, whether it leads an index group and whether the drafter has it."""
        sizes = [*self.groups, *([1] * self.drafts)]
        number = itertools.count()
        for group, size in enumerate(sizes):
            for at in range(size):
                yield f"model.layers.{next(number)}.attn", at == 0, group >= len(self.groups)


ONE_EACH = Model((1, 1, 1))
"""One layer an index group, one index group a KV cache group."""
PACKED = Model((1, 1, 1), indexer_bytes=528)
"""Two index groups share a KV cache group."""
MIXED = Model((1, 1, 4, 4), drafts=1, verification_rows=2)
"""As GLM's: short groups, long ones, a draft layer."""
BF16 = Model((1, 2), kv_cache_dtype="bfloat16")
"""Rows of two bytes an element."""


class Attention:
    """A sparse-MLA module as far as caches go."""

    def __init__(self, group: Any, at: int, is_draft: bool) -> None:
        self.impl = SimpleNamespace(index_group=group, index_group_index=at)
        self.hisparse_cache = group.cache(at)
        self.is_draft_layer = is_draft
        self.kv_cache: torch.Tensor | None = None
        self.backend = "FLASHMLA_SPARSE"

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Drops the dimension of one head, as vLLM's MLA does."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self) -> Any:
        """As vLLM's layers have it, with the name alone."""
        return SimpleNamespace(get_name=lambda: self.backend)


class NoDriver:
    """A CUDA driver that keeps a list of what is pinned; `fail` refuses it."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.num_registered = 0
        self.fail = False

    def register(self, address: int, num_bytes: int) -> int:
        """As the protocol has it."""
        if self.fail:
            return 2
        self.pinned[address] = num_bytes
        self.num_registered += 1
        return 0

    def unregister(self, address: int) -> int:
        """As the protocol has it."""
        del self.pinned[address]
        return 0

    def status_text(self, status: int) -> str:
        """As the protocol has it."""
        return f"status {status}"

    def pci_bus_id(self) -> str | None:
        """As the protocol has it."""
        return None


class CpuWorker:
    """A worker over bound caches, and all that vLLM's runner would write for it.

    Args:
        model: the layers.
        kernels: the library that `compile_kernels` built.
        patch: takes everything back that this puts in the place of CUDA.
        host_layout: as in the connector's options.
        streams: late by default.
        num_blocks: GPU blocks, the null block counted.
        host_blocks: host blocks, the null block counted.
        max_requests: requests of a batch.
        max_tokens: tokens of a step.
        max_pages: pages of a request.
        register: hand the caches over, as vLLM does at once.
        checks_settings: refuse what the connector refuses; some of these models are among it.
        num_ranks: of the tensor parallel group of which this process is a rank.
        executor: of several ranks; vLLM shares the host pool under `mp` alone.
    """

    def __init__(
        self,
        model: Model,
        kernels: ctypes.CDLL,
        patch: pytest.MonkeyPatch,
        *,
        host_layout: str = "row_interleaved",
        streams: Streams | None = None,
        num_blocks: int = 64,
        host_blocks: int = 40,
        max_requests: int = 4,
        max_tokens: int = 256,
        max_pages: int = 6,
        register: bool = True,
        checks_settings: bool = False,
        num_ranks: int = 1,
        executor: str = "mp",
    ) -> None:
        self.model, self.max_pages, self.host_blocks = model, max_pages, host_blocks
        self.streams = streams or Streams()
        self.streams.install(patch)
        self.library = CpuLibrary(kernels, self.streams)
        self.library.install(patch)
        self.driver = NoDriver()
        for module in (pool_module, shared):
            patch.setattr(module, "CudaDriver", lambda _: self.driver)
        for module in (index_group, sparse_mla_attention):
            patch.setattr(module, "triton_convert_req_index_to_global_index", self.convert)
        plugin.activate()
        if not checks_settings:
            patch.setattr(host_pool, "check_worker", lambda _: None)
        self.config = vllm_config(
            model, host_layout, num_blocks=num_blocks, max_requests=max_requests,
            max_tokens=max_tokens, max_model_len=max_pages * BLOCK, num_ranks=num_ranks,
            executor=executor,
        )  # fmt: skip
        if num_ranks > 1:
            patch.setattr(runtime, "current_platform", CUDA_ALIKE)
        self.topk = torch.full((max_tokens, model.top_k), -1, dtype=torch.int32)
        self._build_layers()
        self.cache_config = cache_config(self.config, model, host_blocks)
        self._make_tables(max_requests, max_tokens, max_pages)
        self.worker = NativeConnectorWorker(self.config, self.cache_config, _options(self.config))
        self.poison: torch.Tensor | None = None
        if register:
            self.bind()
            self.worker.register_kv_caches(self.kv_caches)

    def _build_layers(self) -> None:
        context = self.config.compilation_config.static_forward_context
        builders = [SparseMLAIndexGroupBuilder(self.topk) for _ in range(1 + self.model.drafts)]
        num_drafts = 0
        for name, leads, is_draft in self.model.layers():
            num_drafts += is_draft
            group, at = builders[num_drafts].register_layer(
                leads, self.config, head_size=576, kv_cache_dtype=self.model.kv_cache_dtype
            )
            context[name] = Attention(group, at, is_draft)

    def _make_tables(self, max_requests: int, max_tokens: int, max_pages: int) -> None:
        groups = self.cache_config.kv_cache_groups
        self.tables = SimpleNamespace(
            input_block_tables=[
                torch.zeros((max_requests, max_pages + 1), dtype=torch.int32) for _ in groups
            ],
            slot_mappings=torch.full((len(groups), max_tokens), -1, dtype=torch.int64),
        )

    def bind(self) -> None:
        """Allocates and binds the caches by vLLM's functions, and shows them to the layers."""
        context = self.config.compilation_config.static_forward_context
        self.kv_caches = init_hisparse_kv_cache(
            self.cache_config,
            torch.device("cpu"),
            [self.model.block_size] * len(self.cache_config.kv_cache_groups),
            self.config,
            context,
            self.tables,
        )
        for name, layer in context.items():
            layer.bind_kv_cache(self.kv_caches[name])

    def move_vllm_views(self) -> None:
        """Lets what vLLM has bound of the host pool show poison that lies elsewhere.

        Whoever keeps one of these views reads and writes it instead of the pool.
        """
        host_group = next(g for g in self.cache_config.kv_cache_groups if g.host_resident)
        size = host_group.kv_cache_spec.page_size_bytes * self.host_blocks
        self.poison = torch.full((size,), POISON, dtype=torch.uint8)
        for name, layer in self.config.compilation_config.static_forward_context.items():
            old = self.kv_caches[name]
            moved = torch.empty(0, dtype=old.dtype).set_(self.poison.untyped_storage())
            moved = moved.as_strided(old.shape, old.stride(), old.storage_offset())
            self.kv_caches[name] = moved
            layer.bind_kv_cache(moved)
            layer.hisparse_cache.runtime._host_cache = moved.view(-1, moved.shape[-1])

    def convert(
        self,
        req_id: torch.Tensor,
        block_table: torch.Tensor,
        token_indices: torch.Tensor,
        *,
        BLOCK_SIZE: int,  # noqa: N803
        NUM_TOPK_TOKENS: int,  # noqa: N803
        BLOCK_STRIDE_ROWS: int | None = None,  # noqa: N803
        return_valid_counts: bool = False,
        out: torch.Tensor | None = None,
        valid_counts_out: torch.Tensor | None = None,
        idx_mapping: torch.Tensor | None = None,
    ) -> Any:
        """Stands in for vLLM's Triton kernel: positions to rows by a block table."""
        out = torch.empty_like(token_indices) if out is None else out
        counts = valid_counts_out
        if counts is None:
            counts = torch.empty(len(token_indices), dtype=torch.int32)

        def run() -> None:
            request = req_id if idx_mapping is None else idx_mapping[req_id.long()]
            page = token_indices.clamp(min=0) // BLOCK_SIZE
            block = block_table[request.long()].gather(1, page.long())
            rows = block * (BLOCK_STRIDE_ROWS or BLOCK_SIZE) + token_indices % BLOCK_SIZE
            rows = torch.where(token_indices >= 0, rows, -1)
            order = torch.argsort((rows < 0).to(torch.int8), dim=1, stable=True)
            out.numpy()[...] = rows.gather(1, order).numpy()
            counts.numpy()[...] = (rows >= 0).sum(1).numpy()

        self.streams.current.put(run)
        return (out, counts) if return_valid_counts else out

    @property
    def gpu_pool(self) -> torch.Tensor:
        """All bytes of the GPU pool."""
        storage = self.worker.caches.layers[0].handle.view.cache.untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def host_rows(self, name: str) -> torch.Tensor:
        """uint8 `[host blocks][block size][row bytes]` of a layer, where hotpage has it."""
        native = self.worker.host_pool
        if native.pool.layout.row_interleaved:
            return native.layer_rows()[name]
        cache = self.kv_caches[name].squeeze(1)
        return cache.view(torch.uint8).view(*cache.shape[:2], -1)

    def close(self) -> None:
        """Ends the worker."""
        self.worker.shutdown()


def vllm_config(
    model: Model,
    host_layout: str,
    *,
    num_blocks: int,
    max_requests: int,
    max_tokens: int,
    max_model_len: int,
    num_ranks: int = 1,
    executor: str = "mp",
) -> Any:
    """What vLLM and the worker read of a configuration; a real one needs a model."""
    speculative = None
    if model.verification_rows > 1:
        speculative = SimpleNamespace(
            num_speculative_tokens=model.verification_rows - 1, parallel_drafting=False,
            method="mtp", use_multi_module_mtp=lambda: False,
        )  # fmt: skip
    extra = {"host_pool_gib": 1, "host_layout": host_layout, "metrics_interval": 3}
    return SimpleNamespace(
        instance_id=f"cpu-{next(_instances)}",
        attention_config=SimpleNamespace(
            hisparse_config=HiSparseConfig(device_buffer_size=model.hot_rows)
        ),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(index_topk=model.top_k, model_type="deepseek_v32"),
            max_model_len=max_model_len,
            dtype=torch.bfloat16,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=num_ranks, pipeline_parallel_size=1,
            prefill_context_parallel_size=1, decode_context_parallel_size=1, world_size=num_ranks,
            distributed_executor_backend="uni" if num_ranks == 1 else executor,
            nnodes_within_dp=1, enable_dbo=False, ubatch_size=0, data_parallel_index=0,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=num_blocks, prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            cache_dtype=model.kv_cache_dtype, block_size=BLOCK,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_requests, max_num_batched_tokens=max_tokens
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_mode=CUDAGraphMode.NONE
        ),
        speculative_config=speculative,
        num_speculative_tokens=model.verification_rows - 1,
        use_v2_model_runner=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="HiSparseConnector",
            kv_connector_module_path="hotpage.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )  # fmt: skip


def cache_config(config: Any, model: Model, host_blocks: int) -> KVCacheConfig:
    """vLLM's own layout of the model's caches."""
    groups = get_hisparse_kv_cache_groups(config, model.specs())
    assert groups is not None
    host_page = next(g for g in groups if g.host_resident).kv_cache_spec.page_size_bytes
    stride = runtime.get_hisparse_host_block_stride(
        host_page, use_shared_host_pool=runtime.use_shared_hisparse_host_pool(config)
    )
    return get_hisparse_kv_cache_config(config, groups, 1 << 40, stride * host_blocks)


def _options(config: Any) -> Any:
    options = native_options(config)
    assert options is not None
    return options


def row_bytes(values: Iterable[int], layer: int, width: int) -> torch.Tensor:
    """uint8 `[values][width]`: rows of fp8_ds_mla, or of bfloat16, that name their value and layer.

    All fp8 numbers and bfloat16s in them are finite, and the scales are powers of two.
    """
    numbers = np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], np.uint64)
    with np.errstate(over="ignore"):
        mixed = (numbers ^ np.uint64(layer + 1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
    name = mixed.view(np.uint8).reshape(-1, 8)
    rows = np.tile(name, (1, width // 8))
    rows ^= (np.arange(width) // 8 * 37 % 251).astype(np.uint8)
    # Neither an exponent of all ones nor, in fp8, a NaN.
    rows &= 0x77
    if width == 656:
        scales = np.exp2((name[:, :4] & 7).astype(np.float32) - 3)
        rows[:, 512:528] = np.ascontiguousarray(scales, np.float32).view(np.uint8)
    return torch.from_numpy(rows)


def as_bfloat16(rows: torch.Tensor) -> torch.Tensor:
    """bfloat16 `[rows][576]` of fp8_ds_mla rows, by torch."""
    values = rows[:, :512].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    scaled = (values * scales[:, :, None]).view(-1, 512).bfloat16()
    return torch.cat([scaled, rows[:, 528:].contiguous().view(torch.bfloat16)], dim=1)


def refused_unpinned(cpu: CpuWorker, sentence: str) -> None:
    """The pool is refused by this sentence before anything was pinned for it."""
    with pytest.raises(ConfigError, match=sentence) as caught:
        cpu.bind()
    assert "\n" not in str(caught.value)
    assert not cpu.driver.num_registered
    assert cpu.config.instance_id not in runtime._host_pools


def release_all() -> None:
    """Frees host pools that a failed test left."""
    for native in list(host_pool._pools.values()):
        native.cleanup()
    host_pool._pools.clear()
