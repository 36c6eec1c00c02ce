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

DEEPSEEK = ("--model", "deepseek-v3.2")
GLM = ("--model", "glm-5.2")
CHECKS = {
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "glm, graphs": (*GLM, "--graphs"),
    "deepseek, graphs, drafts": (*DEEPSEEK, "--graphs", "--mtp", "3"),
    "glm, graphs, drafts": (*GLM, "--graphs", "--mtp", "3"),
    "glm, graphs, bf16": (*GLM, "--graphs", "--kv-cache-dtype", "bfloat16"),
    "glm, graphs, offloading": (*GLM, "--graphs", "--offloading"),
}


# Each in a process of its own: an engine leaves state behind, and a fault of the GPU ends it.
def passes(command: str, arguments: tuple[str, ...], report: Path) -> None:
    """Runs a command of the harness; AssertionError with the facts of what failed."""
    ended = subprocess.run(
        [sys.executable, str(COMMAND), command, *arguments, "--json", str(report)],
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


@pytest.mark.parametrize("name", CHECKS)
def test_the_native_worker_passes_every_check(name: str, tmp_path: Path) -> None:
    passes("check", CHECKS[name], tmp_path / "report.json")


@pytest.mark.parametrize("model", [DEEPSEEK, GLM], ids=["deepseek", "glm"])
def test_the_registration_of_caches_takes_little_memory(
    model: tuple[str, ...], tmp_path: Path
) -> None:
    passes("memory", model, tmp_path / "report.json")
