# SPDX-License-Identifier: Apache-2.0
"""Owns the equality of abi.h and its ctypes mirror, asked of a C compiler."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hotpage.kernels import _abi

STATUSES = {
    "HOTPAGE_OK": _abi.OK,
    "HOTPAGE_STATUS_STRUCT_SIZE": _abi.STATUS_STRUCT_SIZE,
    "HOTPAGE_STATUS_INVALID_ARGUMENT": _abi.STATUS_INVALID_ARGUMENT,
    "HOTPAGE_STATUS_UNSUPPORTED": _abi.STATUS_UNSUPPORTED,
    "HOTPAGE_STATUS_CUDA_BASE": _abi.STATUS_CUDA_BASE,
}


@pytest.fixture(scope="module")
def header(root: Path) -> str:
    """abi.h without comments."""
    text = (root / "cuda/include/hotpage/abi.h").read_text()
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def c_fields(header: str, struct: str) -> list[str]:
    """Field names of a struct in their order, array bounds dropped."""
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", header, re.DOTALL)
    assert body is not None, f"{struct} is not defined in abi.h"
    return re.findall(r"(\w+)\s*(?:\[[^\]]*\])*\s*;", body[1])


def test_every_struct_has_a_mirror_with_the_same_fields(header: str) -> None:
    listed = set(re.findall(r"X\((hotpage_\w+),", header))
    assert listed == _abi.STRUCTS.keys()
    assert set(re.findall(r"typedef struct (hotpage_\w+) {", header)) == listed
    for name, block in _abi.STRUCTS.items():
        assert c_fields(header, name) == [field[0] for field in block._fields_], name


def test_every_launcher_takes_the_block_that_its_mirror_says(header: str) -> None:
    declared = re.findall(
        r"HOTPAGE_API hotpage_status (\w+)\(const (\w+) \*\w+,\s*void \*stream\);", header
    )
    assert dict(declared) == {name: block.c_name for name, block in _abi.LAUNCHERS.items()}


def test_every_status_has_a_mirror(header: str) -> None:
    assert set(re.findall(r"\b(HOTPAGE_(?:OK|STATUS_\w+)) =", header)) == STATUSES.keys()


def _c_program() -> tuple[str, list[int]]:
    """A program that prints what the C compiler says, and what the mirror says."""
    prints, expected = ["HOTPAGE_ABI_VERSION", *STATUSES], [_abi.ABI_VERSION, *STATUSES.values()]
    for name, block in _abi.STRUCTS.items():
        prints.append(f"sizeof({name})")
        expected.append(ctypes.sizeof(block))
        for field, *_ in block._fields_:
            descriptor = getattr(block, field)
            prints += [f"offsetof({name}, {field})", f"sizeof((({name} *)0)->{field})"]
            expected += [descriptor.offset, descriptor.size]
    lines = "".join(f'  printf("%lld\\n", (long long)({item}));\n' for item in prints)
    includes = '#include <stddef.h>\n#include <stdio.h>\n#include "hotpage/abi.h"\n'
    return f"{includes}int main(void) {{\n{lines}  return 0;\n}}\n", expected


def test_offsets_and_sizes_are_what_a_c_compiler_says(root: Path, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler was found")
    program, expected = _c_program()
    source, binary = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(program)
    flags = ["-std=c11", "-Wall", "-Werror", f"-I{root / 'cuda/include'}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(binary)], check=True)
    done = subprocess.run([binary], capture_output=True, text=True, check=True)
    assert [int(line) for line in done.stdout.split()] == expected


def test_every_block_starts_with_its_size_and_fills_it_in() -> None:
    for block in _abi.STRUCTS.values():
        assert block._fields_[0][0] == "struct_size"
        assert block().struct_size == ctypes.sizeof(block)
