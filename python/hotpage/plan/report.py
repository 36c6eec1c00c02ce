# SPDX-License-Identifier: Apache-2.0
"""Owns how a plan is printed: a short table with what binds and the remedy, or CSV."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from dataclasses import replace
from itertools import groupby
from typing import Any

from hotpage.plan.request import Request, longest_context, notes

_COLUMNS = 100

_BINDS = {
    "gpu:kv": "GPU, KV",
    "gpu:indexer": "GPU, indexer",
    "gpu:hot": "GPU, hot rows",
    "gpu:admission": "GPU, admission",
    "host_pool": "host pool",
    "max_num_seqs": "max_num_seqs",
}

_HEADER = ("context", "ordinary", "hotpage", "bound by", "per request", "host pool", "link")
_UNITS = ("tokens", "running", "running", "", "GPU / host MiB", "needs GiB", "ms a step")


def _requests(running: float, replicas: int) -> int:
    """Whole requests: each replica runs whole ones."""
    return math.floor(running / replicas + 1e-9) * replicas


def _row(point: dict[str, Any], replicas: int) -> tuple[str, ...]:
    size = point["bytes_per_request"]
    link = point["pcie_ms_per_step"]
    return (
        f"{point['context']:,}",
        f"{_requests(point['ordinary'], replicas):,}",
        f"{_requests(point['hotpage'], replicas):,}",
        _BINDS[point["binds"]["hotpage"]],
        f"{size['hotpage'] / 2**20:,.0f} / {size['host'] / 2**20:,.0f}",
        f"{math.ceil(point['min_host_pool_gib']):,}",
        "?" if link is None else f"{link:,.1f}",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    # The text column is read from the left, numbers from the right.
    pads = [str.ljust if _HEADER[column] == "bound by" else str.rjust for column in range(7)]
    lines = []
    for row in rows:
        cells = (pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return lines


def _head(request: Request, plan: dict[str, Any]) -> list[str]:
    packing = plan["packing"]
    model = request.model.name + (" (secondary source)" if request.model.secondary else "")
    gpu = request.gpu.name.upper() if request.gpu else "GPU"
    speculation = f"MTP {request.mtp}" if request.mtp else "no MTP"
    pool = "sized to need" if request.host_pool_gib is None else f"{request.host_pool_gib:g} GiB"
    lines = [
        f"{model} on {request.tp * request.dp} x {gpu} (tp {request.tp}, dp {request.dp}), "
        f"{request.kv_dtype}, {speculation}, {packing['hot_rows']:,} hot rows",
    ]
    kv = [point["kv_bytes"] / 2**30 for point in plan["points"]]
    several = f"{min(kv):.1f} to {max(kv):.1f}" if max(kv) - min(kv) >= 0.05 else f"{max(kv):.1f}"
    lines.append(
        f"KV memory {several} GiB a GPU; {packing['num_groups']} resident groups, "
        f"{packing['block_bytes']:,} B a block; host pool a replica: {pool}"
    )
    return lines


def _remedy(point: dict[str, Any], request: Request, plan: dict[str, Any]) -> str:
    bind = point["binds"]["hotpage"]
    union = request.model.top_k * (request.mtp + 1)
    if bind == "host_pool":
        return f"raise --host-pool-gib to {math.ceil(point['min_host_pool_gib']):,}"
    if bind == "gpu:hot":
        fewer = plan["packing"]["hot_rows"] > union
        rows = f"fewer --hot-rows (at least {union:,}, with more misses)" if fewer else ""
        draft = "fewer --mtp tokens" if request.mtp else ""
        found = [text for text in (rows, draft) if text]
        return " or ".join(found) or "more GPUs"
    if bind == "gpu:indexer":
        return "more --tp (weights leave more room) or more replicas"
    if bind == "gpu:admission":
        return "a smaller --batched-tokens: pages in flight stay resident"
    if bind == "max_num_seqs":
        return "a larger --max-num-seqs"
    return "more GPU memory for KV: every page fits or none is given up"


def _limits(points: list[dict[str, Any]], request: Request, plan: dict[str, Any]) -> list[str]:
    """What limits hotpage and how to lift that, a sentence for lengths that share a limit."""
    lines = []
    for bind, same in groupby(points, key=lambda point: point["binds"]["hotpage"]):
        found = list(same)
        shortest, longest = found[0]["context"], found[-1]["context"]
        several = shortest < longest
        where = f"From {shortest:,} to {longest:,}" if several else f"At {longest:,}"
        # The pool that does not limit is the one number that differs between the lengths.
        worst = max(found, key=lambda point: point["min_host_pool_gib"])
        remedy = _remedy(worst, request, plan)
        lines.append(f"{where} tokens the limit is {_BINDS[bind]}: {remedy}.")
    return lines


def _end_of_pool(longest_shown: int, request: Request) -> list[str]:
    """That the table ends early, where it is the host pool that ends it."""
    longest = longest_context(request)
    without_pool = longest_context(replace(request, host_pool_gib=None))
    if longest_shown < longest or longest == without_pool:
        return []
    return [f"Contexts of more than {longest:,} tokens do not fit the host pool."]


def _comparison(point: dict[str, Any], request: Request, plan: dict[str, Any]) -> list[str]:
    """Which residency carries more; the point is that of the longest length shown."""
    crossover = plan["crossover_context"]
    if crossover is not None:
        return [
            f"hotpage carries more from {crossover:,} tokens on; shorter contexts are better "
            "served by ordinary residency."
        ]
    ordinary, hotpage = (_requests(point[key], request.dp) for key in ("ordinary", "hotpage"))
    if point["binds"]["hotpage"] == "host_pool":
        # No verdict on hotpage: a larger pool may turn it.
        text = f"With this host pool ordinary residency carries more at {point['context']:,} tokens"
        return [f"{text}: {ordinary:,} against {hotpage:,}."] if ordinary > hotpage else []
    if point["context"] < longest_context(request):
        how = "at least as many"
    else:
        how = "more" if ordinary > hotpage else "as many"
    return [f"Ordinary residency carries {how} at the longest length: leave hotpage out."]


def _advice(request: Request, plan: dict[str, Any]) -> list[str]:
    points = sorted(plan["points"], key=lambda point: point["context"])
    point = points[-1]
    lines = [
        *_limits(points, request, plan),
        *_end_of_pool(point["context"], request),
    ]
    if point["hotpage"] < request.dp:
        lines.append(
            f"Not one request of {point['context']:,} tokens fits, so an engine that admits it "
            "does not start."
        )
    lines += _comparison(point, request, plan)
    kept = point["offload_kept"]
    text = "Dense offloading runs as many as ordinary residency, since a request must be on the GPU"
    if kept is not None:
        text += f"; its {request.offload_gib:g} GiB keep {math.floor(kept):,} more waiting"
    lines.append(f"{text}.")
    if plan["host_physical_gib"] is not None:
        lines.append(
            f"Pinned host memory: {plan['host_physical_gib']:,.0f} GiB in all (ranks of a replica "
            f"share one pool), {plan['host_registrations']} registration(s) a pool."
        )
    return lines


def text(request: Request, plan: dict[str, Any]) -> str:
    """The report of a resolved request and its raw plan, at most 100 columns wide."""
    rows = [_HEADER, _UNITS, *(_row(point, request.dp) for point in plan["points"])]
    sentences = _advice(request, plan)
    if request.link_gbps is not None:
        sentences.append(
            f"Link time at {plan['hit_rate']:.1%} hits, layout {request.layout}, all running "
            "requests reading from host."
        )
    parts = [_wrap(line) for line in (*_head(request, plan), *notes(request))]
    return "\n".join([*parts, "", *_table(rows), "", *(_wrap(line) for line in sentences)])


def _wrap(line: str) -> str:
    return textwrap.fill(line, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def table_csv(answer: dict[str, Any]) -> str:
    """The points as CSV: a line a context, nested keys joined with a dot."""
    rows = []
    for point in answer["points"]:
        row: dict[str, Any] = {}
        for key, value in point.items():
            if isinstance(value, dict):
                row |= {f"{key}.{inner}": number for inner, number in value.items()}
            else:
                row[key] = value
        rows.append(row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
