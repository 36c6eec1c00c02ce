# SPDX-License-Identifier: Apache-2.0
"""Owns the check that the GPU benches' pools are what their sides ask for, without a GPU.

Sides and pools are made as the benches make them, on CPU tensors; nothing is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

NUM_BLOCKS = 6
NUM_STEPS = 5
NAMES = ("workload", "sides", "timing", "bench_cooperative")


@pytest.fixture
def benches(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of benches/gpu, whose names are too plain to stay importable."""
    monkeypatch.syspath_prepend(str(root / "benches" / "gpu"))
    import bench_cooperative
    import sides
    import workload

    for module in (workload, sides):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    yield SimpleNamespace(workload=workload, sides=sides, cooperative=bench_cooperative)
    for name in NAMES:
        sys.modules.pop(name, None)


class OneRank:
    """Rank 0 of one, as far as pools ask."""

    rank = 0

    def barrier(self) -> None:
        pass


class SharedPool:
    """Stands in for the pool that ranks share: room for two index groups of the cell, and a bit."""

    def __init__(self, layout: object, ranks: OneRank, *, device: int) -> None:
        self.bytes = torch.zeros(2 * NUM_BLOCKS * 4 * 64 * 656 + 4096, dtype=torch.uint8)

    def bytes_tensor(self) -> torch.Tensor:
        return self.bytes


class Binder:
    """Stands in for what the ranks share; keeps what a copy would be bound to."""

    nothing = None

    def list_of(self, step: int, old: object) -> object:
        return old

    def bind(self, copies: object, layers: object, blocks: int, **options: object) -> object:
        return layers


def _cell(workload: ModuleType, layers: int) -> object:
    blocks_gb = (NUM_BLOCKS * layers * workload.BLOCK_SIZE * workload.ROW_BYTES + 1) / workload.GB
    return workload.Cell(2, 1, layers, blocks_gb, 16 / workload.TOP_K)


def _shared_pools(benches: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> object:
    cooperative, zeros = benches.cooperative, torch.zeros
    monkeypatch.setattr(cooperative, "SharedHostPool", SharedPool)
    monkeypatch.setattr(cooperative, "GPU_BYTES", 4 << 20)
    on_cpu = SimpleNamespace(
        zeros=lambda size, dtype, device: zeros(size, dtype=dtype),
        uint8=torch.uint8,
        manual_seed=torch.manual_seed,
    )
    monkeypatch.setattr(cooperative, "torch", on_cpu)
    return cooperative.SharedPools(OneRank(), 0.001, 0)


@pytest.mark.parametrize("layers", [4, 1])
def test_a_cooperative_side_binds_every_step_to_its_region_of_the_shared_pool(
    layers: int, benches: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = _shared_pools(benches, monkeypatch)
    cell = _cell(benches.workload, layers)
    steps = SimpleNamespace(cell=cell, logical_topk=[None] * NUM_STEPS, num_gpu_blocks=3)
    side = benches.cooperative.CooperativeSide(steps, pools, Binder(), 0)
    num_bytes = NUM_BLOCKS * layers * 64 * 656
    num_regions = pools.host.numel() // num_bytes
    assert num_regions == (2 if layers == 4 else 8)
    for bound in (side.together, side.behind):
        assert len(bound) == NUM_STEPS
        for step, rows in enumerate(bound):
            assert len(rows.host) == len(rows.gpu) == layers
            region = pools.host.data_ptr() + step % num_regions * num_bytes
            assert [host.data_ptr() - region for host in rows.host] == [
                656 * layer for layer in range(layers)
            ]
            assert all(host.shape == (NUM_BLOCKS * 64, 656) for host in rows.host)
            assert rows.gpu[0].data_ptr() == pools.gpu.data_ptr()


def test_shared_pools_have_every_method_of_the_pools_of_one_process(
    benches: SimpleNamespace,
) -> None:
    own, shared = benches.workload.Pools, benches.cooperative.SharedPools
    assert {name for name in dir(own) if name[0] != "_"} <= set(dir(shared))


def test_host_contents_differ_from_row_to_row(
    benches: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = _shared_pools(benches, monkeypatch)
    cell = _cell(benches.workload, 4)
    rows = pools.host_layers(cell, True, 0)[0]
    assert len(torch.unique(rows, dim=0)) == len(rows)
