# SPDX-License-Identifier: Apache-2.0
"""Owns the run of all GPU tests side by side: one GPU serves many small tests at the same time.

    python tests/gpu/run_all.py --json FILE [--jobs N] [--fuzz-steps N]

Each test file runs in a process of its own, long ones in several; the sanitizers one by one. The
table comes last, FILE holds it with the tail of what failed. Ends with status 1 if a process
failed. Timings are no benchmark: processes share the device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS = "test_outputs_state_and_bytes_equal_the_model_over_many_steps"
SPLIT = {
    "test_resolve_and_copy": (
        ("many steps, wide", f"{STEPS} and (096 or 100 or wide)"),
        ("many steps, 2,048", f"{STEPS} and 048"),
        ("many steps, other", f"{STEPS} and not (096 or 100 or wide or 048)"),
        ("the rest", f"not {STEPS}"),
    ),
    "test_sanitizers": tuple(
        (tool, tool) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")
    ),
}
"""Test file -> `(name, -k expression)` of its processes; such an expression takes no comma."""


@dataclass
class Outcome:
    """What one process came to."""

    name: str
    status: int
    seconds: float
    counts: str
    """pytest's last line."""
    tail: str
    """What it printed last, if it failed."""


def run(name: str, arguments: list[str], environment: dict[str, str], limit: float) -> Outcome:
    """Runs pytest once; a process over the time limit has status 124."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=limit, cwd=HERE.parent
        )
        status, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        status, text = 124, (late.stdout or b"").decode(errors="replace")
    seconds = round(time.perf_counter() - began, 1)
    counts = re.findall(r"^.*\b(?:passed|failed|skipped|error)\b.*$", text, re.MULTILINE)
    # No test for a device is a pass of nothing; what was skipped says why.
    tail = text[-3000:] if status or "skipped" in (counts or [""])[-1] else ""
    return Outcome(name, status, seconds, counts[-1].strip("= ") if counts else "no result", tail)


def processes() -> list[tuple[str, list[str]]]:
    """`(name, pytest arguments)`, the longest first."""
    found = []
    for path in sorted(HERE.glob("test_*.py")):
        parts = SPLIT.get(path.stem)
        if parts is None:
            found.append((path.stem, [str(path)]))
        else:
            found += [(f"{path.stem}: {name}", [str(path), "-k", k]) for name, k in parts]
    return sorted(found, key=lambda one: "sanitizers" not in one[0])


def missing_device() -> str | None:
    """Why no test could run here; None if they can."""
    from hotpage.errors import HotPageError
    from hotpage.kernels import load

    try:
        return None if load().device_count() else "none is visible"
    except HotPageError as error:
        return str(error)


def main() -> int:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--fuzz-steps", type=int, default=40, help="steps of each long fuzz case")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each process")
    arguments = parser.parse_args()
    if missing := missing_device():
        print(f"no CUDA device: nothing was run ({missing})", file=sys.stderr)
        return 1
    environment = {"HOTPAGE_FUZZ_STEPS": str(arguments.fuzz_steps), **os.environ}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda one: run(*one, environment, arguments.limit), processes()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    for one in outcomes:
        if one.status:
            print(f"--- {one.name}\n{one.tail}\n")
    for one in outcomes:
        verdict = "ok" if one.status == 0 else f"FAILED ({one.status})"
        print(f"{one.name:44} {verdict:12} {one.seconds:6.1f} s  {one.counts}")
    return 1 if any(one.status for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
