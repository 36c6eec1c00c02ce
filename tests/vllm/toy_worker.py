# SPDX-License-Identifier: Apache-2.0
"""Owns a worker that moves row values instead of bytes and checks what attention would read.

A row's value names all tokens up to it, so a page that was reused, not copied in time or copied
from the wrong place never compares equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sides import VLLM, Side

from hotpage._core import TRANSFER_HOST_COPY, TRANSFER_RESTORE, TRANSFER_SPILL

Rows = list[int]


@dataclass
class ToyWorker:
    """GPU and host blocks of one side, and its residency tables as the plans describe them."""

    side: Side
    gpu: list[Rows] = field(init=False)
    host: list[Rows] = field(init=False)
    tables: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.side.shape
        self.gpu = [[0] * shape.block_size for _ in range(shape.num_blocks)]
        self.host = [[0] * shape.block_size for _ in range(shape.host_blocks)]

    def start(self, metadata: Any, scheduled: Sequence[str]) -> None:
        """What comes before the forward pass: restores and residency updates."""
        if self.side.name == VLLM:
            for transfer in metadata.command.page_transfers:
                if transfer.restore:
                    self._restore(transfer.host_block_id, transfer.resident_block_ids)
            for name, update in metadata.residency_updates.items():
                for page, blocks in zip(
                    update.pages, zip(*update.block_ids, strict=True), strict=True
                ):
                    self.tables.setdefault(name, {})[page] = list(blocks)
            return
        for id in metadata.retired:
            self.names.pop(id, None)
        self.names.update(metadata.started)
        for plan in metadata.plans:
            self._transfers(plan, after_forward=False)
            for id in plan.residency_cleared.tolist():
                self.tables[self.names[id]] = {}
            rows = (plan.residency_request, plan.residency_page, plan.residency_blocks)
            for id, page, blocks in zip(*(row.tolist() for row in rows), strict=True):
                self.tables[self.names[id]][page] = blocks

    def host_blocks(self, name: str) -> list[int]:
        """Host block of each page of a request, as its block table says now."""
        table = self.side.coordinator.host_manager.req_to_blocks[name]
        return [block.block_id for block in table]

    def check_context(
        self, name: str, values: Sequence[int], num_tokens: int, hosts: Sequence[int]
    ) -> None:
        """Every row below `num_tokens` must be readable where the tables say."""
        size = self.side.shape.block_size
        reads_host = False
        for page in range(-(-num_tokens // size)):
            rows = values[page * size : min((page + 1) * size, num_tokens)]
            blocks = self.tables[name].get(page, [0])
            if 0 in blocks:
                assert not any(blocks), (name, page, blocks)
                reads_host = True
                found = [self.host[hosts[page]]]
            else:
                found = [self.gpu[block] for block in blocks]
            for place in found:
                assert place[: len(rows)] == list(rows), (self.side.name, name, page, blocks)
        if reads_host:
            for manager in self.side.coordinator.hot_managers:
                assert manager.has_hot(name), (self.side.name, name)

    def write(self, name: str, values: Sequence[int], start: int, hosts: Sequence[int]) -> None:
        """The forward pass writes rows from `start` on, and mirrors them."""
        size = self.side.shape.block_size
        for position, value in enumerate(values, start):
            page, row = divmod(position, size)
            blocks = self.tables[name][page]
            assert all(blocks), (self.side.name, name, page, blocks)
            for block in blocks:
                self.gpu[block][row] = value
            self.host[hosts[page]][row] = value

    def finish(self, metadata: Any) -> None:
        """What comes after the forward pass."""
        if self.side.name != VLLM:
            for plan in metadata.plans:
                self._transfers(plan, after_forward=True)

    def fill_import(self, name: str, values: Sequence[int]) -> None:
        """A sibling writes the host rows of an import."""
        size = self.side.shape.block_size
        host = self.side.coordinator.host_manager.req_to_blocks[name]
        for position, value in enumerate(values):
            page, row = divmod(position, size)
            self.host[host[page].block_id][row] = value

    def _transfers(self, plan: Any, *, after_forward: bool) -> None:
        columns = (
            plan.transfer_kind,
            plan.transfer_after_forward,
            plan.transfer_host_block,
            plan.transfer_source_host_block,
            plan.transfer_resident_blocks,
        )
        for kind, after, host, source, blocks in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            if bool(after) != after_forward:
                continue
            if kind == TRANSFER_RESTORE:
                self._restore(host, blocks)
            elif kind == TRANSFER_SPILL:
                self.host[host] = list(self.gpu[blocks[0]])
            elif kind == TRANSFER_HOST_COPY:
                self.host[host] = list(self.host[source])

    def _restore(self, host: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.gpu[block] = list(self.host[host])
