# SPDX-License-Identifier: Apache-2.0
"""Owns the budgets of the kernels: registers, spills and shared memory as ptxas reports them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ARCHITECTURES = {"sm_90a", "sm_100", "sm_120"}
REGISTERS_PER_MULTIPROCESSOR = 65_536
RESOLVE_STATIC_SHARED_BYTES = 3584
"""What resolve_layout.h keeps free beside the dynamic shared memory."""
MOST_STATIC_SHARED_BYTES = 48 << 10
"""What every supported architecture gives a block without asking."""


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture."""

    kernel: str
    architecture: str
    stack_bytes: int
    spilled_bytes: int
    registers: int
    shared_bytes: int


@dataclass(frozen=True)
class Budget:
    """What a kernel may take; `threads` are those that must fit a multiprocessor."""

    threads: int
    stack_bytes: int
    spilled_bytes: int
    registers: int
    shared_bytes: int


# resolve_kernel<entries of a thread, stripes of hot slots, ranks in shared memory, passes>. The one
# of 40 entries keeps them in local memory on purpose: ten rows of 4,096 fit no register file. Two
# passes are the top-k of the models that there are; 0 serves any other.
BUDGETS = {
    "cooperative_copy_kernel<false>": Budget(512, 0, 0, 128, 8 << 10),
    "cooperative_copy_kernel<true>": Budget(512, 0, 0, 128, 8 << 10),
    "copy_pages_kernel<false>": Budget(512, 0, 0, 128, 0),
    "copy_pages_kernel<true>": Budget(512, 0, 0, 128, 0),
    "copy_rows_kernel<false>": Budget(512, 0, 0, 96, 8 << 10),
    "copy_rows_kernel<true>": Budget(512, 0, 0, 96, 8 << 10),
    "digest_copies_kernel": Budget(512, 0, 0, 64, 1 << 10),
    "fill_kernel": Budget(1024, 0, 0, 64, 0),
    # Two blocks of 512.
    "invalidate_kernel": Budget(1024, 0, 0, 64, MOST_STATIC_SHARED_BYTES),
    "mirror_rows_kernel": Budget(512, 0, 0, 128, 0),
    "report_mirrored_kernel": Budget(1024, 0, 0, 64, 0),
    "resolve_kernel<2, 1, true, 0>": Budget(1024, 0, 0, 64, RESOLVE_STATIC_SHARED_BYTES),
    "resolve_kernel<2, 1, true, 2>": Budget(1024, 0, 0, 64, RESOLVE_STATIC_SHARED_BYTES),
    "resolve_kernel<4, 2, true, 0>": Budget(1024, 8, 0, 64, RESOLVE_STATIC_SHARED_BYTES),
    "resolve_kernel<4, 2, true, 2>": Budget(1024, 8, 0, 64, RESOLVE_STATIC_SHARED_BYTES),
    "resolve_kernel<8, 3, true, 0>": Budget(1024, 32, 24, 64, RESOLVE_STATIC_SHARED_BYTES),
    "resolve_kernel<8, 3, true, 2>": Budget(1024, 24, 8, 64, RESOLVE_STATIC_SHARED_BYTES),
    "resolve_kernel<8, 3, false, 0>": Budget(1024, 32, 24, 64, RESOLVE_STATIC_SHARED_BYTES),
    "resolve_kernel<8, 3, false, 2>": Budget(1024, 24, 8, 64, RESOLVE_STATIC_SHARED_BYTES),
    "resolve_kernel<40, 8, false, 0>": Budget(1024, 512, 0, 64, RESOLVE_STATIC_SHARED_BYTES),
    "reset_states_kernel": Budget(1024, 0, 0, 64, 0),
    "stage_prefill_kernel<false>": Budget(512, 0, 0, 128, 8 << 10),
    "stage_prefill_kernel<true>": Budget(512, 0, 0, 128, 8 << 10),
    # One block a multiprocessor; its shared memory is asked for at the launch.
    "sweep_copies_kernel<false>": Budget(512, 0, 0, 128, 0),
    "sweep_copies_kernel<true>": Budget(512, 0, 0, 128, 0),
}

_TEMPLATES = {"Lb0E": "false", "Lb1E": "true"}


def readable(mangled: str) -> str | None:
    """`name<arguments>` of a kernel in some namespaces; None for what is none."""
    names, at = [], len("_ZN")
    while found := re.compile(r"\d+").match(mangled, at):
        at = found.end() + int(found[0])
        names.append(mangled[found.end() : at])
    if not mangled.startswith("_ZN") or not names or not names[-1].endswith("_kernel"):
        return None
    template = re.compile(r"I((?:L[ib]\d+E)+)E").match(mangled, at)
    if template is None:
        return names[-1]
    arguments = re.findall(r"L[ib]\d+E", template[1])
    texts = [_TEMPLATES.get(a) or a.removeprefix("Li").removesuffix("E") for a in arguments]
    return f"{names[-1]}<{', '.join(texts)}>"


def parse(report: str) -> list[Usage]:
    """Every kernel of a ptxas report."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\S+)'\s*\n"
        r"(?:.*\n)*?\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads\s*\n"
        r".*?Used (?P<registers>\d+) registers(?P<rest>.*)"
    )
    found = []
    for match in pattern.finditer(report):
        kernel = readable(match["name"])
        if kernel is None:
            continue
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found.append(
            Usage(
                kernel,
                match["arch"],
                int(match["stack"]),
                max(int(match["stores"]), int(match["loads"])),
                int(match["registers"]),
                int(shared[1]) if shared else 0,
            )
        )
    return found


@pytest.fixture(scope="module")
def usages(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Usage]:
    """The report of a build for every architecture; objects of an earlier build are reused."""
    build_dir = root / "build" / "cuda"
    library = tmp_path_factory.mktemp("cuda") / "libhotpage_cuda.so"
    command = [sys.executable, root / "cuda" / "build.py", "--output", library]
    done = subprocess.run(command, capture_output=True, text=True)
    if "no usable nvcc was found" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return parse((build_dir / "ptxas.txt").read_text())


def test_every_kernel_is_compiled_for_every_architecture(usages: list[Usage]) -> None:
    built = {(usage.kernel, usage.architecture) for usage in usages}
    wanted = {(kernel, architecture) for kernel in BUDGETS for architecture in ARCHITECTURES}
    assert built == wanted


@pytest.mark.parametrize("kernel", BUDGETS)
def test_a_kernel_keeps_to_its_budget(kernel: str, usages: list[Usage]) -> None:
    budget = BUDGETS[kernel]
    assert budget.threads * budget.registers <= REGISTERS_PER_MULTIPROCESSOR
    for usage in (usage for usage in usages if usage.kernel == kernel):
        assert usage.registers <= budget.registers, usage
        assert usage.spilled_bytes <= budget.spilled_bytes, usage
        assert usage.stack_bytes <= budget.stack_bytes, usage
        assert usage.shared_bytes <= budget.shared_bytes, usage


def test_the_report_parser_reads_what_it_is_given() -> None:
    report = (
        "ptxas info    : Compiling entry function "
        "'_ZN7hotpage14resolve_kernelILi2ELi1ELb1ELi2EEEvNS_11ResolveArgsE' for 'sm_90a'\n"
        "ptxas info    : Function properties for _ZN7hotpage14resolve_kernelILi2E\n"
        "    24 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 61 registers, used 1 barriers, 1552 bytes smem\n"
    )
    assert parse(report) == [Usage("resolve_kernel<2, 1, true, 2>", "sm_90a", 24, 12, 61, 1552)]
    assert readable("_ZN7hotpage22_GLOBAL__N__1_2_c_cu_311mask_kernelENS0_4ArgsE") == "mask_kernel"
    assert readable("_ZN7hotpage5applyEi") is None
