# SPDX-License-Identifier: Apache-2.0
"""The wheel beside vLLM: it changes no version, and vLLM finds its entry point."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

pytestmark = pytest.mark.vllm

BEFORE = Path(sys.prefix) / "freeze.txt"


def test_installing_the_wheel_changed_no_version() -> None:
    if not BEFORE.is_file():
        pytest.skip("the environment was not made by make test-vllm")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "freeze"]
    now = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    before = BEFORE.read_text().splitlines()
    assert set(before) <= set(now)
    added = {line.partition("==")[0].partition(" @")[0].lower() for line in set(now) - set(before)}
    assert added == {"hotpage"}


def test_vllm_finds_the_entry_point_and_it_activates() -> None:
    found = [
        point for point in entry_points(group="vllm.general_plugins") if point.name == "hotpage"
    ]
    if not found:
        pytest.skip("hotpage is not installed here, only on the path")
    from hotpage.vllm import plugin

    found[0].load()()
    assert plugin.is_active()
