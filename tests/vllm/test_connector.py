# SPDX-License-Identifier: Apache-2.0
"""The connector as vLLM's factory loads it: alone, as a child, and refused."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from sides import Shape, make_request
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.hisparse import runtime
from vllm.v1.outputs import KVConnectorOutput

import hotpage.vllm
from hotpage.errors import ConfigError, UnsupportedVllmError
from hotpage.vllm import _compat, connector, host_pool, options, plugin
from hotpage.vllm.coordinator import NativeCoordinator
from hotpage.vllm.scheduler import NativeConnectorScheduler

pytestmark = pytest.mark.vllm

SHAPE = Shape(
    num_groups=2,
    block_size=16,
    hot_blocks=4,
    num_blocks=256,
    host_blocks=64,
    max_model_len=512,
    max_in_flight_tokens=64,
)
ENTRY = {
    "kv_connector": "HiSparseConnector",
    "kv_connector_module_path": "hotpage.vllm",
    "kv_role": "kv_both",
}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
}


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts with the plugin on and vLLM's steady-state estimate out of the way."""
    plugin.activate()
    monkeypatch.setattr(upstream, "get_hisparse_steady_state_concurrency", lambda *_: 1.0)


def vllm_config(transfer: KVTransferConfig, **settings: Any) -> Any:
    """What the connectors read of a configuration; a real one needs a model."""
    parallel = {"prefill_context_parallel_size": 1, "enable_dbo": False, "ubatch_size": 0}
    parallel |= {
        "world_size": 2,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "nnodes_within_dp": 1,
    }
    parallel |= {"decode_context_parallel_size": 1, "distributed_executor_backend": "mp"}
    model = SimpleNamespace(
        max_model_len=512,
        hf_config=SimpleNamespace(index_topk=16, model_type="deepseek_v32"),
        enable_sleep_mode=settings.pop("enable_sleep_mode", False),
    )
    if "model_type" in settings:
        model.hf_config.model_type = settings.pop("model_type")
    cache = SimpleNamespace(cache_dtype=settings.pop("cache_dtype", "fp8_ds_mla"))
    assert settings.keys() <= parallel.keys()
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(**{**parallel, **settings}),
        model_config=model,
        cache_config=cache,
        scheduler_config=SimpleNamespace(
            async_scheduling=False,
            max_num_batched_tokens=64,
            disable_hybrid_kv_cache_manager=False,
        ),
        speculative_config=None,
        num_lookahead_tokens=0,
        num_speculative_tokens=0,
    )


def entry(**extra: Any) -> dict[str, Any]:
    return {**ENTRY, "kv_connector_extra_config": {"host_pool_gib": 1, **extra}}


def build(transfer: dict[str, Any], role=KVConnectorRole.SCHEDULER, **settings: Any) -> Any:
    config = vllm_config(KVTransferConfig(**transfer), **settings)
    cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    return cls(config, role, SHAPE.cache_config())


def manager() -> KVCacheManager:
    return KVCacheManager(
        SHAPE.cache_config(),
        max_model_len=SHAPE.max_model_len,
        scheduler_block_size=16,
        hash_block_size=16,
        max_in_flight_tokens=64,
        enable_caching=True,
    )


def test_it_loads_by_module_path_alone_and_installs_the_coordinator() -> None:
    built = build(entry())
    assert type(built) is hotpage.vllm.HiSparseConnector
    assert type(built).__name__ == "HiSparseConnector"
    assert isinstance(built, upstream.HiSparseConnector)
    cache = manager()
    built.bind_kv_cache_manager(cache)
    coordinator = built.connector_scheduler.coordinator
    assert isinstance(coordinator, NativeCoordinator)
    for single in cache.coordinator.single_type_managers:
        assert getattr(single, "coordinator", coordinator) is coordinator
    config = coordinator.core.config
    assert (config["num_ranks"], config["top_k"], config["num_kv_groups"]) == (2, 16, 2)
    assert not built.has_pending_push_work()
    assert not built.has_pending_block_frees()


def test_it_loads_as_a_child_and_knows_its_siblings() -> None:
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [entry(), OFFLOADING]},
    )
    children = MultiConnector._get_connector_classes_and_configs(vllm_config(transfer))
    (ours, config), (theirs, _) = children
    assert ours is hotpage.vllm.HiSparseConnector
    assert theirs is not ours
    built = ours(config, KVConnectorRole.SCHEDULER, SHAPE.cache_config())
    assert built.options.siblings == ("OffloadingConnector",)
    assert built.options.resolved_host_layout == "row_interleaved"
    multi = object.__new__(MultiConnector)
    multi._connectors = [built]
    multi.bind_kv_cache_manager(manager())
    assert isinstance(built.connector_scheduler.coordinator, NativeCoordinator)
    # The user's own configuration was not written to.
    first = transfer.kv_connector_extra_config["connectors"][0]
    assert options.SIBLINGS_KEY not in first["kv_connector_extra_config"]


class Sibling:
    """Brings the indexer's pages of one request, and says so in worker metadata of its own."""

    def __init__(self) -> None:
        self.words: list[Any] = []

    def bind_kv_cache_manager(self, _: Any) -> None:
        """It takes blocks as they come."""

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        return request.num_tokens - num_computed, True

    def update_state_after_alloc(self, *_: Any) -> None:
        """It starts its load."""

    def build_connector_meta(self, _: Any) -> str:
        return "sibling's"

    def update_connector_output(self, output: Any) -> None:
        self.words.append(output.kv_connector_worker_meta)


@pytest.mark.parametrize("first", [True, False])
def test_a_siblings_import_ends_through_a_multi_connector_in_either_order(first: bool) -> None:
    ours, sibling = build(entry()), Sibling()
    multi = object.__new__(MultiConnector)
    multi._connectors = [ours, sibling] if first else [sibling, ours]
    multi._requests_to_connector, multi._extra_async_saves = {}, {}
    cache = manager()
    multi.bind_kv_cache_manager(cache)
    request = make_request("import", list(range(40)), 16)
    num_tokens, load_async = multi.get_num_new_matched_tokens(request, 0)
    assert (num_tokens, load_async) == (40, True)
    external = {"num_external_computed_tokens": 40, "delay_cache_blocks": True}
    assert cache.allocate_slots(request, 0, **external) is not None
    multi.update_state_after_alloc(request, cache.get_blocks("import"), 40)
    request.num_computed_tokens = 40

    def step(names: list[str]) -> Any:
        cached = SimpleNamespace(req_ids=names, num_computed_tokens=[39] * len(names))
        cached.new_block_ids = [None] * len(names)
        counts = dict.fromkeys(names, 1)
        output = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
        output.num_scheduled_tokens, output.scheduled_spec_decode_tokens = counts, {}
        metadata = multi.build_connector_meta(output)
        assert output.has_sync_kv_loads
        return metadata.metadata[0 if first else 1]

    assert not step([]).plans[-1].transfer_id.size
    multi.update_connector_output(KVConnectorOutput(finished_recving={"import"}))
    request.num_computed_tokens = 39
    restores = step(["import"]).plans[0].transfer_id.tolist()
    assert len(restores) == 1
    words = HiSparseConnectorWorkerMetadata(dict.fromkeys(restores, 2), dict.fromkeys(restores, 2))
    both = (words, "word") if first else ("word", words)
    multi.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(metadata=both))
    )
    assert sibling.words == [None, "word"]
    assert restores[0] not in ours.connector_scheduler.coordinator.pending_spills


def test_the_host_pool_is_reported_every_so_many_steps() -> None:
    built = build(entry(metrics_interval=3))
    assert built.get_kv_connector_stats() is None, "nothing is bound yet"
    built.bind_kv_cache_manager(manager())
    reports = [built.get_kv_connector_stats() for _ in range(7)]
    assert [report is not None for report in reports] == [True, False, False] * 2 + [True]
    assert reports[3].data["host_cache_usage_perc"] == [0.0]
    assert reports[3].data["pending_page_transfers"] == [0]


def test_engine_upstream_is_vllms_own_path_on_any_version(monkeypatch) -> None:
    monkeypatch.setattr(connector, "check_vllm", lambda: pytest.fail("asked for the version"))
    built = build(entry(engine="upstream"), prefill_context_parallel_size=2)
    assert type(built.connector_scheduler) is upstream.HiSparseConnectorScheduler
    built.bind_kv_cache_manager(manager())
    assert type(built.connector_scheduler.coordinator).__module__ == "vllm.v1.hisparse.coordinator"


@pytest.mark.parametrize(
    ("extra", "settings", "sentence"),
    [
        ({"engin": "native"}, {}, "engin is no option"),
        ({"engine": "fast"}, {}, "engine is 'fast', expected one of native, upstream"),
        ({"host_layout": "wide"}, {}, "host_layout is 'wide'"),
        ({"allocate_fast_path": 1}, {}, "allocate_fast_path is 1, expected true or false"),
        ({"hot_return_steps": 0}, {}, "hot_return_steps is 0, expected at least 1"),
        ({"metrics_interval": "x"}, {}, "metrics_interval is 'x'"),
        ({"cooperative_copy": "on"}, {}, "cooperative_copy is 'on', expected one of auto, off"),
        ({}, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size 2; set it to 1"),
        ({}, {"enable_dbo": True}, "drop --enable-dbo"),
        ({}, {"ubatch_size": 2}, "and --ubatch-size"),
        ({}, {"distributed_executor_backend": "external_launcher"}, "of an external launcher"),
        ({}, {"cache_dtype": "nvfp4_ds_mla"}, "nvfp4_ds_mla; use fp8_ds_mla"),
        ({}, {"enable_sleep_mode": True}, "drop --enable-sleep-mode"),
        ({}, {"model_type": "deepseek_v4"}, "does not serve DeepSeek V4"),
        (
            {"host_layout": "row_interleaved", options.SIBLINGS_KEY: ["NixlConnector"]},
            {},
            "cannot be read by NixlConnector",
        ),
    ],
)
def test_what_native_does_not_serve_is_refused_in_one_sentence(
    extra: dict, settings: dict, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(entry(**extra), **settings)
    text = str(caught.value)
    assert sentence in text
    assert "\n" not in text


@pytest.mark.parametrize("size", ["lots", -3, 0, float("nan"), float("inf"), [384], True - 1])
def test_a_host_pool_of_no_size_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"host_pool_gib is .*, expected a positive number"):
        options.parse_options({"host_pool_gib": size})


def test_host_pools_that_vllm_reads_are_taken() -> None:
    for size in (384, 0.5, "384"):
        options.parse_options({"host_pool_gib": size})


def test_another_connector_under_our_path_is_refused_with_the_remedy() -> None:
    import hotpage.vllm

    with pytest.raises(ConfigError, match="has no OffloadingConnector; give kv_connector_module_"):
        _ = hotpage.vllm.OffloadingConnector
    assert not hasattr(hotpage.vllm, "nothing")


def test_a_sibling_that_reads_host_rows_makes_auto_choose_layer_major() -> None:
    for name, layout in (("OffloadingConnector", "row_interleaved"), ("Nixl", "layer_major")):
        chosen = options.parse_options({options.SIBLINGS_KEY: [name]})
        assert chosen.resolved_host_layout == layout


def test_the_worker_side_checks_what_only_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match="serves one GPU an engine, got 2"):
        build(entry(), KVConnectorRole.WORKER)


def test_an_unknown_version_is_refused_by_name(monkeypatch) -> None:
    _compat.check_vllm.cache_clear()
    monkeypatch.setattr(_compat, "version", lambda _: "0.34.1")
    with pytest.raises(UnsupportedVllmError, match=r"vLLM 0\.34\.1 is installed.*0\.33\.0"):
        build(entry())
    _compat.check_vllm.cache_clear()


def test_a_changed_file_of_a_known_version_is_refused_by_name(monkeypatch) -> None:
    _compat.check_vllm.cache_clear()
    original = _compat.fingerprint
    monkeypatch.setattr(
        _compat,
        "fingerprint",
        lambda path: "0" if path.name == "types.py" else original(path),
    )
    with pytest.raises(UnsupportedVllmError, match=r"v1/hisparse/types\.py of the installed"):
        build(entry())
    _compat.check_vllm.cache_clear()


def test_a_cache_manager_with_vllms_own_coordinator_is_refused() -> None:
    cache = manager()
    build(entry(engine="upstream")).bind_kv_cache_manager(cache)
    with pytest.raises(ConfigError, match="list one HiSparseConnector only"):
        build(entry()).bind_kv_cache_manager(cache)


def test_prefix_hits_inside_a_block_are_refused() -> None:
    cache = manager()
    cache.coordinator.enable_partial_hash_hits = True
    with pytest.raises(ConfigError, match="set the prefix hash block size"):
        build(entry()).bind_kv_cache_manager(cache)


def test_no_abstract_method_is_left_and_none_was_added() -> None:
    assert not hotpage.vllm.HiSparseConnector.__abstractmethods__
    overridden = {n for n in vars(NativeConnectorScheduler) if not n.startswith("_")}
    theirs = {n for n in vars(upstream.HiSparseConnectorScheduler) if not n.startswith("_")}
    assert theirs <= overridden


def test_importing_it_starts_nothing() -> None:
    script = textwrap.dedent("""
        import sys
        import hotpage.vllm, hotpage.vllm.options
        assert not {"torch", "vllm"} & sys.modules.keys(), "the package imports vLLM or torch"
        import torch
        hotpage.vllm.HiSparseConnector
        assert not torch.cuda.is_initialized()
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_native_without_the_entry_point_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(plugin, "is_active", lambda: False)
    with pytest.raises(ConfigError, match=r"vllm\.general_plugins"):
        build(entry())
    assert build(entry(engine="upstream"))


def test_what_hotpage_says_is_heard_where_vllm_is(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM gives its own loggers a handler and a level, and nobody else's."""
    with caplog.at_level(logging.INFO, "vllm"):
        host_pool.logger.info("of the pool")
    assert "of the pool" in caplog.text


def test_files_in_which_something_is_hooked_are_known_by_their_fingerprints() -> None:
    root, places = _compat._root(), plugin._places()
    assert places is not None
    for owner in places:
        path = Path(sys.modules[owner.__module__].__file__ or "")
        assert path.relative_to(root).as_posix() in _compat.FILES


@pytest.mark.parametrize(
    ("owner", "name"),
    [(runtime, "HiSparseHostPool"), (MultiConnector, "_get_connector_classes_and_configs")],
)
def test_a_vllm_without_the_places_for_hooks_starts_without_them(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls the entry point at every start, whatever it is to serve, and catches nothing."""
    monkeypatch.delattr(owner, name)
    plugin.activate()
    assert not plugin.is_active()


def test_the_plugin_changes_nothing_for_other_configurations() -> None:
    original = MultiConnector._get_connector_classes_and_configs.__func__.__wrapped__
    hook = MultiConnector.__dict__["_get_connector_classes_and_configs"]
    plugin.activate()
    assert MultiConnector.__dict__["_get_connector_classes_and_configs"] is hook
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "nowhere"},
    }
    stock = {**entry(), "kv_connector_module_path": None}
    for connectors in ([example, OFFLOADING], [stock, OFFLOADING], [OFFLOADING]):
        transfer = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            engine_id="engine",
            kv_connector_extra_config={"connectors": connectors},
        )
        config = vllm_config(transfer)
        plain = original(MultiConnector, config)
        hooked = MultiConnector._get_connector_classes_and_configs(config)
        assert [cls for cls, _ in hooked] == [cls for cls, _ in plain]
        for (_, one), (_, other) in zip(hooked, plain, strict=True):
            assert one.kv_transfer_config == other.kv_transfer_config
