# SPDX-License-Identifier: Apache-2.0
"""Owns the host pool on a real driver: kernels reach every chunk of it, and it ends cleanly."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from pool_device import load_pages, stream  # noqa: E402
from resolve_device import DEVICE  # noqa: E402

from hotpage.kernels import load  # noqa: E402
from hotpage.kernels.copy_pages import PageList, RestorePages, SpillPages  # noqa: E402
from hotpage.kernels.layer_table import LayerTable, PoolLayer  # noqa: E402
from hotpage.memory import HostPool, PoolLayout  # noqa: E402

pytestmark = pytest.mark.gpu


def test_kernels_reach_every_chunk_of_a_registered_pool() -> None:
    layout = PoolLayout((1, 2), 16, 656, 257)
    with HostPool(layout, chunk_bytes=1 << 20) as pool:
        assert len(layout.chunks(1 << 20)) > 3
        assert load().is_pinned(pool.address, pool.num_bytes)
        gpu = torch.randint(0, 256, (257, 3, 16, 656), dtype=torch.uint8).to(DEVICE)
        before = gpu.clone()
        layers = [PoolLayer(gpu[:, i], pool.layer_rows(i), 0) for i in range(3)]
        pages = PageList.allocate(256, 1, DEVICE)
        blocks = torch.arange(1, 257)
        whole = torch.full((256,), 16)
        load_pages(pages, blocks.numpy(), blocks[:, None].numpy(), whole.numpy())
        table = LayerTable(layers)
        SpillPages(table, pages)(256, stream())
        torch.cuda.synchronize()
        for i, layer in enumerate(layers):
            assert torch.equal(layer.host[1:], before[1:, i].cpu())
        gpu[1:].zero_()
        RestorePages(table, pages)(256, stream())
        torch.cuda.synchronize()
        assert torch.equal(gpu, before)
        address, num_bytes = pool.address, pool.num_bytes
        del layers, layer, table
    assert not load().is_pinned(address, num_bytes)
