# SPDX-License-Identifier: Apache-2.0
"""`hotpage demo`: what it prints, what it checks, and how it ends."""

from __future__ import annotations

import ast
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotpage import cli
from hotpage._core import Demo
from hotpage.cli import demo, demo_report, demo_settings
from hotpage.errors import ConfigError

SMALL = ["demo", "--scale", "0.02", "--conversations", "6"]


def policy_keys() -> set[str]:
    """Keys of a policy's report, from the stub."""
    tree = ast.parse(Path(cli.__file__).parent.with_name("_core.pyi").read_text())
    [report] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PolicyReport"]
    return {ast.unparse(n.target) for n in report.body if isinstance(n, ast.AnnAssign)}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert cli.run([*arguments, "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_json_is_the_whole_output_and_has_the_stated_shape(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run([*SMALL, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "", "progress is for terminals"
    report = json.loads(captured.out)
    assert list(report) == ["rows_checked", "mismatches", "states_seen", "policies"]
    assert list(report["policies"]) == ["hotpage", "preempt", "offload"]
    for policy in report["policies"].values():
        assert set(policy) == policy_keys()
        assert policy["mismatches"] == policy["leaked_blocks"] == 0
        assert policy["first_mismatch"] is None
        assert policy["finished"] == 6 * 13
        assert 0 < policy["running_mean"] <= policy["running_max"]
    assert report["mismatches"] == 0
    rows = [policy["rows_checked"] for policy in report["policies"].values()]
    assert min(rows) > 0
    assert report["rows_checked"] == sum(rows)
    assert report["states_seen"] == ["full", "mixed", "none"]


def test_traffic_adds_up_to_the_bytes_of_each_direction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    to_host = {"mirrored", "spilled", "indexer_to_host"}
    to_gpu = {"restored", "missed", "staged", "indexer_to_gpu"}
    for name, policy in run_json(capsys, *SMALL)["policies"].items():
        traffic = policy["traffic_bytes"]
        assert set(traffic) == to_host | to_gpu
        assert sum(traffic[kind] for kind in to_host) == policy["bytes_gpu_to_host"]
        assert sum(traffic[kind] for kind in to_gpu) == policy["bytes_host_to_gpu"]
        # The pages of earlier turns are found again, and indexer pages are never shared in place.
        has_host_pool = name != "preempt"
        assert (traffic["indexer_to_gpu"] > 0) is has_host_pool
        assert (traffic["indexer_to_host"] > 0) is has_host_pool


def test_the_same_seed_gives_the_same_report_and_another_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = [*SMALL, "--policy", "hotpage"]
    first = run_json(capsys, *one, "--seed", "5")
    assert run_json(capsys, *one, "--seed", "5") == first
    assert run_json(capsys, *one, "--seed", "6") != first


def test_chosen_policies_run_alone_in_the_order_given_by_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = run_json(capsys, *SMALL, "--policy", "offload")
    assert list(report["policies"]) == ["offload"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--layout", "layer_major"],
        ["--mtp", "2"],
        ["--ranks", "3"],
        ["--block-size", "8"],
    ],
    ids=lambda flags: flags[0],
)
def test_each_setting_runs_without_a_wrong_row(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, *SMALL, "--policy", "hotpage", *flags)
    assert report["mismatches"] == 0
    assert report["rows_checked"] > 0


def test_a_planted_wrong_row_is_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--policy", "hotpage", "--plant-wrong-row", "--json"]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["mismatches"] > 0
    first = report["policies"]["hotpage"]["first_mismatch"]
    assert first
    assert captured.err == (
        f"hotpage: error: hotpage: {report['mismatches']} wrong rows, the first: {first}\n"
    )


def test_the_table_and_the_reading_state_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, *SMALL)
    assert cli.run(SMALL) == 0
    out = capsys.readouterr().out
    for name, policy in report["policies"].items():
        assert name in out
        assert f"{policy['running_mean']:.2f}" in out
        assert f"{policy['rows_checked']:,}" in out
    reading = " ".join(demo_report.reading(report))  # type: ignore[arg-type]
    assert f"kept {report['policies']['hotpage']['running_mean']:.1f} requests" in reading
    assert "every one was right" in reading


def test_a_conversation_file_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chats.json"
    turn = [{"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "y" * 40}]
    path.write_text(json.dumps([{"messages": turn * 3}] * 5))
    arguments = ["demo", "--workload", str(path), "--policy", "hotpage"]
    assert run_json(capsys, *arguments)["policies"]["hotpage"]["finished"] == 15
    few = run_json(capsys, *arguments, "--conversations", "2")
    assert few["policies"]["hotpage"]["finished"] == 6
    path.write_text(json.dumps([{"messages": turn}] * (demo.FILE_LIMIT + 3)))
    assert run_json(capsys, *arguments)["policies"]["hotpage"]["finished"] == demo.FILE_LIMIT
    assert cli.run([*arguments, "--conversations", "0"]) == 2
    assert "--conversations is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nope"], "No such option"),
        (["--scale", "big"], "'--scale'"),
        (["--scale", "0"], "--scale is 0"),
        (["--scale", "nan"], "--scale is nan"),
        (
            ["--scale", "100"],
            "--top-k (not given, so by default) is 204800, expected at most 16384",
        ),
        (["--conversations", "0"], "--conversations is 0, expected at least 1; "),
        (["--conversations", "-3"], "--conversations is -3, expected at least 1; "),
        (
            ["--conversations", "4294967296"],
            "--conversations is 4294967296, expected at most 10000",
        ),
        (["--mtp", "-1"], "--mtp is -1, expected at least 0; "),
        (["--mtp", "4294967295"], "--mtp is 4294967295, expected at most 1000; "),
        (["--mtp", "999"], "--mtp is 999, expected at most 797; draft fewer, or give --top-k"),
        (["--ranks", "0"], "--ranks is 0, expected at least 1; "),
        (["--ranks", "4294967295"], "--ranks is 4294967295, expected at most 1024; "),
        (["--gpu-pool-mib", "0"], "--gpu-pool-mib is 0, expected a number above 0; "),
        (["--gpu-pool-mib", "nan"], "--gpu-pool-mib is nan, expected a number above 0; "),
        (["--gpu-pool-mib", "1e30"], "--gpu-pool-mib is 1e+30, expected at most 65536; "),
        (["--gpu-pool-mib", "0.2"], "--gpu-pool-mib is 0.2, expected at least 7; "),
        (["--host-pool-mib", "1.5"], "--host-pool-mib is 1.5, expected at least 7; "),
        (["--top-k", "0"], "--top-k is 0, expected at least 4; "),
        (["--top-k", "20000"], "--top-k is 20000, expected at most 16384; "),
        (["--hot-rows", "16"], "; raise --hot-rows to (--mtp + 1) x --top-k, or "),
        (["--hot-rows", "33"], "--hot-rows is 33, expected a positive multiple of 16; "),
        (["--block-size", "0"], "--block-size is 0, expected at least 1; "),
        (["--block-size", "9999999999999"], "--block-size is 9999999999999, expected at most 1024"),
        (["--seed", "-1"], "--seed is -1, expected at least 0; "),
        (["--layout", "diagonal"], "'--layout'"),
        (["--policy", "hope"], "'--policy'"),
        (["--workload", ""], "--workload is empty, expected the path of a file"),
        (["--workload", "/dev/zero"], "/dev/zero: it is not a regular file; "),
        (["--workload", "gone.json"], "gone.json: No such file or directory"),
        (["--tokenizer", "words"], "give one with --workload"),
        (["extra"], "unexpected extra argument"),
    ],
    ids=" ".join,
)
def test_what_cannot_work_is_one_sentence_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hotpage: error: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err


@pytest.mark.parametrize("flag", demo_settings.LEAST)
def test_the_least_numbers_that_are_stated_first_are_the_cores_own(flag: str) -> None:
    at_bound = demo_settings.from_flags({flag: demo_settings.LEAST[flag]})
    wide = {"hot_rows": 1024} if flag == "--top-k" else {}
    [(name, value)] = at_bound.items()
    if flag == "--hot-rows":
        # Its least is what top-k and the block size make of it; 0 is refused for what it is.
        with pytest.raises(ConfigError, match="hot_rows is 0"):
            Demo(scale=0.02, hot_rows=0)
        return
    Demo(scale=0.02, **{name: value}, **wide)
    with pytest.raises(ConfigError, match=f"expected at least {value}"):
        Demo(scale=0.02, **{name: value - 1}, **wide)


def test_a_pool_of_the_least_size_that_is_named_runs(capsys: pytest.CaptureFixture[str]) -> None:
    one = [*SMALL, "--policy", "hotpage"]
    assert cli.run([*one, "--gpu-pool-mib", "1"]) == 2
    least = capsys.readouterr().err.partition("expected at least ")[2].partition(";")[0]
    assert run_json(capsys, *one, "--gpu-pool-mib", least)["mismatches"] == 0


def test_a_run_without_pressure_says_so_and_compares_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["demo", "--scale", "0.02", "--conversations", "2"]
    calm = " ".join(demo_report.reading(run_json(capsys, *few, "--gpu-pool-mib", "50")))
    assert "under no pressure" in calm
    assert "times as many" not in calm
    tight = run_json(capsys, *few, "--gpu-pool-mib", "20")
    assert "under no pressure" not in " ".join(demo_report.reading(tight))
    alone = run_json(capsys, *few, "--gpu-pool-mib", "20", "--policy", "hotpage")
    assert "under no pressure" not in " ".join(demo_report.reading(alone))


def test_tokens_computed_again_without_a_preemption_have_their_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = run_json(capsys, *SMALL)
    preempt = report["policies"]["preempt"]
    assert preempt["preemptions"] == 0 < preempt["recomputed_tokens"]
    reason = "because its GPU prefix cache had lost the conversation's pages between turns; "
    assert reason in " ".join(demo_report.reading(report))
    preempt["preemptions"] = 2
    assert "between turns or after a preemption; " in " ".join(demo_report.reading(report))


def test_a_bad_file_is_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{")
    assert cli.run(["demo", "--workload", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"hotpage: error: {path}: not JSON at line 1")


def test_progress_goes_to_a_terminal_on_stderr() -> None:
    terminal, child = pty.openpty()
    command = [sys.executable, "-m", "hotpage.cli", *SMALL, "--json"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=child, check=True, timeout=120, env=environment
    )
    os.close(child)
    shown = os.read(terminal, 1 << 20)
    os.close(terminal)
    assert b"offload" in shown
    assert json.loads(done.stdout)["mismatches"] == 0


@pytest.mark.slow
def test_the_default_run_checks_over_100_000_rows_and_shows_the_point(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = run_json(capsys, "demo")
    assert report["mismatches"] == 0
    assert report["states_seen"] == ["full", "mixed", "none"]
    ours, preempt, offload = (report["policies"][n] for n in ("hotpage", "preempt", "offload"))
    assert ours["rows_checked"] > 100_000
    assert ours["running_mean"] > preempt["running_mean"]
    assert ours["running_mean"] > offload["running_mean"]
    assert ours["preemptions"] <= preempt["preemptions"]
    assert ours["recomputed_tokens"] < preempt["recomputed_tokens"]
    moved = [p["bytes_gpu_to_host"] + p["bytes_host_to_gpu"] for p in (ours, offload)]
    assert moved[0] < moved[1]
