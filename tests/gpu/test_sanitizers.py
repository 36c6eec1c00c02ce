# SPDX-License-Identifier: Apache-2.0
"""Owns the runs of the kernels under compute-sanitizer, each in its own process.

The library is compiled anew with HOTPAGE_DEBUG, in which races that are meant are atomic.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

HERE = Path(__file__).resolve().parent
REFUSALS = ("Device not supported", "Unable to", "not permitted")
# torch's own kernels are not ours to check, except where they initialise what ours read.
OURS = ["--kernel-name", "kns=hotpage"]
TOOLS = {
    "memcheck": OURS,
    "racecheck": [*OURS, "--racecheck-report", "all"],
    "synccheck": OURS,
    "initcheck": [],
}


@pytest.fixture(scope="module")
def debug_library(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A debug build of the kernels; HOTPAGE_DEBUG_LIBRARY names one that exists."""
    named = os.environ.get("HOTPAGE_DEBUG_LIBRARY")
    if named:
        return Path(named)
    folder = tmp_path_factory.mktemp("debug")
    library = folder / "libhotpage_cuda.so"
    command = [sys.executable, root / "cuda" / "build.py", "--debug", "--output", library]
    done = subprocess.run([*command, "--build-dir", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return library


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("program", ["sanitized_resolve.py", "sanitized_pools.py"])
def test_kernels_are_clean_under(tool: str, program: str, debug_library: Path, root: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    environment = os.environ | {
        "HOTPAGE_CUDA_LIBRARY": str(debug_library),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(root / "python"), str(HERE)]),
    }
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", *TOOLS[tool],
         sys.executable, str(HERE / program)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    report = (done.stdout + done.stderr)[-3000:]
    if any(text in report for text in REFUSALS) and "results are right" not in report:
        pytest.skip(report[-300:])
    assert done.returncode == 0, report
    assert "results are right" in report, report
