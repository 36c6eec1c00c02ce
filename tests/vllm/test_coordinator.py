# SPDX-License-Identifier: Apache-2.0
"""The seam itself: batched pool work, hot regions both ways, metadata, failed imports."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import chain
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")


from compat_plugin import disable_methods
from serving import Serving, Traffic
from sides import HOTPAGE, Shape, Side, make_request, make_side
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.hisparse.coordinator import HiSparseCoordinator
from vllm.v1.request import RequestStatus

from hotpage.errors import ProtocolError
from hotpage.vllm.coordinator import NativeCoordinator

pytestmark = pytest.mark.vllm

BLOCK = 16


def side(num_blocks: int = 400, *, hot_return_steps: int = 512, **kwargs: Any) -> Side:
    sizes = {
        "num_groups": 3,
        "block_size": BLOCK,
        "hot_blocks": 2,
        "num_blocks": num_blocks,
        "host_blocks": 64,
        "max_model_len": 256,
        "max_in_flight_tokens": 64,
    }
    shape = Shape(**{**sizes, **kwargs})
    return make_side(HOTPAGE, shape, hot_return_steps=hot_return_steps)


def step(side: Side, request, tokens: int) -> Any:
    assert side.manager.allocate_slots(request, tokens) is not None
    metadata = side.plan([(request.request_id, tokens)])
    request.num_computed_tokens += tokens
    return metadata


@pytest.fixture
def pool_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of the pool methods that take blocks."""
    calls: Counter[str] = Counter()
    for name in ("touch", "free_blocks", "unpin_blocks"):
        original = getattr(BlockPool, name)

        def counted(pool, *arguments, _name=name, _original=original):
            calls[_name] += 1
            return _original(pool, *arguments)

        monkeypatch.setattr(BlockPool, name, counted)
    return calls


def test_a_step_makes_one_call_per_pool_and_method(pool_calls: Counter[str]) -> None:
    side_ = side()
    request = make_request("request", list(range(8 * BLOCK)), BLOCK)
    side_.admit(request)
    metadata = step(side_, request, 8 * BLOCK)
    ids = side_.transfers(metadata)
    assert len(ids) == 8
    # The copies lease the blocks of 8 pages in 3 groups, and 8 host blocks.
    assert pool_calls == {"touch": 2}
    pool_calls.clear()
    side_.report(ids, ids)
    assert pool_calls == {"free_blocks": 2}


def test_a_finish_unpins_all_pages_in_one_call(pool_calls: Counter[str]) -> None:
    side_ = side()
    request = make_request("request", list(range(8 * BLOCK)), BLOCK)
    side_.admit(request)
    ids = side_.transfers(step(side_, request, 8 * BLOCK))
    side_.report(ids, ids)
    request.status = RequestStatus.FINISHED_STOPPED
    pool_calls.clear()
    side_.manager.free(request)
    # One for the pages; vLLM frees each group's table, empty or not.
    managers = side_.manager.coordinator.single_type_managers
    assert pool_calls["unpin_blocks"] == 1
    assert pool_calls["free_blocks"] <= len(managers)
    pool = side_.manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_a_hot_region_goes_back_through_vllms_pool_and_comes_again() -> None:
    side_ = side(hot_return_steps=3)
    coordinator, pool = side_.coordinator, side_.manager.block_pool
    donor = make_request("donor", list(range(6 * BLOCK)), BLOCK)
    side_.admit(donor)
    ids = side_.transfers(step(side_, donor, 6 * BLOCK))
    side_.report(ids, ids)
    donor.status = RequestStatus.FINISHED_STOPPED
    side_.manager.free(donor)
    del side_.scheduler.requests["donor"]

    hit = make_request("hit", list(range(6 * BLOCK)), BLOCK)
    side_.admit(hit)
    blocks, num_tokens, _ = side_.manager.get_computed_blocks(hit)
    tokens = 6 * BLOCK - num_tokens
    prefix = {"num_new_computed_tokens": num_tokens, "new_computed_blocks": blocks}
    new = side_.manager.allocate_slots(hit, tokens, **prefix)
    first_region = [ids[:] for ids in new.get_block_ids()[5:]]
    assert [len(ids) for ids in first_region] == [2, 2, 2]
    hit.num_computed_tokens = num_tokens
    metadata = side_.plan([("hit", tokens)])
    assert metadata.plans[-1].hot_region_blocks.tolist() == [[*chain(*first_region)]]
    ids = side_.transfers(metadata)
    side_.report(ids, ids)
    hit.num_computed_tokens = 6 * BLOCK

    def decode() -> Any:
        hit.append_output_token_ids(1)
        new = side_.manager.allocate_slots(hit, 1)
        assert new is not None
        metadata = side_.plan([("hit", 1)])
        ids = side_.transfers(metadata)
        side_.report(ids, ids)
        hit.num_computed_tokens += 1
        return new, metadata

    # There is room, so the pages of the hit are pinned again and the region is not needed.
    decode()
    free = pool.get_num_free_blocks()
    for _ in range(10):
        _, metadata = decode()
        if len(metadata.plans[-1].hot_regions_returned):
            break
    assert metadata.plans[-1].step >= 3
    assert pool.get_num_free_blocks() == free + 6
    assert not any(manager.has_hot("hit") for manager in coordinator.hot_managers)
    assert not coordinator.hot_managers[0].hot_required

    # Under pressure it gets another one; the workers' block tables, which only grow, do not.
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 20)
    decode()
    assert "hit" in coordinator.hot_managers[0].hot_required
    new, metadata = decode()
    assert new.get_block_ids(allow_none=True) is None
    region = [b.block_id for m in coordinator.hot_managers for b in m.req_to_blocks["hit"]]
    assert metadata.plans[-1].hot_region_blocks.tolist() == [region]

    pool.free_blocks(held)
    hit.status = RequestStatus.FINISHED_STOPPED
    side_.manager.free(hit)
    side_.report((), ())
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_metadata_survives_pickling_and_says_what_it_said() -> None:
    side_ = side()
    request = make_request("request", list(range(8 * BLOCK)), BLOCK)
    side_.admit(request)
    metadata = step(side_, request, 8 * BLOCK)
    copy = pickle.loads(pickle.dumps(metadata))
    assert copy == metadata
    assert copy.residency_updates.keys() == {"request"}
    table = side_.manager.get_block_ids("request")[2]
    assert copy.residency_updates["request"].block_ids[0] == table
    assert copy.started == ((0, "request"),)


def test_every_public_method_of_vllms_coordinator_is_ours() -> None:
    public = {
        name
        for name, member in vars(HiSparseCoordinator).items()
        if callable(member) and not name.startswith("_")
    }
    # Only its own methods and tests call it; imports end through finish_host_import.
    public -= {"complete_host_import"}
    for name in public:
        owner = next(cls for cls in NativeCoordinator.__mro__ if name in vars(cls))
        assert owner is not HiSparseCoordinator, name


def test_no_method_of_vllms_coordinator_runs_in_a_whole_life(monkeypatch) -> None:
    for name, member in list(vars(HiSparseCoordinator).items()):
        if callable(member):
            # So that monkeypatch restores it.
            monkeypatch.setattr(HiSparseCoordinator, name, member)
    disable_methods(HiSparseCoordinator)
    shape = Shape(
        num_groups=2,
        block_size=4,
        hot_blocks=8,
        num_blocks=100,
        host_blocks=40,
        max_model_len=64,
        max_in_flight_tokens=16,
        num_speculative_tokens=3,
    )
    traffic = Traffic(seed=7, num_requests=30, max_prompt=40, max_output=12, chunk=16)
    serving = Serving(make_side(HOTPAGE, shape), traffic)
    serving.run(max_steps=3000)
    assert len(serving.finished) == 30


def test_a_request_scheduled_before_its_import_ended_is_a_protocol_error() -> None:
    side_ = side()
    request = make_request("import", list(range(40)), BLOCK)
    side_.admit(request)
    external = {"num_external_computed_tokens": 40, "delay_cache_blocks": True}
    assert side_.manager.allocate_slots(request, 0, **external) is not None
    request.num_computed_tokens = 39
    with pytest.raises(ProtocolError, match="before its import has ended"):
        side_.plan([("import", 1)])


def test_late_repeated_and_unknown_acknowledgements_change_nothing() -> None:
    side_ = side()
    request = make_request("request", list(range(4 * BLOCK)), BLOCK)
    side_.admit(request)
    ids = side_.transfers(step(side_, request, 4 * BLOCK))
    side_.report(ids, ids)
    digest = side_.coordinator.core.state_digest()
    side_.report(ids, ids)
    side_.report([9999], [9999])
    assert side_.coordinator.core.state_digest() == digest


def finished_donor(side_: Side, num_pages: int, name: str = "donor") -> Any:
    request = make_request(name, list(range(num_pages * BLOCK)), BLOCK)
    side_.admit(request)
    ids = side_.transfers(step(side_, request, num_pages * BLOCK))
    side_.report(ids, ids)
    return request


def finish(side_: Side, request: Any) -> None:
    request.status = RequestStatus.FINISHED_STOPPED
    del side_.scheduler.requests[request.request_id]
    side_.manager.free(request)


def test_a_hit_is_no_longer_than_what_the_indexer_still_has() -> None:
    side_ = side()
    donor = finished_donor(side_, 6)
    indexer = side_.manager.get_block_ids("donor")[1]
    finish(side_, donor)
    side_.manager.evict_blocks({indexer[3]})
    hit = make_request("hit", list(range(6 * BLOCK)), BLOCK)
    side_.admit(hit)
    blocks, num_tokens, _ = side_.manager.get_computed_blocks(hit)
    assert num_tokens == 3 * BLOCK
    prefix = {"num_new_computed_tokens": num_tokens, "new_computed_blocks": blocks}
    assert side_.manager.allocate_slots(hit, 3 * BLOCK, **prefix) is not None
    hit.num_computed_tokens = num_tokens
    metadata = side_.plan([("hit", 3 * BLOCK)])
    states = side_.coordinator.request_states["hit"]
    # The donor's GPU copies of the three pages are read again, the rest is computed.
    assert states.valid_pages == {0, 1, 2}
    assert sorted(metadata.residency_updates["hit"].pages) == list(range(6))
    assert metadata.all_context_pages_resident


def test_blocks_that_a_sibling_still_reads_are_handed_to_nobody() -> None:
    side_ = side()
    pool = side_.manager.block_pool
    donor = finished_donor(side_, 6)
    # A sibling stores the indexer's pages and leases them meanwhile, as OffloadingConnector does.
    indexer = [pool.blocks[id] for id in side_.manager.get_block_ids("donor")[1]]
    pool.touch(indexer)
    finish(side_, donor)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(indexer)
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert not {block.block_id for block in taken} & {block.block_id for block in indexer}
    pool.free_blocks(indexer)
    pool.free_blocks(taken)
    side_.report((), ())
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_an_import_that_ends_before_its_last_page_is_confirmed_publishes_nothing() -> None:
    # Rows computed since were computed from a page whose restore nobody has confirmed.
    side_ = side()
    request = make_request("import", list(range(2 * BLOCK)), BLOCK)
    side_.admit(request)
    external = {"num_external_computed_tokens": 2 * BLOCK, "delay_cache_blocks": True}
    assert side_.manager.allocate_slots(request, 0, **external) is not None
    request.num_computed_tokens = 2 * BLOCK
    side_.report((), (), finished_recving={"import"})
    side_.manager.cache_blocks(request, 2 * BLOCK)
    host = side_.manager.get_blocks("import").blocks[0]
    request.num_computed_tokens -= 1
    ids = side_.transfers(step(side_, request, 1))
    finish(side_, request)
    side_.report(ids, ids)
    side_.report((), ())
    assert all(block.block_hash is None for block in host)
    for pool in (side_.manager.block_pool, side_.coordinator.host_pool):
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_a_name_that_comes_again_while_its_copies_are_under_way_is_another_request() -> None:
    side_ = side()
    first = make_request("same", list(range(4 * BLOCK)), BLOCK)
    side_.admit(first)
    metadata = step(side_, first, 4 * BLOCK)
    finish(side_, first)
    second = make_request("same", list(range(500, 500 + 4 * BLOCK)), BLOCK)
    side_.admit(second)
    again = step(side_, second, 4 * BLOCK)
    assert [name for _, name in again.started] == ["same"]
    assert again.started[0][0] != metadata.started[0][0]
    ids = side_.transfers(metadata)
    side_.report(ids, ids)
    ids = side_.transfers(again)
    side_.report(ids, ids)
    side_.manager.cache_blocks(second, 4 * BLOCK)
    # Both prefixes are found, each with its own rows.
    for request in (first, second):
        probe = make_request("probe", [*request.prompt_token_ids, 1], BLOCK)
        assert side_.manager.get_computed_blocks(probe)[1] == 4 * BLOCK
