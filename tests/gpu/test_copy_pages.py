# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that spill_pages and restore_pages move what the numpy reference does."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from pool_cases import PACKINGS, filled_pools, hash_of, malformed_pages, random_pages  # noqa: E402
from pool_device import DevicePools, load_pages, stream  # noqa: E402
from resolve_device import DEVICE  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels.copy_pages import PageList, RestorePages, SpillPages  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", ["row_interleaved", "layer_major"])
@pytest.mark.parametrize("row_bytes", [16, 656, 1152])
def test_pages_equal_the_reference_in_both_directions(
    packing: str, layout: str, row_bytes: int
) -> None:
    rng = np.random.default_rng(hash_of("pages", packing, layout, row_bytes))
    groups = len(PACKINGS[packing])
    for block_size, max_blocks in ((16, 0), (64, 2), (5, 0)):
        n = 6
        pools = filled_pools(
            PACKINGS[packing],
            block_size=block_size,
            row_bytes=row_bytes,
            gpu_blocks=1 + n * groups,
            host_blocks=12,
            host_layout=layout,
        )
        device = DevicePools(pools)
        pages = PageList.allocate(8, groups, DEVICE)
        table = device.table(max_blocks=max_blocks)
        spill, restore = SpillPages(table, pages), RestorePages(table, pages)
        for op, reference in (
            (spill, pools.spill_page),
            (restore, pools.restore_page),
            (spill, pools.spill_page),
        ):
            chosen = random_pages(pools, n, rng)
            load_pages(pages, *chosen)
            op(n, stream())
            for page in zip(*chosen, strict=True):
                reference(*page)
            device.check(f"block size {block_size}, {op._entry_point}")
        assert pages.counters.tolist() == [3 * n, 0]


def test_pages_with_null_or_unknown_blocks_are_left_out_and_counted() -> None:
    pools = filled_pools([[4], [1]], gpu_blocks=20, host_blocks=20)
    device = DevicePools(pools)
    good, bad, listed = malformed_pages()
    pages = PageList.allocate(len(listed), 2, DEVICE)
    load_pages(pages, *(np.array(column) for column in zip(*listed, strict=True)))
    SpillPages(device.table(), pages)(len(listed), stream())
    for page in good:
        pools.spill_page(*page)
    device.check("spill")
    assert pages.counters.tolist() == [len(good), len(bad)]
    RestorePages(device.table(), pages)(len(listed), stream())
    device.check("restore of what was just spilt")
    assert pages.counters.tolist() == [2 * len(good), 2 * len(bad)]


def test_a_captured_spill_reads_the_list_of_the_step_it_is_replayed_in() -> None:
    pools = filled_pools([[1, 4]], gpu_blocks=9, host_blocks=9)
    device = DevicePools(pools)
    pages = PageList.allocate(4, 1, DEVICE)
    spill = SpillPages(device.table(), pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spill(4, stream())
    rng = np.random.default_rng(3)
    for _ in range(3):
        chosen = random_pages(pools, 4, rng)
        load_pages(pages, *chosen)
        graph.replay()
        for page in zip(*chosen, strict=True):
            pools.spill_page(*page)
        device.check("replay")


def test_a_spill_and_a_restore_of_other_pages_share_the_device_on_two_streams() -> None:
    pools = filled_pools([[4]], gpu_blocks=101, host_blocks=101, block_size=64)
    device = DevicePools(pools)
    out, back = PageList.allocate(50, 1, DEVICE), PageList.allocate(50, 1, DEVICE)
    whole = np.full(50, 64)
    load_pages(out, np.arange(1, 51), np.arange(1, 51)[:, None], whole)
    load_pages(back, np.arange(51, 101), np.arange(51, 101)[:, None], whole)
    spill, restore = SpillPages(device.table(), out), RestorePages(device.table(), back)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for on, op in zip(streams, (spill, restore), strict=True):
        with torch.cuda.stream(on):
            op(50, stream())
    for block in range(1, 51):
        pools.spill_page(block, [block], 64)
        pools.restore_page(block + 50, [block + 50], 64)
    device.check("streams")


def test_more_pages_than_the_list_holds_are_refused() -> None:
    device = DevicePools(filled_pools([[1]]))
    pages = PageList.allocate(4, 1, DEVICE)
    with pytest.raises(ConfigError, match="num_pages"):
        SpillPages(device.table(), pages)(5, stream())
    with pytest.raises(ConfigError, match="resident_blocks"):
        SpillPages(device.table(), PageList.allocate(4, 2, DEVICE))
