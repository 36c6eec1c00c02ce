# SPDX-License-Identifier: Apache-2.0
"""Owns where the CUDA compiler is found and what must be installed when it is not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The first toolkit that compiles for sm_100 and sm_120.
MIN_VERSION = (12, 8)

# One release, pinned together: the newest of each do not fit each other.
PYPI_REQUIREMENTS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)

# Links the library and the extension against an older glibc than the build machine's.
ZIG_REQUIREMENT = "ziglang==0.17.1"


class BuildError(RuntimeError):
    """The kernel library cannot be built; the text is one sentence with the remedy."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler and the folder of its static runtime."""

    nvcc: Path
    library_dir: Path
    version: tuple[int, int]


def cuda_wanted() -> bool:
    """False if the user asked for a build without the kernel library."""
    return os.environ.get("HOTPAGE_CUDA", "1") != "0"


def glibc_target() -> str | None:
    """The glibc version to link against, "2.28" say; None for the build machine's own.

    Raises:
        BuildError: HOTPAGE_GLIBC is set to something else than a version.
    """
    target = os.environ.get("HOTPAGE_GLIBC", "")
    if target and not re.fullmatch(r"2\.\d+", target):
        raise BuildError(f"HOTPAGE_GLIBC is {target!r}, expected a version such as 2.28")
    return target or None


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(location) / "cu13" / "bin" / "nvcc"


def _version(nvcc: Path) -> tuple[int, int] | None:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def _library_dir(nvcc: Path) -> Path | None:
    """Folder of libcudart_static.a in the toolkit that `nvcc` belongs to."""
    # NOTE: both are needed: the path itself may be a link into the toolkit, or a copy beside it.
    for binary in (nvcc, nvcc.resolve()):
        root = binary.parent.parent
        for place in ("lib64", "lib", "targets/*/lib", "lib/*-linux-gnu"):
            for archive in sorted(root.glob(f"{place}/libcudart_static.a")):
                return archive.parent
    return None


def _inspect(nvcc: Path) -> Toolkit | None:
    version, library_dir = _version(nvcc), _library_dir(nvcc)
    if version is None or library_dir is None or version < MIN_VERSION:
        return None
    return Toolkit(nvcc, library_dir, version)


def find_toolkit() -> Toolkit | None:
    """First usable toolkit: HOTPAGE_NVCC, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, PyPI's.

    One that is too old, or lacks the static runtime, is passed over.

    Raises:
        BuildError: HOTPAGE_NVCC names a compiler that cannot be used.
    """
    named = os.environ.get("HOTPAGE_NVCC")
    if named:
        toolkit = _inspect(Path(named))
        if toolkit is None:
            wanted = ".".join(map(str, MIN_VERSION))
            raise BuildError(
                f"HOTPAGE_NVCC={named} is not an nvcc of CUDA {wanted} or later with "
                "libcudart_static.a beside it; unset it to search the usual places"
            )
        return toolkit
    return next((kit for path in _candidates() if (kit := _inspect(path))), None)
