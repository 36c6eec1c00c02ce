# SPDX-License-Identifier: Apache-2.0
"""Settings under which vLLM would start and the native worker would serve wrong rows, or fail once
the host pool is pinned: refused before, in one sentence with the remedy.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

# First of all: it tells vLLM that this host has no GPU.
import sides  # noqa: F401
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from worker_on_cpu import (
    BLOCK,
    MIXED,
    ONE_EACH,
    CpuWorker,
    Model,
    refused_unpinned,
    release_all,
)

from hotpage.errors import ConfigError
from hotpage.vllm import HiSparseConnector, host_pool, plugin
from hotpage.vllm.options import check_worker, native_options

pytestmark = pytest.mark.vllm

Make = Callable[..., CpuWorker]


@pytest.fixture
def make(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Workers whose caches are not bound, under the checks of their settings."""

    def build(model: Model = ONE_EACH, **sizes: Any) -> CpuWorker:
        common = {"register": False, "checks_settings": True}
        return CpuWorker(model, kernels, monkeypatch, **common, **sizes)

    yield build
    release_all()


# Attention backends.


def test_a_backend_that_does_not_ask_index_groups_is_refused(make: Make) -> None:
    """vLLM gives its layers index groups, and it reads the host pool's view by host blocks."""
    cpu = make(Model((1, 1), kv_cache_dtype="bfloat16"))
    context = cpu.config.compilation_config.static_forward_context
    for layer in context.values():
        layer.backend = "FLASHINFER_MLA_SPARSE_SM90"
    refused_unpinned(cpu, "FLASHINFER_MLA_SPARSE_SM90 .*; set --attention-backend FLASHMLA_SPARSE")


@pytest.mark.parametrize("name", sorted(host_pool.BACKENDS))
def test_a_backend_that_is_served_asks_the_index_group_of_its_layer(name: str) -> None:
    try:
        implementation = AttentionBackendEnum[name].get_class().get_impl_cls()
    except ImportError as error:
        pytest.skip(f"the kernels of {name} are for hosts with a GPU: {error}")
    methods = [implementation.forward_mqa]
    if implementation is FlashMLASparseImpl:
        methods = [
            FlashMLASparseImpl._forward_bf16_kv,
            FlashMLASparseImpl._forward_fp8_kv_separate_prefill_decode,
        ]
    for method in methods:
        assert "HiSparseMLAIndexGroup" in inspect.getsource(method)


def test_the_remedy_for_other_fp8_rows_names_a_dtype_that_the_backend_takes(make: Make) -> None:
    cpu = make(Model((1, 1), kv_cache_dtype="fp8"))
    refused_unpinned(cpu, "set --kv-cache-dtype fp8_ds_mla --attention-backend FLASHMLA_SPARSE")
    taken = AttentionBackendEnum.FLASHMLA_SPARSE.get_class().supported_kv_cache_dtypes
    assert "fp8_ds_mla" in taken
    assert "fp8_e4m3" not in taken


# Drafts.


def test_several_mtp_modules_are_refused(make: Make) -> None:
    """Later modules write rows of earlier steps anew, which the mirror of a step does not bring."""
    cpu = make(MIXED, max_tokens=64)
    check_worker(cpu.config)
    cpu.config.speculative_config.use_multi_module_mtp = lambda: True
    refused_unpinned(cpu, "one MTP module.*; set num_speculative_tokens to 1")


def test_sparse_draft_layers_of_another_method_are_refused(make: Make) -> None:
    cpu = make(MIXED, max_tokens=64)
    cpu.config.speculative_config.method = "draft_model"
    refused_unpinned(cpu, "sparse draft layers of method mtp, got draft_model; ")


def test_a_drafter_without_sparse_layers_is_none_of_ours(make: Make) -> None:
    cpu = make(Model((1, 1), verification_rows=4), max_tokens=64)
    cpu.config.speculative_config.method = "ngram"
    cpu.bind()


# Sizes that the kernels have.

SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "requests": (
        {"max_requests": 1025, "max_tokens": 2048}, "1024 requests a batch, got 1025; lower --max"
    ),
    "drafts": (
        {"model": Model((1, 1), top_k=4, verification_rows=11)}, "9 draft tokens, got 10; lower num"
    ),
    "tokens": (
        {"model": MIXED, "max_tokens": 7},
        "max_num_batched_tokens is 7, less than the 8 verification rows of 4 requests; raise",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes_beyond_the_kernels_are_refused_before_the_pool_is_pinned(
    name: str, make: Make
) -> None:
    sizes, sentence = SIZES[name]
    cpu = make(**sizes)
    with pytest.raises(ConfigError, match=sentence):
        HiSparseConnector.get_required_kvcache_layout(cpu.config)
    refused_unpinned(cpu, sentence)


def test_rows_of_other_widths_are_refused() -> None:
    host_pool._check_sizes(BLOCK, 1152, 2, 2 * BLOCK)
    with pytest.raises(ConfigError, match=r'rows of 512 elements.* set "engine": "upstream"'):
        host_pool._check_sizes(BLOCK, 1024, 2, 2 * BLOCK)


# Siblings.


def multi(sibling: dict[str, Any], engine: str = "native") -> Any:
    """A configuration with this connector beside ours."""
    ours = {
        "kv_connector": "HiSparseConnector",
        "kv_connector_module_path": "hotpage.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": 1, "engine": engine},
    }
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": [ours, sibling]},
        )
    )


def offloading(**extra: Any) -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": 1 << 20, **extra}
    name = "OffloadingConnector"
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_a_sibling_that_loads_within_a_step_is_refused() -> None:
    """A request would be scheduled before the Coordinator has heard that its import has ended."""
    plugin.activate()
    config = multi(offloading(sync_load_budget_bytes=1 << 20))
    sentence = "sync_load_budget_bytes.*; take it out of OffloadingConnector's"
    with pytest.raises(ConfigError, match=sentence):
        MultiConnector._get_connector_classes_and_configs(config)
    with pytest.raises(ConfigError, match=sentence):
        native_options(config)
    for fine in (multi(offloading()), multi(offloading(sync_load_budget_bytes=0))):
        assert len(MultiConnector._get_connector_classes_and_configs(fine)) == 2
        assert native_options(fine) is not None
    config = multi(offloading(sync_load_budget_bytes=1 << 20), engine="upstream")
    assert len(MultiConnector._get_connector_classes_and_configs(config)) == 2
    assert native_options(config) is None
