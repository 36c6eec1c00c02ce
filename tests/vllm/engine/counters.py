# SPDX-License-Identifier: Apache-2.0
"""Owns the counters that prove that a run was under pressure, from whichever side serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.launch import Engine
    from engine.probe import Probe
    from engine.workload import Served

UNDER_PRESSURE = (
    "lost_pages",
    "hot_hits",
    "hot_misses",
    "host_only_admissions",
    "preemptions",
    "aborts",
)


class Counters:
    """Reads differences since its construction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_lost = 0
        if not hasattr(engine.coordinator, "core"):
            self._count_losses(engine.coordinator)
        self._first = self._read()

    def read(self, probe: Probe, served: Served) -> dict[str, int]:
        """Counters by name. Synchronises."""
        now = self._read()
        counted = {name: now[name] - self._first[name] for name in now}
        return {
            **counted,
            "host_only_admissions": probe.num_host_only_admissions,
            "preemptions": served.num_preempted,
            "aborts": served.num_aborted,
        }

    def _read(self) -> dict[str, int]:
        core = getattr(self._engine.coordinator, "core", None)
        hits, misses = hot_counts(self._engine)
        lost = self._num_lost if core is None else core.stats()["pages_lost"]
        return {"lost_pages": lost, "hot_hits": hits, "hot_misses": misses}

    def _count_losses(self, coordinator: Any) -> None:
        lose = coordinator._lose_page

        def counted(*arguments: Any) -> None:
            self._num_lost += 1
            lose(*arguments)

        coordinator._lose_page = counted


def hot_counts(engine: Engine) -> tuple[int, int]:
    """Hits and misses in hot regions. Synchronises."""
    if engine.spec.engine == "native":
        counts = [state.counters.tolist()[:2] for state in engine.worker.states]
    else:
        counts = [group.hisparse_group.swap_stats.tolist() for group in engine.groups]
    return sum(hits for hits, _ in counts), sum(misses for _, misses in counts)


def regions_granted_again(engine: Engine) -> list[str]:
    """Requests that gave a hot region back and have one now; native only."""
    tracked = engine.coordinator._tracked
    return [name for name, entry in tracked.items() if entry.gave_back and entry.hot]
