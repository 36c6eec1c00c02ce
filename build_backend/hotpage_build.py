# SPDX-License-Identifier: Apache-2.0
"""Owns the PEP 517 hooks: the kernel library first, then maturin, which packs it.

Variables: HOTPAGE_CUDA=0 builds without the kernels; HOTPAGE_GLIBC=2.28 links everything against
that glibc with zig and tags the wheel for it. Run as a script it prints what a build needs
installed, for builds without isolation.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda"
MIN_RUST = (1, 85)

ConfigSettings = Mapping[str, Any] | None


def _load_toolkit() -> ModuleType:
    """cuda/toolkit.py, by path: its folder is no package and must not get onto sys.path."""
    name = "hotpage_cuda_toolkit"
    spec = importlib.util.spec_from_file_location(name, CUDA / "toolkit.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{CUDA / 'toolkit.py'} cannot be loaded")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toolkit = _load_toolkit()


def _fail(sentence: str) -> None:
    sys.exit(f"hotpage: error: {sentence}")


def _check_rust() -> None:
    wanted = ".".join(map(str, MIN_RUST))
    remedy = f"install Rust {wanted} or later with rustup and put cargo on PATH"
    cargo = shutil.which("cargo")
    if cargo is None:
        _fail(f"building hotpage needs Rust and no cargo was found; {remedy}")
    done = subprocess.run(["cargo", "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"cargo (\d+)\.(\d+)", done.stdout)
    if found is None:
        _fail(f"{cargo} does not run ({(done.stdout + done.stderr).strip()}); {remedy}")
    elif (int(found[1]), int(found[2])) < MIN_RUST:
        _fail(
            f"building hotpage needs Rust {wanted} and {cargo} is {found[1]}.{found[2]}; {remedy}"
        )


def _glibc_target() -> str | None:
    try:
        return toolkit.glibc_target()
    except toolkit.BuildError as error:
        _fail(str(error))
        raise


def _build_cuda() -> None:
    """Builds the kernel library, or removes a stale one where none is wanted."""
    options = [] if toolkit.cuda_wanted() else ["--remove"]
    done = subprocess.run([sys.executable, str(CUDA / "build.py"), *options], check=False)
    if done.returncode != 0:
        _fail("the kernel library was not built, see above; HOTPAGE_CUDA=0 builds without it")


def _settings(config_settings: ConfigSettings) -> dict[str, Any]:
    """maturin's settings, with the target glibc added to what the caller gave."""
    import maturin

    arguments = list(maturin.get_maturin_pep517_args(config_settings))
    glibc = _glibc_target()
    if glibc is not None:
        # zigbuild asks this interpreter for ziglang; PATH may hold another one.
        os.environ.setdefault("CARGO_ZIGBUILD_PYTHON_PATH", sys.executable)
        arguments += ["--zig", "--compatibility", f"manylinux_{glibc.replace('.', '_')}"]
    return {**(config_settings or {}), "maturin.build-args": arguments}


def _cuda_requirements() -> list[str]:
    if not toolkit.cuda_wanted():
        return []
    try:
        found = toolkit.find_toolkit()
    except toolkit.BuildError as error:
        _fail(str(error))
    return [] if found else list(toolkit.PYPI_REQUIREMENTS)


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    """The CUDA compiler where none is found, and zig where another glibc is asked for."""
    zig = [toolkit.ZIG_REQUIREMENT] if _glibc_target() else []
    return [*_cuda_requirements(), *zig]


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: ConfigSettings = None) -> list[str]:
    """Nothing beyond maturin."""
    return []


def _maturin() -> ModuleType:
    """maturin's own backend; told never to fetch a toolchain by itself."""
    os.environ.setdefault("MATURIN_NO_INSTALL_RUST", "1")
    _check_rust()
    import maturin

    return maturin


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: ConfigSettings = None
) -> str:
    """Writes the .dist-info folder."""
    return _maturin().prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds the kernels and the extension and packs both."""
    backend = _maturin()
    _build_cuda()
    return backend.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """As `build_wheel`, with both libraries left in python/hotpage and a path to it installed."""
    backend = _maturin()
    _build_cuda()
    return backend.build_editable(wheel_directory, _settings(config_settings), metadata_directory)


def build_sdist(sdist_directory: str, config_settings: ConfigSettings = None) -> str:
    """Packs the sources; no compiled library goes in."""
    return _maturin().build_sdist(sdist_directory, config_settings)


def _print_requirements() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        static = tomllib.load(file)["build-system"]["requires"]
    print("\n".join([*static, *get_requires_for_build_wheel()]))


if __name__ == "__main__":
    _print_requirements()
