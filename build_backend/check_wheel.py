# SPDX-License-Identifier: Apache-2.0
"""Owns the last check of a release wheel: its contents, and that its platform tag is true."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

REQUIRED = ("hotpage/_core.abi3.so", "hotpage/lib/libhotpage_cuda.so", "hotpage/py.typed")


def check(wheel: Path) -> str | None:
    """The first thing wrong with the wheel, None if nothing is."""
    with zipfile.ZipFile(wheel) as archive:
        missing = set(REQUIRED) - set(archive.namelist())
    if missing:
        return f"{wheel.name} lacks {', '.join(sorted(missing))}"
    claimed = re.search(r"-abi3-manylinux_(\d+)_(\d+)_\w+\.whl$", wheel.name)
    if claimed is None:
        return f"{wheel.name} is tagged for one Python or one machine, expected abi3 and manylinux"
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    report = " ".join(done.stdout.split())
    needed = re.search(
        r'consistent with the following platform tag: "manylinux_(\d+)_(\d+)_', report
    )
    if done.returncode != 0 or needed is None:
        return f"auditwheel does not accept {wheel.name}: {report or done.stderr.strip()}"
    if (int(needed[1]), int(needed[2])) > (int(claimed[1]), int(claimed[2])):
        return f"{wheel.name} needs glibc {needed[1]}.{needed[2]}, more than its name says"
    return None


def main(arguments: list[str]) -> int:
    """Checks the one wheel named on the command line; returns the exit code."""
    if len(arguments) != 1:
        print(f"check_wheel: got {len(arguments)} wheels, expected one", file=sys.stderr)
        return 2
    fault = check(Path(arguments[0]))
    if fault is not None:
        print(f"check_wheel: error: {fault}", file=sys.stderr)
        return 1
    print(f"{Path(arguments[0]).name}: contents and platform tag hold")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
