# SPDX-License-Identifier: Apache-2.0
"""Owns the kernel library as installed: its images, its symbols, and what it refuses."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hotpage.errors import KernelError, KernelUnavailableError
from hotpage.kernels import _abi
from hotpage.kernels._library import Library, image_runs_on, library_path

IMAGES = {"sm_90a", "sm_100", "sm_120", "compute_90"}


@pytest.fixture(scope="module")
def library() -> Library:
    if not library_path().exists():
        pytest.skip("hotpage is installed without the CUDA kernels (HOTPAGE_CUDA=0)")
    return Library(library_path())


def load_script(path: Path) -> ModuleType:
    """A file of cuda/ as a module; the folder is no package."""
    name = f"hotpage_cuda_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fatbin(root: Path) -> ModuleType:
    return load_script(root / "cuda/fatbin.py")


def test_every_source_is_in_the_library_for_every_image(
    library: Library, fatbin: ModuleType, root: Path
) -> None:
    containers = fatbin.list_images(library.path)
    assert len(containers) == len(list((root / "cuda/src").glob("*.cu")))
    assert set(map(frozenset, containers)) == {frozenset(IMAGES)}
    assert set(library.architectures) == IMAGES


def test_the_build_refuses_a_library_that_lacks_an_image_or_a_source(
    library: Library, root: Path
) -> None:
    build = load_script(root / "cuda/build.py")
    num_sources = len(list((root / "cuda/src").glob("*.cu")))
    build.verify(library.path, sorted(IMAGES), num_sources)
    with pytest.raises(build.BuildError, match="expected compute_90, sm_100, sm_103"):
        build.verify(library.path, ["compute_90", "sm_100", "sm_103"], num_sources)
    with pytest.raises(build.BuildError, match=f"expected {num_sources + 1}"):
        build.verify(library.path, sorted(IMAGES), num_sources + 1)


def test_only_the_c_entry_points_are_visible(library: Library) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm (binutils) was not found")
    done = subprocess.run(
        [nm, "-D", "--defined-only", library.path], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert _abi.LAUNCHERS.keys() <= names
    assert {name for name in names if not name.startswith("hotpage_")} == set()


def test_a_file_without_device_code_is_not_taken_for_a_kernel_library(
    fatbin: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(fatbin.FatbinError, match="no device code"):
        fatbin.list_images(Path(sys.executable).resolve())
    text = tmp_path / "text"
    text.write_text("not an ELF file")
    with pytest.raises(fatbin.FatbinError, match="not a 64-bit"):
        fatbin.list_images(text)


def test_a_block_of_another_size_is_refused(library: Library) -> None:
    params = _abi.FillParams(pattern=1, address=16, num_bytes=16)
    params.struct_size += 8
    with pytest.raises(KernelError, match="another size") as caught:
        library.launch("hotpage_fill", params, 0)
    assert caught.value.status == _abi.STATUS_STRUCT_SIZE


@pytest.mark.parametrize(("address", "num_bytes"), [(0, 1), (16, 1 << 63)])
def test_an_impossible_range_is_refused(library: Library, address: int, num_bytes: int) -> None:
    params = _abi.FillParams(pattern=1, address=address, num_bytes=num_bytes)
    with pytest.raises(KernelError, match=f"num_bytes={num_bytes}") as caught:
        library.launch("hotpage_fill", params, 0)
    assert caught.value.status == _abi.STATUS_INVALID_ARGUMENT


def test_an_empty_range_needs_no_device(library: Library) -> None:
    library.launch("hotpage_fill", _abi.FillParams(pattern=1, address=0, num_bytes=0), 0)


def test_every_status_has_a_text_of_its_own(library: Library) -> None:
    own = [_abi.OK, _abi.STATUS_STRUCT_SIZE, _abi.STATUS_INVALID_ARGUMENT, _abi.STATUS_UNSUPPORTED]
    texts = [library.status_text(status) for status in own]
    assert len(set(texts)) == len(texts)
    assert library.status_text(77) == library.status_text(-1) == "unknown status"
    assert library.status_text(_abi.STATUS_CUDA_BASE + 2) == "out of memory"


def test_a_missing_library_is_reported_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailableError, match="make wheel"):
        Library(tmp_path / "libhotpage_cuda.so")


def test_a_foreign_library_is_reported_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "libhotpage_cuda.so"
    path.write_text("not a library")
    with pytest.raises(KernelUnavailableError, match=r"cannot be loaded.*make wheel"):
        Library(path)


def test_a_library_of_another_abi_version_is_refused(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_abi, "ABI_VERSION", _abi.ABI_VERSION + 1)
    with pytest.raises(KernelUnavailableError, match="ABI version"):
        Library(library.path)


def test_a_library_with_another_struct_size_is_refused(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_abi.STRUCTS, "hotpage_fill_params", _abi.DeviceProperties)
    with pytest.raises(KernelUnavailableError, match="hotpage_fill_params has 24 bytes"):
        Library(library.path)


@pytest.mark.parametrize(
    ("image", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100", (10, 3), True),
        ("sm_100", (12, 0), False),
        ("sm_120", (12, 1), True),
        ("compute_90", (13, 0), True),
        ("compute_90", (8, 9), False),
        ("", (9, 0), False),
    ],
)
def test_which_image_runs_on_which_device(
    image: str, capability: tuple[int, int], runs: bool
) -> None:
    assert image_runs_on(image, capability) is runs
