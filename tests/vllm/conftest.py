# SPDX-License-Identifier: Apache-2.0
"""Owns the import path of the helpers here, the kernels of a CPU, and says so where these tests
cannot be collected.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cpu_plans import Make

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    version("vllm")
    _MISSING = ""
except PackageNotFoundError:
    # Most modules import vLLM and torch at the top.
    _MISSING = "tests/vllm is not collected: vLLM is not installed (make test-vllm installs it)"
    collect_ignore_glob = ["test_*.py"]


def pytest_report_collectionfinish() -> str:
    """Says why nothing of this folder was run."""
    return _MISSING


@pytest.fixture(scope="session")
def kernels(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as built for a CPU, by the unit tests' own means."""
    sys.path.insert(0, str(root / "tests/unit"))
    from emulated import compile_kernels

    return compile_kernels(root, tmp_path_factory.mktemp("emulation"))


@pytest.fixture
def make(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes workers whose plans the test writes by hand."""
    from cpu_plans import workers

    with workers(kernels, monkeypatch) as build:
        yield build
