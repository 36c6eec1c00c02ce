# SPDX-License-Identifier: Apache-2.0
"""Owns what vLLM has bound when it hands its caches over: checked, and as hotpage's own types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.hisparse.layout import HISPARSE_HOT_SUFFIX
from vllm.v1.hisparse.runtime import HiSparseCacheHandle
from vllm.v1.kv_cache_interface import HiSparseHotSpec, HiSparseResidentSpec, KVCacheConfig

from hotpage.errors import ConfigError
from hotpage.kernels.layer_table import PoolLayer
from hotpage.kernels.mirror_rows import SlotMappings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BoundLayer:
    """One sparse-MLA layer."""

    name: str
    attention: Any
    """vLLM's attention module, which names its cache in the host pool `kv_cache`."""
    handle: HiSparseCacheHandle
    kv_group: int
    """Resident KV cache group, from 0."""

    @property
    def is_draft(self) -> bool:
        """Whether the drafter writes its rows, after the target's forward."""
        return bool(self.handle.draft_layer)


@dataclass(frozen=True)
class BoundGroup:
    """The layers of one index group, leader first."""

    index_group: HiSparseMLAIndexGroup
    layers: tuple[BoundLayer, ...]

    @property
    def leader(self) -> BoundLayer:
        """The layer whose indexer the group follows."""
        return self.layers[0]


def index_groups(config: KVCacheConfig, forward_context: dict[str, Any]) -> list[list[str]]:
    """Layer names of each index group, leader first, groups in the order of their hot regions.

    Raises:
        ConfigError: layers of a group that are not side by side, or none.
    """
    groups: list[list[str]] = []
    last: object = None
    seen: set[int] = set()
    for group in config.kv_cache_groups:
        if not isinstance(group.kv_cache_spec, HiSparseHotSpec):
            continue
        for cache_name in group.layer_names:
            name = cache_name.removesuffix(HISPARSE_HOT_SUFFIX)
            index_group = forward_context[name].impl.index_group
            if index_group is not last:
                if id(index_group) in seen:
                    raise ConfigError(
                        f"layer {name} does not follow the other layers of its index group; "
                        "report this model"
                    )
                seen.add(id(index_group))
                groups.append([])
                last = index_group
            groups[-1].append(name)
    if not groups:
        raise ConfigError("the model has no sparse-MLA layers; take HiSparseConnector out")
    return groups


@dataclass(frozen=True)
class BoundCaches:
    """All sparse-MLA layers of this worker and the tables that they share."""

    groups: tuple[BoundGroup, ...]
    device: torch.device
    block_size: int
    num_host_blocks: int
    num_kv_groups: int
    residency: torch.Tensor
    """int32 `[resident groups][state rows][pages]`: GPU block of a page, 0 if host-only."""
    request_state_indices: torch.Tensor
    """int32 `[max requests]`: state row of each batch request, -1 for padding."""
    slots: SlotMappings
    """vLLM's own, which it writes anew for each forward."""

    @classmethod
    def collect(cls, config: KVCacheConfig, forward_context: dict[str, Any]) -> BoundCaches:
        """Finds the layers and their tables.

        Raises:
            ConfigError: something is bound otherwise than in the vLLM that hotpage knows.
        """
        kv_groups = {
            name.removesuffix(HISPARSE_HOT_SUFFIX): at
            for at, group in enumerate(
                g for g in config.kv_cache_groups if isinstance(g.kv_cache_spec, HiSparseHotSpec)
            )
            for name in group.layer_names
        }
        groups = tuple(
            BoundGroup(
                forward_context[names[0]].impl.index_group,
                tuple(
                    BoundLayer(
                        name,
                        forward_context[name],
                        forward_context[name].hisparse_cache,
                        kv_groups[name],
                    )
                    for name in names
                ),
            )
            for names in index_groups(config, forward_context)
        )
        _check_groups(groups)
        first = groups[0].leader.handle
        num_host_blocks = config.hisparse_host_num_blocks
        state_indices = first.runtime.request_state_indices
        if (
            first.view is None
            or first.residency is None
            or state_indices is None
            or num_host_blocks is None
        ):
            raise ConfigError("the caches were handed over before they were bound")
        return cls(
            groups=groups,
            device=first.view.cache.device,
            block_size=first.view.block_size,
            num_host_blocks=num_host_blocks,
            num_kv_groups=int(first.residency.shape[0]),
            residency=first.residency,
            request_state_indices=state_indices,
            slots=_slot_mappings(config, first),
        )

    @property
    def layers(self) -> list[BoundLayer]:
        """All layers, group after group."""
        return [layer for group in self.groups for layer in group.layers]

    @property
    def max_requests(self) -> int:
        """Requests of a batch at most, and state rows."""
        return int(self.request_state_indices.shape[0])


def _check_groups(groups: tuple[BoundGroup, ...]) -> None:
    for group in groups:
        handles = [layer.handle for layer in group.layers]
        if not isinstance(group.index_group, HiSparseMLAIndexGroup) or (
            group.index_group.caches != handles
        ):
            raise ConfigError(
                f"layer {group.leader.name} is bound to other layers than its KV cache groups say; "
                "report this model"
            )
        if not handles[0].runtime.is_group_leader or any(
            handle.runtime.is_group_leader for handle in handles[1:]
        ):
            raise ConfigError(f"layer {group.leader.name} does not lead its index group")
        if len({layer.kv_group for layer in group.layers}) != 1:
            raise ConfigError(f"the index group of layer {group.leader.name} spans hot regions")


def _slot_mappings(config: KVCacheConfig, first: HiSparseCacheHandle) -> SlotMappings:
    """The whole table of which vLLM's handles hold rows: `[cache groups][max tokens]`."""
    import torch

    row, source = first.slot_mapping, first.mirror_slot_mapping
    assert row is not None
    assert source is not None
    groups = config.kv_cache_groups
    max_tokens = int(row.shape[0])
    if row.untyped_storage().nbytes() != len(groups) * max_tokens * row.element_size() or (
        source.untyped_storage().data_ptr() != row.untyped_storage().data_ptr()
    ):
        raise ConfigError("the slot mappings are not rows of one table; report this vLLM version")
    table = torch.as_strided(row, (len(groups), max_tokens), (max_tokens, 1), 0)
    residents = [
        at for at, g in enumerate(groups) if isinstance(g.kv_cache_spec, HiSparseResidentSpec)
    ]
    (source_at,) = (at for at, group in enumerate(groups) if group.host_resident)
    return SlotMappings(table, table[source_at], residents)


def pool_layers(caches: BoundCaches) -> list[PoolLayer]:
    """Each layer's rows in both pools as vLLM shows them, in the order of `caches.layers`."""
    layers = []
    for layer in caches.layers:
        view, host = layer.handle.view, layer.handle.runtime.host_cache
        assert view is not None
        size, row_stride = view.block_size, host.stride(0)
        blocks = host.as_strided(
            (host.shape[0] // size, size, host.shape[1]),
            (size * row_stride, row_stride, 1),
            host.storage_offset(),
        )
        layers.append(PoolLayer(view.cache, blocks, layer.kv_group))
    return layers
