# SPDX-License-Identifier: Apache-2.0
"""Owns how a simulation is printed: a table, where the time goes, the constants; or CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from typing import Any

from hotpage.simulate.request import Prepared, notes

_COLUMNS = 100

_HEADER = (
    ("policy", ""),
    ("users", ""),
    ("running", "mean"),
    ("pre-", "empted"),
    ("again", "tokens"),
    ("to GPU", "GB"),
    ("to host", "GB"),
    ("between", "p50 ms"),
    ("tokens", "p90 ms"),
    ("tok/s", "user"),
    ("out/s", "GPU"),
    ("all/s", "GPU"),
    ("later", "p50 s"),
    ("TTFT", "p90 s"),
)

_PARTS = (
    ("linear", "linear layers"),
    ("kv", "rows and index read"),
    ("resolve", "resolve"),
    ("misses", "misses"),
    ("staging", "staging for prefill"),
    ("overhead", "fixed cost"),
    ("waiting", "waiting for links or scheduler"),
)


def _count(value: float) -> str:
    for unit in ("", "K", "M"):
        if value < 9_999.5:
            return f"{value:,.0f}{unit}"
        value /= 1e3
    return f"{value:,.0f}G"


def _number(value: float | None) -> str:
    """Three digits that matter."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _latency(latency: dict[str, float] | None, scale: float) -> tuple[str, str]:
    if latency is None:
        return "-", "-"
    return _number(latency["p50"] * scale), _number(latency["p90"] * scale)


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    head = (run["policy"], str(run["concurrency"]))
    if "refused" in run:
        return (*head, *("-" for _ in _HEADER[2:]))
    return (
        *head,
        f"{run['running_mean']:.1f}",
        f"{run['preemptions']:,}",
        _count(run["recomputed_tokens"]),
        _count(run["bytes_host_to_gpu"] / 1e9),
        _count(run["bytes_gpu_to_host"] / 1e9),
        *_latency(run["between_tokens"], 1e3),
        _number(run["user_tokens_per_second"]),
        _number(run["output_tokens_per_second_per_gpu"]),
        _number(run["tokens_per_second_per_gpu"]),
        *_latency(run["later_first_token"], 1.0),
    )


def _table(runs: list[dict[str, Any]]) -> list[str]:
    rows = [tuple(one[line] for one in _HEADER) for line in (0, 1)] + [_row(run) for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    pads = [str.ljust, *(str.rjust for _ in _HEADER[1:])]
    return [
        " ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True))
        for row in rows
    ]


def _head(prepared: Prepared) -> list[str]:
    machine, plan = prepared.machine, prepared.plan
    packing, point = plan["packing"], plan["points"][0]
    gpu = machine.gpu.name.upper() if machine.gpu else "GPU"
    model = machine.model.name + (" (secondary source)" if machine.model.secondary else "")
    speculation = f"MTP {machine.mtp}" if machine.mtp else "no MTP"
    sized = " (sized to the users)" if machine.host_pool_gib is None else ""
    several = len(prepared.asked.conversations)
    kinds = f"{several} kinds of conversations" if several > 1 else "Conversations"
    turns = max(len(one) for one in prepared.asked.conversations)
    return [
        f"{model} on {machine.tp * machine.dp} x {gpu} (tp {machine.tp}, dp {machine.dp}), "
        f"{machine.kv_dtype}, {speculation}, {packing['hot_rows']:,} hot rows",
        f"KV memory {point['kv_bytes'] / 2**30:.1f} GiB a GPU; host pool a replica: "
        f"{prepared.host_pool_gib:,.0f} GiB{sized}",
        f"{kinds} of up to {turns} turns and {point['context']:,} tokens, at which `hotpage plan` "
        f"says {point['hotpage']:.1f} run with hotpage and {point['ordinary']:.1f} with ordinary "
        "residency",
    ]


def _time(run: dict[str, Any]) -> str:
    time = run["time"]
    shares = [(time[name] / time["steps"], words) for name, words in _PARTS]
    said = [
        f"{words} {share:.0%}" for share, words in sorted(shares, reverse=True) if share >= 5e-3
    ]
    return f"{run['policy']}, {run['concurrency']} users: {', '.join(said)}."


def _times(runs: list[dict[str, Any]]) -> list[str]:
    """Where the time goes with the most users of each policy."""
    last = {run["policy"]: run for run in runs if "refused" not in run}
    return ["Where a step's time goes:", *(_wrap(f"  {_time(run)}", 4) for run in last.values())]


def _refused(runs: list[dict[str, Any]]) -> list[str]:
    found = {run["policy"]: run["refused"] for run in runs if "refused" in run}
    return [f"{policy} cannot serve this: {why}." for policy, why in found.items()]


def _value(value: float | tuple[float, float] | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return " + ".join(f"{one:g}" for one in value)
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


def _constants(prepared: Prepared) -> list[str]:
    lines = ["Constants:"]
    for name, one in prepared.constants.items():
        text = f"  {name} {_value(one.value)} {one.unit}".rstrip()
        lines.append(_wrap(f"{text}: {one.source}", 4))
    return lines


def text(prepared: Prepared, runs: list[dict[str, Any]]) -> str:
    """The report, at most 100 columns wide."""
    sentences = [_wrap(line) for line in (*_refused(runs), *notes(prepared))]
    blocks = (
        [_wrap(line) for line in _head(prepared)],
        _table(runs),
        _times(runs),
        sentences,
        _constants(prepared),
    )
    return "\n\n".join("\n".join(block) for block in blocks)


def _wrap(line: str, indent: int = 2) -> str:
    return textwrap.fill(line, _COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False)


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in run.items():
        if isinstance(value, dict):
            row |= {f"{key}.{inner}": number for inner, number in value.items()}
        else:
            row[key] = value
    return row


def table_csv(runs: list[dict[str, Any]]) -> str:
    """A line a run, nested keys joined with a dot; what a run does not have is empty."""
    rows = [_flat(run) for run in runs]
    # A latency without samples is no dictionary, so that its columns come from other runs.
    columns = {name: None for row in rows for name in row}
    out = io.StringIO()
    writer = csv.DictWriter(out, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
