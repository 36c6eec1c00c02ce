# SPDX-License-Identifier: Apache-2.0
"""The planner's groups, blocks and concurrency are those that vLLM's own functions give."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hotpage import _core

pytestmark = pytest.mark.vllm

TOP_K = 2048
FP8, BF16, INDEXER = 656, 1152, 132


@dataclass
class Case:
    """One model and machine, in the terms of both sides; bytes and tokens."""

    leaders: list[bool]
    row_bytes: int = FP8
    mtp: int = 0
    hot_rows: int | None = None
    block_size: int = 64
    tokens_per_indexer_row: int = 1
    ring_bytes: int = 0
    max_model_len: int = 131_072
    batched_tokens: int = 8192
    kv_bytes: int = 26 << 30
    host_bytes: int = 384 << 30

    @property
    def served(self) -> list[bool]:
        return [*self.leaders, True] if self.mtp else self.leaders


def glm_like(layers: int = 78) -> list[bool]:
    return [layer == 0 or (layer + 3) % 4 == 0 for layer in range(layers)]


def vllm_specs(case: Case) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import CircularBufferSpec, MLAAttentionSpec, SparseCacheRole

    specs: dict[str, Any] = {}
    for layer, leads in enumerate(case.served):
        specs[f"layer{layer}"] = MLAAttentionSpec(
            block_size=case.block_size,
            num_kv_heads=1,
            head_size=576,
            dtype=torch.uint8,
            state_content_bytes=case.row_bytes,
            cache_dtype_str="fp8_ds_mla",
            topk_buffer_width=TOP_K,
            is_index_group_leader=leads,
        )
        if leads:
            specs[f"layer{layer}.indexer"] = MLAAttentionSpec(
                block_size=case.block_size,
                num_kv_heads=1,
                head_size=INDEXER,
                dtype=torch.uint8,
                tokens_per_state=case.tokens_per_indexer_row,
                cache_role=SparseCacheRole.INDEXER,
            )
    if case.ring_bytes:
        # Four slots of two heads, as a pooling indexer keeps its raw keys and gates.
        specs["ring"] = CircularBufferSpec(
            block_size=4,
            num_kv_heads=2,
            head_size=case.ring_bytes // 16,
            head_size_v=0,
            dtype=torch.bfloat16,
            dcp_sharded=False,
        )
    return specs


def vllm_config(case: Case) -> Any:
    from vllm.config.attention import HiSparseConfig
    from vllm.v1.kv_cache_layout import KVCacheLayout

    speculative = None
    if case.mtp:
        speculative = SimpleNamespace(num_speculative_tokens=case.mtp, parallel_drafting=False)
    hisparse = HiSparseConfig(device_buffer_size=case.hot_rows)
    return SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=hisparse),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        ),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(index_topk=TOP_K), max_model_len=case.max_model_len
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            world_size=1,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=speculative,
        use_v2_model_runner=True,
        # Two batches under way: asynchronous scheduling with the second model runner.
        max_in_flight_tokens=2 * case.batched_tokens,
    )


@dataclass
class Theirs:
    """What vLLM's functions say."""

    num_groups: int
    layers_in_groups: list[int]
    bytes_per_block: int
    host_page_bytes: int
    hot_blocks_per_request: int
    steady_state: float
    maximum: float
    ordinary: float
    ordinary_bytes_per_block: int


def of_vllm(case: Case) -> Theirs:
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
    from vllm.v1.hisparse import layout
    from vllm.v1.kv_cache_interface import HiSparseHotSpec, HiSparseResidentSpec

    config, specs = vllm_config(case), vllm_specs(case)
    groups = layout.get_hisparse_kv_cache_groups(config, specs)
    assert groups is not None
    kinds = [type(group.kv_cache_spec) for group in groups]
    hot = [group for group in groups if isinstance(group.kv_cache_spec, HiSparseHotSpec)]
    on_gpu = [group for group in groups if not group.host_resident]
    (source,) = (group for group in groups if group.host_resident)
    sized = layout.get_hisparse_kv_cache_config(config, groups, case.kv_bytes, case.host_bytes)

    plain = vllm_config(case)
    plain.attention_config.hisparse_config = None
    plain_groups = planning.get_kv_cache_groups(plain, vllm_specs(case))
    plain_sized = planning.get_kv_cache_config_from_groups(plain, plain_groups, case.kv_bytes)
    kv_layout = config.cache_config.get_resolved_kv_cache_layout()
    return Theirs(
        num_groups=kinds.count(HiSparseResidentSpec),
        layers_in_groups=[
            len(group.layer_names)
            for group in groups
            if isinstance(group.kv_cache_spec, HiSparseResidentSpec)
        ],
        bytes_per_block=planning._get_kv_cache_bytes_per_block(on_gpu, kv_layout),
        host_page_bytes=source.kv_cache_spec.page_size_bytes,
        hot_blocks_per_request=sum(group.kv_cache_spec.blocks_per_request for group in hot),
        steady_state=layout.get_hisparse_steady_state_concurrency(config, sized),
        maximum=get_max_concurrency_for_kv_cache_config(config, sized),
        ordinary=get_max_concurrency_for_kv_cache_config(plain, plain_sized),
        ordinary_bytes_per_block=planning._get_kv_cache_bytes_per_block(plain_groups, kv_layout),
    )


def of_planner(case: Case) -> dict[str, Any]:
    return _core.plan_capacity(
        leaders=case.leaders,
        draft_layers=1,
        row_bytes=case.row_bytes,
        block_align_bytes=1,
        indexer_row_bytes=INDEXER,
        tokens_per_indexer_row=case.tokens_per_indexer_row,
        top_k=TOP_K,
        max_positions=1 << 20,
        request_groups=[(case.ring_bytes, 1)] if case.ring_bytes else [],
        kv_gib=case.kv_bytes / 2**30,
        gpu_memory_utilization=0.92,
        runtime_gib=15.0,
        tp=1,
        dp=1,
        block_size=case.block_size,
        hot_rows=case.hot_rows,
        mtp=case.mtp,
        host_pool_gib=case.host_bytes / 2**30,
        registration_gib=256.0,
        contexts=[case.max_model_len],
        output=0,
        batched_tokens=case.batched_tokens,
        max_num_seqs=1 << 30,
        layout="row_interleaved",
    )


def check(case: Case) -> None:
    theirs, ours = of_vllm(case), of_planner(case)
    packing, (point,) = ours["packing"], ours["points"]
    assert packing["num_groups"] == theirs.num_groups
    assert [sum(group) for group in packing["groups"]] == theirs.layers_in_groups
    assert packing["block_bytes"] == theirs.bytes_per_block
    assert packing["host_page_bytes"] == theirs.host_page_bytes
    assert packing["hot_blocks_per_request"] == theirs.hot_blocks_per_request
    assert packing["ordinary_block_bytes"] == theirs.ordinary_bytes_per_block
    assert point["steady_state"] == theirs.steady_state
    assert point["ordinary"] == pytest.approx(theirs.ordinary, rel=1e-12)


@pytest.fixture(autouse=True)
def on_a_cuda_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's planning asks the platform only whether it is CUDA."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)


GEOMETRIES = {
    "deepseek-v3.2": Case([True] * 61),
    "glm-like fp8": Case(glm_like()),
    "glm-like bf16": Case(glm_like(), BF16),
}


@pytest.mark.parametrize("mtp", [0, 1, 3])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_three_geometries_agree(name: str, mtp: int) -> None:
    case = GEOMETRIES[name]
    check(Case(case.leaders, case.row_bytes, mtp=mtp))


def test_the_glm_profile_agrees() -> None:
    leaders = _core.layers_with_indexer(78, 4, 3)
    for max_model_len in (4096, 131_072, 1_048_576):
        check(Case(leaders, mtp=3, max_model_len=max_model_len))


def test_the_indexer_rule_is_that_of_the_model_code() -> None:
    import inspect

    from vllm.models.deepseek_v32 import attention

    # The rule is an expression inside a constructor; its text is compared, so that a change of it
    # is noticed.
    source = " ".join(inspect.getsource(attention).split())
    assert "max(layer_id - index_skip_topk_offset + 1, 0) % index_topk_freq != 0" in source
    assert 'skip_topk = index_topk_pattern[layer_id] == "S"' in source
    for frequency, offset in [(1, 2), (2, 2), (4, 3), (3, 0), (5, 7)]:
        expected = [max(layer - offset + 1, 0) % frequency == 0 for layer in range(80)]
        assert _core.layers_with_indexer(80, frequency, offset) == expected


def test_a_pooled_indexer_with_a_ring_agrees() -> None:
    case = Case(glm_like(), block_size=256, tokens_per_indexer_row=4, ring_bytes=2048)
    check(case)


def random_case(rng: random.Random) -> Case:
    layers = rng.randint(1, 90)
    leaders = [True, *(rng.random() < rng.choice([0.2, 0.5, 1.0]) for _ in range(layers - 1))]
    mtp = rng.choice([0, 0, 1, 2, 3, 7])
    union = TOP_K * (mtp + 1)
    hot_rows = rng.choice([None, union, union + rng.randint(0, 4096)])
    pooled = rng.random() < 0.25
    max_model_len = rng.randint(1, 400_000)
    row_bytes = rng.choice([FP8, BF16, 16 * rng.randint(1, 120)])
    pages = math.ceil(max_model_len / (256 if pooled else 64)) + 2
    page_bytes = (layers + 1) * row_bytes * (256 if pooled else 64)
    return Case(
        leaders,
        row_bytes,
        mtp=mtp,
        hot_rows=min(hot_rows, 32_768) if hot_rows else None,
        block_size=256 if pooled else 64,
        tokens_per_indexer_row=4 if pooled else 1,
        ring_bytes=16 * rng.randint(1, 10 ** rng.randint(1, 6))
        if pooled and rng.random() < 0.5
        else 0,
        max_model_len=max_model_len,
        batched_tokens=rng.choice([256, 2048, 8192, 32_768]),
        kv_bytes=rng.randint(1 << 28, 200 << 30),
        host_bytes=pages * page_bytes + rng.randint(0, 512 << 30),
    )


@pytest.mark.parametrize("seed", range(200))
def test_random_models_and_machines_agree(seed: int) -> None:
    case = random_case(random.Random(seed))
    check(case)
