# SPDX-License-Identifier: Apache-2.0
"""Owns the picture of a simulation; needs the optional matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotpage.errors import ConfigError
from hotpage.simulate.request import Prepared

_COLOURS = {"hotpage": "#0072B2", "preempt": "#6E6E6E", "offload": "#D55E00"}

# Points this close to each other, as a share of their value, get one label.
_NEAR = 0.1


def _curves(axes: Any, runs: list[dict[str, Any]], x: str, y: str, names_users: bool) -> None:
    for policy, colour in _COLOURS.items():
        found = [run for run in runs if run["policy"] == policy and run.get(x) is not None]
        if not found:
            continue
        xs, ys = [run[x] for run in found], [run[y] for run in found]
        axes.plot(xs, ys, "o-", color=colour, label=policy, linewidth=2, markersize=5)
        if names_users:
            _name_users(axes, found, x, y, colour)


def _name_users(axes: Any, runs: list[dict[str, Any]], x: str, y: str, colour: str) -> None:
    """Writes the number of users at each point, of points that lie together at the first."""
    together: list[tuple[dict[str, Any], list[str]]] = []
    for run in runs:
        users = str(run["concurrency"])
        first = together[-1][0] if together else None
        if first and all(abs(run[one] - first[one]) < _NEAR * first[one] for one in (x, y)):
            together[-1][1].append(users)
        else:
            together.append((run, [users]))
    for run, users in together:
        axes.annotate(
            ", ".join(users),
            (run[x], run[y]),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8,
            color=colour,
        )


def check(path: Path) -> None:
    """Checks that a picture can be drawn, before anything is computed for it.

    Raises:
        ConfigError: matplotlib is missing, or the suffix is none that it writes.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'hotpage[plots]'") from None
    known = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"plot is {path.name!r}, expected a name ending in .png, .svg or .pdf")


def draw(prepared: Prepared, runs: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture of runs that `check` has let pass; the suffix says the format.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    served = [run for run in runs if "refused" not in run]
    speed, total = "user_tokens_per_second", "tokens_per_second_per_gpu"
    _curves(left, served, speed, total, names_users=True)
    left.set_xlabel("tokens/s that a user sees")
    left.set_ylabel("new prompt and answer tokens/s a GPU")
    left.set_title("Interactivity against throughput, by users", loc="left", fontsize=11)
    _curves(right, served, "concurrency", "running_mean", names_users=False)
    right.set_xlabel("users")
    right.set_ylabel("running requests, mean")
    right.set_title("What runs", loc="left", fontsize=11)
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(True, color="#EBEBEB", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    machine = prepared.machine
    gpu = machine.gpu.name.upper() if machine.gpu else "GPU"
    figure.suptitle(
        f"{machine.model.name}, {machine.tp * machine.dp} x {gpu}, host pool "
        f"{prepared.host_pool_gib:,.0f} GiB: a model, no forecast",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    figure.savefig(path)
