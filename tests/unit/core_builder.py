# SPDX-License-Identifier: Apache-2.0
"""Owns the builders of the binding tests: a small Coordinator and flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotpage import _core

Int32 = npt.NDArray[np.int32]

BLOCK_SIZE = 4
NUM_GROUPS = 2

SETTINGS: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_kv_groups": NUM_GROUPS,
    "gpu_blocks": 64,
    "host_blocks": 32,
    "other_blocks_per_page": 0,
    "hot_rows": 8,
    "top_k": 4,
    "verification_rows": 2,
    "num_ranks": 2,
    "num_host_writers": 2,
    "host_copy": "spilled",
    "release_point": "completed",
    "transition": True,
    "hot_return_steps": 4,
    "admission_window_pages": 4,
    "num_reprefillable_tokens": 0,
    "max_model_len": 64,
}


def coordinator(**changes: Any) -> _core.Coordinator:
    """A Coordinator with `SETTINGS` but for `changes`."""
    return _core.Coordinator(**{**SETTINGS, **changes})


def ids(*values: int) -> Int32:
    """An int32 array."""
    return np.array(values, dtype=np.int32)


def blocks(rows: Sequence[Sequence[int]]) -> Int32:
    """GPU blocks, int32 [n, G]."""
    return np.array(rows, dtype=np.int32).reshape(len(rows), NUM_GROUPS)


def admitted(request: int, host: Sequence[int] = ()) -> tuple[Any, ...]:
    """The arrays that admit one request onto host-only pages."""
    kind = np.array([_core.PREFIX_HOST], dtype=np.uint8)
    return (ids(request), kind, ids(0), ids(0, len(host)), ids(*host), ids())


def allocated(
    request: int, first_page: int, host: Sequence[int], rows: Sequence[Sequence[int]]
) -> tuple[Any, ...]:
    """The arrays that append pages to one request."""
    return (ids(request), ids(first_page), ids(0, len(rows)), ids(*host), blocks(rows))


def scheduled(request: int, computed: int, tokens: int, drafts: int = 0) -> tuple[Any, ...]:
    """The arrays of a batch of one request."""
    return (ids(request), ids(computed), ids(tokens), ids(drafts))


def acks(transfers: Sequence[int], count: int = 2) -> tuple[Any, ...]:
    """Acknowledgements by `count` ranks of each transfer."""
    return (np.array(transfers, dtype=np.int64), np.full(len(transfers), count, dtype=np.int32))


def spilling(core: _core.Coordinator) -> _core.StepPlan:
    """Admits request 0 with 4 pages, writes 14 tokens, and returns the plan with 3 spills."""
    return core.step(
        admitted=admitted(0),
        allocated=allocated(0, 0, [1, 2, 3, 4], [(1, 2), (3, 4), (5, 6), (7, 8)]),
        scheduled=scheduled(0, 0, 14),
        gpu_free=55,
        host_free=27,
    )
