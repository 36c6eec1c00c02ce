# SPDX-License-Identifier: Apache-2.0
"""Owns the long fuzz of resolve and copy at the sizes of real models, state carried over.

HOTPAGE_FUZZ_STEPS sets the steps of each case (default 10), HOTPAGE_FUZZ_SEED the seed; a failure
names both. A step is compared in full: outputs, copy list, row map, LRU order, counters, bytes.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from reference import resolve_batch
from resolve_cases import Odds, Shape, Workload, empty_states
from resolve_device import DeviceResolve

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STEPS = int(os.environ.get("HOTPAGE_FUZZ_STEPS", "10"))
SEED = int(os.environ.get("HOTPAGE_FUZZ_SEED", "1"))
HOT_ROWS = {1: 4096, 4: 10_240}


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rows", HOT_ROWS)
def test_large_batches_equal_the_model_over_many_steps(rows: int, interleaved: bool) -> None:
    # Narrow rows keep a step cheap; how many bytes a row has changes no decision.
    shape = Shape(
        num_requests=16,
        rows_per_request=rows,
        top_k=2048,
        hot_rows=HOT_ROWS[rows],
        block_size=64,
        num_pages=100 * (rows + 1),
        num_layers=2,
        row_bytes=48,
        interleaved=interleaved,
    )
    work, states = Workload(shape, SEED, Odds(working_set=0.3)), empty_states(shape)
    device = DeviceResolve(shape)
    for step in range(STEPS):
        batch = work.step()
        device.load(batch)
        device.run()
        device.check(resolve_batch(batch, states), states, f"seed {SEED}, step {step}")
