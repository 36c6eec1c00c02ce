# SPDX-License-Identifier: Apache-2.0
"""Run-ahead, rejected drafts, aborts in every state, reused names, resets: nothing is read wrong.

Every row that attention reads is compared with what its request's tokens say, every page that is
handed to the host with the certain ones, and in the end every block is free.
"""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from ahead import ServingAhead
from serving import Traffic
from sides import HOTPAGE, VLLM, make_request, make_side
from test_differential import BLOCK, assert_nothing_leaks, shape

pytestmark = pytest.mark.vllm


def serve(name: str, seed: int, groups: int, drafts: int, *, fast_path: bool) -> ServingAhead:
    traffic = Traffic(
        seed=900 + seed,
        num_requests=40,
        max_prompt=40,
        max_output=12,
        chunk=16,
        imports=25,
        abort=4,
        reset=8,
    )
    blocks = 16 * (1 + groups) + 6 * (1 + drafts) * groups
    sizes = shape(groups, drafts, blocks, 40)
    side = make_side(name, sizes, fast_path=fast_path, hot_return_steps=20, kv_events=True)
    serving = ServingAhead(side, traffic)
    serving.run(max_steps=3000)
    return serving


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("groups", "drafts"), [(1, 0), (1, 3), (3, 2)])
@pytest.mark.parametrize("fast_path", [False, True])
def test_a_scheduler_ahead_of_its_workers_reads_and_hands_over_what_is_certain(
    seed: int, groups: int, drafts: int, fast_path: bool
) -> None:
    serving = serve(HOTPAGE, seed, groups, drafts, fast_path=fast_path)
    assert_nothing_leaks(serving)
    assert serving.num_handed_over
    assert serving.num_told
    # The workers know nobody for ever.
    assert serving.worker.names.keys() == set(serving.side.coordinator.retired)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rejected_row_is_written_again_before_its_page_is_handed_over(ahead: bool) -> None:
    side = make_side(HOTPAGE, shape(1, 3, 200, 40))
    # Three of four rows of the first page.
    request = make_request("request", [1, 2, 3], BLOCK)
    side.admit(request)

    def plan(tokens: int, drafts: int):
        assert side.manager.allocate_slots(request, tokens, num_lookahead_tokens=3) is not None
        metadata = side.plan([("request", tokens)], {"request": [7] * drafts} if drafts else None)
        request.num_computed_tokens += tokens
        return metadata.plans[-1]

    plan(2, 0)
    # Row 2, and drafts at rows 3 to 5: the first page is full of rows and one of them is a guess.
    assert not len(plan(4, 3).transfer_id)
    # An asynchronous engine plans the next step now, for after full acceptance.
    if ahead:
        assert not len(plan(4, 3).transfer_id)
    request.append_output_token_ids(50)
    request.num_computed_tokens -= 3
    last = plan(4, 3)
    assert last.transfer_id.tolist() == [1]
    # Row 3 is written by the step that hands its page over, or was by the one in flight.
    assert last.transfer_after_forward.tolist() == [0 if ahead else 1]
    assert last.replay_dropped_rows.tolist() == [3]
    assert last.replay_dropped_position.tolist() == [7 if ahead else 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_loop_itself_is_right_for_vllms_own_coordinator(seed: int) -> None:
    assert_nothing_leaks(serve(VLLM, seed, 2, 2, fast_path=False))


def test_the_traces_reach_what_they_are_there_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        serving = serve(HOTPAGE, seed, 1, 3, fast_path=False)
        seen.update(serving.side.coordinator.core.stats())
        seen["engine preemptions"] += serving.num_preemptions
    for name in ("pages_lost", "restores_planned", "rows_rejected", "engine preemptions"):
        assert seen[name] > 0, name
