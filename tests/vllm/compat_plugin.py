# SPDX-License-Identifier: Apache-2.0
"""Owns how vLLM's own tests meet our classes: a pytest plugin, loaded before any of its tests.

`--engine native` puts our coordinator, connector and connector scheduler where the tests find
vLLM's, and makes every method of vLLM's coordinator raise; `--engine upstream` is the baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import vllm.distributed
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

REPLACED = {
    "test_hisparse_async_speculation_mirrors_uncertain_position_range": (
        "native workers mirror by slot mapping, so no row spans are built",
        "test_unverified_tokens_keep_their_page_unsealed",
    ),
    "test_nixl_hisparse_full_block_import_keeps_a_writable_tail[16]": (
        "an import's last page is written again, so it is published when it is copied again",
        "test_an_import_that_ends_at_a_page_boundary_publishes_its_last_page_after_the_copy[16]",
    ),
    "test_nixl_hisparse_full_block_import_keeps_a_writable_tail[32]": (
        "an import's last page is written again, so it is published when it is copied again",
        "test_an_import_that_ends_at_a_page_boundary_publishes_its_last_page_after_the_copy[32]",
    ),
    "test_hisparse_keeps_resident_pages_until_hot_buffer_is_allocated[False]": (
        "a request is not asked for a hot region that the pool cannot give",
        "test_a_region_is_asked_for_only_when_the_pool_can_give_it[False]",
    ),
    "test_hisparse_keeps_resident_pages_until_hot_buffer_is_allocated[True]": (
        "a request is not asked for a hot region that the pool cannot give",
        "test_a_region_is_asked_for_only_when_the_pool_can_give_it[True]",
    ),
    "test_hisparse_materialization_respects_per_step_spill_budget[1]": (
        "a mirrored page's transfer moves no bytes, so there is no budget",
        "test_every_sealed_page_is_handed_over_in_the_step_that_seals_it[1]",
    ),
    "test_hisparse_materialization_respects_per_step_spill_budget[3]": (
        "a mirrored page's transfer moves no bytes, so there is no budget",
        "test_every_sealed_page_is_handed_over_in_the_step_that_seals_it[3]",
    ),
    "test_host_receive_completion_without_spill_metadata[False]": (
        "as above: of an import that ends at a page boundary the last page is not valid yet",
        "test_a_received_import_is_valid_up_to_its_last_page",
    ),
    "test_hisparse_requires_block_outermost_device_layout": (
        "it asks with a configuration that is none, and ours is read to refuse settings early",
        "test_the_layout_of_the_device_is_block_outermost",
    ),
    "test_hisparse_host_import_ignores_unsealed_tail": (
        "it completes an import of a request without blocks, which the Coordinator refuses",
        "test_a_partial_last_page_of_an_import_is_not_valid",
    ),
    "test_hisparse_prefill_reads_host_once_it_fills_admission_window[4-True]": (
        "a request past its window gives up residency when free blocks run low, not at a size",
        "test_a_prefill_past_its_window_keeps_residency_while_there_is_room",
    ),
}
"""Case -> why it cannot hold, and the case of test_replaced.py that stands for it."""

NEEDS_GPU = {
    "test_draft_layer_rows_mirrored_after_drafter[FULL]": "pins host memory, which needs a GPU",
    "test_draft_layer_rows_mirrored_after_drafter[NONE]": "pins host memory, which needs a GPU",
    "test_residency_updates_persist_by_state_row": "pins host memory, which needs a GPU",
}

SELECTED = {
    "test_prefix_caching.py": (
        "hisparse",
        "device_eviction_keeps",
        "host_receive",
        "connector_completes",
    ),
    "test_scheduler.py": ("hisparse",),
}
"""File -> words of which a case's name must have one; other files run whole."""

# vLLM asks for the platform while its tests are imported, and cleans up a GPU after each.
vllm.platforms._current_platform = CpuPlatform()
vllm.distributed.cleanup_dist_env_and_memory = lambda *_, **__: None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--engine`."""
    parser.addoption("--engine", choices=("native", "upstream"), default="native")


def pytest_configure(config: pytest.Config) -> None:
    """Puts our classes in place before the first test module is imported."""
    if config.getoption("--engine") == "native":
        _replace_classes()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out what is not about HiSparse and what is replaced; skips what needs a GPU."""
    native = config.getoption("--engine") == "native"
    kept, dropped = [], []
    for item in items:
        words = SELECTED.get(item.path.name)
        wanted = words is None or any(word in item.name for word in words)
        if not wanted or (native and item.name in REPLACED):
            dropped.append(item)
            continue
        if item.name in NEEDS_GPU:
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU[item.name]))
        kept.append(item)
    found = {item.name for item in items}
    if native and len(found & REPLACED.keys()) not in (0, len(REPLACED)):
        raise pytest.UsageError(f"not in vLLM's tests: {sorted(REPLACED.keys() - found)}")
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Lists the replaced cases with their reasons."""
    if config.getoption("--engine") == "native":
        terminalreporter.section("replaced by cases of tests/vllm/test_replaced.py")
        for name, (reason, ours) in REPLACED.items():
            terminalreporter.line(f"{name}: {reason}; {ours}")


def _replace_classes() -> None:
    import vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector as connectors
    import vllm.v1.hisparse.coordinator as coordinators

    from hotpage.vllm import HiSparseConnector
    from hotpage.vllm.coordinator import NativeCoordinator
    from hotpage.vllm.scheduler import NativeConnectorScheduler

    disable_methods(coordinators.HiSparseCoordinator)
    coordinators.HiSparseCoordinator = NativeCoordinator
    connectors.HiSparseConnector = HiSparseConnector
    connectors.HiSparseConnectorScheduler = NativeConnectorScheduler


def disable_methods(coordinator: type) -> None:
    """Makes every method of a class raise."""
    for name, member in list(vars(coordinator).items()):
        if callable(member):
            setattr(coordinator, name, _raiser(name))


def _raiser(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"vLLM's coordinator ran: {name}")

    return refuse
