# SPDX-License-Identifier: Apache-2.0
"""Owns the host pool inside vLLM: when it is made, where each layer's rows lie, when it goes.

vLLM makes its host pool while it profiles, before any connector exists, and keeps it for the real
caches. The general plugin puts hotpage's in its place; every other configuration gets vLLM's own.
Where vLLM would share one pool among ranks, and its scheduler therefore counts one writer, so does
hotpage, or refuses; where it would not, each rank has a pool of its own.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, Any

from hotpage.errors import ConfigError
from hotpage.kernels.replay_copy import usable_library
from hotpage.memory import HostPool, PoolLayout, SharedHostPool, why_not_shared
from hotpage.runtime.rendezvous import Rendezvous
from hotpage.vllm._compat import check_vllm
from hotpage.vllm.options import check_native, check_worker, native_options
from hotpage.vllm.row_views import flat_rows, rows_as

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.hisparse.runtime import HiSparseHostPool

    from hotpage.vllm.caches import BoundCaches

logger = logging.getLogger(__name__)

_FP8_DS_MLA_BYTES = 656
# No model with rows of another width has been served.
_ROW_ELEMENTS = 576

# vLLM's attention takes a cache of other blocks as one run of rows, which interleaved rows are not.
_KERNEL_BLOCK_SIZE = 64

_JOIN_S = 600.0
"""Seconds between the first and the last rank's profiling."""

BACKENDS = frozenset(
    {
        "FLASHINFER_MLA_SPARSE",
        "FLASHINFER_MLA_SPARSE_SM120",
        "FLASHMLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE_FA4",
    }
)
"""vLLM's attention backends that ask the index group of a layer where its rows are. Others read the
layer's cache by its block table, which names blocks of the host pool.
"""

_pools: dict[str, NativeHostPool] = {}
"""By the instance id of vLLM's configuration, as vLLM keeps its own."""


class NativeHostPool:
    """The pool of one engine, and which layer's rows lie where.

    Args:
        pool: the pinned memory.
        names: layer names in the order of the pool's layers.
        ranks: that share the pool; None if it is this rank's own.
    """

    def __init__(self, pool: HostPool, names: list[str], ranks: Rendezvous | None = None) -> None:
        self.pool, self.names, self.ranks = pool, names, ranks

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the pool: rank 0 of those that share it, or its only one."""
        return self.ranks is None or self.ranks.rank == 0

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Ends the others' set-up with what the body raises."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.telling()

    def layer_rows(self) -> dict[str, torch.Tensor]:
        """uint8 `[host blocks][block size][row_bytes]` of each layer, without a copy."""
        return {name: self.pool.layer_rows(at) for at, name in enumerate(self.names)}

    def cleanup(self) -> None:
        """Unpins and frees; the name under which vLLM calls it when its set-up fails. Ranks that
        share the pool hear that this one has left."""
        self.pool.close()
        if self.ranks is not None:
            self.ranks.close()


def allocate(host: HiSparseHostPool, size: int) -> None:
    """Makes the pool of a native configuration and puts it into vLLM's holder.

    Every rank comes here, where graphs are captured while vLLM still profiles and knows of no
    connector. So what a connector would refuse later is refused first: a pool takes minutes, and
    the pools of several ranks may be more than the machine has. Ranks that share the pool meet
    before anything that one of them could fail in, so that nobody waits for it.

    Args:
        host: vLLM's holder, empty.
        size: bytes that vLLM has counted for the pool.

    Raises:
        CapacityError: memory that cannot be had or pinned.
        ConfigError: a setting that native does not serve, a size other than the layers', or ranks
            that have to share the pool and cannot.
        KernelUnavailableError: no kernels for this device.
        RankError: another rank failed; the text says which and why.
        UnsupportedVllmError: a vLLM whose internals are not known.
        ValueError: vLLM's own, for more than 95% of the RAM that is free.
    """
    import torch

    with contextlib.ExitStack() as undo:
        ranks = _meet(host.vllm_config)
        if ranks is not None:
            undo.enter_context(ranks)
        native = _make(host, size, ranks)
        undo.pop_all()
    host.backing = host.registered = native.pool.bytes_tensor().view(torch.int8)
    # vLLM unpins what it pinned itself; ours goes through the call it has for shared regions.
    host.shared_region = native
    _pools[host.vllm_config.instance_id] = native


def _meet(config: VllmConfig) -> Rendezvous | None:
    """The ranks that share the pool with this one, where vLLM would share its own.

    They are those of vLLM's tensor parallel group, which spans one replica. They meet at a word
    that rank 0 draws: the instance id has five letters and is not always a replica's own.
    """
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.hisparse.runtime import use_shared_hisparse_host_pool

    if not use_shared_hisparse_host_pool(config):
        return None
    group = get_tp_group()
    word = uuid.uuid4().hex if group.rank_in_group == 0 else None
    word = group.broadcast_object(word, src=0)
    return Rendezvous(word, group.rank_in_group, group.world_size, join_s=_JOIN_S)


def _make(host: HiSparseHostPool, size: int, ranks: Rendezvous | None) -> NativeHostPool:
    import torch
    from vllm.v1.hisparse.runtime import check_hisparse_host_memory

    options = native_options(host.vllm_config)
    assert options is not None
    check_vllm()
    check_native(host.vllm_config, options)
    check_worker(host.vllm_config)
    device = torch.accelerator.current_device_index()
    usable_library(torch.device("cuda", device))
    layout, names = _lay_out(host, options.resolved_host_layout == "row_interleaved")
    if layout.num_bytes != size:
        raise ConfigError(
            f"vLLM counts {size} bytes for the host pool, its layers take {layout.num_bytes}; "
            "report this model"
        )
    if ranks is None or ranks.rank == 0:
        # The pool itself asks for the machine's RAM, of which other processes may have a part.
        check_hisparse_host_memory(size)
    if ranks is None:
        pool = HostPool(layout, device=device)
    else:
        reason = why_not_shared(ranks)
        if reason:
            raise ConfigError(
                f"the ranks must share one host pool and cannot ({reason}); "
                'set "engine": "upstream" in kv_connector_extra_config'
            )
        pool = SharedHostPool(layout, ranks, device=device)
    logger.info(
        "hotpage host pool: %.1f GiB pinned, %d blocks, %s, NUMA node %s, %s",
        layout.num_bytes / 2**30,
        layout.num_host_blocks,
        options.resolved_host_layout,
        "unknown" if pool.numa_node is None else pool.numa_node,
        "not shared" if ranks is None else f"shared by {ranks.num_ranks} ranks",
    )
    return NativeHostPool(pool, names, ranks)


def _lay_out(host: HiSparseHostPool, row_interleaved: bool) -> tuple[PoolLayout, list[str]]:
    """Sizes of the pool, and the names of its layers in their order.

    Raises:
        ConfigError: layers that native does not serve.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    from hotpage.vllm.caches import index_groups

    config = host.kv_cache_config
    context = host.vllm_config.compilation_config.static_forward_context
    groups = index_groups(config, context)
    _check_layers([context[name] for names in groups for name in names], host.vllm_config)
    (source,) = (group for group in config.kv_cache_groups if group.host_resident)
    spec = source.kv_cache_spec
    specs = list(
        spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )
    (block_size,) = {one.block_size for one in specs}
    block_bytes = {one.page_size_bytes for one in specs}
    if len(block_bytes) != 1 or next(iter(block_bytes)) % block_size:
        raise ConfigError("the layers have rows of different widths; use one KV cache dtype")
    row_bytes = block_bytes.pop() // block_size
    runtime = context[groups[0][0]].hisparse_cache.runtime
    _check_sizes(block_size, row_bytes, runtime.kv_dtype.itemsize, runtime.region_stride)
    assert config.hisparse_host_num_blocks is not None
    layout = PoolLayout(
        index_groups=tuple(len(names) for names in groups),
        block_size=block_size,
        row_bytes=row_bytes,
        num_host_blocks=config.hisparse_host_num_blocks,
        row_interleaved=row_interleaved,
    )
    return layout, [name for names in groups for name in names]


def _check_layers(layers: list[Any], config: VllmConfig) -> None:
    """Raises ConfigError for attention layers that native does not serve."""
    others = {layer.get_attn_backend().get_name() for layer in layers} - BACKENDS
    if others:
        raise ConfigError(
            f"the attention backend {min(others)} does not go through HiSparse's index groups; "
            "set --attention-backend FLASHMLA_SPARSE"
        )
    speculative = config.speculative_config
    if speculative is None or speculative.method == "mtp":
        return
    if any(layer.is_draft_layer for layer in layers):
        # The mirror takes the drafter's rows for those at the target's positions.
        raise ConfigError(
            f"engine native serves sparse draft layers of method mtp, got {speculative.method}; "
            'use another drafter or set "engine": "upstream" in kv_connector_extra_config'
        )


def _check_sizes(block_size: int, row_bytes: int, element_bytes: int, hot_rows: int) -> None:
    """Raises ConfigError for blocks, rows or hot regions that native does not serve.

    fp8 rows of another format go by the same name in vLLM.
    """
    if block_size != _KERNEL_BLOCK_SIZE:
        raise ConfigError(
            f"engine native serves blocks of {_KERNEL_BLOCK_SIZE} tokens, the caches have "
            f"{block_size}; set --block-size {_KERNEL_BLOCK_SIZE}"
        )
    if element_bytes == 1 and row_bytes != _FP8_DS_MLA_BYTES:
        raise ConfigError(
            f"the attention backend keeps fp8 rows of {row_bytes} bytes, engine native serves "
            f"fp8_ds_mla, of {_FP8_DS_MLA_BYTES}; set --kv-cache-dtype fp8_ds_mla "
            "--attention-backend FLASHMLA_SPARSE"
        )
    if element_bytes > 1 and row_bytes != _ROW_ELEMENTS * element_bytes:
        raise ConfigError(
            f"the layers keep rows of {row_bytes // element_bytes} elements, engine native serves "
            f'{_ROW_ELEMENTS}; set "engine": "upstream" in kv_connector_extra_config'
        )
    if hot_rows % block_size:
        raise ConfigError(
            f"device_buffer_size is {hot_rows}, expected a multiple of the block size; set "
            f"{-(-hot_rows // block_size) * block_size} in hisparse_config"
        )


def host_pool_of(vllm_config: VllmConfig) -> NativeHostPool:
    """The pool that `allocate` made for this configuration.

    Raises:
        ConfigError: there is none, or it is closed.
    """
    native = _pools.get(vllm_config.instance_id)
    if native is None or not native.pool.is_open:
        raise ConfigError(
            "vLLM made the host pool itself; load hotpage's entry point of the group "
            "vllm.general_plugins in the workers, too"
        )
    return native


def release(vllm_config: VllmConfig) -> None:
    """Frees the pool; its streams are idle. Called again it does nothing."""
    from vllm.v1.hisparse.runtime import drop_hisparse_host_pool

    native = _pools.pop(vllm_config.instance_id, None)
    drop_hisparse_host_pool(vllm_config)
    if native is not None:
        native.cleanup()


def rebind(
    caches: BoundCaches, kv_caches: dict[str, torch.Tensor], rows: dict[str, torch.Tensor]
) -> None:
    """Shows vLLM the layers where their rows are, so that its Python reads the right ones.

    Args:
        kv_caches: vLLM's dictionary, changed in place.
        rows: uint8 `[host blocks][block size][row_bytes]` of each layer.
    """
    for layer in caches.layers:
        old = kv_caches[layer.name]
        view = rows_as(rows[layer.name], old.dtype)
        # vLLM's view has a dimension of one head behind the blocks.
        shown = view.unsqueeze(1) if old.dim() == 4 else view
        if tuple(shown.shape) != tuple(old.shape):
            raise ConfigError(
                f"vLLM shows the host cache of layer {layer.name} as {tuple(old.shape)}, expected "
                f"{tuple(shown.shape)}; use the kernel's own --block-size"
            )
        kv_caches[layer.name] = shown
        layer.attention.bind_kv_cache(shown)
        layer.handle.runtime._host_cache = flat_rows(view)
