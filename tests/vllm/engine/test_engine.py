# SPDX-License-Identifier: Apache-2.0
"""A real engine short of GPU blocks decodes as one that has plenty, bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

COMMAND = Path(__file__).resolve().parent / "run_engine.py"


# Each in a process of its own: an engine leaves state behind, and a fault of the GPU ends it.
@pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5.2"])
@pytest.mark.parametrize("command", ["check", "memory"])
def test_the_native_worker_passes_every_check(command: str, model: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = [command, "--model", model, "--engine", "native", "--json", str(report)]
    ended = subprocess.run(
        [sys.executable, str(COMMAND), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert report.is_file(), ended.stderr[-3000:]
    checks = json.loads(report.read_text())["checks"]
    failed = {name: line["facts"] for name, line in checks.items() if not line["passed"]}
    assert not failed
    assert ended.returncode == 0, ended.stderr[-3000:]
