# SPDX-License-Identifier: Apache-2.0
"""Owns the small program that runs the pool kernels under compute-sanitizer: exit 0 if right."""

from __future__ import annotations

import numpy as np
import torch
from pool_cases import SPANS, filled_pools, random_pages, random_tokens
from pool_device import DeviceMirror, DevicePools, load_pages, stream
from reference import invalidate
from resolve_device import DEVICE
from test_invalidate import BLOCK_SIZE, HOST_BLOCKS, Case
from test_stage_prefill import stage_and_check

from hotpage.kernels.copy_pages import PageList, RestorePages, SpillPages
from hotpage.kernels.invalidate import Invalidate
from hotpage.kernels.mirror_rows import ReportMirrored


def move_rows(layout: str) -> None:
    """Mirror, report, spill and restore, compared in full."""
    pools = filled_pools([[1, 4], [2]], gpu_blocks=20, host_blocks=12, host_layout=layout)
    device = DevicePools(pools)
    rng = np.random.default_rng(3)
    mirror = DeviceMirror(device, 64)
    slots, host = random_tokens(pools, 61, rng)
    mirror.load(slots, host)
    mirror.run(61)
    pools.mirror_rows(range(len(device.layers)), slots, host)
    assert mirror.mask_words() == pools.mask_words()
    blocks = torch.arange(12, dtype=torch.int32, device=DEVICE)
    missing = torch.zeros(12, dtype=torch.int32, device=DEVICE)
    ReportMirrored(mirror.mask, blocks, missing)(12, stream())
    landed = pools.mask.sum(axis=1)
    assert missing.tolist()[1:] == (16 - landed[1:]).tolist()
    pages = PageList.allocate(7, 2, DEVICE)
    for kind, reference in ((SpillPages, pools.spill_page), (RestorePages, pools.restore_page)):
        chosen = random_pages(pools, 6, rng)
        load_pages(pages, *chosen)
        # The seventh page is a null page and is left out.
        kind(device.table(), pages)(7, stream())
        for page in zip(*chosen, strict=True):
            reference(*page)
        device.check(f"{layout}, {kind.__name__}")
    assert pages.counters.tolist() == [12, 2]


def free_slots() -> None:
    """One invalidation of more ids than a pass takes, by holders and by all."""
    for by_holders in (True, False):
        rng = np.random.default_rng(4)
        case = Case(2, 40, 516, rng)
        recycled = case.held_rows(rng, 300) // BLOCK_SIZE
        rewritten = case.held_rows(rng, 4000)
        op = Invalidate(
            case.states,
            BLOCK_SIZE,
            HOST_BLOCKS,
            torch.from_numpy(recycled.astype(np.int32)).to(DEVICE),
            torch.from_numpy(rewritten).to(DEVICE),
            holders=case.holders if by_holders else None,
            max_blocks=9,
        )
        op(300, 4000, stream())
        invalidate(case.expected, rewritten, recycled, BLOCK_SIZE)
        case.check(f"holders {by_holders}")


def main() -> None:
    """Every op on small shapes."""
    for layout in ("row_interleaved", "layer_major"):
        move_rows(layout)
        for upconvert in (False, True):
            stage_and_check(layout, upconvert, SPANS["chunks"])
    free_slots()
    print("results are right")


if __name__ == "__main__":
    main()
