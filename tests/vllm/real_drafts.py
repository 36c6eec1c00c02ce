# SPDX-License-Identifier: Apache-2.0
"""Owns vLLM's own asynchronous scheduler with drafts: it counts on all of them until a result that
comes a step later takes some back, while the device starts each step where it really is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from real_scheduler import BLOCK, Flight, RealScheduler
from serving import row_values
from vllm.v1.request import Request

from hotpage._core import TRANSFER_MIRRORED, TRANSFER_SPILL


@dataclass
class OnDevice:
    """A request as the device knows it, which hears of its own results at once."""

    tokens: list[int]
    num_computed: int
    """Tokens whose rows are valid."""
    drafts: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    """Drafts that the step has verified."""


class RealSchedulerWithDrafts(RealScheduler):
    """Serves random traffic with drafts, any number of which a step accepts."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._on_device: dict[str, OnDevice] = {}

    def _request(self, name: str, tokens: list[int], resumable: bool) -> Request:
        # A session takes tokens back that the device would have to hear of.
        return super()._request(name, tokens, False)

    def _values(self, tokens: list[int]) -> list[int]:
        return row_values([-self._weights, *tokens])[1:]

    def _forward(self, flight: Flight, name: str, start: int, count: int) -> None:
        output = flight.output
        admitted = {new.req_id for new in output.scheduled_new_reqs}
        if name in admitted | output.scheduled_cached_reqs.resumed_req_ids:
            self._on_device[name] = OnDevice(flight.tokens[name], start)
        device = self._on_device[name]
        num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        # A request that has decoded nothing is padded with drafts that nobody made.
        device.guessed = (device.drafts or [99] * num_drafts)[:num_drafts]
        first, end = device.num_computed, device.num_computed + count
        assert first <= start, "the scheduler counts on all drafts"
        self.seen["steps behind their plan"] += first < start
        values = self._values([*device.tokens, *device.guessed][:end])
        assert len(values) == end
        hosts = flight.hosts[name]
        current = self.coordinator._tracked.get(name) is flight.entries[name]
        if current:
            self._worker.check_context(name, values, first, hosts)
        self._worker.write(name, values[first:], first, hosts)
        if current:
            self._worker.check_context(name, values, end, hosts)
        self.seen["rows compared" if current else "stale rows"] += count
        self.seen["rows on the host"] += any(
            0 in blocks for blocks in self._worker.tables[name].values()
        )

    def _sample(self, flight: Flight, name: str, end: int) -> list[int]:
        self._check_handed_over(flight, name)
        device, count = self._on_device[name], flight.output.num_scheduled_tokens[name]
        num_drafts = len(device.guessed)
        if device.num_computed + count - num_drafts < len(device.tokens):
            device.num_computed += count
            return []
        accepted = self._rng.randint(0, num_drafts) if device.drafts else 0
        new = [*device.guessed[:accepted], self._rng.randrange(50)]
        self.seen["accepted drafts"] += accepted
        self.seen["rejected drafts"] += num_drafts - accepted
        device.num_computed += count - num_drafts + accepted
        device.tokens = [*device.tokens, *new]
        device.drafts = [50 + self._rng.randrange(50) for _ in range(self.setting.drafts)]
        return new

    def _check_handed_over(self, flight: Flight, name: str) -> None:
        """A page is handed over with the rows of certain tokens."""
        hosts, values = flight.hosts[name], self._values(self._on_device[name].tokens)
        for plan in flight.output.kv_connector_metadata.plans:
            for kind, host in zip(
                plan.transfer_kind.tolist(), plan.transfer_host_block.tolist(), strict=True
            ):
                if kind in (TRANSFER_SPILL, TRANSFER_MIRRORED) and host in hosts:
                    page = hosts.index(host)
                    rows = values[page * BLOCK : (page + 1) * BLOCK]
                    assert self._worker.host[host] == rows, (name, page)
                    self.seen["pages handed over"] += 1
