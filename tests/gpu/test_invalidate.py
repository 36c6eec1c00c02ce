# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that invalidate frees what the numpy reference frees, found by holders or not."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from pool_device import stream  # noqa: E402
from reference import HotState, invalidate, resolve_batch  # noqa: E402
from resolve_cases import Shape, Workload, empty_states  # noqa: E402
from resolve_device import DEVICE, DeviceResolve, same  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels.invalidate import Holders, Invalidate  # noqa: E402
from hotpage.kernels.mirror_rows import MirrorMask  # noqa: E402
from hotpage.kernels.resolve_and_copy import RowState  # noqa: E402

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
HOST_BLOCKS = 5000


class Case:
    """States of some index groups on the device and in the reference, filled alike."""

    def __init__(
        self, groups: int, state_rows: int, hot_rows: int, rng: np.random.Generator
    ) -> None:
        self.states, self.expected = [], []
        self.holders = Holders(HOST_BLOCKS, state_rows, DEVICE)
        marked = np.zeros((HOST_BLOCKS, state_rows), bool)
        for _ in range(groups):
            state = RowState.allocate(state_rows, hot_rows, DEVICE)
            rows = rng.integers(BLOCK_SIZE, HOST_BLOCKS * BLOCK_SIZE, (state_rows, hot_rows))
            rows[rng.random(rows.shape) < 0.3] = -1
            rows[:, 0] = rng.integers(BLOCK_SIZE, HOST_BLOCKS * BLOCK_SIZE, state_rows)
            used = np.where(rows >= 0, rng.integers(1, 30000, rows.shape), 0)
            state.row_map.copy_(torch.from_numpy(rows.astype(np.int32)))
            state.last_used.copy_(torch.from_numpy(used.astype(np.int16)))
            state.epoch.fill_(30001)
            self.states.append(state)
            for s in range(state_rows):
                reference = HotState(hot_rows)
                reference.row_map[:], reference.last_used[:] = rows[s], used[s]
                self.expected.append(reference)
                held = rows[s][rows[s] >= 0]
                marked[held // BLOCK_SIZE, s] = True
        words = np.zeros((HOST_BLOCKS, -(-state_rows // 32)), np.uint32)
        for s in range(state_rows):
            words[:, s // 32] |= marked[:, s].astype(np.uint32) << np.uint32(s % 32)
        self.holders.words.copy_(torch.from_numpy(words.view(np.int32)))
        self.words = words

    def held_rows(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Some rows that are held."""
        held = np.concatenate([state.row_map for state in self.expected])
        return rng.choice(held[held >= 0], n)

    def check(self, where: str) -> None:
        """Compares every state with the reference."""
        got = np.concatenate([state.row_map.cpu().numpy() for state in self.states])
        same(got, np.stack([s.row_map for s in self.expected]), f"{where}: row_map")
        got = np.concatenate([state.last_used.cpu().numpy() for state in self.states])
        same(got, np.stack([s.last_used for s in self.expected]), f"{where}: last_used")


@pytest.mark.parametrize("search", ["all", "holders", "active"])
@pytest.mark.parametrize(
    ("groups", "state_rows", "hot_rows"), [(1, 1, 4), (3, 5, 1028), (2, 70, 4096)]
)
@pytest.mark.parametrize(
    ("num_recycled", "num_rewritten"), [(4, 0), (0, 64), (100, 300), (4000, 8200)]
)
def test_freed_slots_equal_the_reference(
    search: str, groups: int, state_rows: int, hot_rows: int, num_recycled: int, num_rewritten: int
) -> None:
    rng = np.random.default_rng(groups * 1000 + num_recycled + num_rewritten)
    case = Case(groups, state_rows, hot_rows, rng)
    recycled = case.held_rows(rng, num_recycled) // BLOCK_SIZE
    rewritten = case.held_rows(rng, num_rewritten)
    # Ids that nobody holds, padding, and rows that no row map can hold.
    recycled[::3] = rng.integers(-1, HOST_BLOCKS, len(recycled[::3]))
    rewritten[::5] = -1
    rewritten[1::7] += 2**32
    active = torch.arange(state_rows - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    holders = case.holders if search == "holders" else None
    op = Invalidate(
        case.states,
        BLOCK_SIZE,
        HOST_BLOCKS,
        torch.from_numpy(recycled.astype(np.int32)).to(DEVICE),
        torch.from_numpy(rewritten).to(DEVICE),
        active=active if search == "active" else None,
        holders=holders,
    )
    op(num_recycled, num_rewritten, stream())
    freed = invalidate(case.expected, rewritten, recycled, BLOCK_SIZE)
    case.check(search)
    assert op.freed.item() == freed
    if holders is not None:
        words = case.words.copy()
        words[recycled[recycled >= 0]] = 0
        same(holders.words.cpu().numpy().view(np.uint32), words, "holder bits (block, word)")
        # The scratch word is as it was: a second launch does the same.
        op(num_recycled, num_rewritten, stream())
        case.check("again")


def test_state_rows_that_are_not_active_keep_their_rows() -> None:
    case = Case(2, 6, 128, np.random.default_rng(3))
    blocks = torch.arange(HOST_BLOCKS, dtype=torch.int32, device=DEVICE)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    active = torch.tensor([4, -1, 1], dtype=torch.int32, device=DEVICE)
    op = Invalidate(case.states, BLOCK_SIZE, HOST_BLOCKS, blocks, nothing, active=active)
    op(HOST_BLOCKS, 0, stream())
    for group in range(2):
        for state_row in (4, 1):
            invalidate(
                [case.expected[group * 6 + state_row]], [], np.arange(HOST_BLOCKS), BLOCK_SIZE
            )
    case.check("active")


def test_masks_of_recycled_blocks_are_cleared_and_no_others() -> None:
    case = Case(1, 2, 64, np.random.default_rng(4))
    masks = [MirrorMask(HOST_BLOCKS, BLOCK_SIZE, DEVICE) for _ in range(2)]
    for mask in masks:
        mask.words.fill_(0xFFFF)
    recycled = torch.tensor([7, -1, 0, 4999, 5000, 7], dtype=torch.int32, device=DEVICE)
    rewritten = torch.tensor([50 * BLOCK_SIZE], dtype=torch.int64, device=DEVICE)
    op = Invalidate(case.states, BLOCK_SIZE, HOST_BLOCKS, recycled, rewritten, masks=masks)
    op(6, 1, stream())
    for mask in masks:
        cleared = torch.nonzero(mask.words[:, 0] == 0).flatten().tolist()
        assert cleared == [7, 4999]


@pytest.mark.parametrize("copy", ["none", "group", "leader"])
def test_a_resolve_marks_the_holders_that_the_next_invalidation_needs(copy: str) -> None:
    """Steps of resolve and invalidate: a bit that was forgotten would leave a stale row behind.

    The resolve itself marks if it copies nothing, else its copy does.
    """
    shape = Shape(num_requests=6, rows_per_request=2, hot_rows=128)
    work, states = Workload(shape, 41), empty_states(shape)
    holders = Holders(shape.num_host_blocks, shape.num_state_rows, DEVICE)
    device = DeviceResolve(shape, with_bytes=copy != "none", copy=copy, holders=holders.words)
    recycled = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    rewritten = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    op = Invalidate(
        [device.state],
        shape.block_size,
        shape.num_host_blocks,
        recycled,
        rewritten,
        holders=holders,
    )
    rng = np.random.default_rng(43)
    freed = 0
    for step in range(60):
        batch = work.step()
        device.load(batch)
        device.run()
        device.check(resolve_batch(batch, states), states, f"step {step}")
        blocks = rng.integers(1, shape.num_host_blocks, 8)
        rows = rng.integers(shape.block_size, shape.num_host_rows, 40)
        recycled[:8] = torch.from_numpy(blocks.astype(np.int32))
        rewritten[:40] = torch.from_numpy(rows)
        op(8, 40, stream())
        freed += invalidate(states, rows, blocks, shape.block_size)
        row_map = np.stack([state.row_map for state in states])
        same(device.state.row_map.cpu().numpy(), row_map, f"step {step}: row_map after")
    assert op.freed.item() == freed
    assert freed > 100, "the workload must hold rows that are recycled"


def test_lists_that_are_too_short_and_two_searches_at_once_are_refused() -> None:
    case = Case(1, 2, 64, np.random.default_rng(5))
    ids = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    sizes = (BLOCK_SIZE, HOST_BLOCKS)
    with pytest.raises(ConfigError, match="at most 4 and 4"):
        Invalidate(case.states, *sizes, ids, rows)(5, 0, stream())
    with pytest.raises(ConfigError, match="one of them"):
        Invalidate(case.states, *sizes, ids, rows, active=ids[:2], holders=case.holders)
    with pytest.raises(ConfigError, match="16-byte pieces"):
        Invalidate([RowState.allocate(2, 62, DEVICE)], *sizes, ids, rows)
