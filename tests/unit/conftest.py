# SPDX-License-Identifier: Apache-2.0
"""Owns what several unit tests share: the kernels as built for a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from emulated import compile_kernels


@pytest.fixture(scope="session")
def kernels(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as they are shipped."""
    return compile_kernels(root, tmp_path_factory.mktemp("emulation"))
