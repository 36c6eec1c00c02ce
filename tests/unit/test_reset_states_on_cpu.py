# SPDX-License-Identifier: Apache-2.0
"""Owns the run of reset_states on a CPU: listed state rows become empty, all others stay."""

from __future__ import annotations

import ctypes

import numpy as np
from emulated import aligned, launch

from hotpage.kernels import _abi


def test_listed_state_rows_become_empty_in_every_group_and_others_stay(
    kernels: ctypes.CDLL,
) -> None:
    rng = np.random.default_rng(11)
    state_rows, widths = 7, (1028, 4, 2048)
    maps = [aligned((state_rows, width), np.int32, 0) for width in widths]
    used = [aligned((state_rows, width), np.uint16, 0) for width in widths]
    epochs = [np.full(state_rows, 9, np.uint32) for _ in widths]
    for row_map, last_used in zip(maps, used, strict=True):
        row_map[...] = rng.integers(0, 10_000, row_map.shape)
        last_used[...] = rng.integers(1, 9, last_used.shape)
    before = [array.copy() for array in (*maps, *used)]
    states = np.array(
        [
            (m.ctypes.data, u.ctypes.data, e.ctypes.data, m.shape[1])
            for m, u, e in zip(maps, used, epochs, strict=True)
        ],
        np.int64,
    )
    listed = np.array([3, -1, 0, state_rows, 3], np.int32)
    params = _abi.ResetStatesParams(
        num_index_groups=len(widths),
        num_state_rows=state_rows,
        num_listed=len(listed),
        states=states.ctypes.data,
        state_row=listed.ctypes.data,
    )
    assert launch(kernels, "hotpage_reset_states", params) == _abi.OK
    empty = [0, 3]
    kept = [row for row in range(state_rows) if row not in empty]
    for array, old, value in zip((*maps, *used), before, [-1] * 3 + [0] * 3, strict=True):
        assert (array[empty] == value).all()
        np.testing.assert_array_equal(array[kept], old[kept])
    for epoch in epochs:
        assert epoch.tolist() == [0, 9, 9, 0, 9, 9, 9]
