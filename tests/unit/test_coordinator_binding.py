# SPDX-License-Identifier: Apache-2.0
"""A small scripted life through the bindings, seen from a toy worker and from page states."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import core_builder as build
import numpy as np
import pytest

import hotpage
from hotpage import _core

D, S, C, U, H = (
    _core.PAGE_DIRTY,
    _core.PAGE_SPILLING,
    _core.PAGE_CLEAN,
    _core.PAGE_UNPINNED,
    _core.PAGE_HOST_ONLY,
)


class ToyWorker:
    """Replays residency deltas: request -> page -> GPU blocks, as a device table would hold."""

    def __init__(self) -> None:
        self.table: dict[int, dict[int, list[int]]] = {}
        self.hot: dict[int, list[int]] = {}

    def apply(self, plan: _core.StepPlan) -> None:
        for request in plan.residency_cleared.tolist():
            self.table[request] = {}
        deltas = zip(
            plan.residency_request.tolist(),
            plan.residency_page.tolist(),
            plan.residency_blocks.tolist(),
            strict=True,
        )
        for request, page, blocks in deltas:
            self.table[request][page] = blocks
        regions = zip(
            plan.hot_region_request.tolist(), plan.hot_region_blocks.tolist(), strict=True
        )
        self.hot.update(regions)

    def check(self, core: _core.Coordinator, request: int) -> None:
        """Every page reads where the Coordinator says it is."""
        for page in range(core.num_pages(request)):
            expected = core.resident_blocks(request, page)
            seen = self.table[request].get(page, [0] * build.NUM_GROUPS)
            assert seen == (expected or [0] * build.NUM_GROUPS), f"page {page}"


def step(core: _core.Coordinator, gpu_free: int = 55, **events: object) -> _core.StepPlan:
    return core.step(gpu_free=gpu_free, host_free=20, **events)  # type: ignore[arg-type]


def test_a_request_lives_from_admission_through_all_three_residencies_to_its_end() -> None:
    core = build.coordinator(transition_watermark=8)
    worker = ToyWorker()

    # Full residency: four pages written, three sealed and on their way to the host.
    plan = build.spilling(core)
    worker.apply(plan)
    worker.check(core, 0)
    assert list(core.page_states(0)) == [S, S, S, D]
    assert plan.step == 1
    assert plan.all_context_resident
    assert plan.transfer_id.tolist() == [1, 2, 3]
    assert plan.transfer_host_block.tolist() == [1, 2, 3]
    assert plan.transfer_resident_blocks.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert plan.touch_gpu.tolist() == [1, 2, 3, 4, 5, 6]
    assert plan.transfer_after_forward.tolist() == [1, 1, 1]
    core.on_worker_output(enqueued=build.acks([1, 2, 3]), completed=build.acks([1, 2, 3]))
    assert list(core.page_states(0)) == [C, C, C, D]
    assert core.durable_prefix(0) == 3

    # Pressure: the plan asks for a hot region, and returns the leases of the spills. A region
    # pays off only when it costs less than it frees, so the request grows first.
    grow = build.allocated(0, 4, [5, 6, 7], [(9, 10), (11, 12), (13, 14)])
    plan = step(core, allocated=grow, scheduled=build.scheduled(0, 14, 12))
    worker.apply(plan)
    worker.check(core, 0)
    assert plan.publish_request.tolist() == [0]
    assert plan.publish_num_pages.tolist() == [3]
    assert sorted(plan.free_gpu.tolist()) == [1, 2, 3, 4, 5, 6]
    assert plan.free_host.tolist() == [1, 2, 3]
    core.on_worker_output(
        enqueued=build.acks(plan.transfer_id.tolist()),
        completed=build.acks(plan.transfer_id.tolist()),
    )
    plan = step(core, gpu_free=7, scheduled=build.scheduled(0, 26, 1, 0))
    worker.apply(plan)
    assert plan.hot_regions_wanted.tolist() == [0]
    assert plan.replay_row_position.tolist() == [26]
    assert plan.replay_union_bound.tolist() == [4]

    # Mixed residency: with the region the clean pages outside the tail are unpinned, tail last.
    assert core.hot_region_blocks == 4
    region = (build.ids(0), np.array([[40, 41, 42, 43]], np.int32))
    plan = step(core, gpu_free=3, hot_regions=region, scheduled=build.scheduled(0, 27, 1))
    worker.apply(plan)
    worker.check(core, 0)
    assert core.has_hot_region(0)
    assert worker.hot == {0: [40, 41, 42, 43]}
    assert list(core.page_states(0)) == [U, U, U, U, U, C, S]
    assert sorted(plan.unpin_gpu.tolist()) == list(range(1, 11))
    assert core.readable_copies(build.ids(2, 31)) == [[3, 4], None]

    # The pool hands out a block of page 1: the page is lost in both groups.
    plan = step(core, gpu_free=3, reused_blocks=build.ids(4))
    worker.apply(plan)
    assert list(core.page_states(0))[:3] == [U, H, U]
    assert core.resident_blocks(0, 1) == []
    grow = build.allocated(0, 7, [8], [(15, 16)])
    plan = step(core, gpu_free=3, allocated=grow, scheduled=build.scheduled(0, 28, 1))
    worker.apply(plan)
    worker.check(core, 0)
    assert worker.table[0][1] == [0, 0]
    assert not plan.all_context_resident

    # The end: readable copies are unpinned, the rest is freed, transfers drain.
    core.on_worker_output(
        enqueued=build.acks(transfers(core)), completed=build.acks(transfers(core))
    )
    freed = core.on_freed(0, "finished")
    assert freed.publish_pages == 7
    assert {40, 41, 42, 43} <= set(freed.free_gpu.tolist())
    assert freed.retired
    assert core.num_live == 0
    assert core.num_transfers == 0

    # No residency: a request resumes the prefix; only what it allocates is on the GPU.
    core.on_blocks_reused(build.ids(*[b for b in range(1, 15) if b != 4]))
    plan = step(
        core,
        admitted=build.admitted(0, [1, 2, 3]),
        allocated=build.allocated(0, 3, [9], [(17, 18)]),
        hot_regions=(build.ids(0), np.array([[44, 45, 46, 47]], np.int32)),
        scheduled=build.scheduled(0, 12, 2),
    )
    worker.apply(plan)
    worker.check(core, 0)
    assert list(core.page_states(0)) == [H, H, H, D]
    assert worker.table[0] == {3: [17, 18]}
    assert plan.residency_cleared.tolist() == [0], "the id was used before"
    stats = core.stats()
    assert (stats["admitted"], stats["finished"], stats["pages_lost"]) == (2, 1, 1)


def transfers(core: _core.Coordinator) -> list[int]:
    """Ids of the transfers in flight: they rise by one, and tests complete all of them at once."""
    done = core.stats()["spills_completed"]
    return list(range(done + 1, done + core.num_transfers + 1))


def test_admission_says_what_it_costs_or_why_not() -> None:
    core = build.coordinator()
    query = {"host_prefix_pages": 0, "gpu_prefix_pages": 0, "host_free": 30}
    cost = core.try_admit(num_tokens=16, gpu_free=63, **query)
    assert isinstance(cost, _core.AdmissionCost)
    assert (cost.gpu_blocks, cost.host_blocks, cost.hot_region) == (8, 4, False)
    refusal = core.try_admit(num_tokens=16, gpu_free=7, **query)
    assert isinstance(refusal, _core.Refusal)
    assert (refusal.pool, refusal.need, refusal.have) == ("gpu", 8, 7)
    assert not refusal.never_fits
    assert str(refusal) == "the GPU pool has 7 free blocks, 8 are needed"
    never = core.try_admit(num_tokens=2**31 - 1, gpu_free=63, **query)
    assert isinstance(never, _core.Refusal)
    assert never.never_fits
    assert never.pool == "host"
    assert never.need == 2**29


def test_the_settings_read_back_as_they_were_given() -> None:
    core = build.coordinator()
    assert core.config == {**build.SETTINGS, "transition_watermark": None}
    assert core.watermark == 6


def test_the_stub_names_exactly_what_the_module_has() -> None:
    stub = Path(inspect.getfile(hotpage)).with_name("_core.pyi")
    tree = ast.parse(stub.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    typed_dicts = {
        name for name, node in classes.items() if "TypedDict" in map(ast.unparse, node.bases)
    }
    settings = {
        ast.unparse(n.target) for n in classes["_Settings"].body if isinstance(n, ast.AnnAssign)
    }
    assert settings == set(build.coordinator().config)
    for name in classes.keys() - typed_dicts:
        stated = {item.name for item in classes[name].body if isinstance(item, ast.FunctionDef)}
        real = {attr for attr in dir_of(name) if not attr.startswith("_")}
        assert {attr for attr in stated if not attr.startswith("_")} == real, name
    constants = {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)}
    constants = {name for name in constants if name == "__version__" or not name.startswith("_")}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    stated = constants | functions | classes.keys() - typed_dicts
    assert {name for name in stated if not hasattr(_core, name)} == set()
    assert {name for name in dir(_core) if not name.startswith("_")} <= stated


def dir_of(name: str) -> list[str]:
    core = build.coordinator()
    instances = {"StepPlan": build.spilling(core), "FreePlan": core.on_freed(0, "aborted")}
    return dir(instances[name]) if name in instances else dir(getattr(_core, name))


@pytest.mark.parametrize("threads", [4])
def test_concurrent_calls_raise_or_wait_but_never_corrupt(threads: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    core = build.coordinator()

    def admit(request: int) -> None:
        core.on_admitted(*build.admitted(request))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(admit, range(200)))
    assert core.num_live == 200
