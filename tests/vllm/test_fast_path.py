# SPDX-License-Identifier: Apache-2.0
"""The allocate fast path answers as vLLM's own managers do, on the same random traces."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from serving import Traffic
from sides import HOTPAGE, Shape, make_request, make_side
from test_differential import assert_nothing_leaks, serve, shape
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import HiSparseResidentManager

from hotpage.errors import ConfigError
from hotpage.vllm.fast_path import install_fast_path

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize(("groups", "drafts"), [(1, 0), (2, 3)])
def test_it_lives_through_the_same_trace_as_vllms_managers(
    seed: int, tight: bool, groups: int, drafts: int
) -> None:
    traffic = Traffic(seed=500 + seed, num_requests=30, max_prompt=40, max_output=12, chunk=16)
    few = 16 * (1 + groups) + 6 * (1 + drafts) * groups
    pools = (few, 40) if tight else (2000, 1000)
    slow = serve(HOTPAGE, shape(groups, drafts, *pools), traffic)
    fast = serve(HOTPAGE, shape(groups, drafts, *pools), traffic, fast_path=True)
    assert fast.log == slow.log
    assert fast.finished == slow.finished
    assert_nothing_leaks(fast)


def test_a_request_that_needs_no_block_asks_no_manager(monkeypatch) -> None:
    side = make_side(
        HOTPAGE,
        Shape(
            num_groups=3,
            block_size=16,
            hot_blocks=2,
            num_blocks=200,
            host_blocks=32,
            max_model_len=128,
            max_in_flight_tokens=64,
        ),
        fast_path=True,
    )
    request = make_request("request", list(range(20)), 16)
    side.admit(request)
    assert side.manager.allocate_slots(request, 20) is not None
    request.num_computed_tokens = 20
    request.append_output_token_ids(1)

    def refuse(*_, **__):
        raise AssertionError("a manager was asked")

    monkeypatch.setattr(HiSparseResidentManager, "allocate_new_blocks", refuse)
    monkeypatch.setattr(KVCacheCoordinator, "cache_blocks", refuse)
    blocks = side.manager.allocate_slots(request, 1)
    assert blocks is not None
    assert blocks.get_block_ids(allow_none=True) is None
    request.num_computed_tokens = 32
    with pytest.raises(AssertionError, match="a manager was asked"):
        side.manager.allocate_slots(request, 1)


def test_a_manager_that_it_does_not_know_is_refused() -> None:
    side = make_side(HOTPAGE, shape(1, 0, 200, 100))
    coordinator = side.manager.coordinator
    managers = coordinator.single_type_managers

    class Stranger(type(managers[1])):
        """An indexer manager of another kind."""

    managers[1].__class__ = Stranger
    with pytest.raises(ConfigError, match="does not know Stranger; switch it off"):
        install_fast_path(coordinator)
