# SPDX-License-Identifier: Apache-2.0
"""Owns the seam between vLLM's cache managers and the Rust Coordinator.

Managers say what happens while vLLM schedules; one call per step reports it and brings the plan
back, whose pool work is carried out in one call per pool method. No decision about pages here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.hisparse.coordinator import HiSparseCoordinator
from vllm.v1.request import Request

from hotpage._core import RequestInterner, StepPlan
from hotpage.errors import InvariantError, ProtocolError
from hotpage.vllm.acks import TransferAcks
from hotpage.vllm.events import Int32, TableEvents, int32
from hotpage.vllm.publication import Publisher
from hotpage.vllm.surface import VllmSurface
from hotpage.vllm.wiring import CoordinatorSettings, adopt_managers, build_core

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_WORK = (
    "transfer_id",
    "transfer_kind",
    "touch_gpu",
    "touch_host",
    "publish_request",
    "publish_num_pages",
    "unpin_gpu",
    "free_gpu",
    "free_host",
    "hot_regions_wanted",
    "hot_regions_returned",
    "retired",
    "lost_pages",
)
"""Lists of a plan that the scheduler side carries out; the others are the workers'."""


@dataclass(slots=True)
class _Tracked:
    """One admission as the Coordinator knows it."""

    id: int
    table: list[KVCacheBlock]
    """The source manager's block table itself, which grows in place."""
    residents: list[list[KVCacheBlock]]
    """The resident managers' block tables, likewise."""
    pages: int
    """Pages that the Coordinator has been told of."""
    importing: bool = False
    hot: bool = False
    gave_back: bool = False


@dataclass(slots=True)
class _Batch:
    """The last step's batch; decode steps mostly have the same one again."""

    request_ids: list[str]
    entries: list[_Tracked]
    ids: Int32
    changes: int
    """Admissions and frees before it."""
    tables: list[list[KVCacheBlock]]
    """Source tables of the entries."""
    pages: list[int]
    """Their lengths after the step."""


class NativeCoordinator(VllmSurface, HiSparseCoordinator):
    """Stands where vLLM's coordinator stands; none of that class's methods runs.

    The base class is there for isinstance checks alone, so its constructor is not called.

    Raises:
        ConfigError: cache groups or settings that cannot work.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        managers: tuple[SingleTypeKVCacheManager, ...],
        max_model_len: int,
        *,
        num_reprefillable_tokens: int,
        settings: CoordinatorSettings | None = None,
    ) -> None:
        settings = settings or CoordinatorSettings()
        self.managers = managers
        groups = adopt_managers(kv_cache_config, managers, self)
        self.host_group_id = groups.source_id
        self.host_manager = groups.source
        self.resident_managers = groups.residents
        self.hot_managers = groups.hots
        self.block_size = self.host_manager.block_size
        self.num_groups = len(self.resident_managers)
        self.gpu_pool: BlockPool = self.resident_managers[0].block_pool
        self.host_pool: BlockPool = self.host_manager.block_pool
        self.core = build_core(
            kv_cache_config, groups, max_model_len, num_reprefillable_tokens, settings
        )
        self.transition_watermark = self.core.watermark
        self.publisher = Publisher(self.host_manager)
        self.acks = TransferAcks(settings.num_ranks, settings.num_host_writers)
        self.pending_spills = self.acks.pending
        self.hot_granted: list[str] = []
        self.started: list[tuple[int, str]] = []
        self.retired: list[int] = []
        self.due: list[StepPlan] = []
        self._interner = RequestInterner()
        self._names: dict[int, str] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._imports: dict[str, int] = {}
        self._hits: dict[str, int] = {}
        self._reused: list[KVCacheBlock] = []
        self._changes = 0
        self._batch = _Batch([], [], int32([]), 0, [], [])
        self._host_copies: dict[int, tuple[KVCacheBlock, KVCacheBlock]] = {}

    # What the managers call while vLLM schedules.

    def commit_computed_blocks(self, request_id: str, num_host_pages: int) -> None:
        """A prefix hit: the source table holds published pages now. Idempotent."""
        if request_id not in self._hits:
            self._hits[request_id] = len(self.host_manager.req_to_blocks.get(request_id, ()))

    def record_pending_host_import(self, request_id: str, num_tokens: int) -> None:
        """A sibling is about to bring the first `num_tokens` tokens."""
        self._imports[request_id] = num_tokens

    def publish_when_ready(
        self,
        request: Request,
        num_computed_tokens: int,
        retention_interval: int | None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """The first `num_computed_tokens` tokens are final: durable pages of them may publish."""
        self.publisher.note(request, num_computed_tokens, retention_interval, replay_boundaries)

    def free(self, request_id: str) -> None:
        """The request leaves; the resident tables keep what vLLM has to free. Idempotent."""
        self._hits.pop(request_id, None)
        importing = self._imports.pop(request_id, None) is not None
        entry = self._tracked.pop(request_id, None)
        publishable = self.publisher.live.get(request_id)
        if entry is not None:
            self._changes += 1
            finished = publishable is not None and publishable.request.is_finished()
            self._free_tracked(request_id, entry, importing, finished)
        self.publisher.forget(request_id)

    def gave_region_back(self, request_id: str) -> bool:
        """True if the request had another hot region before."""
        entry = self._tracked.get(request_id)
        return entry is not None and entry.gave_back

    def residency_row(self, request_id: str, resident_index: int) -> list[KVCacheBlock]:
        """Blocks of one resident group for the pages that the Coordinator knows."""
        entry = self._tracked.get(request_id)
        if entry is None:
            return []
        self._report_reused()
        row = self.core.residency_row(entry.id)[resident_index :: self.num_groups]
        return list(map(self.gpu_pool.blocks.__getitem__, row))

    # What the connector calls.

    def plan_step(
        self,
        request_ids: Sequence[str],
        starts: Sequence[int],
        counts: Sequence[int],
        drafts: Sequence[int],
        known: Sequence[int],
    ) -> tuple[StepPlan, Int32]:
        """Reports the step and carries out its plan; returns it and the batch's dense ids.

        Args:
            request_ids: the batch, in its order.
            starts: tokens computed before the step.
            counts: tokens that it computes.
            drafts: speculative tokens among them.
            known: tokens that are certain, see `Coordinator.step`.

        Raises:
            ProtocolError: a request without blocks, or scheduled before its import has ended.
        """
        events = TableEvents()
        batch = self._batch
        if batch.changes != self._changes or batch.request_ids != request_ids:
            batch = self._batch = self._gather(request_ids, events)
        pages = list(map(len, batch.tables))
        if pages != batch.pages:
            batch.pages = pages
            for entry, num_pages in zip(batch.entries, pages, strict=True):
                if num_pages != entry.pages:
                    self._append(entry, events)
        self._pull_grants(events)
        plan = self.core.step(
            gpu_free=self.gpu_pool.get_num_free_blocks(),
            host_free=self.host_pool.get_num_free_blocks(),
            scheduled=(batch.ids, int32(starts), int32(counts), int32(drafts)),
            known_tokens=int32(known),
            reused_blocks=self._take_reused(),
            **events.arguments(self.num_groups),
        )
        self._carry_out(plan)
        return plan, batch.ids

    def update_spills(
        self, enqueued_counts: Mapping[int, int], completed_counts: Mapping[int, int]
    ) -> None:
        """Acknowledgements of the workers, summed over ranks."""
        enqueued, completed = self.acks.translate(enqueued_counts, completed_counts)
        plan = self.core.absorb_worker_output(self._take_reused(), enqueued, completed)
        self._carry_out_due(plan)

    def finish_host_import(self, request_id: str, *, failed: bool) -> None:
        """A sibling's import ended. vLLM frees a request whose import failed, as a whole."""
        if request_id not in self._imports:
            return
        self.tell([request_id])
        num_tokens = self._imports.pop(request_id)
        entry = self._tracked.get(request_id)
        if entry is None:
            return
        entry.importing = False
        entry.pages = self.core.on_import_finished(entry.id, None if failed else num_tokens)
        self._carry_out_due(self.core.build_due_plan())

    def take_host_copies(self) -> tuple[tuple[int, int], ...]:
        """Drains host copy-on-write work; both endpoints stay leased until it is reported."""
        pairs = self.host_manager.take_host_cow_copies()
        for source, copy in pairs:
            self._host_copies[copy.block_id] = (source, copy)
        return tuple((source.block_id, copy.block_id) for source, copy in pairs)

    def release_completed_host_copies(self, dst_block_ids: Iterable[int]) -> None:
        """The workers have run these copies."""
        blocks: list[KVCacheBlock] = []
        for block_id in dst_block_ids:
            blocks.extend(self._host_copies.pop(block_id, ()))
        if blocks:
            self.host_pool.free_blocks(reversed(blocks))

    def has_pending_work(self) -> bool:
        """True while the engine must keep stepping so that transfers drain."""
        return (
            bool(self.pending_spills or self.due or self._host_copies)
            or self.core.has_pending_work()
        )

    def has_pending_reclamation(self) -> bool:
        """True if GPU blocks will become free without a preemption.

        A region that was asked for counts once it is taken: vLLM stops at the first request that
        cannot grow, so those behind it do not get to take theirs, and it may be its own that the
        pool cannot give.
        """
        self._report_reused()
        # With no block free the Coordinator counts no region that was only asked for.
        host_free = self.host_pool.get_num_free_blocks()
        return bool(self.hot_granted) or self.core.has_pending_reclamation(0, host_free)

    def get_host_block_pool(self) -> BlockPool:
        """The host pool."""
        return self.host_pool

    def take_plans(self, step: StepPlan) -> tuple[StepPlan, ...]:
        """Drains the plans that the workers have not got, the step's last."""
        plans = (*self.due, step)
        self.due.clear()
        return plans

    # Events.

    def tell(self, request_ids: Iterable[str]) -> None:
        """Reports these requests' tables outside a step."""
        events = TableEvents()
        for request_id in request_ids:
            self._pull(request_id, events)
        self._pull_grants(events)
        self._report_reused()
        if events:
            events.tell(self.core, self.num_groups)

    def _gather(self, request_ids: Sequence[str], events: TableEvents) -> _Batch:
        entries = []
        for request_id in request_ids:
            entry = self._pull(request_id, events)
            if entry is None or entry.importing:
                raise ProtocolError(
                    f"request {request_id} is scheduled without blocks or before its import has "
                    "ended; connectors that load synchronously cannot stand beside this one"
                )
            entries.append(entry)
        ids = int32([entry.id for entry in entries])
        tables = [entry.table for entry in entries]
        return _Batch(list(request_ids), entries, ids, self._changes, tables, [])

    def _pull(self, request_id: str, events: TableEvents) -> _Tracked | None:
        entry = self._tracked.get(request_id)
        if entry is None:
            table = self.host_manager.req_to_blocks.get(request_id)
            if not table or request_id not in self.resident_managers[0].req_to_blocks:
                return None
            entry = self._admit(request_id, table, events)
        if not entry.importing and len(entry.table) != entry.pages:
            self._append(entry, events)
        return entry

    def _append(self, entry: _Tracked, events: TableEvents) -> None:
        first, entry.pages = entry.pages, len(entry.table)
        if entry.pages == first + 1:
            # A decode step's page; without the slices it takes a third of the time.
            rows = [table[first].block_id for table in entry.residents]
        else:
            columns = [
                [block.block_id for block in table[first : entry.pages]]
                for table in entry.residents
            ]
            rows = list(chain.from_iterable(zip(*columns, strict=True)))
        events.append(entry.id, first, [block.block_id for block in entry.table[first:]], rows)

    def _admit(self, request_id: str, table: list[KVCacheBlock], events: TableEvents) -> _Tracked:
        self._changes += 1
        id = self._interner.bind(request_id)
        self._names[id] = request_id
        self.started.append((id, request_id))
        residents = [manager.req_to_blocks[request_id] for manager in self.resident_managers]
        entry = self._tracked[request_id] = _Tracked(id, table, residents, 0)
        hits = self._hits.pop(request_id, 0)
        num_tokens = self._imports.get(request_id)
        if num_tokens is not None:
            entry.importing = True
            entry.pages = -(-num_tokens // self.block_size)
            tail = entry.pages - 1
            events.admit_import(
                id,
                num_tokens,
                min(hits, entry.pages),
                [block.block_id for block in table[: entry.pages]],
                [blocks[tail].block_id for blocks in residents],
            )
        elif hits:
            entry.pages = hits
            events.admit_host_prefix(id, [block.block_id for block in table[:hits]])
        else:
            events.admit(id)
        return entry

    def _pull_grants(self, events: TableEvents) -> None:
        for request_id in dict.fromkeys(self.hot_granted):
            entry = self._pull(request_id, events)
            if entry is None or entry.hot:
                continue
            if all(manager.has_hot(request_id) for manager in self.hot_managers):
                entry.hot = True
                events.grant(
                    entry.id,
                    [
                        block.block_id
                        for manager in self.hot_managers
                        for block in manager.req_to_blocks[request_id]
                    ],
                )
        self.hot_granted.clear()

    def _take_reused(self) -> Int32 | None:
        if not self._reused:
            return None
        blocks = int32([block.block_id for block in self._reused])
        # The pool's watchers append to this very list.
        self._reused.clear()
        return blocks

    def _report_reused(self) -> None:
        blocks = self._take_reused()
        if blocks is not None:
            self.core.on_blocks_reused(blocks)

    # Plans.

    def _carry_out(self, plan: StepPlan) -> None:
        work = plan.nonempty(*_WORK)
        if not work:
            return
        gpu, host = self.gpu_pool, self.host_pool
        if "transfer_id" in work:
            self.acks.expect(work["transfer_id"], work["transfer_kind"])
        if "touch_gpu" in work:
            gpu.touch(list(_blocks(gpu, work["touch_gpu"])))
        if "touch_host" in work:
            host.touch(list(_blocks(host, work["touch_host"])))
        if "publish_request" in work:
            self._publish(work["publish_request"], work["publish_num_pages"])
        if "hot_regions_returned" in work:
            self._take_regions_back(work["hot_regions_returned"])
        # A copy's lease ends before its page is unpinned: the pool hands out a block that is freed
        # last before all others, and one that is unpinned last after them.
        if "free_gpu" in work:
            gpu.free_blocks(_blocks(gpu, work["free_gpu"]))
        if "unpin_gpu" in work:
            gpu.unpin_blocks(_blocks(gpu, work["unpin_gpu"]), self._reused.append)
        if "free_host" in work:
            host.free_blocks(_blocks(host, work["free_host"]))
        for id in work.get("hot_regions_wanted", ()):
            for manager in self.hot_managers:
                manager.require_hot(self._names[id])
        for id in work.get("retired", ()):
            self.publisher.retire(id)
            self._retire(id)
        if "lost_pages" in work:
            request, page, *_ = work["lost_pages"]
            raise InvariantError(
                f"page {page} of request {self._names[request]} was lost: its copy failed after "
                "its GPU blocks were given up"
            )

    def _publish(self, ids: list[int], num_pages: list[int]) -> None:
        for id, pages in zip(ids, num_pages, strict=True):
            name = self._names[id]
            entry = self._tracked.get(name)
            if entry is not None and entry.id == id:
                self.publisher.publish(name, pages)
            else:
                self.publisher.publish_detached(id, pages)

    def _carry_out_due(self, plan: StepPlan) -> None:
        self._carry_out(plan)
        if len(plan.transfer_id):
            self.due.append(plan)

    def _take_regions_back(self, ids: list[int]) -> None:
        for id in ids:
            name = self._names[id]
            entry = self._tracked[name]
            entry.hot, entry.gave_back = False, True
            for manager in self.hot_managers:
                # The plan frees the blocks.
                del manager.req_to_blocks[name]
                manager.hot_required.discard(name)

    def _retire(self, id: int) -> None:
        del self._names[id]
        self._interner.retire(int32([id]))
        self.retired.append(id)

    # Frees.

    def _free_tracked(
        self, request_id: str, entry: _Tracked, importing: bool, finished: bool
    ) -> None:
        self._report_reused()
        if importing:
            # vLLM frees the blocks of an import only once nobody writes them any more.
            self.core.on_import_finished(entry.id, None)
        plan = self.core.on_freed(entry.id, "finished" if finished else "preempted")
        self._interner.unbind(request_id)
        if finished and plan.publish_pages:
            self.publisher.publish(request_id, plan.publish_pages)
        if finished and not plan.retired:
            self.publisher.detach(request_id, entry.id)
        unpinned = plan.unpin_gpu.tobytes()
        if unpinned:
            blocks = _blocks(self.gpu_pool, array("i", unpinned))
            self.gpu_pool.unpin_blocks(blocks, self._reused.append)
        if entry.hot:
            for manager in self.hot_managers:
                del manager.req_to_blocks[request_id]
        # Blocks that the Coordinator was not told of, or has forgotten with an import.
        first = 0 if importing else entry.pages
        tables = [
            block for table in entry.residents for block in table[first:] if not block.is_null
        ]
        # vLLM frees a table from its end, or holds it back while a step may still write it.
        tables.extend(_blocks(self.gpu_pool, plan.free_gpu[::-1].tolist()))
        for manager in self.resident_managers:
            manager.req_to_blocks.pop(request_id, None)
        self.resident_managers[0].req_to_blocks[request_id] = tables
        if plan.retired:
            self._retire(entry.id)


def _blocks(pool: BlockPool, ids: Iterable[int]) -> Iterator[KVCacheBlock]:
    """The blocks one by one: a list would bring each into the CPU's cache once more."""
    return map(pool.blocks.__getitem__, ids)
