# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that the harness sees: one wrong row of one layer changes the logits' bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.compare import _bits
from engine.launch import BLOCK
from engine.workload import Turn, _draw_tokens, serve

if TYPE_CHECKING:
    import random

    from engine.launch import Engine
    from engine.probe import Batch, Outcome, Probe

PROMPT, ANSWER = 1500, 8
"""Shorter than the selection: every row is attended."""
ROW, OTHER = 700, 701
"""Rows of one page."""
STEP = PROMPT + 3
"""Position of a decode row; the row is replaced before its step."""


def check_sensitivity(engine: Engine, probe: Probe, draw: random.Random) -> str:
    """Serves one request twice, the second time with a row of one layer replaced by its neighbour.

    Returns:
        What was found, in words.

    Raises:
        AssertionError: two equal runs differ, or the wrong row changes no bit, or is not found.
    """
    tokens = tuple(_draw_tokens(draw, PROMPT + ANSWER))
    turn = Turn("control", tokens, PROMPT)
    probe.scripts = {turn.name: tokens}
    layer = len(engine.layers) // 2

    replaced: list[int] = []

    def run(replace: bool) -> tuple[dict[int, Outcome], int]:
        probe.take()
        probe.before_forward = (
            (lambda batch: replaced.extend(_replace(engine, layer, batch))) if replace else None
        )
        serve(engine, [turn])
        outcomes, faults = probe.take()
        probe.before_forward = None
        engine.drain()
        return {key[1]: rows[-1] for key, rows in outcomes.items()}, len(faults)

    (first, faults), (again, _), (wrong, found) = run(False), run(False), run(True)
    assert not faults, "a row was wrong before any was replaced"
    answers = range(PROMPT - 1, PROMPT - 1 + ANSWER)
    for at in answers:
        assert torch.equal(_bits(first[at].logits), _bits(again[at].logits)), (
            f"equal runs differ at position {at}"
        )
    since = replaced[0]
    same = [at for at in answers if torch.equal(_bits(first[at].logits), _bits(wrong[at].logits))]
    assert same == [at for at in answers if at < since], f"logits are equal at {same}"
    rows = [at for at in answers if first[at].attended != wrong[at].attended]
    assert rows == [at for at in answers if at >= since], f"attended rows differ at {rows}"
    assert found, "the replaced row was attended and not found"
    change = float((first[STEP].logits.float() - wrong[STEP].logits.float()).abs().max())
    return f"row {ROW} of layer {layer} replaced: logits change by up to {change:.3g}"


def _replace(engine: Engine, layer: int, batch: Batch) -> list[int]:
    """Replaces the row, and returns the position of the step's first decode row."""
    positions = [position for _, position in batch.decode_rows]
    if STEP not in positions:
        return []
    handle = engine.layers[layer].hisparse_cache
    block = int(handle.block_table[int(batch.state_rows[0]), ROW // BLOCK])
    assert block != 0, "the page is not on the GPU"
    page = handle.view.cache[block]
    page[ROW % BLOCK] = page[OTHER % BLOCK]
    return positions[:1]


def attend_first_rows(group: int, logical: torch.Tensor, batch: Batch) -> None:
    """A selection by position in the place of the indexer's, as `Probe.before_resolve`."""
    del group
    positions = [position for _, position in batch.decode_rows]
    last = torch.tensor(positions[: logical.shape[0]], device=logical.device)
    column = torch.arange(logical.shape[1], device=logical.device, dtype=logical.dtype)
    logical.copy_(torch.where(column <= last[:, None], column, -1))
