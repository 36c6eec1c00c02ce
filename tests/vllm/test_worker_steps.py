# SPDX-License-Identifier: Apache-2.0
"""Single steps of the native worker on a CPU: order of copies, tables and acknowledgements."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

import torch
from cpu_attention import Attention
from cpu_plans import LAYOUTS, PAGE, Make, Transfer, page_of, plan, seed_reader
from cpu_streams import Streams
from worker_on_cpu import BLOCK, MIXED, ONE_EACH, PACKED, Model

from hotpage._core import (
    TRANSFER_HOST_COPY,
    TRANSFER_MIRRORED,
    TRANSFER_RESTORE,
    TRANSFER_SPILL,
)
from hotpage.errors import InvariantError, ProtocolError

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("late", [True, False])
def test_draft_rows_are_mirrored_at_the_next_step_to_where_the_target_wrote(
    layout: str, late: bool, make: Make
) -> None:
    steps = make(MIXED, host_layout=layout, streams=Streams(late=late))
    batch = page_of(steps, 1)
    values = batch.parts[0].values
    ask = Transfer(11, 3, steps.blocks(5), TRANSFER_MIRRORED, after_forward=True)
    steps.start(
        plan(steps.groups, transfers=[ask], cleared=[0], residency=[(0, 0, steps.blocks(5))]),
        batch=batch,
        started=[(0, "r1")],
    )
    steps.write(batch)
    steps.worker.finish_forward()
    assert steps.worker.take_transfer_updates() == ([], []), "the drafter has not run"
    steps.write(batch, drafts=True)
    # Later passes of the drafter, and the next step's preparation.
    steps.cpu.tables.slot_mappings.fill_(7 * BLOCK)
    steps.start()
    assert steps.host_holds(3, values)
    assert steps.worker.take_transfer_updates() == ([11], [11])
    assert steps.worker.num_repaired_pages == 0
    for mask in steps.worker._mirrors.masks:
        assert mask.counters.tolist() == [BLOCK, 0, 0]


@pytest.mark.parametrize("sibling", ["NixlConnector", "MooncakeStoreConnector"])
def test_a_sibling_that_uses_host_rows_finds_them_behind_the_computing_stream(
    sibling: str, make: Make
) -> None:
    """It waits for an event there, or for the step's output, and then reads by itself."""
    steps = make(PACKED, host_layout="layer_major")
    worker = steps.worker
    worker._options = replace(worker._options, siblings=("OffloadingConnector", sibling))
    batch = page_of(steps, 1)
    steps.start(batch=batch)
    steps.write(batch)
    worker.finish_forward()
    assert steps.host_holds(3, batch.parts[0].values)


def test_without_a_drafter_the_page_is_asked_about_in_its_own_step(make: Make) -> None:
    steps = make(PACKED)
    batch = page_of(steps, 1)
    ask = Transfer(4, 3, steps.blocks(5), TRANSFER_MIRRORED, after_forward=True)
    steps.start(plan(steps.groups, transfers=[ask]), batch=batch)
    steps.write(batch)
    steps.worker.finish_forward()
    assert steps.worker.take_transfer_updates() == ([4], []), "nothing has run beside"
    assert steps.worker.take_transfer_updates() == ([], [])
    steps.start()
    assert steps.worker.take_transfer_updates() == ([], [4])
    assert steps.host_holds(3, batch.parts[0].values)


@pytest.mark.parametrize(
    ("model", "layers"),
    [(ONE_EACH, {3}), (MIXED, {10}), (MIXED, {1}), (MIXED, {10, 1})],
    ids=["no drafter", "of the target", "of the drafter", "of both"],
)
def test_a_page_without_its_mirror_is_copied_whole_before_it_is_reported(
    model: Model, layers: set[int], make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The mirror of these many layers does not run in one of two steps."""
    steps = make(model)
    steps.cpu.library.faults["hotpage_mirror_rows"] = lambda block: (
        block.num_tokens != 24 or block.pools.num_layers not in layers
    )
    one = steps.batch(steps.part(1, 24, 0, host=[3], resident=[5]))
    rest = steps.batch(steps.part(1, BLOCK, 24, host=[3], resident=[5]))
    values = rest.parts[0].values
    groups = steps.blocks(5)
    for at, batch in enumerate((one, rest)):
        # The tables are those of the step; a batch writes them when it is made.
        batch._write_tables()
        ask = Transfer(9, 3, groups, TRANSFER_MIRRORED, after_forward=True)
        steps.start(plan(steps.groups, transfers=[ask] if at else []), batch=batch)
        steps.write(batch)
        steps.worker.finish_forward()
        steps.write(batch, drafts=True)
    steps.start()
    with caplog.at_level(logging.WARNING, "hotpage.runtime.acks"):
        enqueued, completed = steps.worker.take_transfer_updates()
    assert (enqueued, completed) == ([9], []), "a page with holes was reported complete"
    assert not steps.host_holds(3, values), "the copy has run before anybody waited"
    assert steps.worker.take_transfer_updates() == ([], [])
    steps.start()
    assert steps.worker.take_transfer_updates() == ([], [9])
    assert steps.host_holds(3, values)
    assert steps.worker.num_repaired_pages == 1
    assert "host block 3" in caplog.text
    lost = sum(int(mask.counters[2]) for mask in steps.worker._mirrors.masks)
    assert lost == 24 * len(layers)


def test_a_repair_behind_other_transfers_changes_no_order(make: Make) -> None:
    steps = make(ONE_EACH)
    steps.fill_gpu(5, PAGE)
    steps.fill_gpu(6, [v + 100 for v in PAGE])
    groups = steps.groups
    steps.start(
        plan(
            groups,
            transfers=[
                Transfer(1, 3, steps.blocks(5), TRANSFER_MIRRORED),
                Transfer(2, 4, steps.blocks(6), TRANSFER_SPILL),
            ],
        )
    )
    steps.start()
    enqueued, completed = steps.worker.take_transfer_updates()
    # Spills of a plan come before its questions; the page that nobody mirrored waits.
    assert (sorted(enqueued), completed) == ([1, 2], [2])
    steps.start(plan(groups, transfers=[Transfer(3, 5, steps.blocks(6), TRANSFER_SPILL)]))
    steps.start()
    assert steps.worker.take_transfer_updates() == ([3], [1, 3])
    assert steps.host_holds(3, PAGE)


def test_transfers_are_reported_in_the_order_in_which_they_were_enqueued(make: Make) -> None:
    """A restore has run at once; it waits for the report of a spill that came before it."""
    steps = make(ONE_EACH, streams=Streams(late=True, haste=0))
    groups = steps.groups
    steps.fill_gpu(5, PAGE)
    steps.fill_host(8, [v + 500 for v in PAGE])
    steps.start(
        plan(groups, transfers=[Transfer(21, 3, steps.blocks(5))]),
        plan(groups, transfers=[Transfer(22, 8, steps.blocks(7), TRANSFER_RESTORE)]),
    )
    assert steps.gpu_holds(7, [v + 500 for v in PAGE])
    assert steps.worker.take_transfer_updates() == ([21, 22], [])
    assert not steps.host_holds(3, PAGE)
    steps.worker.finish_forward()
    steps.start()
    assert steps.worker.take_transfer_updates() == ([], [21, 22])
    assert steps.host_holds(3, PAGE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [PACKED, MIXED], ids=["packed", "mixed"])
def test_pages_and_host_copies_move_the_rows_of_every_layer_and_only_theirs(
    model: Model, layout: str, make: Make
) -> None:
    steps = make(model, host_layout=layout)
    groups = steps.groups
    steps.fill_gpu(5, PAGE)
    steps.start(plan(groups, transfers=[Transfer(1, 3, steps.blocks(5))]))
    steps.start(
        plan(
            groups,
            transfers=[
                Transfer(2, 6, kind=TRANSFER_HOST_COPY, source_host_block=3),
                Transfer(3, 6, steps.blocks(9), TRANSFER_RESTORE, num_rows=10),
            ],
        ),
        host_copies=((3, 7),),
    )
    assert steps.host_holds(3, PAGE)
    assert steps.host_holds(6, PAGE)
    assert steps.host_holds(7, PAGE)
    assert steps.gpu_holds(9, PAGE[:10])
    assert all(bool((steps.gpu_rows(layer, 9)[10:] == 0xA5).all()) for _, layer in steps.layers), (
        "a restore wrote rows beyond the page's"
    )
    assert steps.worker.take_completed_host_copies() == [7]
    assert steps.worker.take_completed_host_copies() == []
    assert steps.worker.take_transfer_updates() == ([1, 2, 3], [1, 2, 3])


def test_a_host_copy_waits_for_the_mirror_of_its_source(make: Make) -> None:
    """The CPU copies, so that an order among streams is not enough."""
    steps = make(ONE_EACH)
    streams = (steps.worker._mirrors._side._stream, steps.cpu.streams.computing)
    batch = page_of(steps, 1)
    steps.start(batch=batch)
    steps.write(batch)
    steps.worker.finish_forward()
    assert not steps.host_holds(3, batch.parts[0].values), "the mirror has run already"
    before = [stream.num_waits for stream in streams]
    steps.start(host_copies=((3, 7),))
    assert steps.host_holds(7, batch.parts[0].values)
    assert [stream.num_waits for stream in streams] == [n + 1 for n in before]
    steps.start()
    assert [stream.num_waits for stream in streams] == [n + 1 for n in before], "a wait for nothing"


def test_more_pages_than_one_launch_takes_are_copied_launch_by_launch(make: Make) -> None:
    steps = make(Model((1,)), host_blocks=300)
    steps.fill_gpu(5, PAGE)
    steps.fill_gpu(6, [v + 70 for v in PAGE])
    pages = [Transfer(i, 1 + i, [5 + (i == 258)], num_rows=2) for i in range(260)]
    steps.start(plan(1, transfers=pages))
    steps.start()
    assert steps.worker.take_transfer_updates()[1] == list(range(260))
    assert steps.worker.launch_counts()["spill_pages"] == 2
    for host_block in (1, 256, 257, 258, 260):
        assert steps.host_holds(host_block, PAGE[:2]), host_block
    assert steps.host_holds(259, [70, 71])


def test_a_step_without_tokens_mirrors_and_forgets_nothing(make: Make) -> None:
    steps = make(MIXED)
    before = steps.cpu.library.launches.copy()
    steps.start()
    steps.worker.finish_forward()
    steps.start()
    assert steps.cpu.library.launches == before
    assert steps.worker.take_transfer_updates() == ([], [])


def test_tables_land_in_the_state_rows_of_requests_whatever_the_order_of_the_batch(
    make: Make,
) -> None:
    steps = make(PACKED)
    groups = steps.groups
    steps.start(started=[(5, "r2"), (7, "r1")])
    full = [steps.part(n, 5, 4, host=[n], resident=[n], state_row=4 - n) for n in (3, 4, 1)]
    steps.start(batch=steps.batch(*full))
    assert steps.worker.caches.request_state_indices.tolist() == [1, 0, 3, -1]
    batch = steps.batch(
        steps.part(1, 5, 4, host=[3], resident=[5], state_row=2),
        steps.part(2, 5, 4, host=[4], resident=[6], state_row=0),
    )
    residency = steps.worker.caches.residency
    residency.fill_(33)
    for state in steps.worker.states:
        state.row_map.fill_(9)
    one, two = list(range(10, 10 + groups)), list(range(20, 20 + groups))
    steps.start(
        plan(groups, residency=[(5, 1, one), (7, 0, one)]),
        plan(groups, cleared=[7], residency=[(7, 3, one), (7, 3, two)], granted=[(5, one)]),
        batch=batch,
    )
    expected = torch.full_like(residency, 33)
    expected[:, 0, 1] = torch.tensor(one)
    # Cleared after the first plan had put something there; the last word about a page holds.
    expected[:, 2] = 0
    expected[:, 2, 3] = torch.tensor(two)
    assert torch.equal(residency, expected)
    for state in steps.worker.states:
        assert (state.row_map[0] == -1).all(), "the hot region of r2 starts empty"
        assert (state.row_map[1:] == 9).all()
    assert steps.worker.caches.request_state_indices.tolist() == [2, 0, -1, -1]


def test_a_retired_number_names_the_request_that_takes_it_over(make: Make) -> None:
    steps = make(ONE_EACH)
    blocks = steps.blocks(8)
    steps.start(started=[(0, "r1")])
    batch = steps.batch(steps.part(2, 5, 4, host=[3], resident=[5], state_row=3))
    steps.start(
        plan(steps.groups, residency=[(0, 2, blocks)]),
        batch=batch,
        retired=(0,),
        started=[(0, "r2")],
    )
    assert steps.worker.caches.residency[:, 3, 2].tolist() == blocks


@pytest.mark.parametrize(
    "change",
    [
        {"residency": [(4, 0, [1, 1, 1])]},
        {"cleared": [4]},
        {"granted": [(4, [1] * 3)]},
        {"returned": [4]},
    ],
)
def test_a_plan_for_a_request_that_is_not_scheduled_is_a_protocol_error(
    change: dict[str, Any], make: Make
) -> None:
    steps = make(ONE_EACH)
    batch = steps.batch(steps.part(1, 5, 4, host=[3], resident=[5]))
    with pytest.raises(ProtocolError, match="request 4, which is not scheduled"):
        steps.start(plan(steps.groups, **change), batch=batch, started=[(0, "r1"), (4, "r9")])


# What vLLM's own code must not do here.


@pytest.mark.parametrize("length", [BLOCK, 30])
def test_rows_of_a_resident_prefill_are_found_behind_their_indexer(length: int, make: Make) -> None:
    """vLLM converts them on a stream of its own, which must come behind the top-k."""
    steps = make(MIXED)
    batch = steps.batch(steps.part(1, length, 0, host=[3], resident=[5]))
    residency = [(0, 0, steps.blocks(5))]
    steps.start(
        plan(steps.groups, cleared=[0], residency=residency, resident=True),
        batch=batch,
        started=[(0, "r1")],
    )
    attention = Attention(steps.cpu, seed=1)
    attention.run(batch, batch.metadata(), drafts=False, pages=True)
    assert attention.num_rows > length
    assert steps.worker.launch_counts()["stage_prefill"] == 0


def test_prefill_rows_with_host_only_pages_are_not_resolved_row_by_row(make: Make) -> None:
    steps = make(ONE_EACH)
    batch = steps.batch(steps.part(1, 80, 60, host=[3, 4], resident=[0, 6]))
    steps.start(plan(steps.groups, resident=False), batch=batch)
    group = steps.layers[0][1].attention.impl.index_group
    with pytest.raises(InvariantError, match="were not staged"):
        group.convert_logical_to_physical_topk(
            0,
            steps.cpu.topk[:20],
            batch.metadata(),
            block_stride_rows=None,
            return_valid_counts=True,
        )


def test_methods_of_vllm_that_move_rows_refuse_to_run(make: Make) -> None:
    steps = make(MIXED)
    refused = (
        "swap_in", "gather_prefill_cache", "invalidate_sorted_slots", "invalidate_written_slots",
        "reset_hot_state",
    )  # fmt: skip
    for _, layer in steps.layers:
        for owner, names in ((layer.handle.runtime, refused), (layer.handle, ("swap_in",))):
            for name in names:
                with pytest.raises(InvariantError, match="under engine native"):
                    getattr(owner, name)()
        assert layer.handle.submit_layer_mirror is None


def test_hits_and_misses_come_in_every_few_steps_and_only_once(make: Make) -> None:
    steps = make(ONE_EACH)
    batch = seed_reader(steps, [9])
    steps.read(batch, [0, 1, 2])
    readings = [steps.worker.get_kv_connector_stats() for _ in range(10)]
    (found,) = [stats for stats in readings if stats is not None]
    row_bytes = steps.width
    assert found.data["cache_hits"] == [0] * steps.groups
    assert found.data["cache_misses"] == [3] * steps.groups
    assert found.data["host_to_device_bytes"] == [3 * row_bytes] * steps.groups


def test_capture_runs_leave_no_rows_behind(make: Make) -> None:
    steps = make(ONE_EACH)
    batch = seed_reader(steps, [9])
    steps.read(batch, [0, 1])
    steps.worker.reset_hot_state()
    steps.start(batch=batch)
    steps.read(batch, [0, 1])
    assert steps.counters() == [0, 4, 0]
    assert steps.worker.launch_counts()["resolve_and_copy"] == 6
