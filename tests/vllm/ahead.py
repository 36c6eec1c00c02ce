# SPDX-License-Identifier: Apache-2.0
"""Owns a serving loop whose scheduler is a step ahead of its workers, and its unkind users.

A step is planned before the results of the one before it are known, as under vLLM's asynchronous
scheduling: computed tokens are those of full acceptance until a result takes some back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from serving import Life, Serving, row_values
from sides import HOTPAGE
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.request import RequestStatus

from hotpage._core import TRANSFER_MIRRORED, TRANSFER_SPILL


@dataclass
class Admission:
    """One stay of a request in the running batch, as its workers know it."""

    life: Life
    num_written: int
    """Tokens whose rows are valid."""


@dataclass
class Flight:
    """A step that was planned and has not run."""

    batch: list[tuple[Admission, int, int]]
    hosts: list[list[int]]
    """Host blocks of each request of the batch when the step was planned."""
    metadata: Any


@dataclass
class ServingAhead(Serving):
    """Serving with one step in flight, aborts in every state, names that come again, and resets
    while requests run.
    """

    reuse: int = 30
    """Chance in percent that a request takes the name of one that has left."""
    num_handed_over: int = 0
    num_told: int = 0
    """Most blocks that a follower of the events knew at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flights: deque[Flight] = deque()
        self._admissions: dict[str, Admission] = {}
        self._held_back: list[tuple[int, list[KVCacheBlock]]] = []
        """Steps that must run before, and the blocks."""
        self._told: set[tuple[str, int, Any]] = set()

    def run(self, max_steps: int) -> None:
        """As Serving's; the last step lands too."""
        super().run(max_steps)
        while self._flights:
            self._land(self._flights.popleft())

    # Users.

    def _name(self, at: int) -> str:
        live = {life.name for life in (*self.waiting, *self.running, *self.importing)}
        gone = sorted(self.finished.keys() - live)
        if gone and self.chance(self.reuse, "reuse", at):
            return gone[self.draw(len(gone), "name", at)]
        return super()._name(at)

    def _abort(self) -> None:
        super()._abort()
        for life in [*self.waiting, *self.importing]:
            if life.aborted or not self.chance(self.traffic.abort, "abort", self.step, life.name):
                continue
            life.request.status = RequestStatus.FINISHED_ABORTED
            self.finished[life.name] = 0
            self.side.scheduler.requests.pop(life.name, None)
            if life in self.importing:
                life.aborted = True
            else:
                self.waiting.remove(life)
                self.side.manager.free(life.request)

    def _reset(self) -> None:
        if not self.chance(self.traffic.reset, "reset", self.step):
            return
        if self.chance(50, "reset running", self.step):
            for life in reversed(list(self.running)):
                self._preempt(life)
        self.side.manager.reset_prefix_cache()

    # The scheduler, ahead of its workers.

    def _victim(self) -> Life:
        # As by priority: it may have been scheduled in this very step.
        return self.running[self.draw(len(self.running), "victim", self.step)]

    def _free(self, life: Life) -> None:
        if self.chance(50, "at once", self.step, life.name):
            super()._free(life)
            return
        # Blocks that the step in flight may still write go back when it has run.
        blocks = self.side.manager.pop_blocks_for_free(life.request)
        self._held_back.append((len(self._flights), blocks))

    def _wanted(self, life: Life) -> tuple[int, int]:
        request = life.request
        known = request.num_tokens + request.num_output_placeholders
        missing = known - request.num_computed_tokens
        if missing > 1:
            assert not request.num_output_placeholders
            return min(missing, self.traffic.chunk), 0
        drafts = self.side.shape.num_speculative_tokens
        drafts = self.draw(drafts + 1, "drafts", life.name, request.num_computed_tokens)
        request.spec_token_ids = [7] * drafts
        return 1 + drafts, drafts

    def _execute(self, batch: list[tuple[Life, int, int]]) -> None:
        drafts = {life.name: [7] * count for life, _, count in batch if count}
        metadata = self.side.plan([(life.name, tokens) for life, tokens, _ in batch], drafts)
        flight = Flight([], [], metadata)
        for life, tokens, num_drafts in batch:
            request = life.request
            admission = self._admissions.get(life.name)
            if admission is None:
                admission = Admission(life, request.num_computed_tokens)
                self._admissions[life.name] = admission
            flight.batch.append((admission, tokens, num_drafts))
            flight.hosts.append(self.worker.host_blocks(life.name))
            request.num_computed_tokens += tokens
            if request.num_computed_tokens - num_drafts >= request.num_tokens:
                request.num_output_placeholders += 1 + num_drafts
        self._flights.append(flight)
        if len(self._flights) > 1:
            self._land(self._flights.popleft())

    def _preempt(self, life: Life) -> None:
        super()._preempt(life)
        life.request.num_output_placeholders = 0
        self._admissions.pop(life.name, None)

    def _finish(self, life: Life, status: RequestStatus) -> None:
        super()._finish(life, status)
        self._admissions.pop(life.name, None)

    def _forget_tables(self, life: Life) -> None:
        """Not here: a step in flight still uses them, and the next admission replaces them."""

    # The workers.

    def _land(self, flight: Flight) -> None:
        names = [admission.life.name for admission, _, _ in flight.batch]
        self.worker.start(flight.metadata, names)
        for (admission, tokens, num_drafts), hosts in zip(flight.batch, flight.hosts, strict=True):
            self._fly(admission, tokens, num_drafts, hosts)
        self.worker.finish(flight.metadata)
        if self.side.name == HOTPAGE:
            self._check_handed_over(flight)
        for admission, tokens, num_drafts in flight.batch:
            if self._is_current(admission):
                self._take_result(admission, tokens, num_drafts)
        self._acknowledge(flight.metadata)
        self._free_held_back()
        self._check_events()

    def _free_held_back(self) -> None:
        """One more step has run."""
        held_back, self._held_back = self._held_back, []
        for num_flights, blocks in held_back:
            if num_flights > 1:
                self._held_back.append((num_flights - 1, blocks))
            else:
                self.side.manager.block_pool.free_blocks(reversed(blocks))

    def _check_events(self) -> None:
        """Nobody who follows the events believes in a block that is gone."""
        for event in self.side.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self._told.clear()
                continue
            keys = {(event.medium, event.group_idx, hash) for hash in event.block_hashes}
            self._told = self._told | keys if isinstance(event, BlockStored) else self._told - keys
        gpu, host = self.side.manager.block_pool, self.side.coordinator.get_host_block_pool()
        there = {
            (
                pool.medium,
                get_group_id(block.block_hash),
                maybe_convert_block_hash(get_block_hash(block.block_hash)),
            )
            for pool in (gpu, host)
            for block in pool.blocks
            if block.block_hash is not None
        }
        assert self._told <= there
        self.num_told = max(self.num_told, len(self._told))

    def _is_current(self, admission: Admission) -> bool:
        return self._admissions.get(admission.life.name) is admission

    def _fly(self, admission: Admission, tokens: int, num_drafts: int, hosts: list[int]) -> None:
        life, start = admission.life, admission.num_written
        known = life.request.all_token_ids[: start + tokens - num_drafts]
        values = row_values([*known, *[7] * num_drafts])
        # The step of a request that has left since runs all the same, and nobody reads its result.
        current = self._is_current(admission)
        if current:
            self.worker.check_context(life.name, values, start, hosts)
        self.worker.write(life.name, values[start : start + tokens], start, hosts)
        if current:
            self.worker.check_context(life.name, values, start + tokens, hosts)

    def _check_handed_over(self, flight: Flight) -> None:
        """A page is handed over with the rows of certain tokens: a rejected draft's row has been
        written again by then."""
        size = self.side.shape.block_size
        pages = {
            host: (admission.life, page)
            for (admission, _, _), hosts in zip(flight.batch, flight.hosts, strict=True)
            for page, host in enumerate(hosts)
        }
        for plan in flight.metadata.plans:
            for kind, host in zip(
                plan.transfer_kind.tolist(), plan.transfer_host_block.tolist(), strict=True
            ):
                if kind in (TRANSFER_SPILL, TRANSFER_MIRRORED) and host in pages:
                    life, page = pages[host]
                    values = row_values(life.request.all_token_ids)
                    assert self.host_rows(host) == values[page * size : (page + 1) * size]
                    self.num_handed_over += 1

    def host_rows(self, host: int) -> list[int]:
        """What the host block holds."""
        return self.worker.host[host]

    def _take_result(self, admission: Admission, tokens: int, num_drafts: int) -> None:
        life, request = admission.life, admission.life.request
        admission.num_written += tokens
        if admission.num_written - num_drafts < request.num_tokens:
            return
        accepted = self.draw(num_drafts + 1, "accept", life.name, request.num_tokens)
        rejected = num_drafts - accepted
        admission.num_written -= rejected
        request.num_computed_tokens -= rejected
        request.num_output_placeholders -= 1 + num_drafts
        new = [7] * accepted + [self.draw(50, "token", life.name, request.num_tokens)]
        request.append_output_token_ids(new)
        if len(request.output_token_ids) >= life.num_output:
            self._finish(life, RequestStatus.FINISHED_STOPPED)
