# SPDX-License-Identifier: Apache-2.0
"""Owns the picture of a plan; needs the optional matplotlib."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hotpage.errors import ConfigError
from hotpage.plan.request import Request, compute, longest_context

_HOTPAGE, _ORDINARY = "#0072B2", "#6E6E6E"
_KINDS = (
    ("indexer", "indexer rows", "#56B4E9"),
    ("hot", "hot rows", "#D55E00"),
    ("tail", "resident tail", "#009E73"),
    ("padding", "padding of blocks", "#D8D8D8"),
)
_NUM_LENGTHS = 160
_SHORTEST = 2048


def _lengths(request: Request, plan: dict[str, Any]) -> list[int]:
    """Context lengths of the curves, evenly spaced in logarithms and whole blocks."""
    longest = longest_context(request)
    shortest = min(_SHORTEST, longest)
    step = (longest / shortest) ** (1 / (_NUM_LENGTHS - 1))
    block = plan["packing"]["block_size"]
    found = (round(shortest * step**index / block) * block for index in range(_NUM_LENGTHS))
    return sorted({min(max(length, 1), longest) for length in found})


def _tokens(value: float, _position: int | None = None) -> str:
    if value >= 2**20:
        return f"{value / 2**20:g}M"
    return f"{value / 2**10:g}K" if value >= 2**10 else f"{value:g}"


def _concurrency(axes: Any, request: Request, plan: dict[str, Any], curve: dict[str, Any]) -> None:
    lengths = [point["context"] for point in curve["points"]]
    for key, label, colour in (
        ("ordinary", "ordinary residency, dense offloading", _ORDINARY),
        ("hotpage", "hotpage", _HOTPAGE),
    ):
        axes.plot(
            lengths,
            [point[key] for point in curve["points"]],
            color=colour,
            label=label,
            linewidth=2.2,
        )
        asked = plan["points"] if request.contexts else []
        axes.plot(
            [point["context"] for point in asked],
            [point[key] for point in asked],
            "o",
            color=colour,
            markersize=5,
            clip_on=False,
        )
    crossover = plan["crossover_context"]
    if crossover is not None and lengths[0] < crossover < lengths[-1]:
        axes.axvline(crossover, color=_HOTPAGE, linewidth=1, linestyle=":")
        axes.annotate(
            f"hotpage from {crossover:,}",
            (crossover, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            color=_HOTPAGE,
            fontsize=9,
        )
    axes.axhline(request.dp, color="#BBBBBB", linewidth=0.8)
    if min(point["ordinary"] for point in curve["points"]) < request.dp:
        axes.annotate(
            "under this line no engine starts",
            (lengths[0], request.dp),
            xytext=(5, -11),
            textcoords="offset points",
            color=_ORDINARY,
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axes.set_ylabel("running requests, all replicas")
    axes.set_title("What runs", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def _bytes(axes: Any, curve: dict[str, Any]) -> None:
    lengths = [point["context"] for point in curve["points"]]
    sizes = [point["bytes_per_request"] for point in curve["points"]]
    gib = {key: [size[key] / 2**30 for size in sizes] for key in sizes[0]}
    axes.stackplot(
        lengths,
        [gib[key] for key, _, _ in _KINDS],
        labels=[label for _, label, _ in _KINDS],
        colors=[colour for _, _, colour in _KINDS],
    )
    axes.plot(lengths, gib["ordinary"], color=_ORDINARY, linewidth=2.2, label="ordinary residency")
    axes.set_ylim(0, 1.9 * max(gib["hotpage"]))
    axes.set_ylabel("GiB a request on each GPU")
    axes.set_title("What a request takes with hotpage", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def draw(request: Request, plan: dict[str, Any], path: Path) -> None:
    """Writes a picture of a resolved request and its raw plan; the suffix says the format.

    Raises:
        ConfigError: matplotlib is not installed, or it writes no file of that suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'hotpage[plots]'") from None

    suffix = path.suffix.removeprefix(".").lower()
    figure = Figure(figsize=(11, 4.8), layout="constrained", dpi=150)
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    if suffix not in known:
        raise ConfigError(f"plot is {path.name!r}, expected a name ending in .png, .svg or .pdf")
    curve = compute(replace(request, contexts=tuple(_lengths(request, plan))))
    left, right = figure.subplots(1, 2)
    _concurrency(left, request, plan, curve)
    _bytes(right, curve)
    for axes in (left, right):
        lengths = [point["context"] for point in curve["points"]]
        ticks = [2**power for power in range(11, 25) if lengths[0] <= 2**power <= lengths[-1]]
        axes.set_xscale("log", base=2)
        # A single length is a point in the middle.
        margin = 1 if lengths[0] < lengths[-1] else 2
        axes.set_xlim(lengths[0] / margin, lengths[-1] * margin)
        axes.set_xticks(ticks, [_tokens(tick) for tick in ticks])
        axes.set_xlabel("context in tokens")
        axes.grid(True, color="#EBEBEB", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    gpu = request.gpu.name.upper() if request.gpu else "GPU"
    speculation = f"MTP {request.mtp}" if request.mtp else "no MTP"
    figure.suptitle(
        f"{request.model.name}, {request.tp * request.dp} x {gpu}, {request.kv_dtype}, "
        f"{speculation}, {plan['packing']['hot_rows']:,} hot rows",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    figure.savefig(path)
