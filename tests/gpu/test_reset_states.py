# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that reset_states empties the listed state rows of every group and no other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from pool_device import stream  # noqa: E402
from resolve_device import DEVICE  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels.reset_states import ResetStates  # noqa: E402
from hotpage.kernels.resolve_and_copy import RowState  # noqa: E402

pytestmark = pytest.mark.gpu


def test_listed_state_rows_become_empty_and_others_stay_in_a_graph_too() -> None:
    states = [RowState.allocate(9, hot_rows, DEVICE) for hot_rows in (4096, 128)]
    listed = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
    reset = ResetStates(states, listed)

    def fill() -> None:
        for state in states:
            state.row_map.random_(0, 1000)
            state.last_used.random_(1, 100)
            state.epoch.fill_(100)

    fill()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reset(4, stream())
    for rows in ([2, -1, 8, 9], [0, 0, 1, -1]):
        fill()
        before = [(state.row_map.clone(), state.last_used.clone()) for state in states]
        listed.copy_(torch.tensor(rows, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        empty = sorted({row for row in rows if 0 <= row < 9})
        kept = [row for row in range(9) if row not in empty]
        for state, (row_map, last_used) in zip(states, before, strict=True):
            assert (state.row_map[empty] == -1).all()
            assert (state.last_used[empty] == 0).all()
            assert (state.epoch[empty] == 0).all()
            assert torch.equal(state.row_map[kept], row_map[kept])
            assert torch.equal(state.last_used[kept], last_used[kept])
            assert (state.epoch[kept] == 100).all()


def test_more_rows_than_the_list_holds_are_refused() -> None:
    state = RowState.allocate(2, 64, DEVICE)
    reset = ResetStates([state], torch.zeros(1, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        reset(2, stream())
