# SPDX-License-Identifier: Apache-2.0
"""Owns what every test may need: the checkout's root, and loud skips of what a host cannot run."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """Folder that holds pyproject.toml."""
    return ROOT


@functools.cache
def _why_no_gpu() -> str | None:
    from hotpage.errors import HotPageError
    from hotpage.kernels import load

    try:
        library = load()
        num_devices = library.device_count()
        for device in range(num_devices):
            library.check_device(device)
    except HotPageError as error:
        return f"no usable CUDA device: {error}"
    if num_devices == 0:
        return "no CUDA device is visible"
    return None if find_spec("torch") else "torch is not installed"


@functools.cache
def _has_vllm() -> bool:
    # The folder tests/vllm is importable as a namespace of that name, so only metadata tells.
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips gpu and vllm tests with the reason where they cannot run."""
    if item.get_closest_marker("gpu") is not None:
        reason = _why_no_gpu()
        if reason is not None:
            pytest.skip(reason)
    if item.get_closest_marker("vllm") is not None and not _has_vllm():
        pytest.skip("vLLM is not installed")
