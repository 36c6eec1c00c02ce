# SPDX-License-Identifier: Apache-2.0
"""Owns the bar that long commands show on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr that takes the running policy and the fraction done; none off terminals."""
    if not sys.stderr.isatty():
        yield lambda policy, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>8}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda policy, fraction: shown.update(task, description=policy, completed=fraction)
