# SPDX-License-Identifier: Apache-2.0
"""Owns the record of the checks of one run."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Report:
    """Checks by name, printed as they end and written to a file after each."""

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path = path
        self._lines: dict[str, Any] = {**head, "checks": {}}
        self._started = time.perf_counter()

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [name for name, line in self._lines["checks"].items() if not line["passed"]]

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Runs one check; its facts are what the body puts into the dictionary."""
        facts: dict[str, Any] = {}
        line = {"passed": False, "facts": facts}
        began = time.perf_counter()
        print(f"[{began - self._started:6.1f} s] {name} ...", flush=True)
        try:
            yield facts
            line["passed"] = True
        except Exception as error:
            facts["error"] = f"{type(error).__name__}: {error}"[:600]
            traceback.print_exc()
        finally:
            line["seconds"] = round(time.perf_counter() - began, 1)
            self._lines["checks"][name] = line
            print(f"    {'passed' if line['passed'] else 'FAILED'} {facts}", flush=True)
            if self._path is not None:
                self._path.write_text(json.dumps(self._lines, indent=1))

    def print_table(self) -> None:
        """One line for each check."""
        print()
        for name, line in self._lines["checks"].items():
            facts = ", ".join(f"{key} {value}" for key, value in line["facts"].items())
            verdict = "passed" if line["passed"] else "FAILED"
            print(f"{name:34} {verdict} {line['seconds']:6.1f} s  {facts}"[:400])
