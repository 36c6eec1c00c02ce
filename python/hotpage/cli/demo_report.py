# SPDX-License-Identifier: Apache-2.0
"""Owns how the report of `hotpage demo` reads: a table, then what it says in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hotpage._core import DemoReport

_ROWS: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
    ("running requests, mean", lambda p: f"{p['running_mean']:.2f}"),
    ("running requests, max", lambda p: f"{p['running_max']:,}"),
    ("requests finished", lambda p: f"{p['finished']:,}"),
    ("steps", lambda p: f"{p['steps']:,}"),
    ("preemptions", lambda p: f"{p['preemptions']:,}"),
    ("tokens prefilled", lambda p: f"{p['prefilled_tokens']:,}"),
    ("of them recomputed", lambda p: f"{p['recomputed_tokens']:,}"),
    ("bytes GPU to host", lambda p: num_bytes(p["bytes_gpu_to_host"])),
    ("bytes host to GPU", lambda p: num_bytes(p["bytes_host_to_gpu"])),
    ("hot hit rate", lambda p: percent(p["hot_hit_rate"])),
    ("residency seen", lambda p: ", ".join(p["states_seen"])),
    ("rows checked", lambda p: f"{p['rows_checked']:,}"),
    ("mismatches", lambda p: f"{p['mismatches']:,}"),
]


def num_bytes(value: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def percent(value: float | None) -> str:
    """A share, or a dash where there was nothing to share."""
    return "-" if value is None else f"{100 * value:.1f}%"


def table(report: DemoReport) -> Table:
    """One column for each policy."""
    built = Table(show_edge=False, pad_edge=False)
    built.add_column("", no_wrap=True)
    for name in report["policies"]:
        built.add_column(name, justify="right", no_wrap=True)
    for label, cell in _ROWS:
        built.add_row(label, *(cell(policy) for policy in report["policies"].values()))
    return built


def reading(report: DemoReport) -> list[str]:
    """Sentences that state what the numbers show, whichever way they turn out."""
    policies = report["policies"]
    ours = policies.get("hotpage")
    said = []
    if ours is not None and not _had_pressure(policies):
        said.append(
            "The pools were under no pressure: no request waited for blocks, was preempted or read "
            "from host, so this run shows no difference between policies. A smaller "
            "--gpu-pool-mib or more --conversations bring pressure."
        )
    elif ours is not None:
        said.append(
            f"hotpage kept {ours['running_mean']:.1f} requests running on average, "
            f"{ours['running_max']} at most."
        )
        if "preempt" in policies:
            said.append(_against_preempt(ours, policies["preempt"]))
        if "offload" in policies:
            said.append(_against_offload(ours, policies["offload"]))
        if ours["hot_hit_rate"] is not None:
            said.append(
                f"Of the rows that the indexer wanted from host-only pages, "
                f"{percent(ours['hot_hit_rate'])} were in the hot regions already."
            )
    wrong = report["mismatches"]
    verdict = "every one was right" if wrong == 0 else f"{wrong:,} were wrong"
    said.append(
        f"{report['rows_checked']:,} attended rows were compared with what they must hold: "
        f"{verdict}."
    )
    return said


def _had_pressure(policies: Mapping[str, Any]) -> bool:
    """True if a request waited for blocks, was preempted or read from host, or pages were lost.

    Every policy computes the rows of a conversation's last, unfilled blocks again and reads
    indexer pages back, so neither count says anything by itself: lost pages show where one policy
    computed more again than another.
    """
    return len({policy["recomputed_tokens"] for policy in policies.values()}) > 1 or any(
        policy["preemptions"]
        or any(policy["refusals"].values())
        or any(policy["traffic_bytes"][kind] for kind in ("restored", "missed", "staged"))
        or policy["states_seen"] != ["full"]
        for policy in policies.values()
    )


def _against_preempt(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return (
        f"preempt, with the same GPU pool and no host pool, kept {other['running_mean']:.1f} "
        f"({_ratio(ours['running_mean'], other['running_mean'])}); it preempted "
        f"{_requests(other['preemptions'])} and computed {other['recomputed_tokens']:,} tokens "
        f"again{_why_again(ours, other)}; hotpage preempted {_requests(ours['preemptions'])} and "
        f"computed {ours['recomputed_tokens']:,} again."
    )


def _why_again(ours: Mapping[str, Any], preempt: Mapping[str, Any]) -> str:
    # What hotpage too computes again is the rows of last, unfilled blocks.
    if preempt["recomputed_tokens"] <= ours["recomputed_tokens"]:
        return ""
    lost = ", because its GPU prefix cache had lost the conversation's pages"
    return (
        f"{lost} between turns"
        if preempt["preemptions"] == 0
        else (f"{lost} between turns or after a preemption")
    )


def _against_offload(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return (
        f"offload, with the same two pools, kept {other['running_mean']:.1f} "
        f"({_ratio(ours['running_mean'], other['running_mean'])}) and moved "
        f"{num_bytes(_moved(other))} between host and GPU, hotpage {num_bytes(_moved(ours))}."
    )


def _moved(policy: Mapping[str, Any]) -> int:
    return int(policy["bytes_gpu_to_host"] + policy["bytes_host_to_gpu"])


def _ratio(ours: float, other: float) -> str:
    if other == 0:
        return "none ran"
    return f"hotpage ran {ours / other:.2f} times as many"


def _requests(count: int) -> str:
    return "no request" if count == 0 else "1 request" if count == 1 else f"{count:,} requests"


def show(report: DemoReport) -> None:
    """Prints the table and the reading to stdout."""
    console = Console(highlight=False)
    console.print(table(report))
    console.print()
    for sentence in reading(report):
        console.print(sentence)
