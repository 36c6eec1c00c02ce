# SPDX-License-Identifier: Apache-2.0
"""Owns the import path of the helpers here, and says so where these tests cannot be collected."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
