# SPDX-License-Identifier: Apache-2.0
"""Whole engines on a CPU: every row that attention reads, on every layer, is the one written.

The scheduler side plans, its metadata crosses a pickle, the worker launches the kernels' own bodies
through vLLM's attention, and its acknowledgements go back. Copies beside the computing stream run
as late as CUDA could run them.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

import torch
from cpu_serving import CpuServing, check_end, check_nothing_leaks, serve
from cpu_streams import Streams
from serving import Traffic
from worker_on_cpu import BF16, MIXED, ONE_EACH, PACKED, POISON, Model, release_all

from hotpage.errors import HotPageError
from hotpage.kernels.mirror_rows import SlotMappings
from hotpage.runtime.mirror import Mirrors

pytestmark = pytest.mark.vllm

TRAFFIC = Traffic(
    seed=2,
    num_requests=7,
    max_prompt=300,
    max_output=18,
    chunk=100,
    imports=0,
    num_prefixes=3,
)


@dataclass(frozen=True)
class Case:
    """A traffic on some model; pools are small enough that pages are given up."""

    model: Model
    host_layout: str
    late: bool
    num_blocks: int
    traffic: Traffic = TRAFFIC
    host_blocks: int = 18
    expected: tuple[str, ...] = field(
        default=("pages given up", "host-only admissions", "prefill staged", "prefill resident")
    )

    def serve(self, kernels: ctypes.CDLL, patch: pytest.MonkeyPatch) -> CpuServing:
        """Serves it to its end."""
        return serve(
            self.model,
            kernels,
            patch,
            self.traffic,
            streams=Streams(late=self.late, haste=30, seed=self.traffic.seed),
            poisoned=self.host_layout == "row_interleaved",
            host_layout=self.host_layout,
            num_blocks=self.num_blocks,
            host_blocks=self.host_blocks,
        )


IMPORTS = replace(TRAFFIC, imports=40)
SHARED = replace(
    TRAFFIC, seed=13, num_requests=12, max_prompt=340, max_output=6, num_prefixes=1, arrive=60
)
FEW = replace(SHARED, seed=2, num_requests=6, max_output=5, arrive=70)
CASES = {
    "one layer a group": Case(ONE_EACH, "row_interleaved", True, 24),
    "one layer a group, at once": Case(ONE_EACH, "layer_major", False, 24),
    "one prefix for all": Case(ONE_EACH, "layer_major", True, 26, SHARED, host_blocks=16),
    "packed groups": Case(PACKED, "row_interleaved", True, 24),
    "packed groups, imports": Case(
        PACKED, "layer_major", True, 24, IMPORTS,
        expected=("host-only admissions", "prefill staged", "transfer 2"),
    ),
    "rows of bfloat16": Case(
        BF16, "row_interleaved", True, 26, replace(SHARED, num_requests=8), host_blocks=16
    ),
    "mixed groups and a drafter": Case(MIXED, "row_interleaved", True, 46, FEW, host_blocks=16),
    "mixed groups, layer major": Case(MIXED, "layer_major", True, 46, FEW, host_blocks=16),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    """What a failed test has pinned is freed."""
    yield
    release_all()


@pytest.mark.parametrize("name", CASES)
def test_every_row_that_attention_reads_is_the_one_that_was_written(
    name: str, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    serving = case.serve(kernels, monkeypatch)
    cpu = serving.cpu
    met = {what: serving.seen[what] for what in case.expected}
    assert all(met.values()), serving.seen
    assert min(serving.misses, serving.hits) > 0, "nothing was read from the host"
    check_end(serving)
    cpu.close()
    if cpu.poison is not None:
        assert (cpu.poison == POISON).all(), "somebody wrote through vLLM's view of the host pool"


# Faults that a comparison of all bytes must not miss.


def _leave_out(name: str) -> Any:
    def plant(case: Case, kernels: ctypes.CDLL, patch: pytest.MonkeyPatch) -> CpuServing:
        return _serve_with(case, kernels, patch, {name: lambda _: False})

    return plant


def _wrong_host_row(case: Case, kernels: ctypes.CDLL, patch: pytest.MonkeyPatch) -> CpuServing:
    def shift(block: Any) -> bool:
        # The row of the token before, from the second token on.
        if block.num_tokens > 1:
            block.host_row -= 8 * (block.num_tokens > 70)
        return True

    return _serve_with(case, kernels, patch, {"hotpage_mirror_rows": shift})


def _wrong_layer(case: Case, kernels: ctypes.CDLL, patch: pytest.MonkeyPatch) -> CpuServing:
    def exchange(block: Any) -> bool:
        if block.copy.num_layers > 1:
            layers = block.copy.host_layer
            layers[0], layers[1] = layers[1], layers[0]
        return True

    return _serve_with(case, kernels, patch, {"hotpage_resolve_and_copy": exchange})


def _no_snapshot(case: Case, kernels: ctypes.CDLL, patch: pytest.MonkeyPatch) -> CpuServing:
    """Mirrors read vLLM's own slot mappings, which the drafter overwrites."""
    make = Mirrors.__init__

    def reading(self: Any, layers: Any, drafts: Any, slots: SlotMappings, **sizes: Any) -> None:
        make(self, layers, drafts, slots, **sizes)
        for op in self._ops:
            op.params.resident_slot = slots.resident_slot.data_ptr()
            op.params.host_row = slots.host_row.data_ptr()

    patch.setattr(Mirrors, "__init__", reading)
    return case.serve(kernels, patch)


def _serve_with(
    case: Case, kernels: ctypes.CDLL, patch: pytest.MonkeyPatch, faults: dict[str, Any]
) -> CpuServing:
    from cpu_library import CpuLibrary

    make = CpuLibrary.__init__

    def faulty(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self.faults.update(faults)

    patch.setattr(CpuLibrary, "__init__", faulty)
    return case.serve(kernels, patch)


FAULTS = {
    "row maps of a new hot region": ("one prefix for all", _leave_out("hotpage_reset_states")),
    "restores": ("packed groups, imports", _leave_out("hotpage_restore_pages")),
    "host row of another token": ("one layer a group", _wrong_host_row),
    "host rows of another layer": ("mixed groups and a drafter", _wrong_layer),
    "slot mappings without a snapshot": ("mixed groups and a drafter", _no_snapshot),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_notices(
    name: str, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plant = FAULTS[name]
    with pytest.raises((AssertionError, HotPageError), match=r"reads a wrong row|staged row"):
        plant(CASES[case], kernels, monkeypatch)


@pytest.mark.parametrize("dropped", [0, 1])
def test_pages_whose_mirror_did_not_run_are_copied_whole_before_anybody_reads_them(
    dropped: int, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third mirror is left out: of the target's layers, or of all with the drafter's."""
    case = CASES["mixed groups and a drafter"] if dropped else CASES["one layer a group"]
    count: Counter[str] = Counter()

    def now_and_then(_: Any) -> bool:
        count["mirrors"] += 1
        return count["mirrors"] % 3 != 0

    serving = _serve_with(case, kernels, monkeypatch, {"hotpage_mirror_rows": now_and_then})
    worker = serving.cpu.worker
    assert worker.num_repaired_pages > 0
    assert worker.launch_counts()["spill_pages"] > 0
    assert sorted(serving.completed) == sorted(serving.enqueued)
    assert serving.misses, "nothing was read from the host"
    lost = torch.stack([mask.counters for mask in worker._mirrors.masks])[:, 2]
    assert int(lost.sum()) > 0
    check_nothing_leaks(serving)
