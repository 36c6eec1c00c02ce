# SPDX-License-Identifier: Apache-2.0
"""The wheel beside vLLM: it changes no version, vLLM finds its entry point, the README's command
is one that starts.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

# First of all: it tells vLLM that this host has no GPU.
import sides  # noqa: F401
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hotpage.vllm.options import parse_options

pytestmark = pytest.mark.vllm

BEFORE = Path(sys.prefix) / "freeze.txt"


def test_installing_the_wheel_changed_no_version() -> None:
    if not BEFORE.is_file():
        pytest.skip("the environment was not made by make test-vllm")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "freeze"]
    now = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    before = BEFORE.read_text().splitlines()
    assert set(before) <= set(now)
    added = {line.partition("==")[0].partition(" @")[0].lower() for line in set(now) - set(before)}
    assert added == {"hotpage"}


def test_vllm_finds_the_entry_point_and_it_activates() -> None:
    found = [
        point for point in entry_points(group="vllm.general_plugins") if point.name == "hotpage"
    ]
    if not found:
        pytest.skip("hotpage is not installed here, only on the path")
    from hotpage.vllm import plugin

    found[0].load()()
    assert plugin.is_active()


def test_the_command_of_the_readme_asks_for_what_native_serves(root: Path) -> None:
    """Left to itself vLLM keeps rows of another kind."""
    text = (root / "README.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^    (--kv-transfer-config '.*?)\n\n", text, re.M | re.S)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(shlex.split(command))
    transfer = arguments.kv_transfer_config
    assert transfer.kv_connector == "HiSparseConnector"
    assert transfer.kv_connector_module_path == "hotpage.vllm"
    assert parse_options(transfer.kv_connector_extra_config).engine == "native"
    assert arguments.kv_cache_dtype == "fp8_ds_mla"
    assert arguments.attention_backend == "FLASHMLA_SPARSE"
