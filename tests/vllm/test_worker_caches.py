# SPDX-License-Identifier: Apache-2.0
"""What the native worker takes over when vLLM hands its caches over: host pool, views, refusals."""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

import torch
from cpu_plans import Steps, Transfer, plan
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.hisparse import binding, runtime
from worker_on_cpu import (
    BF16,
    BLOCK,
    MIXED,
    ONE_EACH,
    PACKED,
    CpuWorker,
    Model,
    refused_unpinned,
    release_all,
)

from hotpage.errors import (
    CapacityError,
    ConfigError,
    KernelUnavailableError,
    UnsupportedVllmError,
)
from hotpage.vllm import HiSparseConnector, host_pool
from hotpage.vllm.caches import index_groups
from hotpage.vllm.metadata import HotPageConnectorMetadata
from hotpage.vllm.options import check_worker

pytestmark = pytest.mark.vllm

LAYOUTS = ("row_interleaved", "layer_major")
MODELS = {"one each": ONE_EACH, "packed": PACKED, "mixed": MIXED, "bfloat16": BF16}

Make = Callable[..., CpuWorker]


@pytest.fixture
def make(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Workers; whatever they have pinned is freed in the end."""

    def build(model: Model = ONE_EACH, **sizes: Any) -> CpuWorker:
        return CpuWorker(model, kernels, monkeypatch, **sizes)

    yield build
    release_all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_view_that_vllm_keeps_shows_a_layer_its_own_rows(
    name: str, layout: str, make: Make
) -> None:
    cpu = make(MODELS[name], host_layout=layout)
    pool = cpu.worker.host_pool.pool.bytes_tensor()
    pool.zero_()
    layers = cpu.worker.caches.layers
    assert len(layers) == len(list(MODELS[name].layers()))
    for number, (layer, rows) in enumerate(zip(layers, cpu.worker.layers, strict=True), 1):
        handle = layer.handle.runtime
        shown = cpu.kv_caches[layer.name]
        blocks = (cpu.host_blocks, BLOCK, handle.row_width)
        assert shown.shape == (cpu.host_blocks, 1, *blocks[1:])
        assert layer.attention.kv_cache.shape == blocks
        assert handle.host_cache.shape == (cpu.host_blocks * BLOCK, handle.row_width)
        assert rows.host.shape == blocks
        for view in (shown, layer.attention.kv_cache, handle.host_cache, rows.host):
            assert view.dtype == handle.kv_dtype
            assert view.untyped_storage().data_ptr() == pool.data_ptr()
        # What is written through one view is what all others show, row by row.
        marks = torch.arange(cpu.host_blocks * BLOCK) % 97 + 3 * number
        handle.host_cache.copy_(marks[:, None].to(handle.kv_dtype).expand_as(handle.host_cache))
        expected = marks.view(cpu.host_blocks, BLOCK, 1).to(handle.kv_dtype)
        for view in (shown.squeeze(1), layer.attention.kv_cache, rows.host):
            assert (view == expected).all()
    for number, layer in enumerate(layers, 1):
        marks = torch.arange(cpu.host_blocks * BLOCK) % 97 + 3 * number
        view = layer.handle.runtime.host_cache
        assert (view == marks[:, None].to(view.dtype)).all(), "another layer wrote here"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_an_index_group_lie_side_by_side_only_if_the_layout_says_so(
    layout: str, make: Make
) -> None:
    cpu = make(MIXED, host_layout=layout)
    at = {layer.name: rows for layer, rows in zip(
        cpu.worker.caches.layers, cpu.worker.layers, strict=True
    )}  # fmt: skip
    for group in cpu.worker.caches.groups:
        rows = [at[layer.name] for layer in group.layers]
        side_by_side = layout == "row_interleaved"
        width = rows[0].row_bytes
        assert {row.host_row_stride for row in rows} == {
            width * len(rows) if side_by_side else width
        }
        if side_by_side:
            starts = [row.host.data_ptr() for row in rows]
            assert starts == [starts[0] + width * i for i in range(len(rows))]


def test_every_layer_knows_its_group_and_who_leads(make: Make) -> None:
    cpu = make(PACKED)
    caches = cpu.worker.caches
    assert [len(group.layers) for group in caches.groups] == [1, 1, 1]
    assert [layer.kv_group for layer in caches.layers] == [0, 0, 1]
    assert not any(layer.is_draft for layer in caches.layers)
    caches = make(MIXED).worker.caches
    assert [len(group.layers) for group in caches.groups] == [1, 1, 4, 4, 1]
    assert [layer.kv_group for layer in caches.layers] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert [layer.is_draft for layer in caches.layers] == [False] * 10 + [True]
    slots = caches.slots
    assert list(slots.slot_rows) == [2, 3, 4, 5, 6]
    assert slots.host_row.data_ptr() == slots.resident_slot[0].data_ptr()


# The host pool.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pool_is_as_large_as_vllm_counts_and_survives_profiling(
    layout: str, make: Make
) -> None:
    cpu = make(MIXED, host_layout=layout, register=False)
    cpu.bind()
    holder = runtime.get_hisparse_host_pool(cpu.config, cpu.cache_config)
    native = host_pool.host_pool_of(cpu.config)
    size = next(t.size for t in cpu.cache_config.kv_cache_tensors if t.host_resident)
    assert size == native.pool.num_bytes == 11 * 656 * BLOCK * cpu.host_blocks
    assert holder.backing.numel() == size
    assert sum(cpu.driver.pinned.values()) == size
    # Profiling lets go of its caches; the real ones are bound to the same memory.
    context = cpu.config.compilation_config.static_forward_context
    binding.release_hisparse_profiling_cache(context)
    assert sum(cpu.driver.pinned.values()) == size
    cpu.bind()
    cpu.worker.register_kv_caches(cpu.kv_caches)
    assert host_pool.host_pool_of(cpu.config) is native
    cpu.close()
    assert not cpu.driver.pinned


@pytest.mark.parametrize(
    "transfer",
    [
        None,
        {"kv_connector": "HiSparseConnector", "kv_connector_extra_config": {"host_pool_gib": 1}},
        {
            "kv_connector": "HiSparseConnector",
            "kv_connector_module_path": "hotpage.vllm",
            "kv_connector_extra_config": {"host_pool_gib": 1, "engine": "upstream"},
        },
    ],
    ids=["no connector", "vLLM's own", "engine upstream"],
)
def test_other_configurations_get_vllms_own_pool(
    transfer: dict[str, Any] | None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = make(ONE_EACH, register=False)
    cpu.config.kv_transfer_config = transfer and KVTransferConfig(kv_role="kv_both", **transfer)
    memory = torch.zeros(1 << 16, dtype=torch.int8)
    asked: list[int] = []

    def pinned(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(size)
        return memory[:size], memory

    monkeypatch.setattr(runtime, "allocate_pinned_host_pool", pinned)
    holder = runtime.HiSparseHostPool(cpu.config, cpu.cache_config)
    assert holder.allocate(4096).data_ptr() == memory.data_ptr()
    assert asked == [4096]
    assert holder.shared_region is None
    assert not cpu.driver.pinned
    with pytest.raises(ConfigError, match=r"vLLM made the host pool itself.*vllm.general_plugins"):
        host_pool.host_pool_of(cpu.config)


def test_a_pool_of_another_size_than_vllm_counts_is_refused(make: Make) -> None:
    cpu = make(ONE_EACH, register=False)
    holder = runtime.HiSparseHostPool(cpu.config, cpu.cache_config)
    with pytest.raises(ConfigError, match="vLLM counts 4096 bytes for the host pool"):
        holder.allocate(4096)
    assert holder.backing is None
    assert not cpu.driver.pinned


@pytest.mark.parametrize(
    "phase", ["bind_hisparse_kv_caches", "initialize_hisparse_runtime_buffers"]
)
def test_a_set_up_that_fails_in_vllm_leaves_nothing_pinned_and_can_be_repeated(
    phase: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = make(ONE_EACH, register=False)
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no luck")

        patch.setattr(binding, phase, fail)
        with pytest.raises(RuntimeError, match="no luck"):
            cpu.bind()
    assert not cpu.driver.pinned
    with pytest.raises(ConfigError):
        host_pool.host_pool_of(cpu.config)
    cpu.bind()
    cpu.worker.register_kv_caches(cpu.kv_caches)
    assert cpu.driver.pinned
    cpu.close()
    assert not cpu.driver.pinned


def test_memory_that_cannot_be_pinned_is_a_capacity_error(make: Make) -> None:
    cpu = make(ONE_EACH, register=False)
    cpu.driver.fail = True
    with pytest.raises(CapacityError, match="cannot be pinned"):
        cpu.bind()
    with pytest.raises(ConfigError):
        host_pool.host_pool_of(cpu.config)
    assert cpu.config.instance_id not in runtime._host_pools


def test_the_end_may_come_twice_and_waits_for_what_is_enqueued(make: Make) -> None:
    cpu = make(ONE_EACH)
    steps = Steps(cpu)
    steps.fill_gpu(5, range(BLOCK))
    steps.start(plan(steps.groups, transfers=[Transfer(1, 3, steps.blocks(5))]))
    launched = cpu.library.launches["hotpage_spill_pages"]
    side = cpu.worker._mirrors._side._stream
    assert len(side.queue) > 0
    cpu.worker.shutdown()
    assert not side.queue
    assert launched == 1
    assert not cpu.driver.pinned
    assert cpu.config.instance_id not in runtime._host_pools
    cpu.worker.shutdown()
    host_pool.release(cpu.config)


def test_a_pool_ends_even_if_the_device_is_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = make(ONE_EACH)

    def gone(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    with caplog.at_level(logging.WARNING, "hotpage.vllm.worker"):
        cpu.worker.shutdown()
    assert "illegal memory access" in caplog.text
    assert not cpu.driver.pinned


# Refusals.


def refused(cpu: CpuWorker, sentence: str) -> None:
    """The caches are refused by this sentence, and nothing stays pinned."""
    with pytest.raises(ConfigError, match=sentence) as caught:
        cpu.worker.register_kv_caches(cpu.kv_caches)
    assert "\n" not in str(caught.value)
    assert not cpu.driver.pinned


def test_caches_that_are_not_bound_are_refused(make: Make) -> None:
    cpu = make(ONE_EACH, register=False)
    cpu.kv_caches = {}
    refused(cpu, "before they were bound")


def test_blocks_of_another_size_than_the_attention_kernels_are_refused(make: Make) -> None:
    cpu = make(Model((1, 1), block_size=32), register=False)
    refused_unpinned(cpu, "the caches have 32; set --block-size 64")


def test_fp8_rows_of_another_format_are_refused(make: Make) -> None:
    """vLLM's FlashInfer backend keeps plain fp8 rows under the name that FlashMLA's go by."""
    cpu = make(Model((1, 1), kv_cache_dtype="fp8"), register=False)
    refused_unpinned(cpu, "fp8 rows of 576 bytes.*--attention-backend FLASHMLA_SPARSE")


def test_a_pool_larger_than_the_memory_that_is_free_is_refused_before_it_is_touched(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = make(ONE_EACH, register=False)
    free = SimpleNamespace(available=1 << 20)
    monkeypatch.setattr(runtime.psutil, "virtual_memory", lambda: free)
    with pytest.raises(ValueError, match="RAM is available"):
        cpu.bind()
    assert not cpu.driver.pinned


def test_slot_mappings_that_lie_apart_are_refused(make: Make) -> None:
    cpu = make(ONE_EACH, register=False)
    cpu.tables.slot_mappings = [row.clone() for row in cpu.tables.slot_mappings]
    cpu.bind()
    refused(cpu, "slot mappings are not rows of one table")


def test_fewer_tokens_than_verification_rows_are_refused(make: Make) -> None:
    cpu = make(MIXED, register=False, max_tokens=6)
    cpu.bind()
    refused(cpu, "max_num_batched_tokens is less than the 8 verification rows")


def test_a_hot_region_that_ends_inside_a_block_is_refused(make: Make) -> None:
    cpu = make(Model((1, 1), hot_rows=100), register=False)
    sentence = "device_buffer_size is 100, expected a multiple of the block size; set 128"
    refused_unpinned(cpu, sentence)


def test_layers_of_an_index_group_that_lie_apart_are_refused() -> None:
    shared, other = object(), object()
    context = {
        name: SimpleNamespace(impl=SimpleNamespace(index_group=group))
        for name, group in (("a", shared), ("b", other), ("c", shared))
    }
    config = SimpleNamespace(kv_cache_groups=[hot_group("a", "b", "c")])
    with pytest.raises(ConfigError, match="layer c does not follow the other layers"):
        index_groups(config, context)
    config = SimpleNamespace(kv_cache_groups=[hot_group("a", "c"), hot_group("b")])
    assert index_groups(config, context) == [["a", "c"], ["b"]]
    with pytest.raises(ConfigError, match="no sparse-MLA layers"):
        index_groups(SimpleNamespace(kv_cache_groups=[]), context)


def hot_group(*names: str) -> Any:
    """A hot KV cache group of these layers."""
    from vllm.v1.kv_cache_interface import HiSparseHotSpec

    spec = HiSparseHotSpec(block_size=BLOCK, page_size=BLOCK * 656, blocks_per_request=1)
    return SimpleNamespace(
        kv_cache_spec=spec, layer_names=[name + binding.HISPARSE_HOT_SUFFIX for name in names]
    )


def test_several_gpus_an_engine_are_refused_in_one_sentence(make: Make) -> None:
    config = make(ONE_EACH, register=False).config
    check_worker(config)
    config.parallel_config.world_size = 2
    with pytest.raises(ConfigError, match="serves one GPU an engine, got 2") as caught:
        check_worker(config)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith('or set "engine": "upstream" in kv_connector_extra_config')


EARLY = {
    "tensor parallel": ("parallel_config", "world_size", 2, "serves one GPU an engine"),
    "sleep": ("model_config", "enable_sleep_mode", True, "does not survive sleep mode"),
    "microbatches": ("parallel_config", "enable_dbo", True, "a step in microbatches"),
    "dtype": ("cache_config", "cache_dtype", "nvfp4_ds_mla", "use fp8_ds_mla"),
}


@pytest.mark.parametrize("name", EARLY)
def test_settings_are_refused_before_the_pool_is_pinned(name: str, make: Make) -> None:
    """vLLM makes the pool while it profiles graphs, in each rank, before it builds a connector."""
    where, what, value, sentence = EARLY[name]
    cpu = make(ONE_EACH, register=False, checks_settings=True)
    setattr(getattr(cpu.config, where), what, value)
    refused_unpinned(cpu, sentence)


def test_a_changed_vllm_is_refused_before_the_pool_is_pinned(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> str:
        raise UnsupportedVllmError("vLLM 0.34.1 is installed")

    cpu = make(ONE_EACH, register=False, checks_settings=True)
    monkeypatch.setattr(host_pool, "check_vllm", unknown)
    refused_unpinned(cpu, "0.34.1")


def test_a_device_without_kernels_is_refused_before_the_pool_is_pinned(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(device: torch.device) -> Any:
        raise KernelUnavailableError(f"the kernel library has nothing for {device}")

    cpu = make(ONE_EACH, register=False)
    monkeypatch.setattr(host_pool, "usable_library", none)
    with pytest.raises(KernelUnavailableError, match="nothing for cuda:0"):
        cpu.bind()
    assert not cpu.driver.num_registered


def test_the_engine_core_refuses_settings_before_its_workers_profile(make: Make) -> None:
    """It asks for the layout of the caches first, with the configuration as a whole."""
    config = make(ONE_EACH, register=False).config
    assert HiSparseConnector.get_required_kvcache_layout(config) == "BLHNC"
    # A worker may still make another name of the same rows of this one.
    config.cache_config.cache_dtype = "fp8_e4m3"
    assert HiSparseConnector.get_required_kvcache_layout(config) == "BLHNC"
    for where, what, value, sentence in EARLY.values():
        config = make(ONE_EACH, register=False).config
        setattr(getattr(config, where), what, value)
        with pytest.raises(ConfigError, match=sentence):
            HiSparseConnector.get_required_kvcache_layout(config)
        config.kv_transfer_config.kv_connector_extra_config["engine"] = "upstream"
        assert HiSparseConnector.get_required_kvcache_layout(config) == "BLHNC"


def test_the_connector_drives_the_worker_through_vllms_hooks(make: Make) -> None:
    cpu = make(ONE_EACH, register=False)
    cpu.bind()
    connector = HiSparseConnector(cpu.config, KVConnectorRole.WORKER, cpu.cache_config)
    connector.register_kv_caches(cpu.kv_caches)
    cpu.worker = connector.connector_worker
    steps = Steps(cpu)
    values = list(range(1000, 1000 + BLOCK))
    batch = steps.batch(steps.part(1, BLOCK, 0, host=[3], resident=[5], state_row=2))
    step = plan(
        steps.groups,
        transfers=[Transfer(6, 3, steps.blocks(5), after_forward=True)],
        cleared=[0],
        residency=[(0, 0, steps.blocks(5))],
        resident=True,
    )
    first = HotPageConnectorMetadata((step,), bytes(4), started=((0, "r1"),))
    connector.bind_connector_metadata(first)
    connector.start_load_kv(
        None,
        request_state_indices=batch.state_rows,
        request_ids=batch.names,
        num_tokens=BLOCK,
        attn_metadata={layer.name: batch.metadata() for _, layer in steps.layers},
    )
    assert cpu.worker.caches.residency[:, 2, 0].tolist() == steps.blocks(5)
    assert all(layer.handle.num_actual_tokens == BLOCK for _, layer in steps.layers)
    assert all(layer.handle.all_context_pages_resident for _, layer in steps.layers)
    steps.write(batch)
    connector.finish_forward()
    told = connector.build_connector_worker_meta()
    assert told.enqueued_transfer_counts == {6: 1}
    assert told.completed_transfer_counts == {}
    connector.clear_connector_metadata()
    # A step without a forward pass; the copies of the last one have to end.
    empty = HotPageConnectorMetadata((plan(steps.groups),), b"")
    connector.bind_connector_metadata(empty)
    connector.start_load_kv(None)
    connector.finish_forward()
    told = connector.build_connector_worker_meta()
    assert told.completed_transfer_counts == {6: 1}
    assert connector.build_connector_worker_meta() is None
    assert steps.host_holds(3, values)
    connector.reset_capture_state()
    connector.shutdown()
    assert not cpu.driver.pinned


def test_every_gpu_view_of_a_layer_is_its_part_of_a_block(make: Make) -> None:
    """GPU rows of different layers never share a byte of the same block."""
    cpu = make(PACKED)
    cpu.gpu_pool.zero_()
    for number, rows in enumerate(cpu.worker.layers, 1):
        rows.gpu[4].fill_(number)
    by_group: dict[int, list[int]] = {}
    for number, rows in enumerate(cpu.worker.layers, 1):
        by_group.setdefault(rows.kv_group, []).append(number)
    for one, other in itertools.combinations(by_group[0], 2):
        layers = cpu.worker.layers
        assert (layers[one - 1].gpu[4] != layers[other - 1].gpu[4]).all()
