# SPDX-License-Identifier: Apache-2.0
"""Owns the kernels' reading of mirror.json, pages.json and invalidate.json."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from pool_cases import filled_pools  # noqa: E402
from pool_device import DeviceMirror, DevicePools, load_pages, stream  # noqa: E402
from reference import Pools, filled_bytes  # noqa: E402
from resolve_device import DEVICE, same  # noqa: E402
from test_resolve_vectors import cases  # noqa: E402

from hotpage.kernels.copy_pages import PageList, RestorePages, SpillPages  # noqa: E402
from hotpage.kernels.invalidate import Invalidate  # noqa: E402
from hotpage.kernels.resolve_and_copy import RowState  # noqa: E402

pytestmark = pytest.mark.gpu


def _pools(case: dict[str, Any]) -> Pools:
    sizes = ("packing", "block_size", "row_bytes", "gpu_blocks", "host_blocks", "host_layout")
    pools = filled_pools(**{key: case[key] for key in sizes})
    pools.gpu[:] = filled_bytes(pools.gpu.size, case["gpu_salt"])
    pools.host[:] = filled_bytes(pools.host.size, case["host_salt"])
    return pools


def _check_bytes(pools: DevicePools, expect: dict[str, Any], where: str) -> None:
    gpu, host = pools.bytes_now()
    assert zlib.crc32(gpu.tobytes()) == expect["gpu_crc32"], f"{where}: GPU pool"
    assert zlib.crc32(host.tobytes()) == expect["host_crc32"], f"{where}: host pool"


def _recycle(mirror: DeviceMirror, host_blocks: list[int]) -> None:
    """Clears masks as a step does: in the launch that invalidates what was recycled."""
    state = RowState.allocate(1, 4, DEVICE)
    recycled = torch.tensor(host_blocks, dtype=torch.int32, device=DEVICE)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    mask = mirror.mask
    sizes = (mask.block_size, mask.num_host_blocks)
    op = Invalidate([state], *sizes, recycled, nothing, masks=[mask])
    op(len(host_blocks), 0, stream())


@pytest.mark.parametrize("case", cases("mirror.json"))
def test_mirrors_equal_the_golden_vectors(case: dict[str, Any]) -> None:
    pools = DevicePools(_pools(case))
    mirrors: dict[tuple[int, ...], DeviceMirror] = {}
    # The cases keep one mask for every step, whichever layers it mirrors.
    shared = DeviceMirror(pools, 1)
    for i, step in enumerate(case["steps"]):
        where, expect = f"step {i} ({step['op']})", step["expect"]
        if step["op"] == "recycle":
            _recycle(shared, step["host_blocks"])
        else:
            layers = tuple(step["layers"])
            mirror = mirrors.setdefault(layers, DeviceMirror(pools, 512, list(layers)))
            mirror.mask.words.copy_(shared.mask.words)
            before = mirror.mask.counters.cpu().numpy()
            slots = np.array(step["resident_slot"], np.int64).reshape(pools.num_kv_groups, -1)
            mirror.load(slots, np.array(step["host_row"], np.int64))
            mirror.run(len(step["host_row"]))
            shared.mask.words.copy_(mirror.mask.words)
            counted = mirror.mask.counters.cpu().numpy() - before
            wanted = np.array([expect[key] for key in ("copied", "skipped", "lost")])
            same(counted, wanted, f"{where}: copied, skipped, lost")
        assert shared.mask_words() == expect["mask_words"], where
        _check_bytes(pools, expect, where)


@pytest.mark.parametrize("case", cases("pages.json"))
def test_page_copies_equal_the_golden_vectors(case: dict[str, Any]) -> None:
    pools = DevicePools(_pools(case))
    pages = PageList.allocate(1, pools.num_kv_groups, DEVICE)
    ops = {
        "spill_page": SpillPages(pools.table(), pages),
        "restore_page": RestorePages(pools.table(), pages),
    }
    for i, step in enumerate(case["steps"]):
        where = f"step {i} ({step['op']})"
        if step["op"] == "copy_host_page":
            # Host to host is the CPU's: only its effect on what follows is wanted here.
            for layer in pools.layers:
                rows = slice(0, step["num_rows"])
                source = layer.host[step["source_host_block"], rows]
                layer.host[step["host_block"], rows] = source
        else:
            load_pages(pages, [step["host_block"]], [step["resident_blocks"]], [step["num_rows"]])
            ops[step["op"]](1, stream())
        _check_bytes(pools, step["expect"], where)
    copied = sum(step["op"] != "copy_host_page" for step in case["steps"])
    assert pages.counters.tolist() == [copied, 0]


@pytest.mark.parametrize("case", cases("invalidate.json"))
@pytest.mark.parametrize("groups", [1, 3])
def test_invalidations_equal_the_golden_vectors(case: dict[str, Any], groups: int) -> None:
    row_map, last_used = np.array(case["row_map"]), np.array(case["last_used"])
    num_states, hot_rows = row_map.shape
    # Row maps are read in whole 16-byte pieces; the slots that this adds are free.
    width = -(-hot_rows // 4) * 4
    states = []
    for _ in range(groups):
        state = RowState.allocate(num_states, width, DEVICE)
        state.row_map[:, :hot_rows] = torch.from_numpy(row_map.astype(np.int32))
        state.last_used[:, :hot_rows] = torch.from_numpy(last_used.astype(np.int16))
        state.epoch.fill_(int(last_used.max(initial=0)) + 1)
        states.append(state)
    recycled = np.array(case["recycled_host_blocks"], np.int32)
    rewritten = np.array(case["rewritten_host_rows"], np.int64)
    op = Invalidate(
        states,
        case["block_size"],
        4096,
        torch.from_numpy(recycled).to(DEVICE),
        torch.from_numpy(rewritten).to(DEVICE),
    )
    op(len(recycled), len(rewritten), stream())
    expect = case["expect"]
    for i, state in enumerate(states):
        got = state.row_map.cpu().numpy()[:, :hot_rows]
        same(got, np.array(expect["row_map"]), f"index group {i}: row_map (state, slot)")
        got = state.last_used.cpu().numpy()[:, :hot_rows]
        same(got, np.array(expect["last_used"]), f"index group {i}: last_used (state, slot)")
    assert op.freed.item() == groups * expect["freed"]
