# SPDX-License-Identifier: Apache-2.0
"""Owns the mirrors of each step's rows to the host pool, on a stream beside the computing one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hotpage.kernels.layer_table import LayerTable, PoolLayer
from hotpage.kernels.mirror_rows import MirrorMask, MirrorRows, SlotMappings
from hotpage.runtime.streams import SideStream

if TYPE_CHECKING:
    import torch


class Mirrors:
    """mirror_rows of all layers, those of the drafter after it has run.

    The mirrors read a snapshot of the slot mappings: whoever writes them next, the drafter or the
    coming step, does so on the computing stream without asking what the side stream still reads.

    Args:
        layers: whose rows the target's forward pass writes.
        drafts: whose rows the drafter writes.
        slots: written anew for each forward pass on the computing stream.
        num_kv_groups: KV cache groups of all layers.
        before_writes: called with the side stream as the current one, in front of each mirror.
    """

    def __init__(
        self,
        layers: Sequence[PoolLayer],
        drafts: Sequence[PoolLayer],
        slots: SlotMappings,
        *,
        num_kv_groups: int,
        before_writes: Callable[[], None] = lambda: None,
    ) -> None:
        import torch

        first = LayerTable(layers, num_kv_groups=num_kv_groups)
        self._side, self._before_writes = SideStream(first.device), before_writes
        # Rows of the table up to the last one that is read: one copy takes them all.
        table = slots.resident_slot
        source_at = (slots.host_row.data_ptr() - table.data_ptr()) // (
            table.stride(0) * table.element_size()
        )
        self._table = table[: max(source_at, *slots.slot_rows) + 1]
        self._snapshot = torch.full_like(self._table, -1)
        taken = SlotMappings(self._snapshot, self._snapshot[source_at], slots.slot_rows)
        self.masks: list[MirrorMask] = []
        self._ops: list[MirrorRows] = []
        tables = [first]
        if drafts:
            tables.append(LayerTable(drafts, num_kv_groups=num_kv_groups))
        for layer_table in tables:
            mask = MirrorMask(
                layer_table.num_host_blocks, layer_table.block_size, layer_table.device
            )
            self.masks.append(mask)
            self._ops.append(MirrorRows(layer_table, taken, mask))
        self._draft_tokens = 0
        self.num_launches = 0

    @property
    def has_drafts(self) -> bool:
        """Whether some rows are mirrored after the drafter."""
        return len(self._ops) > 1

    @property
    def stream(self) -> int:
        """Address of the side stream."""
        return self._side.address

    @property
    def counters(self) -> torch.Tensor:
        """int64 `[3]` of the target's layers: tokens copied, skipped as padding, lost."""
        return self.masks[0].counters

    def mirror(self, num_tokens: int) -> None:
        """Enqueues the mirror of the first `num_tokens` tokens of the forward pass just made."""
        if not num_tokens:
            return
        self._snapshot[:, :num_tokens].copy_(self._table[:, :num_tokens])
        self._draft_tokens = num_tokens if self.has_drafts else 0
        self._launch(0, num_tokens)

    def mirror_drafts(self) -> None:
        """Enqueues the mirror of the drafter's rows of the last forward pass, if it has one."""
        num_tokens, self._draft_tokens = self._draft_tokens, 0
        if num_tokens:
            self._launch(1, num_tokens)

    def _launch(self, which: int, num_tokens: int) -> None:
        with self._side.forked() as stream:
            self._before_writes()
            self._ops[which](num_tokens, stream)
        self.num_launches += 1

    def run_beside(self, work: Callable[[], None]) -> None:
        """Calls `work` with the side stream as the current one, behind all mirrors."""
        with self._side.forked():
            work()

    def join(self) -> None:
        """The current stream waits for everything beside it: rows may be overwritten then."""
        self._side.join()

    def synchronize(self) -> None:
        """The calling thread waits for everything on the side stream."""
        self._side.synchronize()
