# SPDX-License-Identifier: Apache-2.0
"""Owns the check that the test plan names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path


def _defined_tests(root: Path) -> set[str]:
    names: set[str] = set()
    for folder in (root / "tests", root / "rust"):
        for path in [*folder.rglob("*.rs"), *folder.rglob("*.py")]:
            pattern = r"\bfn (\w+)\(\)" if path.suffix == ".rs" else r"\bdef (test_\w+)\("
            names.update(re.findall(pattern, path.read_text()))
    return names


def test_every_test_that_the_plan_names_exists(root: Path) -> None:
    rows = [
        line
        for line in (root / "tests/README.md").read_text().splitlines()
        if re.match(r"\| \d", line)
    ]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 40
    assert named - _defined_tests(root) == set()


def test_every_report_has_a_test_a_later_part_or_a_reason(root: Path) -> None:
    for line in (root / "tests/README.md").read_text().splitlines():
        if re.match(r"\| \d", line):
            answer = line.split("|")[3]
            reasons = ("`", "later:", "does not apply:", "nothing to reproduce", "a method note")
            assert any(reason in answer for reason in reasons), line
