# SPDX-License-Identifier: Apache-2.0
"""Owns the cut of a tile of tokens into chunks: complete, no row twice, layers side by side."""

from __future__ import annotations

import pytest

from hotpage.kernels import _abi
from hotpage.kernels.layer_table import build_chunks
from hotpage.memory import PoolLayout

GROUPS = {
    "one layer": (1,),
    "groups of every size": (1, 2, 3, 4, 5, 6, 7, 8),
    "GLM-like": (1, 1, *([4] * 19), 1),
}


def places(layout: PoolLayout) -> list[tuple[int, int]]:
    """Host address and row stride of each layer."""
    found = [layout.place(layer) for layer in range(layout.num_layers)]
    return [(place.offset, place.row_stride) for place in found]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("row_interleaved", [True, False])
def test_chunks_hold_every_row_of_a_tile_once(name: str, row_interleaved: bool) -> None:
    layout = PoolLayout(GROUPS[name], 64, 656, 9, row_interleaved)
    rows = [
        (token + t, layer + i)
        for layer, num_layers, token, num_tokens in build_chunks(places(layout), 656)
        for t in range(num_tokens)
        for i in range(num_layers)
    ]
    tile = [(t, i) for t in range(_abi.TILE_TOKENS) for i in range(layout.num_layers)]
    assert sorted(rows) == tile


@pytest.mark.parametrize("row_interleaved", [True, False])
def test_a_chunk_fits_a_warp_and_its_layers_lie_side_by_side(row_interleaved: bool) -> None:
    layout = PoolLayout(GROUPS["groups of every size"], 64, 656, 9, row_interleaved)
    layers = places(layout)
    chunks = build_chunks(layers, 656)
    for layer, num_layers, _, num_tokens in chunks:
        assert num_tokens in (1, 2, 4)
        assert num_layers * num_tokens <= _abi.CHUNK_ROWS
        offsets = [layers[layer + i][0] - layers[layer][0] for i in range(num_layers)]
        assert offsets == [656 * i for i in range(num_layers)]
    widest = max(chunk[1] for chunk in chunks)
    assert widest == (_abi.CHUNK_ROWS if row_interleaved else 1)


def test_neighbours_of_another_group_do_not_share_a_chunk() -> None:
    # The last layer of one group ends where the next group begins, with another stride.
    layers = [(0, 1312), (656, 1312), (1312, 1968), (1968, 1968), (2624, 1968)]
    chunks = build_chunks(layers, 656)
    assert sorted({chunk[:2] for chunk in chunks}) == [(0, 2), (2, 3)]
