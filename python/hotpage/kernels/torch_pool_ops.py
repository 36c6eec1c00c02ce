# SPDX-License-Identifier: Apache-2.0
"""Owns the registration of the pool ops as torch custom ops, `torch.ops.hotpage.*`, with fakes.

These ops run over tables that lie on the device, so they are bound once: `bind(MirrorRows(...))`
gives an int, the first argument of an op call. The tensors beside it are those of the binding; they
tell a tracer what the op reads and writes, and a call with others is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from hotpage.errors import ConfigError
from hotpage.kernels._torch_library import register, stream_of
from hotpage.kernels.copy_pages import RestorePages, SpillPages
from hotpage.kernels.invalidate import Invalidate
from hotpage.kernels.mirror_rows import MirrorRows, ReportMirrored
from hotpage.kernels.stage_prefill import StagePrefill

BoundOp = MirrorRows | ReportMirrored | SpillPages | RestorePages | StagePrefill | Invalidate

_bound: dict[int, BoundOp] = {}
_numbers = itertools.count(1)


def bind(op: BoundOp) -> int:
    """Number of a bound op, for `torch.ops.hotpage.*`; keeps it alive until `release`.

    Numbers are not used again, so a stale one is refused. Not thread-safe.
    """
    number = next(_numbers)
    _bound[number] = op
    return number


def release(number: int) -> None:
    """Forgets a bound op. Graphs that captured its launches need its tensors for themselves.

    Raises:
        ConfigError: there is no such number.
    """
    if _bound.pop(number, None) is None:
        raise ConfigError(f"there is no bound op {number}")


def _find(number: int, kind: type) -> Any:
    op = _bound.get(number)
    if not isinstance(op, kind):
        got = "nothing" if op is None else type(op).__name__
        raise ConfigError(f"bound op {number} is {got}, expected {kind.__name__}")
    return op


def _check(op: BoundOp, tensors: dict[str, Tensor]) -> None:
    """Raises ConfigError unless each tensor is the one in the parameter of its name."""
    for name, tensor in tensors.items():
        _check_addresses(name, [tensor], [getattr(op.params, name)])


def _check_addresses(name: str, tensors: Sequence[Tensor], addresses: Iterable[int]) -> None:
    if [tensor.data_ptr() for tensor in tensors] != list(addresses):
        raise ConfigError(f"{name} is not what the op is bound to")


def _check_layers(
    op: MirrorRows | SpillPages | RestorePages,
    gpu_layers: Sequence[Tensor],
    host_layers: Sequence[Tensor],
) -> None:
    layers = op.table.layers
    _check_addresses("gpu_layers", gpu_layers, (layer.gpu.data_ptr() for layer in layers))
    _check_addresses("host_layers", host_layers, (layer.host.data_ptr() for layer in layers))


def _mirror_rows(
    bound: int,
    resident_slot: Tensor,
    host_row: Tensor,
    mask: Tensor,
    counters: Tensor,
    gpu_layers: list[Tensor],
    host_layers: list[Tensor],
    num_tokens: int,
) -> None:
    op = _find(bound, MirrorRows)
    _check(op, {"resident_slot": resident_slot, "host_row": host_row, "mask": mask,
                "counters": counters})  # fmt: skip
    _check_layers(op, gpu_layers, host_layers)
    op(num_tokens, stream_of(mask))


def _report_mirrored(
    bound: int,
    host_block: Tensor,
    mask: Tensor,
    missing_rows: Tensor,
    counters: Tensor,
    num_blocks: int,
) -> None:
    op = _find(bound, ReportMirrored)
    _check(op, {"host_block": host_block, "mask": mask, "missing_rows": missing_rows,
                "counters": counters})  # fmt: skip
    op(num_blocks, stream_of(mask))


def _copy_pages(kind: type[SpillPages] | type[RestorePages]) -> Callable[..., None]:
    def call(
        bound: int,
        host_block: Tensor,
        resident_blocks: Tensor,
        num_rows: Tensor,
        counters: Tensor,
        gpu_layers: list[Tensor],
        host_layers: list[Tensor],
        num_pages: int,
    ) -> None:
        op = _find(bound, kind)
        _check(op, {"host_block": host_block, "resident_blocks": resident_blocks,
                    "num_rows": num_rows, "counters": counters})  # fmt: skip
        _check_layers(op, gpu_layers, host_layers)
        op(num_pages, stream_of(counters))

    return call


def _stage_prefill(
    bound: int,
    row_start: Tensor,
    first_position: Tensor,
    state_row: Tensor,
    residency: Tensor,
    source_block_table: Tensor,
    counters: Tensor,
    gpu_layers: list[Tensor],
    host_layers: list[Tensor],
    workspace: list[Tensor],
    num_requests: int,
    num_rows: int,
) -> None:
    op = _find(bound, StagePrefill)
    _check(op, {"row_start": row_start, "first_position": first_position, "state_row": state_row,
                "residency": residency, "source_block_table": source_block_table,
                "counters": counters})  # fmt: skip
    n = op.params.num_layers
    _check_addresses("gpu_layers", gpu_layers, op.params.gpu_layer[:n])
    _check_addresses("host_layers", host_layers, op.params.host_layer[:n])
    _check_addresses("workspace", workspace, op.params.workspace[:n])
    op(num_requests, num_rows, stream_of(counters))


def _invalidate(
    bound: int,
    recycled: Tensor,
    rewritten: Tensor,
    row_maps: list[Tensor],
    last_used: list[Tensor],
    holders: Tensor | None,
    masks: list[Tensor],
    freed: Tensor,
    num_recycled: int,
    num_rewritten: int,
) -> None:
    op = _find(bound, Invalidate)
    _check(op, {"recycled_host_block": recycled, "rewritten_host_row": rewritten, "freed": freed})
    _check_addresses("row_maps", row_maps, (s.row_map.data_ptr() for s in op.states))
    _check_addresses("last_used", last_used, (s.last_used.data_ptr() for s in op.states))
    _check_addresses(
        "holders", [] if holders is None else [holders], [a for a in [op.params.holders] if a]
    )
    _check_addresses("masks", masks, [a for a in op.params.mask if a])
    op(num_recycled, num_rewritten, stream_of(freed))


_PAGES = "(int bound, Tensor host_block, Tensor resident_blocks, Tensor num_rows, "

# Schemas are spelled because torch reads annotations as objects.
for _name, _schema, _call in (
    (
        "mirror_rows",
        "(int bound, Tensor resident_slot, Tensor host_row, Tensor(a!) mask, Tensor(b!) counters, "
        "Tensor[] gpu_layers, Tensor(c!)[] host_layers, int num_tokens) -> ()",
        _mirror_rows,
    ),
    (
        "report_mirrored",
        "(int bound, Tensor host_block, Tensor mask, Tensor(a!) missing_rows, "
        "Tensor(b!) counters, int num_blocks) -> ()",
        _report_mirrored,
    ),
    (
        "spill_pages",
        f"{_PAGES}Tensor(a!) counters, Tensor[] gpu_layers, Tensor(b!)[] host_layers, "
        "int num_pages) -> ()",
        _copy_pages(SpillPages),
    ),
    (
        "restore_pages",
        f"{_PAGES}Tensor(a!) counters, Tensor(b!)[] gpu_layers, Tensor[] host_layers, "
        "int num_pages) -> ()",
        _copy_pages(RestorePages),
    ),
    (
        "stage_prefill",
        "(int bound, Tensor row_start, Tensor first_position, Tensor state_row, Tensor residency, "
        "Tensor source_block_table, Tensor(a!) counters, Tensor[] gpu_layers, "
        "Tensor[] host_layers, Tensor(b!)[] workspace, int num_requests, int num_rows) -> ()",
        _stage_prefill,
    ),
    (
        "invalidate",
        "(int bound, Tensor recycled, Tensor rewritten, Tensor(a!)[] row_maps, "
        "Tensor(b!)[] last_used, Tensor(c!)? holders, Tensor(d!)[] masks, Tensor(e!) freed, "
        "int num_recycled, int num_rewritten) -> ()",
        _invalidate,
    ),
):
    register(_name, _schema, _call)
