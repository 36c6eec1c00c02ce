# SPDX-License-Identifier: Apache-2.0
"""Several ranks over one shared pool, in real processes: every rank reads what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

import ctypes

from cpu_ranks import RankProcess, Setup, ranks
from rank_serving import RankServing, RankServingAhead
from serving import Traffic
from worker_on_cpu import MIXED, ONE_EACH, PACKED, CpuWorker, Model, release_all

from hotpage._core import TRANSFER_MIRRORED
from hotpage.errors import HotPageError
from hotpage.kernels.cooperative_copy import CooperativeCopy
from hotpage.runtime._ipc import IpcError
from hotpage.runtime.events import WriteOrder
from hotpage.vllm import cooperation
from hotpage.vllm.host_pool import NativeHostPool
from hotpage.vllm.transfers import HostReader

pytestmark = pytest.mark.vllm

AHEAD = Traffic(
    seed=3, num_requests=14, max_prompt=340, max_output=10, chunk=100, imports=0, num_prefixes=2,
    arrive=60, abort=4, reset=4,
)  # fmt: skip
FEW = replace(AHEAD, num_requests=8, max_output=8)
IN_STEP = Traffic(
    seed=2, num_requests=6, max_prompt=300, max_output=8, chunk=100, imports=50, failed_imports=20,
    num_prefixes=2, arrive=60,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A traffic on ranks, and what it must meet."""

    model: Model
    traffic: Traffic
    num_blocks: int
    host_blocks: int
    num_ranks: int = 2
    ahead: bool = True
    host_layout: str = "row_interleaved"
    slow: int | None = None
    late: bool = True
    executor: str = "mp"
    cooperative: bool = False
    graphs: bool = False
    fault: Callable[[RankProcess], None] | None = None
    max_steps: int = 600
    expected: tuple[str, ...] = ("pages given up", "prefix hits")


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    """What a failed test has pinned is freed."""
    yield
    release_all()


Serve = Callable[[Case], tuple[Any, list[dict[str, Any]]]]


@pytest.fixture
def serve(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Serves a case to its end: the loop, and what each rank has seen."""

    def run(case: Case) -> tuple[Any, list[dict[str, Any]]]:
        sizes = {
            "num_blocks": case.num_blocks, "host_blocks": case.host_blocks, "max_pages": 8,
            "max_requests": 12, "max_tokens": 1200, "host_layout": case.host_layout,
        }  # fmt: skip
        setup = Setup(
            case.model, kernels._name, tmp_path, case.num_ranks, sizes, case.traffic.seed,
            case.slow, late=case.late, executor=case.executor, cooperative=case.cooperative,
            graphs=case.graphs, fault=case.fault,
        )  # fmt: skip
        cpu = CpuWorker(case.model, kernels, monkeypatch, **sizes)
        with ranks(setup) as running:
            if case.ahead:
                serving = RankServingAhead(running, cpu, case.traffic, 5, 0, 0)
            else:
                serving = RankServing(running, cpu, case.traffic)
            serving.run(max_steps=case.max_steps)
            running.send("end")
            return serving, running.receive_all("end")

    return run


CASES = {
    "two ranks": Case(ONE_EACH, AHEAD, 26, 18),
    "three ranks, the last one slow": Case(
        PACKED, replace(AHEAD, seed=2), 30, 24, num_ranks=3, slow=2, late=False,
        host_layout="layer_major",
    ),
    "imports": Case(
        PACKED, IN_STEP, 24, 18, ahead=False, expected=("pages given up", "transfer 2")
    ),
    "pools of their own": Case(
        PACKED, IN_STEP, 24, 18, ahead=False, executor="ray",
        expected=("pages given up", "transfer 2"),
    ),
    "two ranks together": Case(PACKED, FEW, 26, 18, late=False, cooperative=True),
    "replays of two ranks together": Case(
        PACKED, FEW, 26, 18, slow=1, late=False, cooperative=True, graphs=True
    ),
    "three ranks together, the first one slow": Case(
        MIXED, replace(IN_STEP, imports=0), 46, 16, num_ranks=3, ahead=False, slow=0, late=False,
        cooperative=True,
    ),
    "a drafter": Case(MIXED, replace(IN_STEP, imports=0), 46, 16, ahead=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_rank_reads_the_rows_that_were_written(name: str, serve: Serve) -> None:
    case = CASES[name]
    serving, seen = serve(case)
    assert all(serving.seen[what] for what in case.expected), serving.seen
    writer, *readers = seen
    for rank in seen:
        for what in ("unresolved", "staged from nowhere", "lost", "repaired", "waiting", "pinned"):
            assert rank[what] == 0, what
        assert rank["rows"] == writer["rows"] > 0
        # Ranks agree about every hot row, without a word between them.
        assert rank["row maps"] == writer["row maps"]
        assert (rank["hits"], rank["misses"]) == (writer["hits"], writer["misses"])
        assert min(rank["hits"], rank["misses"]) > 0, "nothing was read from the host"
        assert rank["launches"]["restore_pages"] == writer["launches"]["restore_pages"]
    assert writer["launches"]["mirror_rows"] > 0
    for rank in readers:
        mirrors = 0 if case.executor == "mp" else writer["launches"]["mirror_rows"]
        assert rank["launches"]["mirror_rows"] == mirrors
    assert_fetched_together(case, seen)
    side = serving.side
    for pool in (side.manager.block_pool, side.coordinator.get_host_block_pool()):
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def assert_fetched_together(case: Case, seen: list[dict[str, Any]]) -> None:
    """Every miss came over one rank's link, and ranks agreed about each list."""
    if not case.cooperative:
        assert all(rank["together"] is None for rank in seen)
        return
    for rank in seen:
        together = rank["together"]
        if case.graphs:
            # Warm-ups and replays, which the worker does not see.
            assert rank["replays"] > 3
            assert together["shared_launches"] > rank["replays"]
        else:
            assert together["shared_launches"] == rank["launches"]["resolve_and_copy"]
        assert together["digested_launches"] == together["shared_launches"]
        assert together["digest"] == seen[0]["together"]["digest"] != 0
        for what in ("private_launches", "different_requests", "failed_launches", "lost_ranks"):
            assert together[what] == 0, what
    shares = [rank["together"]["shared_rows"] for rank in seen]
    assert min(shares) > 0
    assert sum(shares) == seen[0]["misses"]


def keeps_its_memory(process: RankProcess) -> None:
    """Rank 1's hot slots cannot be mapped by other processes."""
    if process.rank == 1:
        process.patch.setattr(process, "_share_memory", lambda: None)


def wants_no_help(process: RankProcess) -> None:
    """The option is off."""
    worker = process.cpu.worker
    worker._options = replace(worker._options, cooperative_copy="off")


@pytest.mark.parametrize("reason", [keeps_its_memory, wants_no_help])
def test_each_rank_fetches_its_own_misses_where_ranks_cannot_or_must_not_help(
    reason: Callable[[RankProcess], None], serve: Serve
) -> None:
    _, seen = serve(replace(CASES["two ranks together"], fault=reason))
    for rank in seen:
        together = rank["together"] or {"shared_launches": 0, "private_launches": 0}
        assert together["shared_launches"] == together["private_launches"] == 0
        assert rank["misses"] == seen[0]["misses"] > 0


def reaches_one_group(process: RankProcess) -> None:
    """Rank 1's memory of index groups but the first cannot be mapped by other processes."""
    memory = process.memory_of_peers
    export = memory.export_memory

    def export_memory(address: int) -> tuple[bytes, int]:
        if process.rank == 1 and process.cpu.worker._cooperation._num_bound:
            raise IpcError("no more handles")
        return export(address)

    process.patch.setattr(memory, "export_memory", export_memory)


def test_ranks_fetch_together_what_they_can_reach_of_each_other(serve: Serve) -> None:
    _, seen = serve(replace(CASES["two ranks together"], fault=reaches_one_group))
    num_groups = len(CASES["two ranks together"].model.groups)
    for rank in seen:
        launches, together = rank["launches"]["resolve_and_copy"], rank["together"]
        assert together["shared_launches"] * num_groups == launches > 0
        assert together["failed_launches"] == rank["unresolved"] == 0
        assert rank["rows"] == seen[0]["rows"] > 0
        assert rank["row maps"] == seen[0]["row maps"]
    assert 0 < sum(rank["together"]["shared_rows"] for rank in seen) < seen[0]["misses"]


def is_sooner_out_of_patience(process: RankProcess) -> None:
    """Copies that are not told how long to wait give up within less than a rank is late."""
    patience = {**CooperativeCopy.__init__.__kwdefaults__, "time_limit_s": 0.002}
    process.patch.setattr(CooperativeCopy.__init__, "__kwdefaults__", patience)


def test_a_rank_that_is_late_within_a_step_is_waited_for(serve: Serve) -> None:
    case = replace(CASES["two ranks together"], slow=1, fault=is_sooner_out_of_patience)
    assert_fetched_together(case, serve(case)[1])


def selects_other_rows(process: RankProcess) -> None:
    """Rank 1's indexer does not agree with rank 0's; ranks look often."""
    process.patch.setattr(cooperation, "LOOK_STEPS", 10)
    if process.rank == 1:
        process.setup = replace(process.setup, seed=77)


def looks_often(process: RankProcess) -> None:
    """Ranks compare what they fetch every few steps."""
    process.patch.setattr(cooperation, "LOOK_STEPS", 10)


@pytest.mark.parametrize("fault", [looks_often, selects_other_rows])
def test_ranks_that_select_other_rows_read_them_and_say_that_they_differ(
    fault: Callable[[RankProcess], None], serve: Serve
) -> None:
    differ = fault is selects_other_rows
    _, seen = serve(replace(CASES["two ranks together"], fault=fault))
    for rank in seen:
        assert rank["compared"] > 1
        assert rank["diverged"] == differ
        assert (rank["together"]["different_requests"] > 0) == differ
        assert rank["rows"] > 0


# Faults that must be found.


def writes_as_well(process: RankProcess) -> None:
    """A reader takes itself for the writer."""
    if process.rank == 1:
        process.patch.setattr(NativeHostPool, "is_writer", True)
        for call in ("record", "await_reads"):
            process.patch.setattr(WriteOrder, call, lambda *_: None)


def acknowledges_copies(process: RankProcess) -> None:
    """A reader says of pages that they are in the pool, which only the writer can know."""
    original = HostReader._restore

    def restore(self: HostReader, plan: Any) -> None:
        original(self, plan)
        self.acks.add(plan.transfer_id[plan.transfer_kind == TRANSFER_MIRRORED].tolist())

    if process.rank == 1:
        process.patch.setattr(HostReader, "_restore", restore)


def keeps_restores_to_itself(process: RankProcess) -> None:
    """A reader brings pages back and does not say so."""

    original = HostReader._restore

    def restore(self: HostReader, plan: Any) -> None:
        acks, self.acks = self.acks, SimpleNamespace(add=lambda ids: None)
        original(self, plan)
        self.acks = acks

    if process.rank == 1:
        process.patch.setattr(HostReader, "_restore", restore)


def serves_more_than_the_batch(process: RankProcess) -> None:
    """The ranks fetch what lists of a larger batch have left behind."""
    process.patch.setattr(CooperativeCopy, "set_batch", lambda *_: None)


FAULTS = {
    # What was left there may be anything: processes may not survive it.
    "serves more than the batch": (
        CASES["two ranks together"], serves_more_than_the_batch, "ranks failed",
    ),
    "writes as well": (CASES["two ranks"], writes_as_well, "acknowledge"),
    "acknowledges copies": (CASES["two ranks"], acknowledges_copies, "acknowledge"),
    "keeps restores to itself": (
        replace(CASES["imports"], max_steps=120), keeps_restores_to_itself, "not done after",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_does_not_keep_to_its_part_is_found(name: str, serve: Serve) -> None:
    case, fault, found = FAULTS[name]
    with pytest.raises((AssertionError, HotPageError), match=found):
        serve(replace(case, fault=fault))
