# SPDX-License-Identifier: Apache-2.0
"""How `hotpage plan` prints an answer: limits and remedies, the verdict, notes, CSV."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hotpage import cli

H200_TP8 = ["plan", "--gpu", "h200", "--tp", "8"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a command line on 8 H200."""
    assert cli.run([*H200_TP8, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def advice(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line on 8 H200 prints under its table, a sentence a line."""
    assert cli.run([*H200_TP8, *arguments]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    _head, _table, sentences = out.split("\n\n")
    return sentences.replace("\n  ", " ")


def test_csv_has_one_line_for_each_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*H200_TP8, "--context", "8192,65536", "--csv"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("context,ordinary,hotpage,offload,binds.ordinary,")
    assert [line.split(",")[0] for line in lines] == ["8192", "65536"]
    assert {len(line.split(",")) for line in lines} == {len(header.split(","))}


def test_the_report_names_the_limit_and_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*H200_TP8, "--host-pool-gib", "64", "--context", "131072"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert "the limit is host pool: raise --host-pool-gib to 24" in out
    assert "hotpage carries more from" in out
    assert cli.run([*H200_TP8, "--context", "1048576", "--mtp", "14"]) == 0
    assert "the limit is GPU" in capsys.readouterr().out


def test_every_length_has_its_limit_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--host-pool-gib", "128", "--context"]
    out = advice(capsys, *arguments, "8K,32K,64K,1M")
    assert "From 8,192 to 32,768 tokens the limit is GPU, hot rows: fewer --hot-rows " in out
    # The pool that is advised lifts the limit at every one of the lengths.
    needs = [point["min_host_pool_gib"] for point in run(capsys, *arguments, "64K,1M")["points"]]
    most = f"{math.ceil(max(needs)):,}"
    limit = "From 65,536 to 1,048,576 tokens the limit is host pool: raise --host-pool-gib to "
    assert f"{limit}{most}.\n" in out
    assert out.count("tokens the limit is ") == 2
    assert advice(capsys, *arguments, "1M,8K,64K,32K") == out


def test_a_pool_that_is_too_small_is_no_verdict_on_hotpage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    point = run(capsys, "--host-pool-gib", "1")["points"][-1]
    ordinary, hotpage = (math.floor(point[key]) for key in ("ordinary", "hotpage"))
    assert ordinary > hotpage == 1
    out = advice(capsys, "--host-pool-gib", "1")
    longest = f"{point['context']:,} tokens"
    assert f"raise --host-pool-gib to {math.ceil(point['min_host_pool_gib'])}." in out
    assert "leave hotpage out" not in out
    assert f"residency carries more at {longest}: {ordinary} against {hotpage}." in out
    assert f"Contexts of more than {longest} do not fit the host pool." in out
    for arguments in (
        ["--host-pool-gib", "1", "--context", "8K"],
        ["--host-pool-gib", "384"],
        ["--max-model-len", "16384"],
        [],
    ):
        assert "do not fit the host pool" not in advice(capsys, *arguments), arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-model-len", "4096"], "carries more at"),
        (["--max-model-len", "8192", "--max-num-seqs", "4"], "carries as many at"),
        (
            ["--max-model-len", "8192", "--max-num-seqs", "4", "--context", "4K"],
            "carries at least as many at",
        ),
    ],
)
def test_where_hotpage_has_no_advantage_it_is_advised_against(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, *arguments)
    assert found["crossover_context"] is None
    point = found["points"][-1]
    assert (math.floor(point["ordinary"]) > math.floor(point["hotpage"])) is ("more" in says)
    out = advice(capsys, *arguments)
    assert f"Ordinary residency {says} the longest length: leave hotpage out." in out


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ([], None),
        (["--tp", "8"], "tp 8 yet: it takes one GPU an engine."),
        (["--mtp", "3", "--kv-dtype", "bf16"], None),
        (["--block-size", "128"], "blocks of 128 tokens yet: it takes blocks of 64."),
        (
            ["--tp", "2", "--block-size", "128"],
            "tp 2 and blocks of 128 tokens yet: it takes one GPU an engine and blocks of 64.",
        ),
        (["--dp", "2"], None),
    ],
)
def test_what_the_native_engine_does_not_serve_is_said(
    arguments: list[str], note: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "--kv-gib", "100", "--context", "64K", *arguments]
    expected = [] if note is None else [f"engine: native does not serve {note}"]
    assert cli.run([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == expected
    assert cli.run(line) == 0
    # Long lines are wrapped.
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("engine: native") == len(expected)
    assert all(one in out for one in expected)


def test_the_remedy_of_a_host_pool_removes_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    (point,) = run(capsys, "--host-pool-gib", "64", "--context", "131072")["points"]
    assert point["binds"]["hotpage"] == "host_pool"
    larger = str(math.ceil(point["min_host_pool_gib"]))
    (point,) = run(capsys, "--host-pool-gib", larger, "--context", "131072")["points"]
    assert point["binds"]["hotpage"] != "host_pool"
