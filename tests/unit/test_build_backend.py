# SPDX-License-Identifier: Apache-2.0
"""Owns what a build asks for and refuses, without building anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Ask = Callable[..., subprocess.CompletedProcess[str]]

FAKE_NVCC = '#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.0"\n'


@pytest.fixture
def ask(root: Path, tmp_path: Path) -> Ask:
    """Runs the script that prints a build's requirements, in an environment without any nvcc."""

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        # OK because -S hides site-packages, and with them the compiler packages of a checkout.
        environment = {"PATH": "/nonexistent", "HOME": str(tmp_path), **variables}
        command = [sys.executable, "-I", "-S", str(root / "build_backend/hotpage_build.py")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def make_toolkit(folder: Path, version: str, *, runtime: bool = True) -> Path:
    """A folder that looks like a CUDA toolkit of that version."""
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(FAKE_NVCC.format(version=version))
    nvcc.chmod(0o755)
    if runtime:
        (folder / "lib64").mkdir()
        (folder / "lib64/libcudart_static.a").touch()
    return folder


needs_no_system_toolkit = pytest.mark.skipif(
    os.path.exists("/usr/local/cuda/bin/nvcc"), reason="this host has a CUDA toolkit"
)


@needs_no_system_toolkit
def test_without_a_compiler_the_pinned_packages_are_asked_for(ask: Ask) -> None:
    wanted = ask().stdout.split()
    packages = [line for line in wanted if line.startswith("nvidia-")]
    assert len(packages) == 5
    assert all(re.fullmatch(r"[a-z-]+==13\.0\.\d+", line) for line in packages), packages
    assert [line for line in wanted if line.startswith("maturin")] == ["maturin==1.16.*"]


def test_without_cuda_no_compiler_is_asked_for(ask: Ask) -> None:
    assert ask(HOTPAGE_CUDA="0").stdout.split() == ["maturin==1.16.*"]


def test_a_toolkit_in_cuda_home_is_used(ask: Ask, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda", "13.0")
    assert ask(CUDA_HOME=str(home)).stdout.split() == ["maturin==1.16.*"]


@needs_no_system_toolkit
@pytest.mark.parametrize(("version", "runtime"), [("12.6", True), ("13.0", False)])
def test_a_toolkit_that_cannot_build_this_is_passed_over(
    ask: Ask, tmp_path: Path, version: str, runtime: bool
) -> None:
    home = make_toolkit(tmp_path / "cuda", version, runtime=runtime)
    assert "nvidia-cuda-nvcc==13.0.88" in ask(CUDA_HOME=str(home)).stdout.split()


def test_a_named_compiler_that_cannot_be_used_is_one_sentence(ask: Ask) -> None:
    done = ask(HOTPAGE_NVCC="/nonexistent/nvcc")
    assert done.returncode == 1
    assert done.stderr.startswith("hotpage: error: HOTPAGE_NVCC=/nonexistent/nvcc is not")
    assert done.stderr.count("\n") == 1


def test_an_older_glibc_needs_zig(ask: Ask) -> None:
    wanted = ask(HOTPAGE_CUDA="0", HOTPAGE_GLIBC="2.28").stdout
    assert re.search(r"^ziglang==[\d.]+$", wanted, re.MULTILINE)


def test_a_glibc_that_is_no_version_is_one_sentence(ask: Ask) -> None:
    done = ask(HOTPAGE_CUDA="0", HOTPAGE_GLIBC="new")
    assert done.returncode == 1
    assert "expected a version such as 2.28" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("cargo", "text"),
    [(None, "no cargo was found"), ("1.63.0", "needs Rust 1.85"), ("", "not run")],
)
def test_a_missing_or_old_rust_is_one_sentence_with_the_remedy(
    root: Path, tmp_path: Path, cargo: str | None, text: str
) -> None:
    if cargo is not None:
        script = tmp_path / "cargo"
        script.write_text(f"#!/bin/sh\n{f'echo cargo {cargo}' if cargo else 'exit 1'}\n")
        script.chmod(0o755)
    code = f"import hotpage_build; hotpage_build.build_wheel({str(tmp_path)!r})"
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(root / "build_backend")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hotpage: error: ")
    assert text in done.stderr
    assert "rustup" in done.stderr
    assert done.stderr.count("\n") == 1
