# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a pool, step by step: who waits for whom, who hears of whose end, and that two
engines never meet.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from cpu_plans import Steps, Transfer, plan
from cpu_ranks import RankFailuresError, RankProcess, Ranks, Setup, die, ranks
from worker_on_cpu import BLOCK, ONE_EACH, CpuWorker, release_all

from hotpage.memory import shared
from hotpage.runtime.acks import AckQueue
from hotpage.runtime.events import WriteOrder
from hotpage.vllm.caches import BoundCaches
from hotpage.vllm.metadata import HotPageConnectorMetadata
from hotpage.vllm.step_tables import StepTables
from hotpage.vllm.transfers import HostReader
from hotpage.vllm.worker import NativeConnectorWorker

pytestmark = pytest.mark.vllm

Fault = Callable[[RankProcess], None]
SOON_S = 1.0


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    """What a failed test has pinned is freed."""
    yield
    release_all()


@pytest.fixture
def steps(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Knows the ranks' blocks and groups; its own worker serves nothing."""
    return Steps(CpuWorker(ONE_EACH, kernels, monkeypatch))


def setup_of(kernels: ctypes.CDLL, folder: Path, **options: Any) -> Setup:
    """Ranks of the smallest model."""
    folder.mkdir(exist_ok=True)
    return Setup(ONE_EACH, kernels._name, folder, **options)


def metadata(
    *plans: Any,
    scheduled: Sequence[int] = (),
    started: Sequence[tuple[int, str]] = (),
    **fields: Any,
) -> HotPageConnectorMetadata:
    """A step's metadata with plans that the test wrote."""
    batch = np.array(scheduled, np.int32).tobytes()
    return HotPageConnectorMetadata(plans, batch, started=tuple(started), **fields)


def idle(steps: Steps, **fields: Any) -> HotPageConnectorMetadata:
    """A step without a forward."""
    return metadata(plan(steps.groups), **fields)


# Who waits for whom.


def write(running: Ranks, steps: Steps) -> None:
    """A request computes a page, which has host block 3, and a bit."""
    resident = [(0, 0, steps.blocks(5)), (0, 1, steps.blocks(6))]
    running.step(
        metadata(
            plan(steps.groups, cleared=[0], residency=resident, resident=True),
            scheduled=[0],
            started=[(0, "r1")],
        ),
        [steps.part(1, 70, 0, host=[3, 4], resident=[5, 6])],
    )


def write_then_read(running: Ranks, steps: Steps) -> None:
    """In the step after, the request reads the page from the host."""
    write(running, steps)
    zeros = [0] * steps.groups
    given_up = plan(steps.groups, residency=[(0, 0, zeros)], granted=[(0, steps.region([9]))])
    running.step(
        metadata(given_up, scheduled=[0]),
        [steps.part(1, 71, 70, host=[3, 4], resident=[0, 6], hot=[9])],
    )


def answers(running: Ranks, num_steps: int) -> list[Any]:
    """What the ranks answer to the last of some steps: metadata of each, None for nothing."""
    for _ in range(num_steps):
        outputs = running.receive_all("step")
    told = [output.kv_connector_output for output in outputs]
    return [one and one.kv_connector_worker_meta for one in told]


def reads_without_waiting(process: RankProcess) -> None:
    """A reader does not wait for the writer."""

    def wait(self: WriteOrder, stream: int) -> None:
        self.waited += 1
        self._words[2].value = self.waited

    if process.rank == 1:
        process.patch.setattr(WriteOrder, "wait", wait)


def test_a_reader_finds_rows_of_the_step_before(
    kernels: ctypes.CDLL, steps: Steps, tmp_path: Path
) -> None:
    with ranks(setup_of(kernels, tmp_path, num_ranks=3, slow=0, slow_s=0.5)) as running:
        write_then_read(running, steps)
        answers(running, 2)


def test_a_reader_that_does_not_wait_reads_rows_that_are_not_there_yet(
    kernels: ctypes.CDLL, steps: Steps, tmp_path: Path
) -> None:
    setup = setup_of(kernels, tmp_path, slow=0, slow_s=0.5, fault=reads_without_waiting)
    with ranks(setup) as running:
        write_then_read(running, steps)
        with pytest.raises(RankFailuresError, match="reads a wrong row") as caught:
            answers(running, 2)
    assert list(caught.value.failures) == [1]


def mirror_over(running: Ranks, steps: Steps) -> None:
    """Another request computes a page, whose rows go to host block 3."""
    fresh = plan(
        steps.groups, cleared=[1], residency=[(1, 0, steps.blocks(7))], recycled=[3], resident=True
    )
    running.step(
        metadata(fresh, scheduled=[1], started=[(1, "r2")]),
        [steps.part(2, BLOCK, 0, host=[3], resident=[7], state_row=1)],
    )


def copy_over(running: Ranks, steps: Steps) -> None:
    """Host block 4 is copied to host block 3, in a step without a forward."""
    running.step(metadata(plan(steps.groups, recycled=[3]), host_copies=((4, 3),)), [])


def spill_over(running: Ranks, steps: Steps) -> None:
    """A page is copied to host block 3, in a step without a forward."""
    spill = Transfer(1, 3, steps.blocks(6))
    running.step(metadata(plan(steps.groups, transfers=[spill], recycled=[3])), [])


def writes_without_waiting(process: RankProcess) -> None:
    """The writer's stream does not wait for the readers'."""
    process.patch.setattr(WriteOrder, "await_reads", lambda *_: None)


@pytest.mark.parametrize("write_over", [mirror_over, copy_over, spill_over])
@pytest.mark.parametrize("fault", [None, writes_without_waiting])
def test_a_slow_reader_finds_the_rows_of_a_block_that_the_next_step_writes_over(
    write_over: Callable[[Ranks, Steps], None],
    fault: Fault | None,
    kernels: ctypes.CDLL,
    steps: Steps,
    tmp_path: Path,
) -> None:
    """Copies to the host run at once; the reader is half a second behind."""
    setup = setup_of(kernels, tmp_path, slow=1, slow_s=0.5, late=False, fault=fault)
    with ranks(setup) as running:
        write_then_read(running, steps)
        running.receive_all("step")
        write_over(running, steps)
        if fault is None:
            said = answers(running, 2)
            assert said[1] is None, "a reader speaks of the writer's copies"
            if write_over is spill_over:
                assert said[0].enqueued_transfer_counts == {1: 1}
            if write_over is copy_over:
                assert said[0].completed_host_copy_dst_ids == (3,)
        else:
            with pytest.raises(RankFailuresError, match="reads a wrong row") as caught:
                answers(running, 2)
            assert 1 in caught.value.failures


def stands_beside_a_reader_of_host_rows(process: RankProcess) -> None:
    """A sibling uses host rows, on every rank."""
    worker = process.cpu.worker
    worker._options = replace(worker._options, siblings=("NixlConnector",))


@pytest.mark.parametrize("fault", [None, stands_beside_a_reader_of_host_rows])
def test_a_sibling_on_another_rank_finds_the_rows_of_a_step_behind_it(
    fault: Fault | None, kernels: ctypes.CDLL, steps: Steps, tmp_path: Path
) -> None:
    with ranks(setup_of(kernels, tmp_path, slow=0, slow_s=0.5, fault=fault)) as running:
        write(running, steps)
        running.receive("step", 1)
        running.send("holds", 3, [1000 + position for position in range(BLOCK)], to=1)
        assert running.receive("holds", 1) == (fault is not None)
        running.receive("step", 0)
        running.step(idle(steps), [])
        running.receive_all("step")


# Who hears of whose end.


def dies_in_step_3(rank: int, process: RankProcess) -> None:
    """A rank is killed when its third step begins."""
    original = WriteOrder.begin_step

    def begin(self: WriteOrder, stream: int) -> None:
        if process.num_steps == 3:
            die()
        original(self, stream)

    if process.rank == rank:
        process.patch.setattr(WriteOrder, "begin_step", begin)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_steps_of_the_others_at_once(
    rank: int, kernels: ctypes.CDLL, steps: Steps, tmp_path: Path
) -> None:
    # At once: a device here would wait for what a dead one has not done, as no host does.
    setup = setup_of(kernels, tmp_path, late=False, fault=partial(dies_in_step_3, rank))
    with ranks(setup) as running:
        for _ in range(6):
            running.step(idle(steps), [])
        start = time.monotonic()
        with pytest.raises(RankFailuresError) as caught:
            answers(running, 6)
        assert time.monotonic() - start < SOON_S
    assert caught.value.failures[rank] == "", "killed"
    assert f"rank {rank} has ended" in caught.value.failures[1 - rank]


def fails_in_step_3(where: type, call: str, process: RankProcess) -> None:
    """Rank 1 fails in its third step; processes of ranks that fail live on, as vLLM's do."""
    original, step = getattr(where, call), process.step

    def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        if process.num_steps == 3:
            raise ValueError("no luck")
        return original(self, *arguments, **options)

    def live_on(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        except Exception as error:
            process.pipe.send(("error", f"{type(error).__name__}: {error}"))
            time.sleep(10 * SOON_S)
            raise

    process.patch.setattr(process, "step", live_on)
    if process.rank == 1:
        process.patch.setattr(where, call, fail)


@pytest.mark.parametrize(
    ("where", "call"),
    [(StepTables, "forget_stale"), (HostReader, "finish_forward"), (AckQueue, "take")],
)
def test_a_rank_that_fails_in_a_step_ends_the_steps_of_the_others_at_once(
    where: type, call: str, kernels: ctypes.CDLL, steps: Steps, tmp_path: Path
) -> None:
    fault = partial(fails_in_step_3, where, call)
    setup = setup_of(kernels, tmp_path, num_ranks=3, late=False, fault=fault)
    with ranks(setup) as running:
        for _ in range(6):
            running.step(idle(steps), [])
        start = time.monotonic()
        with pytest.raises(RankFailuresError) as caught:
            answers(running, 6)
        assert time.monotonic() - start < SOON_S
    failures = caught.value.failures
    assert failures[1] == "ValueError: no luck"
    for rank in (0, 2):
        assert failures[rank].startswith("RankError: ")
        assert "rank 1: no luck" in failures[rank]


def cannot_pin(process: RankProcess) -> None:
    """Rank 1's driver refuses."""
    process.cpu.driver.fail = process.rank == 1


def cannot_share(process: RankProcess) -> None:
    """Rank 1's kernel has no memory without a name."""
    if process.rank == 1:
        process.patch.setattr(shared, "_why_not_here", lambda: "no memfd: not here")


def cannot_bind(process: RankProcess) -> None:
    """Rank 1 finds other caches than it expects."""

    def collect(*_: Any) -> None:
        raise ValueError("no luck")

    if process.rank == 1:
        process.patch.setattr(BoundCaches, "collect", collect)


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        (cannot_pin, "CapacityError: .*cannot be pinned", "RankError: rank 1: .*cannot be pinned"),
        (
            cannot_share,
            'ConfigError: the ranks must share .*no memfd: not here.*"engine": "upstream"',
            'ConfigError: the ranks must share .*no memfd: not here.*"engine": "upstream"',
        ),
        (cannot_bind, "ValueError: no luck", "RankError: rank 1 has ended"),
    ],
)
def test_a_rank_that_cannot_be_set_up_ends_the_set_up_of_all(
    fault: Fault, own: str, others: str, kernels: ctypes.CDLL, tmp_path: Path
) -> None:
    setup = setup_of(kernels, tmp_path, num_ranks=3, fault=fault)
    with ranks(setup, opened=False) as running, pytest.raises(RankFailuresError) as caught:
        running.receive_all("ready")
    failures = caught.value.failures
    assert sorted(failures) == [0, 1, 2]
    for rank, text in failures.items():
        assert re.match(own if rank == 1 else others, text), text


def counts_what_it_leaves(process: RankProcess) -> None:
    """Rank 1 fails when the ranks are connected, and says what it leaves of events and maps."""
    register, events = NativeConnectorWorker.register_kv_caches, process.events
    create, open_event = events.create_event, events.open_event
    live: list[int] = []

    def created() -> tuple[int, bytes]:
        event, handle = create()
        live.append(event)
        return event, handle

    def opened(handle: bytes) -> int:
        live.append(open_event(handle))
        return live[-1]

    def count(self: NativeConnectorWorker, kv_caches: Any) -> None:
        try:
            register(self, kv_caches)
        finally:
            left = [*live, *process.memory_of_peers._opened]
            if left:
                raise ValueError(f"events and maps are left: {left}")

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no luck")

    if process.rank == 1:
        process.patch.setattr(events, "create_event", created)
        process.patch.setattr(events, "open_event", opened)
        process.patch.setattr(events, "destroy_event", live.remove)
        process.patch.setattr(NativeConnectorWorker, "register_kv_caches", count)
        process.patch.setattr(StepTables, "__init__", fail)


def test_a_set_up_that_fails_ends_what_it_had_of_other_ranks(
    kernels: ctypes.CDLL, tmp_path: Path
) -> None:
    setup = setup_of(kernels, tmp_path, late=False, cooperative=True, fault=counts_what_it_leaves)
    with ranks(setup, opened=False) as running, pytest.raises(RankFailuresError) as caught:
        running.receive("ready", 1)
    assert caught.value.failures[1] == "ValueError: no luck"


def test_engines_that_start_at_the_same_time_do_not_meet(
    kernels: ctypes.CDLL, tmp_path: Path
) -> None:
    """Two replicas of one engine, say: vLLM's instance id is the same for all processes here."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(ranks(setup_of(kernels, tmp_path / str(at)), opened=False))
            for at in range(2)
        ]
        memory = []
        for running in engines:
            running.receive_all("ready")
            running.send("memory")
            one, other = running.receive_all("memory")
            assert one == other, "ranks of one engine map one memory"
            memory += one
        assert len(set(memory)) == 2
