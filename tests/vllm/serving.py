# SPDX-License-Identifier: Apache-2.0
"""Owns a small serving loop in the order of vLLM's scheduler, with every choice drawn from a seed.

A choice depends on the seed, the step and the request alone, never on the side, so two sides that
answer alike live through the same trace.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sides import Side, make_request
from toy_worker import ToyWorker
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import Request, RequestStatus


@dataclass(frozen=True)
class Traffic:
    """What arrives and what may happen to it, chances in percent."""

    seed: int
    num_requests: int
    max_prompt: int
    max_output: int
    chunk: int
    num_prefixes: int = 3
    arrive: int = 40
    imports: int = 20
    failed_imports: int = 30
    abort: int = 2
    reset: int = 5
    max_lag: int = 2
    """Most steps between a copy's enqueue and its completion."""
    settle: int = 0
    """Steps after an import in which nobody is admitted, aborted or forgotten."""
    min_import_output: int = 1
    """Fewest tokens that a request with an import answers."""


@dataclass
class Life:
    """One request from the user's point of view."""

    name: str
    prompt: list[int]
    num_output: int
    imports: bool
    request: Request
    num_shared: int
    """Leading tokens that other requests may have too."""
    ready_at: int = -1
    """Step in which its import ends."""
    num_hit_pages: int = 0
    """Pages of its local prefix hit."""
    aborted: bool = False
    """Gone, but a sibling still writes its blocks."""


@dataclass
class Serving:
    """Runs a traffic on one side and logs what a user or a sibling could see."""

    side: Side
    traffic: Traffic
    log: list[tuple] = field(default_factory=list)
    num_preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.worker = ToyWorker(self.side)
        self.waiting: deque[Life] = deque()
        self.running: list[Life] = []
        self.importing: list[Life] = []
        self.step = 0
        self.num_arrived = 0
        self._quiet_until = 0
        self._acks: dict[int, int] = {}

    def run(self, max_steps: int) -> None:
        """Steps until every request has left and every transfer has drained."""
        while self.step < max_steps:
            self.step += 1
            self._arrive()
            if self.step > self._quiet_until:
                self._abort()
                self._reset()
            batch = self._schedule()
            self._execute(batch)
            left = self.waiting or self.running or self.importing or self._acks
            if left or self.num_arrived < self.traffic.num_requests:
                continue
            if not self.side.coordinator.has_pending_work():
                return
        raise AssertionError(f"{self.side.name}: not done after {max_steps} steps, {self!r:.300}")

    def draw(self, below: int, *what: object) -> int:
        """A number below `below` that depends on the seed and `what`."""
        digest = hashlib.blake2b(repr((self.traffic.seed, what)).encode(), digest_size=8)
        return int.from_bytes(digest.digest()) % below

    def chance(self, percent: int, *what: object) -> bool:
        """True in `percent` of all cases."""
        return self.draw(100, *what) < percent

    # What happens between steps.

    def _arrive(self) -> None:
        traffic = self.traffic
        if self.num_arrived == traffic.num_requests:
            return
        if not self.chance(traffic.arrive, "arrive", self.step):
            return
        at = self.num_arrived
        self.num_arrived += 1
        name = self._name(at)
        length = 2 + self.draw(traffic.max_prompt - 1, "prompt", at)
        prefix = self.draw(traffic.num_prefixes, "prefix", at)
        shared = self.draw(length + 1, "shared", at)
        tail = 1000 + 100 * at
        prompt = [prefix] * shared + [tail + p % 100 for p in range(length - shared)]
        imports = self.chance(traffic.imports, "import", at)
        request = make_request(name, prompt, self.side.shape.block_size)
        request.status = RequestStatus.WAITING
        output = 1 + self.draw(traffic.max_output, "output", at)
        if imports:
            output = max(output, traffic.min_import_output)
        self.waiting.append(Life(name, prompt, output, imports, request, shared))

    def _name(self, at: int) -> str:
        return f"r{at}"

    def _abort(self) -> None:
        for life in list(self.running):
            if self.chance(self.traffic.abort, "abort", self.step, life.name):
                self._finish(life, RequestStatus.FINISHED_ABORTED)

    def _reset(self) -> None:
        busy = self.running or self.importing or self._acks
        if busy or not self.chance(self.traffic.reset, "reset", self.step):
            return
        if not self.side.coordinator.has_pending_work():
            assert self.side.manager.reset_prefix_cache()
            self.log.append(("reset", self.step))

    # One step.

    def _schedule(self) -> list[tuple[Life, int, int]]:
        batch: list[tuple[Life, int, int]] = []
        stalled = False
        for life in list(self.running):
            if life not in self.running or stalled:
                continue
            tokens, drafts = self._wanted(life)
            while True:
                lookahead = self.side.shape.num_speculative_tokens
                blocks = self.side.manager.allocate_slots(
                    life.request, tokens, num_lookahead_tokens=lookahead
                )
                if blocks is not None:
                    batch.append((life, tokens, drafts))
                    break
                if self.side.coordinator.has_pending_reclamation():
                    stalled = True
                    break
                victim = self._victim()
                batch = [entry for entry in batch if entry[0] is not victim]
                self._preempt(victim)
                if victim is life:
                    break
        if not stalled and self.step > self._quiet_until:
            self._admit_waiting(batch)
        return batch

    def _victim(self) -> Life:
        return self.running[-1]

    def _wanted(self, life: Life) -> tuple[int, int]:
        request = life.request
        missing = request.num_tokens - request.num_computed_tokens
        if missing > 1:
            return min(missing, self.traffic.chunk), 0
        drafts = self.side.shape.num_speculative_tokens
        drafts = self.draw(drafts + 1, "drafts", life.name, request.num_tokens)
        request.spec_token_ids = [7] * drafts
        return 1 + drafts, drafts

    def _admit_waiting(self, batch: list[tuple[Life, int, int]]) -> None:
        while self.waiting:
            life = self.waiting[0]
            request, manager = life.request, self.side.manager
            blocks, local, _ = manager.get_computed_blocks(request)
            external = 0
            if life.imports:
                external = max(len(life.prompt) - local, 0)
            common = {
                "num_new_computed_tokens": local,
                "new_computed_blocks": blocks,
                "full_sequence_must_fit": True,
                "has_scheduled_reqs": bool(batch),
            }
            if external:
                new = manager.allocate_slots(
                    request,
                    0,
                    num_external_computed_tokens=external,
                    delay_cache_blocks=True,
                    **common,
                )
            else:
                tokens = min(request.num_tokens - local, self.traffic.chunk)
                new = manager.allocate_slots(request, tokens, **common)
            if new is None:
                return
            self.waiting.popleft()
            self.side.admit(request)
            life.num_hit_pages = local // self.side.shape.block_size
            self.log.append(("admit", self.step, life.name, local, external))
            if external:
                request.num_computed_tokens = local + external
                request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
                life.ready_at = self.step + self.draw(3, "import lasts", life.name)
                self.importing.append(life)
            else:
                request.num_computed_tokens = local
                request.status = RequestStatus.RUNNING
                self.running.append(life)
                batch.append((life, tokens, 0))

    def _execute(self, batch: list[tuple[Life, int, int]]) -> None:
        drafts = {life.name: [7] * count for life, _, count in batch if count}
        metadata = self.side.plan([(life.name, tokens) for life, tokens, _ in batch], drafts)
        self.worker.start(metadata, [life.name for life, _, _ in batch])
        for life, tokens, num_drafts in batch:
            self._forward(life, tokens, num_drafts)
        self.worker.finish(metadata)
        self._log_state(batch)
        for life, tokens, num_drafts in batch:
            self._sample(life, tokens, num_drafts)
        self._acknowledge(metadata)

    def _acknowledge(self, metadata: Any) -> None:
        ids = self.side.transfers(metadata)
        lag = self.draw(self.traffic.max_lag + 1, "lag", self.step)
        self._acks.update(dict.fromkeys(ids, self.step + lag))
        done = [id for id, due in self._acks.items() if due <= self.step]
        for id in done:
            del self._acks[id]
        self._report(ids, done)

    def _forward(self, life: Life, tokens: int, num_drafts: int) -> None:
        request = life.request
        start = request.num_computed_tokens
        known = request.all_token_ids
        draft = [7] * num_drafts
        values = row_values([*known[: start + tokens - num_drafts], *draft])
        hosts = self.worker.host_blocks(life.name)
        self.worker.check_context(life.name, values, start, hosts)
        self.worker.write(life.name, values[start : start + tokens], start, hosts)
        self.worker.check_context(life.name, values, start + tokens, hosts)

    def _sample(self, life: Life, tokens: int, num_drafts: int) -> None:
        request = life.request
        request.num_computed_tokens += tokens
        if request.num_computed_tokens - num_drafts < request.num_tokens:
            return
        accepted = self._accepted(life, num_drafts)
        request.num_computed_tokens -= num_drafts - accepted
        # An accepted draft is the token that was drafted.
        new = [7] * accepted + [self.draw(50, "token", life.name, request.num_tokens)]
        request.append_output_token_ids(new)
        if len(request.output_token_ids) >= life.num_output:
            self._finish(life, RequestStatus.FINISHED_STOPPED)

    def _accepted(self, life: Life, num_drafts: int) -> int:
        """Drafts of a step that turn out to be right."""
        return self.draw(num_drafts + 1, "accept", life.name, life.request.num_tokens)

    def _report(self, enqueued: list[int], completed: list[int]) -> None:
        received, failed = set(), set()
        for life in list(self.importing):
            if life.ready_at <= self.step:
                received.add(life.name)
                if self.chance(self.traffic.failed_imports, "fails", life.name):
                    failed.add(life.name)
                    # vLLM recomputes from the start where it cannot tell blocks apart.
                    life.request.num_computed_tokens = 0
                else:
                    values = row_values(life.request.all_token_ids)
                    self.worker.fill_import(life.name, values[: life.request.num_computed_tokens])
        outcome = {"finished_recving": received, "failed_recving": failed} if received else {}
        self.side.report(enqueued, completed, **outcome)
        for life in list(self.importing):
            if life.name in received:
                self.importing.remove(life)
                if life.aborted:
                    self.side.manager.free(life.request)
                else:
                    self._resume(life, life.name in failed)

    def _resume(self, life: Life, failed: bool) -> None:
        request, manager = life.request, self.side.manager
        life.imports = False
        if failed:
            manager.free(request)
            request.status = RequestStatus.WAITING
            self.waiting.appendleft(life)
            return
        self._quiet_until = self.step + self.traffic.settle
        size = self.side.shape.block_size
        own = request.block_hashes[life.num_shared // size : request.num_computed_tokens // size]
        # Pages that only this request can publish.
        hashes = tuple(make_block_hash_with_group_id(h, 0) for h in own)
        self.log.append(("import", self.step, life.name, hashes))
        manager.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = RequestStatus.RUNNING
        self.running.append(life)

    def _preempt(self, life: Life) -> None:
        self.num_preemptions += 1
        self.running.remove(life)
        self._free(life)
        self._forget_tables(life)
        life.request.status = RequestStatus.PREEMPTED
        life.request.num_computed_tokens = 0
        life.request.spec_token_ids = []
        self.waiting.appendleft(life)
        self.log.append(("preempt", self.step, life.name))

    def _finish(self, life: Life, status: RequestStatus) -> None:
        self.running.remove(life)
        life.request.status = status
        self.finished[life.name] = len(life.request.output_token_ids)
        self.side.scheduler.requests.pop(life.name)
        self._free(life)
        self._forget_tables(life)

    def _free(self, life: Life) -> None:
        self.side.manager.free(life.request)

    def _forget_tables(self, life: Life) -> None:
        self.worker.tables.pop(life.name, None)

    def _log_state(self, batch: list[tuple[Life, int, int]]) -> None:
        size = self.side.shape.block_size
        # Which GPU copies of a hit are found depends on their order in each index; that what is
        # found is right has been checked row by row.
        readable = {
            life.name: tuple(
                page
                for page in range(life.num_hit_pages, -(-life.request.num_computed_tokens // size))
                if 0 not in self.worker.tables[life.name].get(page, [0])
            )
            for life, _, _ in batch
        }
        published = sorted(
            block.block_hash
            for block in self.side.coordinator.get_host_block_pool().blocks
            if block.block_hash is not None
        )
        self.log.append(("state", self.step, readable, published))


def row_values(tokens: list[int]) -> list[int]:
    """A value for each position that names all tokens up to it."""
    values, state = [], 17
    for token in tokens:
        state = hash((state, token)) | 1
        values.append(state)
    return values
