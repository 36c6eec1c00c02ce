# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that the pool ops do the same through torch.ops.hotpage, and refuse strangers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from pool_cases import filled_pools, random_pages, random_tokens  # noqa: E402
from pool_device import DeviceMirror, DevicePools, load_pages  # noqa: E402
from resolve_device import DEVICE  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels import torch_pool_ops  # noqa: E402
from hotpage.kernels.copy_pages import PageList, RestorePages, SpillPages  # noqa: E402
from hotpage.kernels.invalidate import Invalidate  # noqa: E402
from hotpage.kernels.layer_table import PoolLayer  # noqa: E402
from hotpage.kernels.mirror_rows import ReportMirrored  # noqa: E402
from hotpage.kernels.resolve_and_copy import RowState  # noqa: E402
from hotpage.kernels.stage_prefill import StageInputs, StagePrefill  # noqa: E402

pytestmark = pytest.mark.gpu

OPS = torch.ops.hotpage


def ints(values: object) -> torch.Tensor:
    """int32 on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sides(layers: list[PoolLayer]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GPU and host views of layers."""
    return [layer.gpu for layer in layers], [layer.host for layer in layers]


def test_mirror_report_spill_and_restore_run_by_number() -> None:
    pools = filled_pools([[1, 4], [2]], gpu_blocks=20, host_blocks=12, host_layout="layer_major")
    device = DevicePools(pools)
    gpu, host = sides(device.layers)
    rng = np.random.default_rng(8)
    mirror = DeviceMirror(device, 64)
    slots, host_row = random_tokens(pools, 61, rng)
    mirror.load(slots, host_row)
    mask, where = mirror.mask, mirror.slots
    bound = torch_pool_ops.bind(mirror.op)
    written = (mask.words, mask.counters)
    OPS.mirror_rows(bound, where.resident_slot, where.host_row, *written, gpu, host, 61)
    pools.mirror_rows(range(len(device.layers)), slots, host_row)
    device.check("mirror by number")
    blocks, missing = ints(list(range(12))), torch.zeros(12, dtype=torch.int32, device=DEVICE)
    report = torch_pool_ops.bind(ReportMirrored(mask, blocks, missing))
    OPS.report_mirrored(report, blocks, mask.words, missing, mask.counters, 12)
    assert missing.tolist()[1:] == (16 - pools.mask.sum(axis=1)[1:]).tolist()
    pages = PageList.allocate(6, 2, DEVICE)
    tensors = (pages.host_block, pages.resident_blocks, pages.num_rows, pages.counters)
    for kind, op, reference in (
        (SpillPages, OPS.spill_pages, pools.spill_page),
        (RestorePages, OPS.restore_pages, pools.restore_page),
    ):
        chosen = random_pages(pools, 6, rng)
        load_pages(pages, *chosen)
        number = torch_pool_ops.bind(kind(device.table(), pages))
        op(number, *tensors, gpu, host, 6)
        for page in zip(*chosen, strict=True):
            reference(*page)
        device.check(kind.__name__)
    stranger = where.host_row.clone()
    with pytest.raises(ConfigError, match="host_row is not what the op is bound to"):
        OPS.mirror_rows(bound, where.resident_slot, stranger, *written, gpu, host, 61)
    with pytest.raises(ConfigError, match="expected SpillPages"):
        OPS.spill_pages(bound, *tensors, gpu, host, 6)
    torch_pool_ops.release(bound)
    with pytest.raises(ConfigError, match="is nothing"):
        OPS.mirror_rows(bound, where.resident_slot, where.host_row, *written, gpu, host, 61)


def test_stage_prefill_runs_by_number() -> None:
    pools = filled_pools([[1, 2]], row_bytes=32)
    device = DevicePools(pools)
    layers = device.layers[1:]
    gpu, host = sides(layers)
    out = [torch.zeros((16, 32), dtype=torch.uint8, device=DEVICE) for _ in layers]
    inputs = StageInputs(
        ints([0, 16]), ints([0]), ints([-1]), ints([[0]]), ints([[3]]),
        torch.zeros(3, dtype=torch.int64, device=DEVICE),
    )  # fmt: skip
    number = torch_pool_ops.bind(StagePrefill(layers, out, inputs))
    OPS.stage_prefill(
        number, inputs.row_start, inputs.first_position, inputs.state_row, inputs.residency,
        inputs.source_block_table, inputs.counters, gpu, host, out, 1, 16,
    )  # fmt: skip
    torch.cuda.synchronize()
    for rows, layer in zip(out, layers, strict=True):
        assert torch.equal(rows.cpu(), layer.host[3])


def test_invalidate_runs_by_number() -> None:
    state = RowState.allocate(2, 16, DEVICE)
    state.row_map[1, 4], state.row_map[1, 5] = 35, 20
    state.last_used.fill_(3)
    state.epoch.fill_(3)
    recycled, rewritten = ints([2]), torch.tensor([20], device=DEVICE)
    op = Invalidate([state], 16, 10, recycled, rewritten)
    number = torch_pool_ops.bind(op)
    OPS.invalidate(
        number, recycled, rewritten, [state.row_map], [state.last_used], None, [], op.freed, 1, 1
    )
    assert int((state.row_map != -1).sum()) == 0
    assert int(op.freed) == 2
