# SPDX-License-Identifier: Apache-2.0
"""Owns the release artifacts: the wheel in a clean environment, and the sdist that builds it again.

They are what `make wheel` left in dist; the tests skip where it has not run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Compiled differently every time (paths, build ids) or derived from what is compared already.
UNSTABLE = (".so", "/RECORD", "/WHEEL")


@pytest.fixture(scope="module")
def wheel(root: Path) -> Path:
    wheels = list((root / "dist").glob("*.whl"))
    if len(wheels) != 1:
        pytest.skip(f"dist holds {len(wheels)} wheels, expected the one that `make wheel` writes")
    return wheels[0]


@pytest.fixture(scope="module")
def hotpage(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that holds the wheel and its dependencies alone."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True)
    return folder / "bin/hotpage"


def locked_packages(lock: Path) -> set[tuple[str, str, str]]:
    """Name, version and checksum of each package in a Cargo.lock."""
    packages = tomllib.loads(lock.read_text())["package"]
    return {(one["name"], one["version"], one.get("checksum", "")) for one in packages}


def run(command: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command far from the checkout, so that nothing of it can be imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [command, *arguments],
        cwd=command.parent,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def contents(wheel: Path) -> dict[str, str]:
    """Name of each file -> digest, or a placeholder where the bytes may differ."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: "any"
            if name.endswith(UNSTABLE)
            else hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
        }


def test_the_wheel_is_for_every_python_from_3_11(wheel: Path) -> None:
    assert "-cp311-abi3-manylinux_2_" in wheel.name


def test_a_clean_install_prints_its_version(hotpage: Path) -> None:
    done = run(hotpage, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hotpage 0.")


def test_a_clean_install_has_core_and_kernels(hotpage: Path) -> None:
    done = run(hotpage, "doctor", "--json")
    report = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert report["core"]["ok"], report["core"]
    assert report["kernels"]["ok"], report["kernels"]
    assert not report["torch"]["ok"]


def test_a_clean_install_runs_the_demo(hotpage: Path) -> None:
    done = run(hotpage, "demo", "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.fixture(scope="module")
def sdist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = f"import hotpage_build; hotpage_build.build_sdist({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(root / "build_backend")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.tar.gz"))


def test_the_sdist_holds_every_source_and_no_binary(root: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "pyproject.toml",
        "Cargo.toml",
        "Cargo.lock",
        "LICENSE",
        "README.md",
        "Makefile",
        "rustfmt.toml",
    }
    needed.add(".cargo/config.toml")
    for folder in ("build_backend", "cuda", "python", "rust/core/src", "rust/python/src", "tests"):
        for path in (root / folder).rglob("*"):
            unwanted = path.suffix in (".so", ".pyc") or "__pycache__" in path.parts
            if path.is_file() and not unwanted:
                needed.add(str(path.relative_to(root)))
    assert needed - names == set()
    assert {name for name in names if name.endswith((".so", ".pyc", ".o", ".whl"))} == set()


def test_a_wheel_built_from_the_sdist_has_the_same_contents(
    root: Path, wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    # Objects carry the digest of what they were made from, so only sources that the sdist changed
    # are compiled again.
    if (root / "build/cuda").is_dir():
        shutil.copytree(root / "build/cuda", source / "build/cuda")
    environment = {**os.environ, "HOTPAGE_CUDA": "1", "CARGO_TARGET_DIR": str(root / "target")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment.pop("HOTPAGE_GLIBC", None)
    options = ["--no-build-isolation", "--no-deps", "-q", "-w", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(next(tmp_path.glob("*.whl"))) == contents(wheel)
    assert locked_packages(source / "Cargo.lock") <= locked_packages(root / "Cargo.lock")
