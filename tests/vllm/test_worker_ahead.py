# SPDX-License-Identifier: Apache-2.0
"""A scheduler ahead of its worker: every row that attention reads is still the one written."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from cpu_ahead import CpuServingAhead
from cpu_graph_serving import CpuServingGraphsAhead
from cpu_graphs import GraphStreams
from serving import Traffic
from worker_on_cpu import ONE_EACH, PACKED, CpuWorker, Model, release_all

from hotpage.errors import HotPageError
from hotpage.vllm.step_tables import HotRegions

pytestmark = pytest.mark.vllm


@dataclass(frozen=True)
class Case:
    """A traffic on some model, and what it must meet."""

    model: Model
    seed: int
    num_blocks: int
    host_blocks: int
    expected: tuple[str, ...]
    num_requests: int = 12
    sessions: int = 0
    host_layout: str = "row_interleaved"

    def serve(
        self,
        kernels: ctypes.CDLL,
        patch: pytest.MonkeyPatch,
        kind: type[CpuServingAhead] = CpuServingAhead,
    ) -> CpuServingAhead:
        """Serves it to its end."""
        traffic = Traffic(
            seed=self.seed, num_requests=self.num_requests, max_prompt=340, max_output=10,
            chunk=100, imports=0, num_prefixes=2, arrive=60, abort=4, reset=4,
        )  # fmt: skip
        cpu = CpuWorker(
            self.model, kernels, patch, streams=GraphStreams(late=True, haste=30, seed=self.seed),
            host_layout=self.host_layout, num_blocks=self.num_blocks,
            host_blocks=self.host_blocks, max_requests=12, max_tokens=1200, max_pages=8,
        )  # fmt: skip
        cpu.gpu_pool.fill_(0xA5)
        serving = kind(cpu, traffic, 5, dummies=30, sessions=self.sessions)
        serving.run(max_steps=600)
        return serving


ALWAYS = ("stale parts", "dummy steps", "pages given up", "prefill staged", "aborts")
CASES = {
    "preempted, and hits": Case(
        ONE_EACH, 3, 26, 18, (*ALWAYS, "host-only admissions", "preemptions")
    ),
    "packed groups": Case(
        PACKED, 2, 30, 24, (*ALWAYS, "host-only admissions"), host_layout="layer_major"
    ),
    "sessions": Case(
        ONE_EACH, 6, 26, 18, (*ALWAYS, "sessions gone on", "preemptions"), 8, sessions=60
    ),
}


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    """What a failed test has pinned is freed."""
    yield
    release_all()


@pytest.mark.parametrize("kind", [CpuServingAhead, CpuServingGraphsAhead], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", CASES)
def test_a_worker_behind_its_scheduler_reads_the_rows_that_were_written(
    name: str,
    kind: type[CpuServingAhead],
    kernels: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES[name]
    serving = case.serve(kernels, monkeypatch, kind)
    worker, side = serving.cpu.worker, serving.side
    replayed = ("replays", "padded replays", "captures") if kind is not CpuServingAhead else ()
    assert all(serving.seen[what] for what in case.expected + replayed), serving.seen
    assert min(serving.misses, serving.hits) > 0, "nothing was read from the host"
    assert worker.num_repaired_pages == 0
    assert int(worker._mirrors.counters[2]) == 0, "rows lost by mirrors"
    assert all(int(state.counters[2]) == 0 for state in worker.states), "misses without a slot"
    assert serving.enqueued == serving.completed
    assert len(worker._acks) == 0
    for pool in (side.manager.block_pool, side.coordinator.get_host_block_pool()):
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_the_comparison_notices_regions_of_another_batch(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HotRegions, "gather", lambda self, state_rows: None)
    with pytest.raises((AssertionError, HotPageError), match=r"reads a wrong row|staged row"):
        CASES["preempted, and hits"].serve(kernels, monkeypatch)
