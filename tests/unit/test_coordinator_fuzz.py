# SPDX-License-Identifier: Apache-2.0
"""Random events, right and wrong ones mixed: a call works, or raises and changes nothing."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import core_builder as build
import numpy as np
import pytest

from hotpage import _core
from hotpage.errors import ProtocolError

GPU_BLOCKS, HOST_BLOCKS = 600, 300
EVENTS = 200

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"host_copy": "mirrored"},
    {"release_point": "enqueued"},
    {"transition": False},
    {"transition": False, "host_copy": "none", "host_blocks": 0},
    {"num_ranks": 1, "num_host_writers": 1, "release_point": "enqueued", "host_copy": "mirrored"},
]

# How often each event is drawn, relative to the others.
WEIGHTS = {
    "on_admitted": 3.0,
    "on_blocks_allocated": 6.0,
    "on_blocks_reused": 2.0,
    "on_hot_region_allocated": 2.0,
    "on_import_finished": 1.0,
    "on_host_block_redirected": 1.0,
    "on_mirror_lost": 1.0,
    "on_prefix_cache_reset": 0.2,
    "on_transfers_enqueued": 4.0,
    "on_transfers_completed": 4.0,
    "on_transfers_failed": 1.0,
    "on_worker_output": 2.0,
    "on_freed": 1.0,
    "step": 8.0,
}


class Caller:
    """Draws the arguments of an event: mostly plausible, sometimes wild."""

    def __init__(self, seed: int, core: _core.Coordinator) -> None:
        self.random = random.Random(seed)
        self.core = core

    def request(self) -> int:
        return self.random.choice([*range(4)] * 4 + [-1, 5, 2**31 - 1])

    def blocks(self, count: int, total: int) -> build.Int32:
        wild = [0, -2, total, 2**31 - 1]
        draw = self.random
        values = (
            draw.choice(wild) if draw.random() < 0.01 else draw.randrange(1, total)
            for _ in range(count)
        )
        return build.ids(*values)

    def states(self, request: int) -> list[int]:
        try:
            return list(self.core.page_states(request))
        except ProtocolError:
            return []

    def ragged(self) -> tuple[list[int], build.Int32, int]:
        requests = [self.request() for _ in range(self.random.randrange(3))]
        offsets = np.cumsum([0, *(self.random.randrange(4) for _ in requests)]).astype(np.int32)
        return requests, offsets, int(offsets[-1])

    def acks(self) -> tuple[Any, ...]:
        stats = self.core.stats()
        last = stats["spills_planned"] + stats["restores_planned"] + 2
        ids = [self.random.randrange(max(0, last - 12), last + 1) for _ in range(4)]
        counts = [self.random.choice([0, 1, 2, 2]) for _ in ids]
        return np.array(ids, np.int64), build.ids(*counts)

    def on_admitted(self) -> None:
        requests, offsets, pages = self.ragged()
        kinds = np.array([self.random.choice([0, 0, 0, 1, 2, 3]) for _ in requests], np.uint8)
        tokens = build.ids(*(4 * int(n) for n in np.diff(offsets)))
        host = self.blocks(self.random.choice([pages, pages, pages, 0, 1]), HOST_BLOCKS)
        with_blocks = self.random.random() < 0.4
        resident = self.blocks(build.NUM_GROUPS * pages if with_blocks else 0, GPU_BLOCKS)
        self.core.on_admitted(build.ids(*requests), kinds, tokens, offsets, host, resident)

    def on_blocks_allocated(self) -> None:
        requests, offsets, pages = self.ragged()
        first = build.ids(*(len(self.states(r)) + (self.random.random() < 0.1) for r in requests))
        host = self.blocks(pages, HOST_BLOCKS)
        resident = self.blocks(build.NUM_GROUPS * pages, GPU_BLOCKS)
        self.core.on_blocks_allocated(build.ids(*requests), first, offsets, host, resident)

    def on_blocks_reused(self) -> None:
        self.core.on_blocks_reused(self.blocks(self.random.randrange(3), GPU_BLOCKS))

    def on_hot_region_allocated(self) -> None:
        size = self.core.hot_region_blocks - (self.random.random() < 0.1)
        self.core.on_hot_region_allocated(self.request(), self.blocks(size, GPU_BLOCKS))

    def on_import_finished(self) -> None:
        tokens = self.random.choice([None, 0, 4, 7, 8, 30])
        self.core.on_import_finished(self.request(), tokens)

    def on_host_block_redirected(self) -> None:
        page, host = self.random.randrange(4), self.random.randrange(-1, HOST_BLOCKS + 1)
        resident = self.random.choice([None, self.blocks(build.NUM_GROUPS, GPU_BLOCKS)])
        self.core.on_host_block_redirected(self.request(), page, host, resident)

    def on_mirror_lost(self) -> None:
        self.core.on_mirror_lost(self.request(), self.random.randrange(5))

    def on_prefix_cache_reset(self) -> None:
        self.core.on_prefix_cache_reset()

    def on_transfers_enqueued(self) -> None:
        self.core.on_transfers_enqueued(*self.acks())

    def on_transfers_completed(self) -> None:
        self.core.on_transfers_completed(*self.acks())

    def on_transfers_failed(self) -> None:
        self.core.on_transfers_failed(*self.acks())

    def on_worker_output(self) -> None:
        failed = self.acks() if self.random.random() < 0.3 else None
        self.core.on_worker_output(self.acks(), self.acks(), failed)

    def on_freed(self) -> None:
        reason: Any = self.random.choice(["finished", "preempted", "aborted"])
        self.core.on_freed(self.request(), reason)

    def step(self) -> None:
        requests = [self.request() for _ in range(self.random.randrange(3))]
        computed, tokens, drafts = [], [], []
        for request in requests:
            states = self.states(request)
            capacity = build.BLOCK_SIZE * len(states)
            writable = [p for p, state in enumerate(states) if state == _core.PAGE_DIRTY]
            start = build.BLOCK_SIZE * writable[0] if writable else 0
            computed.append(self.random.randrange(start, capacity + 1))
            tokens.append(self.random.randrange(capacity - computed[-1] + 2))
            drafts.append(self.random.choice([0, 0, 1, 2]))
        scheduled = tuple(build.ids(*column) for column in (requests, computed, tokens, drafts))
        gpu_free = self.random.choice([0, 4, 30, 60, 500])
        # Without events, so that a fault of the plan is a fault of the whole call.
        self.core.step(gpu_free=gpu_free, host_free=20, scheduled=scheduled)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_an_event_works_or_raises_and_changes_nothing(config: dict[str, Any]) -> None:
    done: Counter[str] = Counter()
    for seed in range(12):
        settings = {"gpu_blocks": GPU_BLOCKS, "host_blocks": HOST_BLOCKS, **config}
        core = build.coordinator(**settings)
        caller = Caller(seed, core)
        for at in range(EVENTS):
            name = caller.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            digest, fault = core.state_digest(), None
            try:
                getattr(caller, name)()
                done[name] += 1
            except ProtocolError as error:
                fault = error
            unchanged = fault is None or core.state_digest() == digest
            assert unchanged, f"seed {seed}, event {at} {name}: {fault}"
        core.shutdown()
    # The events that make states, or the test would only see refusals.
    for name in ("on_admitted", "on_blocks_allocated", "step"):
        assert done[name] >= 20, done
