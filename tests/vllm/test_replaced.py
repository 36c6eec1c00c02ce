# SPDX-License-Identifier: Apache-2.0
"""Cases that stand for cases of vLLM's suite; compat_plugin.py says which and why."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from sides import HOTPAGE, Shape, Side, make_request, make_side
from worker_on_cpu import ONE_EACH, vllm_config

from hotpage.vllm import HiSparseConnector, plugin

pytestmark = pytest.mark.vllm

BLOCK = 16


def side(
    num_blocks: int = 64,
    *,
    groups: int = 1,
    max_model_len: int = 128,
    window: int = 128,
    drafts: int = 0,
) -> Side:
    return make_side(
        HOTPAGE,
        Shape(
            num_groups=groups,
            block_size=BLOCK,
            hot_blocks=2,
            num_blocks=num_blocks,
            host_blocks=32,
            max_model_len=max_model_len,
            max_in_flight_tokens=window,
            num_speculative_tokens=drafts,
        ),
    )


def allocate(side: Side, request, tokens: int, **kwargs):
    if request.request_id not in side.requests:
        side.admit(request)
    return side.manager.allocate_slots(request, tokens, **kwargs)


def step(side: Side, request, tokens: int, **kwargs):
    """Allocates and plans one step of one request; returns its metadata."""
    assert allocate(side, request, tokens, **kwargs) is not None
    return side.plan([(request.request_id, tokens)])


def settle(side: Side, metadata) -> None:
    """Acknowledges every transfer of a step."""
    ids = side.transfers(metadata)
    side.report(ids, ids)


def import_prompt(side: Side, num_tokens: int):
    """A request whose whole prompt a sibling has brought; returns it."""
    request = make_request("import", list(range(num_tokens)), BLOCK)
    external = {"num_external_computed_tokens": num_tokens, "delay_cache_blocks": True}
    assert allocate(side, request, 0, **external) is not None
    request.num_computed_tokens = num_tokens
    side.report((), (), finished_recving={"import"})
    side.manager.cache_blocks(request, num_tokens)
    return request


def test_unverified_tokens_keep_their_page_unsealed() -> None:
    side_ = side(drafts=3)
    request = make_request("request", list(range(2 * BLOCK - 2)), BLOCK)
    settle(side_, step(side_, request, 2 * BLOCK - 2))
    request.num_computed_tokens = 2 * BLOCK - 2
    request.append_output_token_ids(1)
    # One certain token and three drafts reach past the second page.
    metadata = step(side_, request, 4, num_lookahead_tokens=3)
    assert not side_.transfers(metadata)
    # An asynchronous engine plans the next step before it knows what was accepted.
    request.num_computed_tokens += 4
    assert not side_.transfers(step(side_, request, 4, num_lookahead_tokens=3))
    # All were accepted: now the page is certain.
    request.append_output_token_ids([1, 1, 1])
    assert len(side_.transfers(step(side_, request, 4, num_lookahead_tokens=3))) == 1


@pytest.mark.parametrize("num_tokens", [16, 32])
def test_an_import_that_ends_at_a_page_boundary_publishes_its_last_page_after_the_copy(
    num_tokens: int,
) -> None:
    side_ = side()
    request = import_prompt(side_, num_tokens)
    host = side_.manager.get_blocks("import").blocks[0]
    gpu = side_.coordinator.resident_managers[0].req_to_blocks["import"][-1]
    restore = side_.plan([])
    assert len(side_.transfers(restore)) == 1
    # Nothing is published on rows that were read through a restore nobody has confirmed.
    assert all(block.block_hash is None for block in host)
    # The last token is computed again, for its logits, and the page with it.
    request.num_computed_tokens = num_tokens - 1
    again = step(side_, request, 1)
    assert len(side_.transfers(again)) == 1
    settle(side_, restore)
    assert host[-1].block_hash is None
    assert gpu.ref_cnt == 2
    settle(side_, again)
    assert host[-1].block_hash is not None
    assert gpu.ref_cnt == 1
    assert side_.coordinator.copies[host[-1].block_hash] == (gpu,)


@pytest.mark.parametrize("caching", [False, True])
def test_a_region_is_asked_for_only_when_the_pool_can_give_it(caching: bool) -> None:
    side_ = side(num_blocks=32, max_model_len=256, window=64)
    if not caching:
        side_.manager.coordinator.cache_blocks = lambda *_: None
    first = make_request("first", list(range(160)), BLOCK)
    settle(side_, step(side_, first, 128))
    first.num_computed_tokens = 128
    pool = side_.manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    (hot,) = side_.coordinator.hot_managers
    hot.hot_required.clear()
    # One block is left after this page, a region needs two: asking would make the next
    # allocation fail, and the request be preempted.
    settle(side_, step(side_, first, 1))
    assert pool.get_num_free_blocks() == 1
    assert "first" not in hot.hot_required
    assert side_.coordinator.all_context_pages_resident([("first", 128, 1)])
    # With two blocks free it is asked, gets the region, and gives up its pages.
    pool.free_blocks(held[:6])
    side_.plan([("first", 1)])
    assert "first" in hot.hot_required
    settle(side_, step(side_, first, 1))
    assert hot.has_hot("first")
    pool.get_new_blocks(pool.get_num_free_blocks())
    assert not side_.coordinator.all_context_pages_resident([("first", 128, 1)])


@pytest.mark.parametrize("groups", [1, 3])
def test_every_sealed_page_is_handed_over_in_the_step_that_seals_it(groups: int) -> None:
    side_ = side(groups=groups)
    request = make_request("request", list(range(6 * BLOCK)), BLOCK)
    assert len(side_.transfers(step(side_, request, 6 * BLOCK))) == 6


def test_a_received_import_is_valid_up_to_its_last_page() -> None:
    side_ = side()
    import_prompt(side_, 2 * BLOCK)
    assert side_.coordinator.request_states["import"].valid_pages == {0}


def test_a_partial_last_page_of_an_import_is_not_valid() -> None:
    side_ = side()
    import_prompt(side_, BLOCK + 1)
    state = side_.coordinator.request_states["import"]
    assert state.valid_pages == {0}
    assert state.ready_prefix_pages == 1


def test_a_prefill_past_its_window_keeps_residency_while_there_is_room() -> None:
    side_ = side(num_blocks=128, window=4 * BLOCK)
    request = make_request("prefill", list(range(8 * BLOCK)), BLOCK)
    settle(side_, step(side_, request, 6 * BLOCK))
    request.num_computed_tokens = 6 * BLOCK
    (hot,) = side_.coordinator.hot_managers
    pool = side_.manager.block_pool
    assert pool.get_num_free_blocks() >= side_.coordinator.transition_watermark
    assert not hot.hot_required
    # The same prefill with little room left is asked before the next chunk could fail.
    pool.get_new_blocks(pool.get_num_free_blocks() - 8)
    settle(side_, side_.plan([("prefill", 0)]))
    assert "prefill" in hot.hot_required


def test_the_layout_of_the_device_is_block_outermost() -> None:
    plugin.activate()
    config = vllm_config(
        ONE_EACH, "auto", num_blocks=64, max_requests=4, max_tokens=64, max_model_len=128
    )
    assert HiSparseConnector.get_required_kvcache_layout(config) == "BLHNC"
