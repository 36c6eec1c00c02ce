# SPDX-License-Identifier: Apache-2.0
"""Owns the command that judges a worker side with a real vLLM engine on one Hopper GPU.

    python tests/vllm/engine/run_engine.py check --model glm-5.2 --engine native --json FILE \
        [--graphs] [--mtp 3] [--kv-cache-dtype bfloat16] [--offloading]
    python tests/vllm/engine/run_engine.py memory --model glm-5.2 --engine native --json FILE

`check` serves one workload with an ample and with a small GPU pool and compares them bit by bit,
plants faults, and compares with vLLM's own worker side and with vLLM without HiSparse. `memory`
measures what the registration of the KV caches adds. Both print a table and end with status 1 if a
check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import compare, controls, determinism, faults, poison
from engine.counters import UNDER_PRESSURE, Counters, regions_granted_again
from engine.launch import Engine, EngineName, EngineSpec, require_gpu, set_environment
from engine.models import CALM, MODELS, UNEVEN, write_model
from engine.probe import Probe
from engine.report import Report
from engine.sizes import sizes_for
from engine.workload import Served, Turn, make_returning_turns, make_turns, serve

BASELINE = 3000
PHASES = (
    "ample", "control", "small", "faults", "views", "regions", "upstream", "ahead", "baseline",
)  # fmt: skip
TOLERANCE = 0.1
"""Most mean difference of log probabilities to other kernels, relative to unrelated outputs."""
RETURN_STEPS = 4
"""Steps of full residency after which a hot region is given back, where that is looked at."""
REGISTRATION_LIMIT = 16 << 20
OFFLOADING = (
    {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
    },
)
SEED = 1


class Check:
    """The phases of `check`, in order; later ones use what earlier ones left."""

    def __init__(self, arguments: argparse.Namespace, report: Report, folder: Path) -> None:
        self._arguments = arguments
        self._report = report
        self._model = write_model(arguments.model, folder / arguments.model, arguments.layers)
        self._sizes = sizes_for(arguments.model, arguments.mtp)
        self._turns = make_turns(SEED, self._sizes.scale)
        self._small_blocks: int = arguments.gpu_blocks or self._sizes.small
        self._ample: Any = None
        kept = arguments.kept
        if kept is not None and kept.is_file() and "ample" not in arguments.phases:
            self._ample = pickle.loads(kept.read_bytes())

    def run(self) -> None:
        """Runs the phases that were asked for."""
        phases, sizes = self._arguments.phases, self._sizes
        native, drafts = self._arguments.engine == "native", self._arguments.mtp > 0
        if {"ample", "control"} & set(phases):
            with self._engine("ample", sizes.ample) as engine:
                if engine is not None:
                    self._run_ample(engine, phases)
        if {"small", "faults", "views"} & set(phases):
            with self._engine("small", self._small_blocks) as engine:
                if engine is not None:
                    self._run_small(engine, phases)
        if native and not drafts and "regions" in phases:
            with self._engine("regions", sizes.returning, hot_return_steps=RETURN_STEPS) as engine:
                if engine is not None:
                    self._run_regions(engine)
        if native and "upstream" in phases:
            with self._engine("upstream", sizes.ample, name="upstream") as engine:
                if engine is not None:
                    self._run_again(engine, "ample = vLLM's own, bit by bit")
        # Running ahead, vLLM does not know which drafts were accepted: nor would the probe.
        if not drafts and "ahead" in phases:
            with self._engine("ahead", self._small_blocks, runs_ahead=True) as engine:
                if engine is not None:
                    self._run_again(engine, "ample = small, scheduler ahead, bit by bit")
        # Another selection can be put in the indexer's place only where layers run.
        if not drafts and not self._arguments.graphs and "baseline" in phases:
            self._run_baseline()

    @contextlib.contextmanager
    def _engine(
        self,
        label: str,
        blocks: int,
        name: EngineName | None = None,
        query_scale: float = UNEVEN,
        runs_ahead: bool = False,
        **options: Any,
    ) -> Iterator[Engine | None]:
        engine, arguments = None, self._arguments
        with self._report.check(f"start {label}") as facts:
            spec = EngineSpec(
                self._model,
                name or arguments.engine,
                blocks,
                hot_rows=self._sizes.hot_rows,
                max_model_len=self._sizes.max_model_len,
                mtp=arguments.mtp,
                graphs=arguments.graphs,
                kv_cache_dtype=arguments.kv_cache_dtype,
                async_scheduling=runs_ahead,
                siblings=OFFLOADING if arguments.offloading else (),
                query_scale=query_scale,
                options={**options, **arguments.options},
            )
            engine = Engine(spec)
            facts["seconds"] = round(engine.seconds_to_start, 1)
            facts["blocks"] = blocks
        yield engine
        if engine is not None:
            with self._report.check(f"end {label}"):
                engine.close()

    def _run_ample(self, engine: Engine, phases: list[str]) -> None:
        with _poisoned(engine):
            probe = Probe(engine)
            self._serve_ample(engine, probe, phases)

    def _serve_ample(self, engine: Engine, probe: Probe, phases: list[str]) -> None:
        if "ample" in phases:
            with self._report.check("ample pool") as facts:
                self._ample = self._serve(engine, probe, self._turns, facts)
                if self._arguments.kept is not None:
                    self._arguments.kept.write_bytes(pickle.dumps(self._ample))
            with self._report.check("drain ample"):
                engine.drain()
        if "control" in phases:
            with self._report.check("one wrong row changes the logits") as facts:
                facts["found"] = controls.check_sensitivity(engine, probe, random.Random(SEED))

    def _run_small(self, engine: Engine, phases: list[str]) -> None:
        native = engine.spec.engine == "native"
        with _poisoned(engine):
            probe = Probe(engine)
            if "small" in phases:
                self._serve_small(engine, probe)
            if native and "faults" in phases:
                with self._report.check("lost mirror is made good") as facts:
                    self._lose_mirror(engine, probe, facts)
            if "faults" in phases:
                for at, (name, fault) in enumerate(faults.FAULTS.items()):
                    with self._report.check(f"planted: {name}") as facts:
                        self._plant(engine, probe, fault(engine), SEED + 1 + at, facts)
            if "views" in phases:
                with self._report.check("poisoned host views") as facts:
                    self._poison_views(engine, probe, facts)

    def _serve_small(self, engine: Engine, probe: Probe) -> None:
        counters = Counters(engine)
        launches = _launch_counts(engine)
        small: Any = None
        with self._report.check("small pool") as facts:
            small = self._serve(engine, probe, self._turns, facts)
        if small is None:
            return
        with self._report.check("pressure") as facts:
            facts |= counters.read(probe, small[1])
            wanted = [*UNDER_PRESSURE]
            if engine.spec.mtp:
                facts["accepted drafts"] = probe.num_accepted
                facts["rejected drafts"] = probe.num_rejected
                wanted += ["accepted drafts", "rejected drafts"]
            missing = [name for name in wanted if facts[name] <= 0]
            assert not missing, f"not seen: {missing}"
        if engine.spec.engine == "native":
            with self._report.check("own kernels launched") as facts:
                now = _launch_counts(engine)
                facts |= {name: count - launches.get(name, 0) for name, count in now.items()}
                assert any(count > 0 for count in facts.values()), "no launch was counted"
        if self._ample is not None:
            with self._report.check("ample = small, bit by bit") as facts:
                self._compare(small, facts)
        with self._report.check("drain small"):
            engine.drain()

    def _serve(
        self,
        engine: Engine,
        probe: Probe,
        turns: list[Turn],
        facts: dict[str, Any],
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[dict, Served]:
        probe.scripts = {turn.name: turn.tokens for turn in turns}
        served = serve(engine, turns, stop=stop)
        outcomes, wrong = probe.take()
        facts["steps"] = served.num_steps
        facts["decode rows checked"] = sum(
            bool(row.attended) for rows in outcomes.values() for row in rows
        )
        assert not wrong, f"{len(wrong)} attended lists are not what was written: {wrong[:3]}"
        return outcomes, served

    def _compare(self, small: tuple[dict, Served], facts: dict[str, Any]) -> None:
        left, right = self._ample, small
        result = compare.compare(left[0], right[0], self._turns, (left[1], right[1]))
        facts["positions"] = result.num_positions
        facts["compared"] = result.num_compared
        facts["decode rows"] = result.num_decode
        facts["wrong rows"] = len(result.wrong_rows)
        facts["wrong logits"] = len(result.wrong_logits)
        result.check()

    def _plant(
        self, engine: Engine, probe: Probe, fault: Any, seed: int, facts: dict[str, Any]
    ) -> None:
        turns = make_turns(seed, self._sizes.scale)
        probe.scripts = {turn.name: turn.tokens for turn in turns}
        probe.before_resolve, probe.before_forward = fault.before_resolve, fault.before_forward
        try:
            served = serve(engine, turns, stop=lambda: probe.num_wrong() > 0)
            _, found = probe.take()
        finally:
            probe.before_resolve = probe.before_forward = None
            fault.undo()
        engine.drain()
        facts["planted"] = fault.planted
        facts["steps"] = served.num_steps
        facts["layers"] = sorted({entry.layer for entry in found})
        assert fault.planted is not None, "the fault had no occasion"
        assert found, "the fault was not found"

    def _lose_mirror(self, engine: Engine, probe: Probe, facts: dict[str, Any]) -> None:
        worker = engine.worker
        repaired = worker.num_repaired_pages
        turns = make_turns(SEED + 20, self._sizes.scale)
        faults.NativeAccess(engine).drop_next_mirror()
        self._serve(engine, probe, turns, facts)
        engine.drain()
        facts["pages copied whole"] = worker.num_repaired_pages - repaired
        assert facts["pages copied whole"] > 0, "no page was found to miss rows"

    def _poison_views(self, engine: Engine, probe: Probe, facts: dict[str, Any]) -> None:
        turns = make_turns(SEED + 10, self._sizes.scale)
        probe.scripts = {turn.name: turn.tokens for turn in turns}
        views = poison.PoisonedViews(engine)
        probe.recapture()
        served = serve(engine, turns, stop=lambda: probe.num_wrong() > 0)
        _, found = probe.take()
        facts["steps"] = served.num_steps
        facts["wrong lists"] = len(found)
        if engine.spec.engine == "native":
            assert not found, f"the pattern was read: {found[:3]}"
            assert len(served.answers) == len(turns), "not every turn was answered"
            views.check_unwritten()
        else:
            # vLLM's own readers use these views: here the check must fail.
            assert found, "the pattern was read and not found"

    def _run_regions(self, engine: Engine) -> None:
        """Hot regions that are given back while their requests run on, and granted again."""
        coordinator = engine.coordinator
        granted_again: set[str] = set()

        def note() -> bool:
            granted_again.update(regions_granted_again(engine))
            return False

        with self._report.check("hot regions return and are granted again") as facts:
            probe = Probe(engine)
            before = coordinator.core.stats()
            self._serve(engine, probe, make_returning_turns(SEED + 30), facts, note)
            now = coordinator.core.stats()
            for name in ("hot_regions_granted", "hot_regions_returned", "pages_adopted"):
                facts[name] = now[name] - before[name]
            facts["granted again"] = sorted(granted_again)
            assert granted_again, "no request was granted a region again"

    def _run_again(self, engine: Engine, name: str) -> None:
        """The workload in another engine. By vLLM's own worker side a prefill that reads wrong rows
        would differ."""
        with self._report.check(name) as facts:
            with _poisoned(engine):
                run = self._serve(engine, Probe(engine), self._turns, facts)
            assert self._ample is not None, "the ample run is missing"
            self._compare(run, facts)

    def _run_baseline(self) -> None:
        """A small pool against vLLM without HiSparse, whose kernels round otherwise."""
        runs: dict[str, tuple[dict, Served]] = {}
        with self._engine("calm", self._small_blocks, query_scale=CALM) as engine:
            if engine is None:
                return
            probe = Probe(engine)
            with self._report.check("calm small pool") as facts:
                runs["ours"] = self._serve(engine, probe, self._turns, facts)
                engine.drain()
            with self._report.check("calm, first rows attended") as facts:
                probe.before_resolve = controls.attend_first_rows
                runs["first rows"] = self._serve(engine, probe, self._turns, facts)
        with self._engine("baseline", BASELINE, name="none", query_scale=CALM) as engine:
            if engine is None:
                return
            with self._report.check("log probabilities of other kernels") as facts:
                baseline = self._serve(engine, Probe(engine), self._turns, facts)
                far = {
                    name: compare.distance(run[0], baseline[0], self._turns, (run[1], baseline[1]))
                    for name, run in runs.items()
                }
                facts["positions"] = far["ours"].num_positions
                facts["mean difference"] = round(far["ours"].mean, 4)
                facts["with the first rows attended"] = round(far["first rows"].mean, 4)
                facts["of unrelated outputs"] = round(far["ours"].shuffled, 4)
                most = TOLERANCE * far["ours"].shuffled
                assert far["ours"].mean <= most, "outputs are another model's"
                assert far["first rows"].mean > most, "attended rows do not matter"


def _poisoned(engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Whatever of vLLM's HiSparse runs while serving, or is captured into a graph, raises."""
    if engine.spec.engine != "native":
        return contextlib.nullcontext()
    # What moves a sibling's own blocks is left to it.
    return poison.raising(spared={"swap_blocks_batch"} if engine.spec.siblings else frozenset())


def _launch_counts(engine: Engine) -> dict[str, int]:
    return engine.worker.launch_counts() if engine.spec.engine == "native" else {}


def measure_registration(arguments: argparse.Namespace, report: Report, folder: Path) -> None:
    """GPU memory that `register_kv_caches` adds at 256 sequences and MTP 3."""
    import torch

    if arguments.engine == "native":
        from hotpage.vllm import HiSparseConnector
    else:
        from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
            HiSparseConnector,
        )
    seen: list[tuple[int, int]] = []
    register = HiSparseConnector.register_kv_caches

    def measured(self: Any, kv_caches: Any) -> None:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        register(self, kv_caches)
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        seen.append((after[0] - before[0], before[1] - after[1]))

    HiSparseConnector.register_kv_caches = measured
    model = write_model(arguments.model, folder / arguments.model, arguments.layers)
    spec = EngineSpec(model, arguments.engine, 9000, hot_rows=8192, max_num_seqs=256, mtp=3)
    try:
        with report.check("memory of the registration") as facts:
            engine = Engine(spec)
            assert len(seen) == 1, f"registered {len(seen)} times"
            facts["allocated bytes"], facts["bytes that the card lost"] = seen[0]
            assert max(seen[0]) <= REGISTRATION_LIMIT, "more than 16 MiB"
            engine.close()
    finally:
        HiSparseConnector.register_kv_caches = register


def main() -> int:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("check", "memory"))
    parser.add_argument("--model", choices=tuple(MODELS), required=True)
    parser.add_argument("--engine", choices=("native", "upstream"), default="native")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, vLLM's default modes")
    parser.add_argument("--mtp", type=int, default=0, help="draft tokens")
    parser.add_argument("--kv-cache-dtype", choices=("fp8", "bfloat16"), default="fp8")
    parser.add_argument(
        "--offloading", action="store_true", help="vLLM's OffloadingConnector beside ours"
    )
    parser.add_argument("--layers", type=int, help="layers of the model")
    parser.add_argument("--gpu-blocks", type=int, help="GPU blocks of the small pool")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help='JSON: more of kv_connector_extra_config, {"hot_return_steps": 4} say',
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument(
        "--kept", type=Path, help="file that takes the ample run, or gives it if it is not run"
    )
    arguments = parser.parse_args()
    require_gpu()
    set_environment()
    determinism.install()
    names = ("model", "engine", "graphs", "mtp", "kv_cache_dtype", "offloading")
    report = Report(arguments.json, {name: getattr(arguments, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        if arguments.command == "memory":
            measure_registration(arguments, report, Path(folder))
        else:
            Check(arguments, report, Path(folder)).run()
    report.print_table()
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
