# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that stage_prefill gathers and converts the rows of a context, chunk by chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from pool_cases import (  # noqa: E402
    PAGES,
    SPANS,
    Context,
    expected_rows,
    fill_with_fp8_rows,
    filled_pools,
    hash_of,
)
from pool_device import DevicePools, stream  # noqa: E402
from resolve_device import DEVICE, same  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels.stage_prefill import BF16_ROW_WIDTH, StageInputs, StagePrefill  # noqa: E402

pytestmark = pytest.mark.gpu

POISON = 0x5A


def _ints(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def _inputs(context: Context, spans: list[tuple[int, int]]) -> StageInputs:
    starts = np.cumsum([0, *(end - first for first, end in spans)])
    return StageInputs(
        _ints(starts),
        _ints([first for first, _ in spans]),
        _ints(context.state_row),
        _ints(context.residency),
        _ints(context.source),
        torch.zeros(3, dtype=torch.int64, device=DEVICE),
    )


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("layout", ["row_interleaved", "layer_major"])
def test_raw_rows_come_from_wherever_they_are(group: int, layout: str) -> None:
    rng = np.random.default_rng(hash_of("stage", group, layout))
    for row_bytes, max_blocks in ((656, 0), (1152, 2), (16, 1)):
        pools = filled_pools([[1, group]], row_bytes=row_bytes, host_layout=layout)
        device = DevicePools(pools)
        for name, spans in SPANS.items():
            context = Context.random(pools, len(spans), rng)
            inputs = _inputs(context, spans)
            num_rows = sum(end - first for first, end in spans)
            outs = [
                torch.full((num_rows + 6, row_bytes), POISON, dtype=torch.uint8, device=DEVICE)
                for _ in range(group)
            ]
            stage = StagePrefill(device.layers[1:], outs, inputs, max_blocks=max_blocks)
            # More rows than the requests have: those beyond stay as they are.
            stage(len(spans), num_rows + 5, stream())
            torch.cuda.synchronize()
            for layer, out in enumerate(outs):
                rows, counts = expected_rows(device.reference, context, spans, layer + 1)
                got = out.cpu().numpy()
                where = f"{name}, {row_bytes} bytes, layer {layer}"
                same(got[:num_rows], rows, f"{where}: row, byte")
                assert (got[num_rows:] == POISON).all(), f"{where}: guard rows"
            assert inputs.counters.tolist() == counts.tolist(), name


def converted(rows: np.ndarray) -> torch.Tensor:
    """bfloat16 `[rows][576]` of fp8_ds_mla rows, by torch."""
    raw = torch.from_numpy(np.ascontiguousarray(rows))
    values = raw[:, :512].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    scales = raw[:, 512:528].contiguous().view(torch.float32)
    scaled = (values * scales[:, :, None]).view(-1, 512).bfloat16()
    return torch.cat([scaled, raw[:, 528:].contiguous().view(torch.bfloat16)], dim=1)


def stage_and_check(layout: str, upconvert: bool, spans: list[tuple[int, int]]) -> None:
    """Stages the rows of a layer alone and of a group of four, compared bit for bit."""
    pools = filled_pools([[1], [4]], host_layout=layout)
    fill_with_fp8_rows(pools)
    device = DevicePools(pools)
    rng = np.random.default_rng(23)
    num_rows = sum(end - begin for begin, end in spans)
    shape, dtype = ((BF16_ROW_WIDTH,), torch.bfloat16) if upconvert else ((656,), torch.uint8)
    for first, group in ((0, 1), (1, 4)):
        context = Context.random(device.reference, len(spans), rng)
        inputs = _inputs(context, spans)
        outs = [
            torch.full((num_rows + 3, *shape), 5, device=DEVICE).to(dtype) for _ in range(group)
        ]
        stage = StagePrefill(device.layers[first : first + group], outs, inputs)
        stage(len(spans), num_rows, stream())
        torch.cuda.synchronize()
        for layer, out in enumerate(outs):
            rows, counts = expected_rows(device.reference, context, spans, first + layer)
            wanted = converted(rows) if upconvert else torch.from_numpy(rows)
            bits = torch.int16 if upconvert else torch.uint8
            got = out.cpu().view(bits).numpy()
            same(got[:num_rows], wanted.view(bits).numpy(), f"layer {layer}: row, value")
            assert bool((out[num_rows:] == 5).all()), "guard rows"
        assert inputs.counters.tolist() == counts.tolist()


@pytest.mark.parametrize("layout", ["row_interleaved", "layer_major"])
@pytest.mark.parametrize("name", SPANS)
def test_fp8_rows_become_the_bfloat16_that_torch_makes_of_them(layout: str, name: str) -> None:
    stage_and_check(layout, True, SPANS[name])


def test_a_long_context_is_staged_chunk_by_chunk_through_a_small_workspace() -> None:
    device = DevicePools(filled_pools([[4]]))
    context = Context.random(device.reference, 1, np.random.default_rng(31))
    total, chunk = PAGES * 16, 50
    outs = [torch.zeros((chunk, 656), dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    inputs = _inputs(context, [(0, chunk)])
    stage = StagePrefill(device.layers, outs, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage(1, chunk, stream())
    got: list[list[np.ndarray]] = [[] for _ in outs]
    for first in range(0, total, chunk):
        rows = min(chunk, total - first)
        inputs.first_position.fill_(first)
        inputs.row_start[1] = rows
        graph.replay()
        torch.cuda.synchronize()
        for layer, out in enumerate(outs):
            got[layer].append(out[:rows].cpu().numpy())
    for layer in range(4):
        rows, _ = expected_rows(device.reference, context, [(0, total)], layer)
        same(np.concatenate(got[layer]), rows, f"layer {layer}: row, byte")


def test_another_chunk_comes_from_its_own_tables_into_its_own_workspace() -> None:
    device = DevicePools(filled_pools([[1, 2]]))
    spans = [(0, 40), (0, 64), (0, 5), (0, 90)]
    context = Context.random(device.reference, len(spans), np.random.default_rng(37))
    # Nothing of this is read once a chunk is set.
    inputs = replace(_inputs(context, [(0, 0)] * len(spans)), state_row=_ints([-1] * len(spans)))
    bound = [torch.full((8, 656), POISON, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    stage = StagePrefill(device.layers[1:], bound, inputs)
    state_row, total = _ints(context.state_row), np.zeros(3, np.int64)
    for first, end in ((1, 3), (0, 4), (3, 4), (0, 1)):
        part = spans[first:end]
        starts = np.cumsum([0, *(stop for _, stop in part)])
        num_rows = int(starts[-1])
        # Rows of the workspace with a gap behind each.
        outs = [
            torch.full((num_rows + 2, 672), POISON, dtype=torch.uint8, device=DEVICE)[:, :656]
            for _ in range(2)
        ]
        table = inputs.source_block_table[first:end]
        stage.set_chunk(outs, _ints(starts), state_row[first:end], table)
        stage(len(part), num_rows + 1, stream())
        torch.cuda.synchronize()
        chosen = Context(context.state_row[first:end], context.residency, context.source[first:end])
        for layer, out in enumerate(outs, 1):
            rows, counts = expected_rows(device.reference, chosen, part, layer)
            same(out.cpu().numpy()[:num_rows], rows, f"requests {first} to {end}: row, byte")
            assert bool((out[num_rows:] == POISON).all()), "guard rows"
        total += counts
        assert inputs.counters.tolist() == total.tolist()
    assert all(bool((out == POISON).all()) for out in bound), "the first workspace was written"


def test_a_chunk_that_does_not_fit_what_was_bound_is_refused() -> None:
    device = DevicePools(filled_pools([[1]]))
    context = Context.random(device.reference, 2, np.random.default_rng(1))
    inputs = _inputs(context, [(0, 8), (0, 8)])
    out = torch.zeros((16, 656), dtype=torch.uint8, device=DEVICE)
    stage = StagePrefill(device.layers, [out], inputs)
    three = _ints([0, 0, 0])
    table = inputs.source_block_table
    with pytest.raises(ConfigError, match="3 requests, expected 1 to 2"):
        stage.set_chunk([out], _ints([0, 1, 2, 3]), three, table)
    with pytest.raises(ConfigError, match="row_start has 2 entries"):
        stage.set_chunk([out], _ints([0, 1]), inputs.state_row, table)
    with pytest.raises(ConfigError, match="source_block_table has shape"):
        stage.set_chunk([out], inputs.row_start, inputs.state_row, table[:, :-1])
    with pytest.raises(ConfigError, match="got 2 workspaces, expected 1"):
        stage.set_chunk([out, out], inputs.row_start, inputs.state_row, table)
    # Later chunks may be longer again than the one before.
    stage.set_chunk([out], inputs.row_start[:2], inputs.state_row[:1], table[:1])
    with pytest.raises(ConfigError, match="num_requests is 2, expected 1 to 1"):
        stage(2, 16, stream())
    stage.set_chunk([out], inputs.row_start, inputs.state_row, table)
    stage(2, 16, stream())


def test_a_workspace_of_another_width_or_a_layer_of_another_stride_is_refused() -> None:
    device = DevicePools(filled_pools([[1, 2]]))
    context = Context.random(device.reference, 1, np.random.default_rng(1))
    inputs = _inputs(context, [(0, 8)])
    narrow = torch.zeros((8, 640), dtype=torch.uint8, device=DEVICE)
    whole = torch.zeros((8, 656), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ConfigError, match="640 bytes"):
        StagePrefill(device.layers[:1], [narrow], inputs)
    with pytest.raises(ConfigError, match="other strides"):
        StagePrefill(device.layers[:2], [whole, whole.clone()], inputs)
    stage = StagePrefill(device.layers[:1], [whole], inputs)
    with pytest.raises(ConfigError, match="num_rows"):
        stage(1, 9, stream())
