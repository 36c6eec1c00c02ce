# SPDX-License-Identifier: Apache-2.0
"""Owns `hotpage demo`: one workload under three policies on the CPU, every attended row checked.

The run itself is the core's; this module turns flags into settings and the report into text.
"""

from __future__ import annotations

import enum
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotpage.cli import demo_settings
from hotpage.cli.progress import bar
from hotpage.cli.workload_file import turns_of
from hotpage.errors import ConfigError

if TYPE_CHECKING:
    from hotpage._core import Demo, DemoReport

# Conversations of a file unless it is told otherwise, so that a large file takes seconds too.
FILE_LIMIT = 32

# Steps of the simulated engine between two looks at the keyboard and the progress bar: some tens
# of milliseconds.
_STEPS_PER_CALL = 64


class Layout(enum.StrEnum):
    """Order of rows in the host pool."""

    ROW_INTERLEAVED = "row_interleaved"
    LAYER_MAJOR = "layer_major"


class Policy(enum.StrEnum):
    """What happens when GPU memory runs short."""

    HOTPAGE = "hotpage"
    PREEMPT = "preempt"
    OFFLOAD = "offload"


def demo(
    scale: Annotated[
        float | None, typer.Option(help="Factor on the built-in workload's tokens and on top-k.")
    ] = None,
    conversations: Annotated[
        int | None, typer.Option(help=f"Conversations; of a file the first so many ({FILE_LIMIT}).")
    ] = None,
    gpu_pool_mib: Annotated[float | None, typer.Option(help="GPU pool of each policy.")] = None,
    host_pool_mib: Annotated[
        float | None, typer.Option(help="Host pool of each policy that has one.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Rows that the indexer selects for each decode row.")
    ] = None,
    hot_rows: Annotated[
        int | None, typer.Option(help="Hot rows of a request in each index group.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block.")] = None,
    layout: Annotated[Layout | None, typer.Option(help="Order of rows in the host pool.")] = None,
    mtp: Annotated[int | None, typer.Option(help="Draft tokens of each decode step.")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks that acknowledge copies separately.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything that is drawn.")] = None,
    workload: Annotated[
        # NOTE: a Path would make "." of an empty name.
        str | None,
        typer.Option(
            help="ShareGPT or OpenAI messages file instead of the built-in conversations; "
            "a token is 4 bytes of UTF-8 unless --tokenizer is given."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Hugging Face tokenizer that counts the file's tokens.")
    ] = None,
    policy: Annotated[
        list[Policy] | None, typer.Option(help="Policy to run; may repeat. Default: all three.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON and nothing else.")
    ] = False,
    plant_wrong_row: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve conversations from too small a pool, on the CPU, and check every attended row."""
    flags: dict[str, Any] = {
        "--scale": scale,
        "--conversations": conversations,
        "--gpu-pool-mib": gpu_pool_mib,
        "--host-pool-mib": host_pool_mib,
        "--top-k": top_k,
        "--hot-rows": hot_rows,
        "--block-size": block_size,
        "--layout": layout and layout.value,
        "--mtp": mtp,
        "--ranks": ranks,
        "--seed": seed,
    }
    settings = demo_settings.from_flags(flags)
    if policy:
        settings["policies"] = [one.value for one in policy]
    if workload is not None:
        settings["conversations"] = turns_of(
            workload, tokenizer, settings.pop("num_conversations", FILE_LIMIT)
        )
    elif tokenizer is not None:
        raise ConfigError("--tokenizer counts the tokens of a file; give one with --workload")

    from hotpage._core import Demo

    with demo_settings.refusals_by_flag(flags):
        report = _run(Demo(plant_wrong_row=plant_wrong_row, **settings))
    if as_json:
        print(json.dumps(report))
    else:
        from hotpage.cli import demo_report

        demo_report.show(report)
    complaint = _complaint(report)
    if complaint is not None:
        print(f"hotpage: error: {complaint}", file=sys.stderr)
        raise typer.Exit(1)


def _run(demo: Demo) -> DemoReport:
    with bar() as show:
        while not demo.advance(_STEPS_PER_CALL):
            show(demo.policy, demo.fraction)
    return demo.report()


def _complaint(report: DemoReport) -> str | None:
    """What is wrong with a run; a correct one has neither mismatches nor leaked blocks."""
    for name, policy in report["policies"].items():
        wrong, leaked = policy["mismatches"], policy["leaked_blocks"]
        if wrong:
            return f"{name}: {wrong} wrong rows, the first: {policy['first_mismatch']}"
        if leaked:
            return f"{name}: {leaked} blocks are still leased after the last request"
    return None
