# SPDX-License-Identifier: Apache-2.0
"""What a scheduler that cannot grow a request is told: to wait only for what will come."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from sides import HOTPAGE, Shape, Side, make_request, make_side

pytestmark = pytest.mark.vllm

BLOCK = 16
SHAPE = Shape(
    num_groups=3,
    block_size=BLOCK,
    hot_blocks=2,
    num_blocks=120,
    host_blocks=128,
    max_model_len=512,
    max_in_flight_tokens=64,
)
REGION = 6
PAGE = 4


def resident(side: Side, name: str, num_pages: int):
    """A running request whose pages are all on the GPU, and copied."""
    first = 1000 * len(side.requests)
    request = make_request(name, list(range(first, first + num_pages * BLOCK)), BLOCK)
    side.admit(request)
    while request.num_computed_tokens < request.num_tokens:
        tokens = min(4 * BLOCK, request.num_tokens - request.num_computed_tokens)
        assert side.manager.allocate_slots(request, tokens) is not None
        ids = side.transfers(side.plan([(name, tokens)]))
        side.report(ids, ids)
        request.num_computed_tokens += tokens
    request.append_output_token_ids(1)
    return request


def idle_steps_until_it_says_no(side: Side) -> int:
    """Steps in which nothing is scheduled, as long as the scheduler is told to wait."""
    for step in range(20):
        if not side.coordinator.has_pending_reclamation():
            return step
        ids = side.transfers(side.plan([]))
        side.report(ids, ids)
    raise AssertionError("told to wait for ever")


def leave_free(side: Side, num_blocks: int) -> None:
    pool = side.manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - num_blocks)


def test_a_request_that_cannot_take_its_region_and_a_page_does_not_wait_for_itself() -> None:
    side = make_side(HOTPAGE, SHAPE)
    request = resident(side, "only", 8)
    # Enough for the region or for a page, not for both.
    leave_free(side, REGION + PAGE - 1)
    side.plan([])
    assert "only" in side.coordinator.hot_managers[0].hot_required
    assert side.manager.allocate_slots(request, 1) is None
    assert idle_steps_until_it_says_no(side) < 3


def test_a_request_does_not_wait_for_one_that_waits_behind_it() -> None:
    side = make_side(HOTPAGE, SHAPE)
    first = resident(side, "first", 2)
    resident(side, "behind", 8)
    leave_free(side, REGION)
    side.plan([])
    assert "behind" in side.coordinator.hot_managers[0].hot_required
    # vLLM stops its running loop here; the one behind is not asked for its allocation.
    assert side.manager.allocate_slots(first, 2 * BLOCK) is None
    assert idle_steps_until_it_says_no(side) < 3


def test_a_region_taken_in_the_same_pass_is_worth_waiting_for() -> None:
    side = make_side(HOTPAGE, SHAPE)
    before = resident(side, "before", 8)
    first = resident(side, "first", 2)
    leave_free(side, REGION + PAGE)
    side.plan([])
    assert "before" in side.coordinator.hot_managers[0].hot_required
    assert side.manager.allocate_slots(before, 1) is not None
    assert side.manager.allocate_slots(first, 1) is None
    assert side.coordinator.has_pending_reclamation()
    side.plan([("before", 1)])
    assert side.manager.allocate_slots(first, 1) is not None


def test_a_request_that_is_not_scheduled_any_more_does_not_stand_for_those_that_are() -> None:
    side = make_side(HOTPAGE, SHAPE)
    # Finished, its blocks held until a sibling has sent them.
    resident(side, "sending", 8)
    request = resident(side, "running", 8)
    leave_free(side, REGION + 8)
    (hot, *_) = side.coordinator.hot_managers
    for _ in range(12):
        ids = side.transfers(side.plan([("running", 0)]))
        side.report(ids, ids)
        if "running" in hot.hot_required:
            break
    assert "running" in hot.hot_required
    assert side.manager.allocate_slots(request, 1) is not None


def test_pages_of_running_requests_make_room_for_a_waiting_one() -> None:
    side = make_side(HOTPAGE, SHAPE)
    running = [resident(side, "one", 13), resident(side, "two", 13)]
    waiting = make_request("waiting", list(range(5000, 5000 + 10 * BLOCK)), BLOCK)

    def admitted() -> bool:
        new = side.manager.allocate_slots(
            waiting, 4 * BLOCK, full_sequence_must_fit=True, has_scheduled_reqs=True
        )
        return new is not None

    assert not admitted()
    for _ in range(6):
        batch = []
        for request in running:
            assert side.manager.allocate_slots(request, 1) is not None
            batch.append((request.request_id, 1))
        if admitted():
            return
        ids = side.transfers(side.plan(batch))
        side.report(ids, ids)
        for request in running:
            request.num_computed_tokens += 1
            request.append_output_token_ids(1)
    raise AssertionError("the waiting request does not fit")
