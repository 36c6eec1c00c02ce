# SPDX-License-Identifier: Apache-2.0
"""Every fault a caller can make is an `Exception` of the right class and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import core_builder as build
import numpy as np
import pytest

from hotpage import _core, errors

HUGE = 2**31 - 1


def test_each_family_of_core_errors_has_its_class() -> None:
    classes = {name: type(error) for name, error in _core._sample_errors()}
    assert classes == {
        "config": errors.ConfigError,
        "capacity": errors.CapacityError,
        "protocol": errors.ProtocolError,
        "invariant": errors.InvariantError,
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block_size": 0}, "block_size is 0, expected at least 1; use 16 to 128"),
        ({"block_size": -1}, "block_size is -1, expected at least 0; raise it"),
        ({"gpu_blocks": 2**32}, "gpu_blocks is 4294967296, expected at most 4294967295; lower it"),
        ({"gpu_blocks": 10**30}, f"gpu_blocks is {10**30}, expected at most 4294967295; lower it"),
        ({"gpu_blocks": HUGE}, "gpu_blocks is 2147483647, expected at most 67108864"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer"),
        ({"top_k": None}, "top_k is None, expected an integer"),
        ({"hot_rows": 6}, "hot_rows is 6, expected a positive multiple of 4"),
        ({"top_k": 5}, "hot_rows is 8, expected at least 10"),
        ({"num_kv_groups": 2**31}, "num_kv_groups is 2147483648, expected at most 1024"),
        ({"host_copy": "mirror"}, 'host_copy is \'mirror\', expected one of "none", "mirrored"'),
        ({"release_point": 1}, 'release_point is 1, expected one of "enqueued", "completed"'),
        ({"transition": "yes"}, "transition is 'yes', expected True or False"),
        ({"transition_watermark": -3}, "transition_watermark is -3, expected at least 0"),
        ({"hot_row": 8}, "hot_row is no setting"),
    ],
)
def test_a_wrong_setting_names_value_bound_and_remedy(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ConfigError, match=re.escape(text)):
        build.coordinator(**changes)


def test_a_missing_setting_is_named() -> None:
    settings = {name: value for name, value in build.SETTINGS.items() if name != "top_k"}
    with pytest.raises(errors.ConfigError, match="top_k is missing"):
        _core.Coordinator(**settings)


def test_a_pool_under_one_request_is_a_capacity_error() -> None:
    with pytest.raises(errors.CapacityError, match="the GPU pool has 7 blocks, one request needs"):
        build.coordinator(gpu_blocks=8)


Fault = Callable[[_core.Coordinator], object]

FAULTS: dict[str, Fault] = {
    "unknown request scheduled": lambda c: step(c, scheduled=build.scheduled(1, 0, 1)),
    "huge request scheduled": lambda c: step(c, scheduled=build.scheduled(HUGE, 0, 1)),
    "negative request scheduled": lambda c: step(c, scheduled=build.scheduled(-1, 0, 1)),
    "tokens past the pages": lambda c: step(c, scheduled=build.scheduled(0, 14, 3)),
    "tokens that wrap int32": lambda c: step(c, scheduled=build.scheduled(0, HUGE, HUGE)),
    "negative tokens": lambda c: step(c, scheduled=build.scheduled(0, 14, -1)),
    "more drafts than rows": lambda c: step(c, scheduled=build.scheduled(0, 14, 1, 2)),
    "request twice in a batch": lambda c: step(
        c, scheduled=(build.ids(0, 0), build.ids(14, 14), build.ids(1, 1), build.ids(0, 0))
    ),
    "arrays of unequal length": lambda c: step(
        c, scheduled=(build.ids(0), build.ids(14, 14), build.ids(1), build.ids(0))
    ),
    "write to a page that is not writable": lambda c: step(c, scheduled=build.scheduled(0, 0, 1)),
    "negative pool level": lambda c: c.step(gpu_free=-1, host_free=0),
    "huge pool level": lambda c: c.step(gpu_free=2**40, host_free=0),
    "admission of a live request": lambda c: c.on_admitted(*build.admitted(0)),
    "admission of a huge id": lambda c: c.on_admitted(*build.admitted(HUGE)),
    "admission of a negative id": lambda c: c.on_admitted(*build.admitted(-5)),
    "admission onto a bad host block": lambda c: c.on_admitted(*build.admitted(1, [32])),
    "admission onto the null host block": lambda c: c.on_admitted(*build.admitted(1, [0])),
    "unknown prefix kind": lambda c: c.on_admitted(
        build.ids(1),
        np.array([4], np.uint8),
        build.ids(0),
        build.ids(0, 0),
        build.ids(),
        build.ids(),
    ),
    "prefix kind of another type": lambda c: c.on_admitted(
        build.ids(1), build.ids(0), build.ids(0), build.ids(0, 0), build.ids(), build.ids()
    ),
    "offsets that fall": lambda c: c.on_blocks_allocated(
        build.ids(0, 1), build.ids(4, 0), build.ids(0, 1, 0), build.ids(5), build.blocks([(9, 10)])
    ),
    "offsets that start late": lambda c: c.on_blocks_allocated(
        build.ids(0), build.ids(4), build.ids(1, 1), build.ids(5), build.blocks([(9, 10)])
    ),
    "too few offsets": lambda c: c.on_blocks_allocated(
        build.ids(0), build.ids(4), build.ids(0), build.ids(5), build.blocks([(9, 10)])
    ),
    "pages without GPU blocks": lambda c: c.on_blocks_allocated(
        build.ids(0), build.ids(4), build.ids(0, 1), build.ids(5), build.ids()
    ),
    "half a page": lambda c: c.on_blocks_allocated(
        build.ids(0), build.ids(4), build.ids(0, 1), build.ids(5), build.ids(9)
    ),
    "a page out of order": lambda c: c.on_blocks_allocated(*build.allocated(0, 6, [5], [(9, 10)])),
    "pages of an unknown request": lambda c: c.on_blocks_allocated(
        *build.allocated(HUGE, 0, [5], [(9, 10)])
    ),
    "a held GPU block": lambda c: c.on_blocks_allocated(*build.allocated(0, 4, [5], [(1, 10)])),
    "a held host block": lambda c: c.on_blocks_allocated(*build.allocated(0, 4, [1], [(9, 10)])),
    "a GPU block past the pool": lambda c: c.on_blocks_allocated(
        *build.allocated(0, 4, [5], [(9, HUGE)])
    ),
    "a negative GPU block": lambda c: c.on_blocks_allocated(*build.allocated(0, 4, [5], [(9, -2)])),
    "reuse of a held block": lambda c: c.on_blocks_reused(build.ids(60, 3)),
    "hot region of an unknown request": lambda c: c.on_hot_region_allocated(
        1, build.ids(20, 21, 22, 23)
    ),
    "hot region of the wrong size": lambda c: c.on_hot_region_allocated(0, build.ids(20, 21)),
    "hot region with a held block": lambda c: c.on_hot_region_allocated(
        0, build.ids(20, 21, 22, 1)
    ),
    "import that was never planned": lambda c: c.on_import_finished(0, 4),
    "import with negative tokens": lambda c: c.on_import_finished(0, -4),
    "redirect of a resident page": lambda c: c.on_host_block_redirected(0, 0, 9),
    "redirect to a huge block": lambda c: c.on_host_block_redirected(0, 0, 2**40),
    "lost mirror past the end": lambda c: c.on_mirror_lost(0, 4),
    "unknown transfer enqueued": lambda c: c.on_transfers_enqueued(*build.acks([99])),
    "negative transfer": lambda c: c.on_transfers_enqueued(*build.acks([-1])),
    "too many acknowledgements": lambda c: c.on_transfers_enqueued(*build.acks([1], 3)),
    "negative acknowledgements": lambda c: c.on_transfers_enqueued(*build.acks([1], -1)),
    "completed before enqueued": lambda c: c.on_transfers_completed(*build.acks([1])),
    "failed before enqueued": lambda c: c.on_transfers_failed(*build.acks([1])),
    "worker output with one bad list": lambda c: c.on_worker_output(
        enqueued=build.acks([1, 2]), completed=build.acks([1, 99])
    ),
    "worker output completed twice": lambda c: c.on_worker_output(
        enqueued=build.acks([1]), completed=build.acks([1]), failed=build.acks([1])
    ),
    "transfer ids of the wrong type": lambda c: c.on_worker_output(
        enqueued=(build.ids(1), build.ids(2))
    ),
    "free of an unknown request": lambda c: c.on_freed(7, "finished"),
    "free of a huge request": lambda c: c.on_freed(HUGE, "finished"),
    "free of a negative request": lambda c: c.on_freed(-1, "finished"),
    "free for no known reason": lambda c: c.on_freed(0, "done"),
    "pages of an unknown request asked": lambda c: c.num_pages(3),
    "int64 where int32 is due": lambda c: c.on_blocks_reused(np.array([60])),
    "floats": lambda c: c.on_blocks_reused(np.array([60.0], np.float32)),
    "a list": lambda c: c.on_blocks_reused([60]),
    "no array at all": lambda c: c.on_blocks_reused(None),
    "a strided array": lambda c: c.on_blocks_reused(np.arange(40, 60, dtype=np.int32)[::2]),
    "a matrix": lambda c: c.on_blocks_reused(np.zeros((2, 2), np.int32)),
    "a scalar array": lambda c: c.on_blocks_reused(np.array(3, np.int32)),
    "big-endian": lambda c: c.on_blocks_reused(np.array([60], ">i4")),
    "blocks [n, G] of another G": lambda c: c.on_blocks_allocated(
        build.ids(0), build.ids(4), build.ids(0, 1), build.ids(5), np.array([[9, 10, 11]], np.int32)
    ),
}


def step(core: _core.Coordinator, **events: Any) -> _core.StepPlan:
    return core.step(gpu_free=55, host_free=27, **events)


@pytest.mark.parametrize("name", FAULTS)
def test_a_protocol_fault_raises_and_changes_nothing(name: str) -> None:
    core = build.coordinator()
    build.spilling(core)
    digest, stats = core.state_digest(), core.stats()
    with pytest.raises(errors.ProtocolError) as caught:
        FAULTS[name](core)
    assert str(caught.value)
    assert (core.state_digest(), core.stats()) == (digest, stats)


def test_events_for_a_freed_request_are_faults() -> None:
    core = build.coordinator()
    build.spilling(core)
    plan = core.on_freed(0, "finished")
    assert not plan.retired, "three spills are in flight"
    digest = core.state_digest()
    for fault in (
        lambda: core.on_freed(0, "finished"),
        lambda: step(core, scheduled=build.scheduled(0, 14, 1)),
        lambda: core.on_blocks_allocated(*build.allocated(0, 4, [5], [(9, 10)])),
        lambda: core.on_hot_region_allocated(0, build.ids(20, 21, 22, 23)),
        lambda: core.on_mirror_lost(0, 0),
        lambda: core.on_admitted(*build.admitted(0)),
        lambda: core.page_states(0),
    ):
        with pytest.raises(errors.ProtocolError):
            fault()
    assert core.state_digest() == digest


def test_a_transfer_completes_once() -> None:
    core = build.coordinator()
    build.spilling(core)
    core.on_worker_output(enqueued=build.acks([1]), completed=build.acks([1]))
    digest = core.state_digest()
    with pytest.raises(errors.ProtocolError, match="transfer 1 is unknown or was completed before"):
        core.on_worker_output(completed=build.acks([1]))
    assert core.state_digest() == digest


def test_after_shutdown_every_event_is_refused_and_a_second_shutdown_frees_nothing() -> None:
    core = build.coordinator()
    build.spilling(core)
    plan = core.shutdown()
    # Each of the 3 spills has a lease of its own on its page's 2 GPU blocks and 1 host block.
    assert sorted(plan.free_gpu) == sorted([1, 2, 3, 4, 5, 6] * 2 + [7, 8])
    assert sorted(plan.free_host) == sorted([1, 2, 3] * 2 + [4])
    with pytest.raises(errors.ProtocolError, match="shut down"):
        step(core)
    assert core.shutdown().free_gpu.size == 0


def test_a_wild_id_costs_no_memory() -> None:
    import resource

    core = build.coordinator()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        with pytest.raises(errors.ProtocolError, match="request id is 2147483647"):
            core.on_admitted(*build.admitted(HUGE))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_the_interner_refuses_wrong_calls() -> None:
    interner = _core.RequestInterner()
    first = interner.bind("a")
    with pytest.raises(errors.ProtocolError):
        interner.bind("a")
    with pytest.raises(errors.ProtocolError):
        interner.retire(build.ids(first))
    with pytest.raises(errors.ProtocolError):
        interner.retire(build.ids(-1))
    assert interner.unbind("a") == first
    assert interner.bind("a") != first, "the first admission has not retired"
    assert interner.name(first) == "a"
    interner.retire(build.ids(first))
    assert interner.name(first) is None
    assert interner.bind("b") == first
    assert (len(interner), interner.num_in_use, "b" in interner, "c" in interner) == (
        2,
        2,
        True,
        False,
    )
