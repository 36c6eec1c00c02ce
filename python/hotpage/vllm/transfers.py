# SPDX-License-Identifier: Apache-2.0
"""Owns what a rank does with the host pool in a step: the order of its copies, and what of them it
acknowledges.

Of ranks that share a pool one writes. What other ranks must not see too early, or lose too early:

* Rows that the forward pass of step n wrote are read from the host in step n + 1 at the earliest.
  The writer records in step n + 1, when the copies of step n are enqueued, and the readers wait for
  that before they read.
* A host block that a plan of step n recycles is written in step n at the earliest, and the rows
  that it held were read in steps before n: a request leaves with a step, and a step that had been
  planned before that reads them last. So the writer's first copy of step n waits for the readers'
  reads of steps before n. Rows that step n itself writes are in resident pages, which nobody reads
  from the host in that step.
* GPU blocks are each rank's own, and only its computing stream writes them, behind its reads. One
  that was given up has been copied on the writer by then; one that is brought back is acknowledged
  by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from hotpage.errors import InvariantError
from hotpage.kernels.copy_pages import RestorePages, SpillPages
from hotpage.runtime.acks import AckQueue
from hotpage.runtime.mirror import Mirrors
from hotpage.runtime.pages import PageCopier, Pages
from hotpage.runtime.streams import current_stream, wait_for_current_stream
from hotpage.vllm.metadata import (
    TRANSFER_HOST_COPY,
    TRANSFER_MIRRORED,
    TRANSFER_RESTORE,
    TRANSFER_SPILL,
)

if TYPE_CHECKING:
    from hotpage.kernels.layer_table import LayerTable, PoolLayer
    from hotpage.kernels.mirror_rows import MirrorMask, SlotMappings
    from hotpage.runtime.events import WriteOrder
    from hotpage.vllm.metadata import HotPageConnectorMetadata, StepPlan


class HostReader:
    """A rank that reads the pool that another one writes: it makes and acknowledges restores, and
    nothing else that plans ask of the host pool.

    Args:
        table: all layers.
        order: of the ranks that share the pool.
    """

    mirrors: Mirrors | None = None
    spill: PageCopier | None = None
    masks: Sequence[MirrorMask] = ()
    """Mirror masks of all layers."""

    def __init__(self, table: LayerTable, order: WriteOrder | None) -> None:
        self._device, self._order = table.device, order
        self.restore = PageCopier(RestorePages, table)
        self.acks = AckQueue((), _refuse, _refuse)

    def begin_step(self) -> None:
        """What the computing stream has so far were the reads of earlier steps."""
        assert self._order is not None
        self._order.begin_step(current_stream(self._device))

    def transfer(self, metadata: HotPageConnectorMetadata) -> None:
        """Enqueues the step's page copies, and lets what comes next on the computing stream read
        the rows of earlier steps.

        Raises:
            KernelError: a launch failed.
            RankError: another rank has ended.
        """
        assert self._order is not None
        self._order.wait(current_stream(self._device))
        for plan in metadata.plans:
            self._restore(plan)

    def _restore(self, plan: StepPlan) -> None:
        restores = np.flatnonzero(plan.transfer_kind == TRANSFER_RESTORE)
        if len(restores):
            self.restore(_pages(plan).take(restores))
            self.acks.add(plan.transfer_id[restores].tolist())

    def finish_forward(self, num_tokens: int, *, joins: bool) -> None:
        """Another rank mirrors the rows, which it has written as well.

        Args:
            num_tokens: of the forward pass.
            joins: the computing stream waits for that, for siblings that use host rows.

        Raises:
            RankError: another rank has ended.
        """
        if joins:
            assert self._order is not None
            self._order.wait(current_stream(self._device))

    def take_completed_host_copies(self) -> list[int]:
        """Another rank makes them."""
        return []


class HostWriter(HostReader):
    """The rank that writes the host pool, or one that has its own.

    Args:
        layers: all layers, in the order of `table`.
        drafts: for each layer whether the drafter writes its rows.
        slots: vLLM's, written anew for each forward pass.
        table: all layers.
        order: of the ranks that share the pool; None for a pool of this rank's own.
    """

    mirrors: Mirrors
    spill: PageCopier

    def __init__(
        self,
        layers: Sequence[PoolLayer],
        drafts: Sequence[bool],
        slots: SlotMappings,
        table: LayerTable,
        order: WriteOrder | None,
    ) -> None:
        self._layers = list(layers)
        self._may_write = order is None
        self.mirrors = Mirrors(
            [rows for rows, draft in zip(layers, drafts, strict=True) if not draft],
            [rows for rows, draft in zip(layers, drafts, strict=True) if draft],
            slots,
            num_kv_groups=table.num_kv_groups,
            before_writes=self._before_writes,
        )
        self._after_forward: list[StepPlan] = []
        self._host_copies_done: list[int] = []
        super().__init__(table, order)
        self.masks = self.mirrors.masks
        self.spill = PageCopier(SpillPages, table)
        self.acks = AckQueue(self.masks, self._copy_whole, self.mirrors.run_beside)

    def _before_writes(self) -> None:
        """The current stream waits, once a step, for what the other ranks read in earlier ones."""
        if not self._may_write:
            assert self._order is not None
            self._order.await_reads(current_stream(self._device))
            self._may_write = True

    def begin_step(self) -> None:
        """What the computing stream gets from now on comes behind all copies of earlier steps."""
        self._finish_previous_step()
        self.mirrors.join()
        if self._order is not None:
            self._order.begin_step(current_stream(self._device))
            self._may_write = False

    def transfer(self, metadata: HotPageConnectorMetadata) -> None:
        """As a reader's; copies within the pool have run when it returns.

        Raises:
            KernelError: a launch failed.
            RankError: another rank has ended.
        """
        if metadata.host_copies:
            self._copy_host_blocks(metadata.host_copies)
            self._host_copies_done.extend(target for _, target in metadata.host_copies)
        # Behind the last copy within the pool, which the readers' restores may need, and else in
        # front of the step's copies, for which nobody's reads have to wait.
        copies_later = any((p.transfer_kind == TRANSFER_HOST_COPY).any() for p in metadata.plans)
        if not copies_later:
            self._publish()
        for plan in metadata.plans:
            self._transfer_before_forward(plan)
        if copies_later:
            self._publish()

    def _publish(self) -> None:
        """Lets the other ranks read what is on the side stream."""
        if self._order is not None:
            self._order.record(self.mirrors.stream)
            # The computing stream joins this one with the next step.
            self._order.wait(self.mirrors.stream)

    def finish_forward(self, num_tokens: int, *, joins: bool) -> None:
        """Enqueues the mirror of the rows that the forward pass wrote.

        Args:
            num_tokens: of the forward pass.
            joins: the computing stream waits for it, for siblings that use host rows.

        Raises:
            KernelError: a launch failed.
        """
        self.mirrors.mirror(num_tokens)
        if not self.mirrors.has_drafts:
            self._finish_previous_step()
        if joins:
            # Such a sibling takes the computing stream, or the step's output, for the end of the
            # mirrors: it saves rows behind an event there, sends those of a request that ended, and
            # fills host blocks that were freed. So do siblings on other ranks.
            self.mirrors.join()
            self._publish()

    def _finish_previous_step(self) -> None:
        """What waits for the drafter's rows, or for the mirror alone where there is no drafter."""
        self.mirrors.mirror_drafts()
        plans, self._after_forward = self._after_forward, []
        if plans:
            self.mirrors.run_beside(lambda: self._transfer_after_forward(plans))

    def _transfer_before_forward(self, plan: StepPlan) -> None:
        kinds = plan.transfer_kind
        if not len(kinds):
            return
        now = plan.transfer_after_forward == 0
        copies = np.flatnonzero(kinds == TRANSFER_HOST_COPY)
        if len(copies):
            sources = plan.transfer_source_host_block[copies].tolist()
            targets = plan.transfer_host_block[copies].tolist()
            self._copy_host_blocks(list(zip(sources, targets, strict=True)))
            self.acks.add(plan.transfer_id[copies].tolist())
        self._restore(plan)
        if not now.all():
            self._after_forward.append(plan)
        self._transfer_to_host(plan, now)

    def _transfer_after_forward(self, plans: Sequence[StepPlan]) -> None:
        for plan in plans:
            self._enqueue_to_host(plan, plan.transfer_after_forward == 1)

    def _transfer_to_host(self, plan: StepPlan, chosen: np.ndarray) -> None:
        kinds = plan.transfer_kind
        if (chosen & ((kinds == TRANSFER_SPILL) | (kinds == TRANSFER_MIRRORED))).any():
            self.mirrors.run_beside(lambda: self._enqueue_to_host(plan, chosen))

    def _enqueue_to_host(self, plan: StepPlan, chosen: np.ndarray) -> None:
        spills = np.flatnonzero(chosen & (plan.transfer_kind == TRANSFER_SPILL))
        if len(spills):
            self._copy_whole(_pages(plan).take(spills))
            self.acks.add(plan.transfer_id[spills].tolist())
        mirrored = np.flatnonzero(chosen & (plan.transfer_kind == TRANSFER_MIRRORED))
        if len(mirrored):
            self.acks.add_mirrored(plan.transfer_id[mirrored].tolist(), _pages(plan).take(mirrored))

    def _copy_whole(self, pages: Pages) -> None:
        self._before_writes()
        self.spill(pages)

    def _copy_host_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies host blocks by the CPU, which waits for rows on their way there and for readers of
        what the blocks held before.

        Rare: a request that shares a page and is about to write it.
        """
        if not self._may_write:
            self.mirrors.run_beside(self._before_writes)
        self.mirrors.synchronize()
        wait_for_current_stream(self._device)
        for rows in self._layers:
            for source, target in pairs:
                rows.host[target].copy_(rows.host[source])

    def take_completed_host_copies(self) -> list[int]:
        """Drains destinations of host block copies that have run."""
        done, self._host_copies_done = self._host_copies_done, []
        return done


def _refuse(*_: object) -> NoReturn:
    raise InvariantError("a rank that only reads the host pool was asked to copy a page there")


def _pages(plan: StepPlan) -> Pages:
    groups = plan.num_kv_groups
    return Pages(
        plan.transfer_host_block,
        plan.transfer_resident_blocks.reshape(-1, groups),
        plan.transfer_num_rows,
    )
