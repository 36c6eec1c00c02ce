# SPDX-License-Identifier: Apache-2.0
"""Owns `make test-vllm`: vLLM's own cases on our classes, then the tests beside this file.

    python tests/vllm/run_suite.py VLLM_SOURCE [--engine native|upstream]

Runs in an environment with vLLM and the built wheel; VLLM_SOURCE is its unpacked source archive.
Ends with one line, `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
UPSTREAM = (
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/kv_connector/unit/test_hisparse_connector.py",
    "tests/v1/kv_connector/unit/test_hisparse_stats.py",
)
MODEL_STUB = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
"""Sizes of facebook/opt-125m, which vLLM's scheduler tests name and never load."""


def main() -> int:
    """Runs both suites and prints the sum."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--engine", choices=("native", "upstream"), default="native")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        environment = _environment(Path(scratch))
        upstream = ["-p", "compat_plugin", "--engine", arguments.engine, *UPSTREAM]
        counts += _run(upstream, arguments.source, Path(scratch), environment)
        if arguments.engine == "native":
            # From this folder, so that the installed wheel is tested and not the checkout.
            own = ["-m", "vllm", "-c", str(HERE.parents[1] / "pyproject.toml"), str(HERE)]
            counts += _run(own, HERE, Path(scratch), environment)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


def _environment(scratch: Path) -> dict[str, str]:
    hub = scratch / "hub" / "models--facebook--opt-125m"
    (hub / "refs").mkdir(parents=True)
    (hub / "snapshots" / "stub").mkdir(parents=True)
    (hub / "refs" / "main").write_text("stub")
    (hub / "snapshots" / "stub" / "config.json").write_text(json.dumps(MODEL_STUB))
    return {
        **os.environ,
        "HF_HOME": str(scratch),
        # Without it every test that names a model waits for retries.
        "HF_HUB_OFFLINE": "1",
        # A caller that names a checkout here tests it instead of the installed wheel.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
    }


def _run(
    arguments: list[str], folder: Path, scratch: Path, environment: dict[str, str]
) -> Counter[str]:
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *arguments]
    status = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
    counts: Counter[str] = Counter()
    if report.is_file():
        for suite in ET.parse(report).getroot().iter("testsuite"):
            total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            counts.update(passed=total - skipped - failed, failed=failed, skipped=skipped)
    if status not in (0, 1) or not counts["passed"]:
        # Collection broke, or the interpreter did: no count says so.
        counts["failed"] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
