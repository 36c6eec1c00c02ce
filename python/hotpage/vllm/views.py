# SPDX-License-Identifier: Apache-2.0
"""Owns plans and page states in vLLM's shapes, for inspection and for vLLM's own tests.

Nothing here is on the path of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.hisparse.types import SparseKVPageTransfer, SparseKVResidencyUpdate, SparseKVRowMirror

from hotpage._core import PAGE_UNPINNED, TRANSFER_RESTORE, StepPlan

if TYPE_CHECKING:
    from hotpage.vllm.coordinator import NativeCoordinator


def page_transfers(plans: Iterable[StepPlan]) -> list[SparseKVPageTransfer]:
    """Page copies of plans, in order.

    A page is handed over after the forward pass unless it is restored: vLLM's workers know
    no finer order.
    """
    transfers = []
    for plan in plans:
        columns = (
            plan.transfer_id.tolist(),
            plan.transfer_host_block.tolist(),
            plan.transfer_resident_blocks.tolist(),
            plan.transfer_kind.tolist(),
        )
        for transfer_id, host_block, blocks, kind in zip(*columns, strict=True):
            restore = kind == TRANSFER_RESTORE
            transfers.append(
                SparseKVPageTransfer(
                    transfer_id=transfer_id,
                    host_block_id=host_block,
                    resident_block_ids=tuple(blocks),
                    after_forward=not restore,
                    restore=restore,
                )
            )
    return transfers


def residency_pages(plans: Iterable[StepPlan]) -> dict[int, dict[int, list[int]]]:
    """Dense id -> page -> blocks `[G]`, the last change of each page."""
    changes: dict[int, dict[int, list[int]]] = {}
    for plan in plans:
        for request in plan.residency_cleared.tolist():
            changes[request] = {}
        rows = zip(
            plan.residency_request.tolist(),
            plan.residency_page.tolist(),
            plan.residency_blocks.tolist(),
            strict=True,
        )
        for request, page, blocks in rows:
            changes.setdefault(request, {})[page] = blocks
    return changes


def as_update(pages: Mapping[int, list[int]]) -> SparseKVResidencyUpdate:
    """One request's changes in vLLM's shape: pages, then blocks per group."""
    order = sorted(pages)
    return SparseKVResidencyUpdate(
        pages=order, block_ids=tuple(map(list, zip(*(pages[page] for page in order), strict=True)))
    )


def residency_updates(
    plans: Iterable[StepPlan], names: Mapping[int, str]
) -> dict[str, SparseKVResidencyUpdate]:
    """Residency changes of the requests that `names` knows."""
    changes = residency_pages(plans)
    return {names[id]: as_update(pages) for id, pages in changes.items() if pages and id in names}


@dataclass(frozen=True)
class RequestView:
    """Pages of one request by what can be done with them."""

    valid_pages: set[int]
    unpinned_pages: set[int]
    ready_prefix_pages: int


def request_view(coordinator: NativeCoordinator, dense_id: int) -> RequestView:
    """Reads a live request's pages."""
    core = coordinator.core
    durable = core.durable_pages(dense_id)
    states = core.page_states(dense_id)
    return RequestView(
        valid_pages={page for page, complete in enumerate(durable) if complete},
        unpinned_pages={page for page, state in enumerate(states) if state == PAGE_UNPINNED},
        ready_prefix_pages=core.durable_prefix(dense_id),
    )


def row_mirrors(
    coordinator: NativeCoordinator, requests: Iterable[tuple[str, int, int]]
) -> tuple[SparseKVRowMirror, ...]:
    """Spans of rows `(request, first token, tokens)` that have both a GPU and a host row."""
    mirrors = []
    for request_id, start, count in requests:
        host = coordinator.host_manager.req_to_blocks.get(request_id, [])
        rows = [m.get_residency_row(request_id) for m in coordinator.resident_managers]
        size = coordinator.block_size
        at, end = start, start + count
        while at < end:
            page, offset = divmod(at, size)
            num_rows = min(size - offset, end - at)
            at += num_rows
            if page >= len(host) or host[page].is_null or page >= len(rows[0]):
                continue
            sources = [row[page] for row in rows]
            if any(block.is_null for block in sources):
                continue
            mirrors.append(
                SparseKVRowMirror(
                    source_starts=tuple(block.block_id * size + offset for block in sources),
                    destination_start=host[page].block_id * size + offset,
                    num_rows=num_rows,
                )
            )
    return tuple(mirrors)
