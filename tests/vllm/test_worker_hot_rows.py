# SPDX-License-Identifier: Apache-2.0
"""Single steps of the native worker on a CPU: hot regions and the rows that lie in them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

import torch
from cpu_plans import (
    LAYOUTS,
    PAGE,
    Make,
    Transfer,
    page_of,
    plan,
    reader,
    seed_reader,
)
from worker_on_cpu import BLOCK, MIXED, ONE_EACH, PACKED, Model

from hotpage._core import TRANSFER_MIRRORED

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [PACKED, MIXED], ids=["packed", "mixed"])
def test_a_row_missed_once_is_hit_by_every_layer_afterwards(
    model: Model, layout: str, make: Make
) -> None:
    steps = make(model, host_layout=layout)
    batch = seed_reader(steps, [9])
    steps.read(batch, [0, 63, 5, 69, 64])
    assert steps.counters() == [0, 3, 0]
    steps.start(batch=batch)
    steps.read(batch, [5, 63, 66])
    assert steps.counters() == [2, 3, 0]


def test_a_hot_region_that_is_granted_starts_without_rows_of_the_one_before(make: Make) -> None:
    steps = make(ONE_EACH)
    steps.read(seed_reader(steps, [9]), [0, 1, 2])
    # Another request takes the state row and reads the same page into another region.
    steps.fill_gpu(9, [7] * BLOCK)
    batch = reader(steps, [3, 4], [10])
    granted = [(1, steps.region([10]))]
    steps.start(plan(steps.groups, granted=granted), batch=batch, retired=(0,), started=[(1, "r1")])
    steps.read(batch, [0, 1, 2])
    assert steps.counters() == [0, 6, 0]


def test_a_region_in_the_place_of_one_given_back_is_read_where_it_is(make: Make) -> None:
    """vLLM's block tables only grow: they name the first region for ever."""
    steps = make(PACKED)
    batch = seed_reader(steps, [9])
    steps.read(batch, [0, 1, 2])
    steps.start(plan(steps.groups, returned=[0]), batch=batch)
    # The pool hands the first region to somebody else.
    steps.fill_gpu(9, [v + 7000 for v in PAGE])
    granted = [(0, steps.region([10]))]
    steps.start(plan(steps.groups, granted=granted), batch=batch)
    steps.read(batch, [0, 1, 2])
    assert steps.gpu_holds(9, [v + 7000 for v in PAGE]), "rows were written into a block given back"
    # It stays so in steps that say nothing about regions.
    steps.start(batch=batch)
    steps.read(batch, [3, 1, 2])
    assert steps.gpu_holds(9, [v + 7000 for v in PAGE])
    assert steps.counters() == [2, 7, 0]


@pytest.mark.parametrize("change", [{"returned": [0]}, {"cleared": [0]}])
def test_a_request_without_a_region_writes_into_nobodys(change: dict[str, Any], make: Make) -> None:
    steps = make(ONE_EACH)
    batch = seed_reader(steps, [9])
    steps.start(plan(steps.groups, **change), batch=batch)
    steps.fill_gpu(9, PAGE)
    topk = torch.full_like(steps.cpu.topk[:1], -1)
    topk[0, 0] = 1
    for _, layer in steps.layers:
        _, counts = layer.attention.impl.index_group.convert_logical_to_physical_topk(
            0, topk, batch.metadata(), block_stride_rows=None, return_valid_counts=True
        )
        assert counts.tolist() == [0]
    assert steps.gpu_holds(9, PAGE)
    assert steps.counters() == [0, 1, 1]


def test_a_dummy_run_between_two_steps_touches_no_request(make: Make) -> None:
    """As vLLM makes it while other replicas compute: tables of zeros, and no call of the worker."""
    steps = make(ONE_EACH)
    batch = seed_reader(steps, [9])
    steps.read(batch, [0, 1, 2])
    before = [state.row_map.clone() for state in steps.worker.states]
    pool, counters = steps.cpu.gpu_pool.clone(), steps.counters()
    for table in steps.cpu.tables.input_block_tables:
        table.zero_()
    steps.cpu.tables.slot_mappings.fill_(-1)
    topk = torch.full_like(steps.cpu.topk[:1], 7)
    for _, layer in steps.layers:
        layer.attention.impl.index_group.convert_logical_to_physical_topk(
            0, topk, batch.metadata(), block_stride_rows=None, return_valid_counts=True
        )
    assert torch.equal(pool, steps.cpu.gpu_pool)
    assert steps.counters() == counters
    for state, rows in zip(steps.worker.states, before, strict=True):
        assert torch.equal(state.row_map, rows)
    batch._write_tables()
    steps.start(batch=batch)
    steps.read(batch, [0, 1, 2])
    assert steps.counters() == [3, 3, 0]


def test_hot_rows_of_a_recycled_host_block_are_read_again(make: Make) -> None:
    steps = make(ONE_EACH)
    batch = seed_reader(steps, [9])
    steps.read(batch, [0, 1, 2])
    batch.parts[0].values[:BLOCK] = [v + 5000 for v in batch.parts[0].values[:BLOCK]]
    steps.fill_host(3, batch.parts[0].values[:BLOCK])
    steps.start(plan(steps.groups, recycled=[2, 3]), batch=batch)
    steps.read(batch, [0, 1, 2])
    assert steps.counters() == [0, 6, 0]


def test_hot_rows_that_a_step_writes_anew_are_freed_before_its_attention(make: Make) -> None:
    steps = make(ONE_EACH)
    batch = seed_reader(steps, [9])
    steps.read(batch, [0, 1, 2])
    # A rejected draft: its row was brought in, and this step computes the position again.
    (source,) = steps.cpu.cache_config.host_group_ids
    steps.cpu.tables.slot_mappings[source, 0] = 3 * BLOCK + 1
    steps.start(batch=batch)
    steps.read(batch, [0, 1, 2])
    assert steps.counters() == [2, 4, 0]


def test_a_second_pass_over_the_same_metadata_sees_its_own_lengths(make: Make) -> None:
    """A drafter's passes write the grown lengths into the metadata that they share."""
    steps = make(PACKED)
    batch = seed_reader(steps, [9])
    metadata = batch.metadata()
    topk = torch.full_like(steps.cpu.topk[:1], -1)
    topk[0, :2] = torch.tensor([69, 70], dtype=torch.int32)
    for length, found in ((70, 1), (71, 2)):
        metadata.seq_lens.fill_(length)
        for _, layer in steps.layers:
            _, counts = layer.attention.impl.index_group.convert_logical_to_physical_topk(
                0, topk, metadata, block_stride_rows=None, return_valid_counts=True
            )
            assert counts.tolist() == [found]


def test_rows_that_landed_before_a_block_was_recycled_do_not_count(make: Make) -> None:
    steps = make(ONE_EACH)
    batch = page_of(steps, 1)
    steps.start(batch=batch)
    steps.write(batch)
    steps.worker.finish_forward()
    ask = Transfer(1, 3, steps.blocks(5), TRANSFER_MIRRORED)
    # More ids than one launch takes, the block among the last.
    steps.start(plan(steps.groups, transfers=[ask], recycled=[1] * 5000 + [3]))
    steps.start()
    assert steps.worker.take_transfer_updates() == ([1], [])
    assert steps.worker.num_repaired_pages == 1
