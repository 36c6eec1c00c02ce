# SPDX-License-Identifier: Apache-2.0
"""Owns how a coordinator takes its place: which managers it binds to, and the core's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import (
    HiSparseHotManager,
    HiSparseResidentManager,
    HiSparseSourceManager,
    SingleTypeKVCacheManager,
)

from hotpage._core import Coordinator
from hotpage.errors import ConfigError
from hotpage.vllm.managers import NativeHotManager, NativeResidentManager

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from hotpage.vllm.coordinator import NativeCoordinator

_MIN_WINDOW_PAGES = 3
"""A request needs its two-page tail and one page to prefill into."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """What the managers do not know.

    Args:
        num_ranks: ranks that make restores; None takes it from the first acknowledgement.
        num_host_writers: ranks that write the host pool; None with `num_ranks`.
        top_k: rows that one decode row selects; None takes what the hot region holds.
        verification_rows: decode rows of a request in one step, 1 + speculative tokens.
        hot_return_steps: steps of full residency after which a hot region is given back.
        step_tokens: most tokens of one step; 0 where it is not known.
    """

    num_ranks: int | None = None
    num_host_writers: int | None = None
    top_k: int | None = None
    verification_rows: int = 1
    hot_return_steps: int = 512
    step_tokens: int = 0


@dataclass(frozen=True)
class Groups:
    """Managers of one model's cache groups by role.

    Args:
        source_id: group id of the source manager.
        source: manager of the host blocks.
        residents: managers of the resident groups, in group order.
        hots: managers of the hot groups, in group order.
        num_others: groups that take GPU blocks for each page and are not the Coordinator's.
    """

    source_id: int
    source: HiSparseSourceManager
    residents: tuple[NativeResidentManager, ...]
    hots: tuple[NativeHotManager, ...]
    num_others: int


def adopt_managers(
    config: KVCacheConfig,
    managers: Sequence[SingleTypeKVCacheManager],
    coordinator: NativeCoordinator,
) -> Groups:
    """Binds the managers to `coordinator` and the source to its host pool.

    Raises:
        ConfigError: groups that cannot work together, or no host pool.
    """
    sources, residents, hots = [], [], []
    num_others = 0
    for group_id, manager in enumerate(managers):
        if isinstance(manager, HiSparseSourceManager):
            sources.append((group_id, manager))
        elif isinstance(manager, HiSparseResidentManager):
            residents.append((group_id, manager))
        elif isinstance(manager, HiSparseHotManager):
            hots.append(manager)
        else:
            num_others += 1
    if len(sources) != 1 or not residents or len(hots) != len(residents):
        raise ConfigError(
            f"{len(sources)} source, {len(residents)} resident and {len(hots)} hot cache groups "
            "were found, expected one source group and as many hot as resident groups; "
            "use a model with sparse attention layers"
        )
    ((source_id, source),) = sources
    if source_id > residents[0][0]:
        raise ConfigError(
            "the source cache group comes after a resident one, but requests are freed in group "
            "order and it must be first; report this vLLM version"
        )
    sizes = {manager.block_size for manager in [source, *(m for _, m in residents)]}
    if len(sizes) != 1:
        raise ConfigError(f"cache groups have block sizes {sorted(sizes)}; use one --block-size")
    if config.hisparse_host_num_blocks is None:
        raise ConfigError("there is no host pool; set host_pool_gib in kv_connector_extra_config")
    source.coordinator = coordinator
    source.bind_host_pool(config.hisparse_host_num_blocks)
    groups = Groups(
        source_id,
        source,
        tuple(NativeResidentManager.adopt(m, at) for at, (_, m) in enumerate(residents)),
        tuple(NativeHotManager.adopt(m, at == len(hots) - 1) for at, m in enumerate(hots)),
        num_others,
    )
    for manager in (*groups.residents, *groups.hots):
        manager.coordinator = coordinator
    return groups


def build_core(
    config: KVCacheConfig,
    groups: Groups,
    max_model_len: int,
    num_reprefillable_tokens: int,
    settings: CoordinatorSettings,
) -> Coordinator:
    """The Rust Coordinator for these pools and groups.

    Raises:
        ConfigError: a setting out of bounds.
    """
    num_groups, block_size = len(groups.residents), groups.source.block_size
    region = groups.hots[0].blocks_per_request
    hot_rows = region * block_size
    window = max(groups.residents[0].max_admission_blocks_per_request, _MIN_WINDOW_PAGES)
    # A request that is asked to take a hot region gets it with the step after: before that, two
    # steps allocate.
    lag = max(window, 2 * settings.step_tokens // block_size)
    assert config.hisparse_host_num_blocks is not None
    return Coordinator(
        # vLLM admits by the window below and has sized its pools by it.
        engine_checks_pools=True,
        block_size=block_size,
        num_kv_groups=num_groups,
        gpu_blocks=config.num_blocks,
        host_blocks=config.hisparse_host_num_blocks,
        other_blocks_per_page=groups.num_others,
        hot_rows=hot_rows,
        top_k=settings.top_k or hot_rows // settings.verification_rows,
        verification_rows=settings.verification_rows,
        num_ranks=settings.num_ranks or 1,
        num_host_writers=settings.num_host_writers or 1,
        host_copy="mirrored",
        # A sibling may load asynchronously into any block that the pool hands out.
        release_point="completed",
        transition=True,
        # vLLM admits a request onto one window of pages and counts on the rest being given up, so
        # what is allocated meanwhile must find free blocks.
        transition_watermark=max(
            region * num_groups + lag * (num_groups + groups.num_others), config.num_blocks // 10
        ),
        hot_return_steps=settings.hot_return_steps,
        admission_window_pages=window,
        num_reprefillable_tokens=num_reprefillable_tokens,
        max_model_len=max_model_len,
    )
