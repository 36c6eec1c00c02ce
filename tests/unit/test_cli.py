# SPDX-License-Identifier: Apache-2.0
"""Owns how the command ends: one sentence on stderr for what a user can get wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer

from hotpage import __version__, cli
from hotpage.cli import doctor
from hotpage.errors import (
    CapacityError,
    ConfigError,
    InvariantError,
    KernelUnavailableError,
    UnsupportedVllmError,
)


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch):
    """Puts a command `fail` in place that raises what it is given."""

    def install(error: BaseException) -> None:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command("fail")
        def fail() -> None:
            raise error

        @app.command("other")
        def other() -> None: ...

        monkeypatch.setattr(cli, "app", app)

    return install


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"hotpage {__version__}\n"


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--nope"], ["nope"], ["doctor", "--nope"], ["doctor", "extra"], ["doctor", "--json=3"]],
)
def test_a_wrong_call_is_one_sentence_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hotpage: error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("hot_rows is 5,\n  expected 2048"), 2),
        (UnsupportedVllmError("vLLM 0.1 is not supported"), 2),
        (CapacityError("the host pool has 3 blocks"), 2),
        (KernelUnavailableError("no library"), 1),
        (FileNotFoundError(2, "No such file or directory", "config.json"), 2),
    ],
)
def test_what_a_user_can_cause_is_one_sentence(
    raising, error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(error)
    assert cli.run(["fail"]) == code
    err = capsys.readouterr().err.strip()
    assert err.startswith("hotpage: error: ")
    assert "\n" not in err
    assert "Traceback" not in err


def test_an_interrupt_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> list[doctor.Check]:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "diagnose", interrupted)
    assert cli.run(["doctor"]) == 130
    assert capsys.readouterr().err == "hotpage: interrupted\n"


# Plain printing that waits in a buffer for the end, help that comes before any command runs, and
# rich, which writes at once and has an end of its own for closed pipes.
PRINTING = [
    ["plan", "--gpu", "h200", "--tp", "8"],
    ["plan", "--gpu", "h200", "--tp", "8", "--json"],
    ["--help"],
    ["demo", "--scale", "0.005", "--conversations", "2", "--policy", "hotpage"],
]


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_output_that_cannot_be_written_is_one_sentence_and_exit_code_2(
    arguments: list[str],
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hotpage", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stderr == (
        "hotpage: error: the output could not be written: No space left on device; send it "
        "elsewhere\n"
    )


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_reader_that_goes_away_is_no_answer(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "hotpage", *arguments],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", [[], ["demo"], ["doctor"], ["plan"], ["simulate"]], ids=str)
def test_help_has_a_short_name(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*command, "--help"]) == 0
    long = capsys.readouterr().out
    assert cli.run([*command, "-h"]) == 0
    assert capsys.readouterr().out == long


@pytest.mark.parametrize("error", [InvariantError("bug"), ValueError("bug"), OSError("bug")])
def test_a_bug_keeps_its_traceback(raising, error: Exception) -> None:
    raising(error)
    with pytest.raises(type(error), match="bug"):
        cli.run(["fail"])


def test_doctor_reports_every_check_and_a_remedy_for_each_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = cli.run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    assert names == ["hotpage", "core", "kernels", "gpu", "torch", "vllm", "plugin"]
    for check in report["checks"]:
        assert check["finding"]
        assert bool(check["remedy"]) is not check["ok"], check
    assert code == (0 if report["ok"] else 1)
    assert report["ok"] is all(check["ok"] for check in report["checks"])


def test_doctor_looks_for_the_entry_point_that_vllm_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = metadata.EntryPoint("hotpage", "hotpage.vllm.plugin:activate", "vllm.general_plugins")
    found = {"vllm.general_plugins": [point]}
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: found.get(group, []))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert doctor.check_plugin().ok
    monkeypatch.setenv("VLLM_PLUGINS", "other,hotpage")
    assert doctor.check_plugin().ok
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "add hotpage" in doctor.check_plugin().remedy
    found.clear()
    assert "no entry point" in doctor.check_plugin().finding


def test_doctor_says_so_when_the_kernels_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hotpage.kernels import _library

    monkeypatch.setenv("HOTPAGE_CUDA_LIBRARY", str(tmp_path / "none.so"))
    _library.load.cache_clear()
    try:
        assert cli.run(["doctor"]) == 1
    finally:
        _library.load.cache_clear()
    out = capsys.readouterr().out
    assert "no  kernels" in out
    assert "without the CUDA kernels" in out
    assert "make wheel" in out


def test_doctor_ends_with_0_only_if_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def healthy() -> doctor.Check:
        return doctor.Check("core", True, "fine")

    def sick() -> doctor.Check:
        return doctor.Check("gpu", False, "none", "get one")

    monkeypatch.setattr(doctor, "CHECKS", (healthy,))
    assert cli.run(["doctor"]) == 0
    monkeypatch.setattr(doctor, "CHECKS", (healthy, sick))
    assert cli.run(["doctor"]) == 1
    assert "remedy: get one" in capsys.readouterr().out
