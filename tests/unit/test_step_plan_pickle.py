# SPDX-License-Identifier: Apache-2.0
"""Plans cross process borders as one bytes object, unchanged, and damaged bytes are refused."""

from __future__ import annotations

import pickle

import core_builder as build
import numpy as np
import pytest

from hotpage import _core
from hotpage.errors import ProtocolError


def lists(plan: _core.StepPlan | _core.FreePlan) -> dict[str, object]:
    values: dict[str, object] = {}
    for name in dir(plan):
        value = getattr(plan, name)
        if isinstance(value, np.ndarray):
            values[name] = (value.dtype.str, value.shape, value.tolist())
        elif isinstance(value, int | list) and not name.startswith("_"):
            values[name] = value
    return values


def refused_plan() -> _core.StepPlan:
    """A plan with spills, deltas, a replay plan with drafts and a refusal."""
    core = build.coordinator(transition_watermark=20)
    build.spilling(core)
    grow = build.allocated(0, 4, [5, 6, 7], [(9, 10), (11, 12), (13, 14)])
    core.step(gpu_free=55, host_free=20, allocated=grow, scheduled=build.scheduled(0, 14, 12))
    return core.step(gpu_free=2, host_free=20, scheduled=build.scheduled(0, 26, 2, 1))


def test_a_step_plan_survives_pickling_with_every_list() -> None:
    plan = refused_plan()
    before = lists(plan)
    assert len(before) == 38, "34 lists, refusals, step, num_kv_groups, all_context_resident"
    copy = pickle.loads(pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL))
    assert lists(copy) == before
    assert copy == plan
    assert plan.replay_row_provisional.tolist() == [0, 1]
    [(request, refusal)] = copy.refusals
    assert request == 0
    assert refusal == plan.refusals[0][1]
    assert (refusal.pool, refusal.need, refusal.have, refusal.reclaiming) == ("gpu", 4, 2, True)


def test_a_free_plan_survives_pickling() -> None:
    core = build.coordinator()
    build.spilling(core)
    plan = core.on_freed(0, "finished")
    copy = pickle.loads(pickle.dumps(plan))
    assert lists(copy) == lists(plan)
    assert copy == plan
    assert copy.free_gpu.tolist() == plan.free_gpu.tolist() != []


def test_lists_are_read_only_views_of_the_bytes() -> None:
    plan = refused_plan()
    array = plan.residency_blocks
    assert array.base is plan.to_bytes()
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 1
    assert plan.residency_blocks.shape[1:] == (build.NUM_GROUPS,)
    with pytest.raises(AttributeError, match="'StepPlan' object has no attribute 'residency'"):
        plan.residency  # type: ignore[attr-defined]  # noqa: B018


def test_a_plan_outlives_its_coordinator_and_does_not_change_with_the_next_one() -> None:
    core = build.coordinator()
    first = build.spilling(core)
    before = lists(first)
    core.step(gpu_free=50, host_free=20)
    del core
    assert lists(first) == before


def test_damaged_bytes_are_refused() -> None:
    data = refused_plan().to_bytes()
    for at, value, why in [
        (0, 0, "another tag"),
        (4, 9, "another version"),
        (32, 1, "another number of lists"),
        (40, 7, "length is not what their lists add up to|differ in length"),
    ]:
        damaged = bytearray(data)
        damaged[at] = value
        with pytest.raises(ProtocolError, match=why):
            _core.StepPlan.from_bytes(bytes(damaged))
    for length in [*range(0, 60), len(data) - 1]:
        with pytest.raises(ProtocolError):
            _core.StepPlan.from_bytes(data[:length])
    with pytest.raises(ProtocolError):
        _core.StepPlan.from_bytes(data + b"\0")
    with pytest.raises(ProtocolError, match="no free plan"):
        _core.FreePlan.from_bytes(data)
