# SPDX-License-Identifier: Apache-2.0
"""Owns the equality of the places that state the version."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import hotpage
from hotpage import _core


def test_every_place_states_the_same_version(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    workspace = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    stated = {
        "pyproject.toml": project,
        "Cargo.toml": workspace,
        "hotpage": hotpage.__version__,
        "hotpage._core": _core.__version__,
        "installed": metadata.version("hotpage"),
    }
    assert set(stated.values()) == {project}, stated
