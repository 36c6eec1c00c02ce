# SPDX-License-Identifier: Apache-2.0
"""Whole engines on a CPU whose decode batches replay captured graphs: every row that attention
reads, on every layer and of every pass of the drafter, is the one written.

A replay runs what the capture has recorded and no Python of hotpage between the launches, on the
buffers that are written anew for each batch; see `cpu_graphs.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

import torch
from cpu_graph_attention import GraphAttention
from cpu_graph_serving import CpuServingGraphs
from cpu_graphs import SPOILT, GraphStreams
from cpu_serving import check_end, serve
from serving import Traffic
from worker_on_cpu import MIXED, ONE_EACH, PACKED, POISON, Model, release_all

from hotpage.kernels.resolve_and_copy import ResolveAndCopy
from hotpage.vllm.resolver import GroupResolver, RowLengths
from hotpage.vllm.step_tables import HotRegions, StepTables

pytestmark = pytest.mark.vllm

DRAFTING = Model((1, 2), drafts=1, verification_rows=4)
"""A drafter that makes two passes more, of a row a request."""

TRAFFIC = Traffic(
    seed=2, num_requests=7, max_prompt=300, max_output=24, chunk=100, imports=0, num_prefixes=3
)
SHARED = replace(TRAFFIC, seed=13, num_requests=12, max_prompt=340, max_output=12, num_prefixes=1)
DRAFTS = replace(SHARED, seed=2, num_requests=6, max_output=40)


@dataclass(frozen=True)
class Case:
    """A traffic on some model; pools are small enough that pages are given up."""

    model: Model
    host_layout: str
    num_blocks: int
    traffic: Traffic = TRAFFIC
    late: bool = True
    host_blocks: int = 18

    def serve(self, kernels: ctypes.CDLL, patch: pytest.MonkeyPatch) -> CpuServingGraphs:
        """Serves it to its end."""
        serving = serve(
            self.model,
            kernels,
            patch,
            self.traffic,
            streams=GraphStreams(late=self.late, haste=30, seed=self.traffic.seed),
            poisoned=self.host_layout == "row_interleaved",
            host_layout=self.host_layout,
            num_blocks=self.num_blocks,
            host_blocks=self.host_blocks,
            kind=CpuServingGraphs,
        )
        assert isinstance(serving, CpuServingGraphs)
        return serving


CASES = {
    "one layer a group": Case(ONE_EACH, "row_interleaved", 24),
    "one layer a group, at once": Case(ONE_EACH, "layer_major", 24, late=False),
    "one prefix for all": Case(ONE_EACH, "layer_major", 26, SHARED, host_blocks=16),
    "packed groups": Case(PACKED, "row_interleaved", 24),
    "packed groups, imports": Case(PACKED, "layer_major", 24, replace(TRAFFIC, imports=40)),
    "mixed groups, a drafter": Case(MIXED, "row_interleaved", 46, DRAFTS, host_blocks=16),
    "mixed groups, layer major": Case(
        MIXED, "layer_major", 46, replace(DRAFTS, seed=8), late=False, host_blocks=16
    ),
    "more drafts": Case(DRAFTING, "row_interleaved", 40, DRAFTS, host_blocks=16),
    "more drafts, layer major": Case(
        DRAFTING, "layer_major", 38, replace(DRAFTS, seed=7), host_blocks=16
    ),
}

MET = (
    "captures", "replays", "padded replays", "misses in replays", "eager passes", "dummy steps",
    "pages given up", "hot regions",
)  # fmt: skip
MET_BY_DRAFTERS = ("replays of the drafter", "accepted drafts", "rejected drafts")
MET_BY_LATER_PASSES = ("later drafts", "later drafts, eager")


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    """What a failed test has pinned is freed."""
    yield
    release_all()


@pytest.mark.parametrize("name", CASES)
def test_every_row_that_a_replay_reads_is_the_one_that_was_written(
    name: str, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    serving = case.serve(kernels, monkeypatch)
    expected = MET + (MET_BY_DRAFTERS if case.model.drafts else ())
    if serving.attention.num_passes:
        expected += MET_BY_LATER_PASSES
    assert all(serving.seen[what] for what in expected), serving.seen
    assert serving.seen["captures"] > 1, "no capture while requests were there"
    check_end(serving)
    serving.cpu.close()
    if serving.cpu.poison is not None:
        poison = serving.cpu.poison
        assert (poison == POISON).all(), "somebody wrote through vLLM's view of the host pool"


# Faults that eager steps do not show, and replays must.

WRONG = "graph of .* reads a wrong row"


def _captures() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _lengths_are_eager(patch: pytest.MonkeyPatch) -> None:
    """No graph holds the work that fills the lengths."""
    update = RowLengths.update

    def only_eager(self: Any, *batch: Any) -> None:
        if not _captures():
            update(self, *batch)

    patch.setattr(RowLengths, "update", only_eager)


def _lengths_of_the_first_pass(patch: pytest.MonkeyPatch) -> None:
    """A graph of several passes, which share their metadata, works the lengths out once."""
    update = RowLengths.update
    known: list[Any] = []

    def once(self: Any, metadata: Any, *batch: Any) -> None:
        if not _captures() or not any(metadata is one for one in known):
            update(self, metadata, *batch)
            known.append(metadata)

    patch.setattr(RowLengths, "update", once)


def _rows_are_counted_by_python(patch: pytest.MonkeyPatch) -> None:
    """A graph takes all rows that it was captured for as rows of requests.

    It shows where a request has fewer rows than it may have: the first of padding pass for its own.
    """
    set_batch = ResolveAndCopy.set_batch

    def counted(self: Any, topk: Any, request: Any, num_valid_rows: Any, num_requests: int) -> None:
        if _captures():
            num_valid_rows = self.counted[len(topk)]
        set_batch(self, topk, request, num_valid_rows, num_requests)

    make = ResolveAndCopy.__init__

    def counting(self: Any, *arguments: Any, **settings: Any) -> None:
        make(self, *arguments, **settings)
        self.counted = torch.arange(65, dtype=torch.int32)[:, None].unbind()

    patch.setattr(ResolveAndCopy, "__init__", counting)
    patch.setattr(ResolveAndCopy, "set_batch", counted)


def _padding_keeps_its_state_rows(patch: pytest.MonkeyPatch) -> None:
    def set_batch(self: Any, state_rows: torch.Tensor) -> None:
        self._state_rows[: len(state_rows)].copy_(state_rows)

    patch.setattr(StepTables, "set_batch", set_batch)


def _regions_move(patch: pytest.MonkeyPatch) -> None:
    """Each batch has its regions in a tensor of its own; eager steps know it, graphs do not."""
    make, resolve = GroupResolver.__init__, GroupResolver.resolve
    kept: list[torch.Tensor] = []

    def bound(self: Any, group: Any, caches: Any, rows: Any, regions: Any, *others: Any) -> None:
        make(self, group, caches, rows, regions, *others)
        self.where = lambda: regions.of_group(group.leader.kv_group).data_ptr()

    def resolving(self: Any, *batch: Any) -> Any:
        self._op.params.hot_block_table = self.where()
        return resolve(self, *batch)

    def gather(self: Any, state_rows: torch.Tensor) -> None:
        kept.append(self._of_batch)
        self._of_batch = torch.zeros_like(self._of_batch)
        torch.index_select(self._of_state, 0, state_rows, out=self._of_batch[: len(state_rows)])

    patch.setattr(GroupResolver, "__init__", bound)
    patch.setattr(GroupResolver, "resolve", resolving)
    patch.setattr(HotRegions, "gather", gather)


def _residency_is_copied(patch: pytest.MonkeyPatch) -> None:
    """A graph reads which pages were resident at the first capture: none."""
    make, resolve = GroupResolver.__init__, GroupResolver.resolve

    def bound(self: Any, group: Any, *others: Any) -> None:
        make(self, group, *others)
        self.table = group.leader.handle.block_table
        self.old = torch.zeros_like(self.table)

    def resolving(self: Any, *batch: Any) -> Any:
        self._op.params.residency = (self.old if _captures() else self.table).data_ptr()
        return resolve(self, *batch)

    patch.setattr(GroupResolver, "__init__", bound)
    patch.setattr(GroupResolver, "resolve", resolving)


def _dummies_have_blocks(patch: pytest.MonkeyPatch) -> None:
    """Warm-ups of captures find the host blocks of the last batch."""
    stage = GraphAttention._stage_dummy

    def staged(self: Any, size: int) -> None:
        tables = [table.clone() for table in self.cpu.tables.input_block_tables]
        stage(self, size)
        for table, old in zip(self.cpu.tables.input_block_tables, tables, strict=True):
            table.copy_(old)

    patch.setattr(GraphAttention, "_stage_dummy", staged)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "lengths are not captured": ("one layer a group", _lengths_are_eager, WRONG),
    "lengths of a drafter's first pass": (
        "more drafts", _lengths_of_the_first_pass, f"pass 2, {WRONG}",
    ),
    "rows are counted by Python": (
        "more drafts", _rows_are_counted_by_python, "pass 1, graph of .* padding reads a row",
    ),
    "state rows of padding": (
        "one layer a group", _padding_keeps_its_state_rows, "padding has the state row",
    ),
    "regions in another tensor": ("one layer a group", _regions_move, WRONG),
    "residency of the capture": ("one layer a group", _residency_is_copied, WRONG),
    "dummies have blocks": (
        "one prefix for all", _dummies_have_blocks, "a (capture|dummy step) changed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_of_replays_notices(
    name: str, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plant, text = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=text):
        CASES[case].serve(kernels, monkeypatch)


# What stands for a graph.


def test_a_graph_runs_what_was_enqueued_on_the_tensors_of_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = GraphStreams()
    streams.install(monkeypatch)
    values, at, out = torch.arange(4), torch.tensor([2, 0]), torch.zeros(2, dtype=torch.int64)
    log: list[str] = []
    with streams.capture() as graph:
        log.append("python")
        made = torch.index_select(values, 0, at)
        streams.computing.put(lambda: log.append("launch"))
        torch.add(made, values[1:3], out=out)
    assert (log, out.tolist(), made.tolist()) == (["python"], [0, 0], [SPOILT] * 2)
    for step in (1, 2):
        values.copy_(torch.arange(4) * 10**step)
        graph.replay()
        assert out.tolist() == [3 * 10**step, 2 * 10**step]
        assert log == ["python", *["launch"] * step]
        assert made.tolist() == [SPOILT] * 2, "of use inside the graph alone"


@pytest.mark.parametrize(
    "refused",
    [
        lambda streams, side: torch.zeros(1).item(),
        lambda streams, side: torch.tensor([1, 2]),
        lambda streams, side: side.put(lambda: None),
        lambda streams, side: side.synchronize(),
    ],
    ids=["reads back", "copies from the host", "another stream", "waits"],
)
def test_a_capture_refuses_what_no_graph_can_hold(
    refused: Callable[[GraphStreams, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = GraphStreams()
    streams.install(monkeypatch)
    side = streams.make()
    side.wait_stream(streams.computing)
    with pytest.raises(AssertionError, match="capture"), streams.capture():
        refused(streams, side)
