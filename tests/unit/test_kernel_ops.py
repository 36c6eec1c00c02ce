# SPDX-License-Identifier: Apache-2.0
"""Owns what resolve_and_copy and replay_copy refuse when they are bound, on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hotpage.errors import ConfigError
from hotpage.kernels.replay_copy import CopyList, LayerRows, ReplayCopy
from hotpage.kernels.resolve_and_copy import (
    ResolveAndCopy,
    ResolveInputs,
    ResolveOutputs,
    ResolveShape,
    RowState,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

ROWS, REQUESTS, STATES, TOP_K, HOT, PAGES, BS = 4, 3, 5, 8, 32, 6, 16


def ints(*shape: int) -> Any:
    """Zeros, int32."""
    return torch.zeros(shape, dtype=torch.int32)


class Arguments:
    """Arguments of a bind that only lacks a CUDA device."""

    def __init__(self) -> None:
        self.inputs = ResolveInputs(
            ints(ROWS, TOP_K),
            ints(ROWS),
            ints(1),
            ints(REQUESTS),
            ints(ROWS),
            ints(STATES, PAGES),
            ints(REQUESTS, PAGES),
            ints(REQUESTS, HOT // BS),
        )
        self.state = RowState.allocate(STATES, HOT, "cpu")
        copies = CopyList.allocate(REQUESTS, 2 * TOP_K, "cpu")
        self.outputs = ResolveOutputs(ints(ROWS, TOP_K), ints(ROWS), copies)
        self.shape = ResolveShape(2, BS, 3 * BS, 10, 10)

    def bind(self) -> None:
        """Binds; on the CPU always an error."""
        ResolveAndCopy(self.inputs, self.state, self.outputs, self.shape)


def test_arguments_that_fit_lack_nothing_but_a_device() -> None:
    with pytest.raises(ConfigError, match="tensors are on cpu, expected a CUDA device"):
        Arguments().bind()


@pytest.mark.parametrize(
    ("part", "field", "value", "text"),
    [
        ("inputs", "logical_topk", lambda: torch.zeros(ROWS, TOP_K), "logical_topk has dtype"),
        ("inputs", "row_request", lambda: ints(ROWS + 1), "row_request has shape"),
        ("inputs", "seq_len", lambda: ints(2 * ROWS)[::2], "seq_len has stride 2"),
        ("inputs", "residency", lambda: ints(STATES + 1, PAGES), "residency has shape"),
        ("inputs", "source_block_table", lambda: ints(REQUESTS, 1), "source_block_table has shape"),
        ("inputs", "hot_block_table", lambda: ints(REQUESTS, 1), "width of hot_block_table is 1"),
        ("inputs", "num_valid_rows", lambda: ints(2), "num_valid_rows has shape"),
        ("state", "last_used", lambda: ints(STATES, HOT), "last_used has dtype int32"),
        ("state", "row_map", lambda: ints(STATES, 2 * HOT)[:, :HOT], "row_map is not contiguous"),
        ("state", "row_map", lambda: ints(STATES, 16), "hot_rows is 16, expected 16 to|last_used"),
        ("state", "counters", lambda: torch.zeros(2, dtype=torch.int64), "counters has shape"),
        ("outputs", "physical_topk", lambda: ints(ROWS, TOP_K + 1), "physical_topk has shape"),
        ("shape", "max_rows_per_request", lambda: 11, "max_rows_per_request is 11, expected 1"),
        ("shape", "max_rows_per_request", lambda: 5, "hot_rows is 32, expected 40 to 32768"),
        ("shape", "block_size", lambda: 256, "block_size is 256, expected 2 to 128"),
        ("shape", "block_size", lambda: 24, "hot_rows is 32, expected a multiple of 4 and of"),
        ("shape", "block_stride_rows", lambda: 8, "block_stride_rows is 8, expected 16"),
        ("shape", "num_host_blocks", lambda: 2**28, "num_host_rows is 4294967296"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(part: str, field: str, value: Any, text: str) -> None:
    arguments = Arguments()
    setattr(arguments, part, replace(getattr(arguments, part), **{field: value()}))
    with pytest.raises(ConfigError, match=text):
        arguments.bind()


def test_a_copy_list_shorter_than_the_union_is_refused() -> None:
    arguments = Arguments()
    short = CopyList.allocate(REQUESTS, TOP_K, "cpu")
    arguments.outputs = replace(arguments.outputs, copies=short)
    with pytest.raises(ConfigError, match="length of the copy list is 8, expected 16"):
        arguments.bind()


@pytest.mark.parametrize(
    ("host", "gpu", "text"),
    [
        ((64, 24), (4, BS, 24), "row_bytes is 24, expected a positive multiple of 16"),
        ((64, 48), (4, BS, 32), "host layer 0 has shape"),
        ((64, 32), (4, BS, 32), "host layer 0 is not pinned host memory"),
    ],
)
def test_rows_that_the_copy_cannot_move_are_refused(
    host: tuple[int, ...], gpu: tuple[int, ...], text: str
) -> None:
    rows = torch.zeros(host, dtype=torch.uint8), torch.zeros(gpu, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=text):
        ReplayCopy(CopyList.allocate(2, 8, "cpu"), LayerRows([rows[0]], [rows[1]], BS))


def test_more_than_eight_layers_are_refused() -> None:
    rows = [torch.zeros((64, 32), dtype=torch.uint8)] * 9
    layers = LayerRows(rows, [row.view(4, BS, 32) for row in rows], BS)
    with pytest.raises(ConfigError, match="9 host and 9 GPU layers"):
        ReplayCopy(CopyList.allocate(2, 8, "cpu"), layers)


def test_the_torch_ops_trace_with_fakes_and_say_what_they_write() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    import hotpage.kernels.torch_ops  # noqa: F401

    schema = torch.ops.hotpage.resolve_and_copy.default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == {
        "row_map", "last_used", "epoch", "counters", "physical_topk", "valid_counts",
        "copy_host_row", "copy_hot_row", "copy_count", "gpu_layers",
    }  # fmt: skip
    with FakeTensorMode():
        lists = (ints(2, 8).to("cuda"), ints(2, 8).to("cuda"), ints(2).to("cuda"))
        host = torch.zeros((64, 32), dtype=torch.uint8)
        gpu = torch.zeros((4, BS, 32), dtype=torch.uint8, device="cuda")
        assert torch.ops.hotpage.replay_copy(*lists, [host], [gpu], BS, 0) is None
