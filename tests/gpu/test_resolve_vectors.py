# SPDX-License-Identifier: Apache-2.0
"""Owns the kernels' reading of the golden vectors: resolve.json and the copies of copy.json."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference import HotState, Pools, filled_bytes, invalidate  # noqa: E402
from resolve_device import DEVICE, same  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels.replay_copy import CopyList, LayerRows, ReplayCopy  # noqa: E402
from hotpage.kernels.resolve_and_copy import (  # noqa: E402
    ResolveAndCopy,
    ResolveInputs,
    ResolveOutputs,
    ResolveShape,
    RowState,
)

pytestmark = pytest.mark.gpu

VECTORS = Path(__file__).resolve().parent.parent / "vectors"


def cases(name: str) -> list[Any]:
    """Cases of one file as pytest parameters."""
    found = json.loads((VECTORS / name).read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in found]


def _ints(values: Any, *shape: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE).reshape(shape)


def _rows_per_request(case: dict[str, Any]) -> int:
    most = 1
    for step in case["steps"]:
        owners = [r for r in step["row_request"][: step["num_valid_rows"]] if r >= 0]
        most = max([most, *(owners.count(r) for r in owners)])
    return most


def _bind(
    case: dict[str, Any], step: dict[str, Any], state: RowState, rows_per_request: int
) -> tuple[ResolveAndCopy, ResolveOutputs]:
    rows, requests, k = len(step["row_request"]), len(step["state_row"]), case["top_k"]
    bs, pages = case["block_size"], case["pages"]
    inputs = ResolveInputs(
        logical_topk=_ints(step["logical_topk"], rows, k),
        row_request=_ints(step["row_request"], rows),
        num_valid_rows=_ints(step["num_valid_rows"], 1),
        state_row=_ints(step["state_row"], requests),
        seq_len=_ints(step["seq_len"], rows),
        residency=_ints(step["residency"], case["state_rows"], pages),
        source_block_table=_ints(step["source_block_table"], requests, pages),
        hot_block_table=_ints(step["hot_block_table"], requests, case["hot_rows"] // bs),
    )
    outputs = ResolveOutputs(
        torch.full((rows, k), -99, dtype=torch.int32, device=DEVICE),
        torch.full((rows,), -99, dtype=torch.int32, device=DEVICE),
        CopyList.allocate(requests, rows_per_request * k, DEVICE),
    )
    stride = case["block_stride_rows"]
    blocks = 2**31 // stride - 1
    shape = ResolveShape(rows_per_request, bs, stride, 2**31 // bs - 1, blocks)
    return ResolveAndCopy(inputs, state, outputs, shape), outputs


def _prepare_states(case: dict[str, Any], step: dict[str, Any], state: RowState) -> None:
    """Resets and invalidates as the step says, by the reference."""
    states = [HotState(case["hot_rows"]) for _ in range(case["state_rows"])]
    arrays = (state.row_map, state.last_used, state.epoch)
    row_map, last_used, epoch = (t.cpu().numpy().copy() for t in arrays)
    for i, one in enumerate(states):
        if i in step["reset_state_rows"]:
            row_map[i], last_used[i], epoch[i] = -1, 0, 0
        one.row_map[:], one.last_used[:] = row_map[i], last_used[i]
    rows, blocks = step["rewritten_host_rows"], step["recycled_host_blocks"]
    invalidate(states, rows, blocks, case["block_size"])
    for i, one in enumerate(states):
        row_map[i], last_used[i] = one.row_map, one.last_used
    for tensor, array in zip(arrays, (row_map, last_used, epoch), strict=True):
        tensor.copy_(torch.from_numpy(array))


@pytest.mark.parametrize("case", cases("resolve.json"))
def test_resolve_equals_the_golden_vectors(case: dict[str, Any]) -> None:
    state = RowState.allocate(case["state_rows"], case["hot_rows"], DEVICE)
    rows_per_request = _rows_per_request(case)
    bounded = rows_per_request * case["top_k"] <= case["hot_rows"]
    if not bounded or case["block_size"] < 2 or case["hot_rows"] % 4:
        with pytest.raises(ConfigError, match=r"hot_rows|block_size"):
            _bind(case, case["steps"][0], state, rows_per_request)
        return
    for i, step in enumerate(case["steps"]):
        _prepare_states(case, step, state)
        before = state.counters.cpu().numpy().copy()
        resolve, outputs = _bind(case, step, state, rows_per_request)
        resolve(torch.cuda.current_stream().cuda_stream)
        _check_resolve(step["expect"], state, outputs, before, f"step {i}")


def _check_resolve(
    expect: dict[str, Any], state: RowState, out: ResolveOutputs, before: np.ndarray, where: str
) -> None:
    def compare(tensor: torch.Tensor, key: str) -> None:
        got = tensor.cpu().numpy()
        same(got, np.array(expect[key]).reshape(got.shape), f"{where}: {key}")

    compare(out.physical_topk, "physical_topk")
    compare(out.valid_counts, "valid_counts")
    compare(out.copies.count, "copy_count")
    lists = ((out.copies.host_row, "copy_host_row"), (out.copies.hot_row, "copy_hot_row"))
    for tensor, key in lists:
        got = tensor.cpu().numpy()
        for request, rows in enumerate(expect[key]):
            what = f"{where}: {key} of request {request}"
            same(got[request, : len(rows)], np.array(rows, np.int32), what)
    compare(state.row_map, "row_map")
    compare(state.last_used, "last_used")
    compare(state.epoch, "epoch")
    counted = state.counters.cpu().numpy() - before
    same(counted, np.array([expect[k] for k in ("hits", "misses", "overflow")]), f"{where}: counts")


@pytest.mark.parametrize("case", cases("copy.json"))
def test_copies_equal_the_golden_vectors(case: dict[str, Any]) -> None:
    sizes = ("packing", "block_size", "row_bytes", "gpu_blocks", "host_blocks", "host_layout")
    pools = Pools(**{key: case[key] for key in sizes})
    row_bytes = case["row_bytes"]
    host = torch.from_numpy(filled_bytes(pools.host.size, case["host_salt"])).pin_memory()
    gpu = torch.from_numpy(filled_bytes(pools.gpu.size, case["gpu_salt"])).to(DEVICE)

    def rows_of(layers: list[int], block_stride_rows: int) -> LayerRows:
        """The layers' rows in both pools, found where the reference's views begin."""
        on_host, on_gpu = [], []
        num_rows = case["host_blocks"] * case["block_size"]
        for layer in layers:
            view = pools.host_layers[layer]
            start = view.ctypes.data - pools.host.ctypes.data
            on_host.append(host.as_strided((num_rows, row_bytes), (view.strides[1], 1), start))
            view = pools.gpu_layers[layer]
            start = view.ctypes.data - pools.gpu.ctypes.data
            on_gpu.append(gpu.as_strided(view.shape, view.strides, start))
        return LayerRows(on_host, on_gpu, block_stride_rows)

    for i, step in enumerate(case["steps"]):
        n = len(step["copy_host_row"])
        copies = CopyList.allocate(1, max(n, 1), DEVICE)
        copies.host_row[0, :n] = _ints(step["copy_host_row"], n)
        copies.hot_row[0, :n] = _ints(step["copy_hot_row"], n)
        copies.count.fill_(n)
        stride = step["block_stride_rows"]
        if step["op"] == "replay_copy":
            layers = [step["layer"]]
        else:
            layers = pools.layers_of_index_group[step["index_group"]]
        copy = ReplayCopy(copies, rows_of(layers, stride))
        copy(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        expect = step["expect"]
        assert zlib.crc32(gpu.cpu().numpy().tobytes()) == expect["gpu_crc32"], f"step {i}"
        assert zlib.crc32(host.numpy().tobytes()) == expect["host_crc32"], f"step {i}"
