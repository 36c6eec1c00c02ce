# SPDX-License-Identifier: Apache-2.0
"""Owns `hotpage doctor`: what of hotpage works on this host, and how to mend the rest."""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated

import typer

from hotpage import __version__
from hotpage.errors import KernelError, KernelUnavailableError, UnsupportedVllmError


@dataclass(frozen=True)
class Check:
    """One line of the report; `remedy` is empty exactly if `ok`."""

    name: str
    ok: bool
    finding: str
    remedy: str = ""


def check_package() -> Check:
    """The package itself, with the Python that runs it."""
    return Check("hotpage", True, f"{__version__} on Python {platform.python_version()}")


def check_core() -> Check:
    """The Rust extension loads and is of the same version."""
    try:
        core = importlib.import_module("hotpage._core")
    except ImportError as error:
        remedy = "install a wheel of hotpage, or run pip install . in the source checkout"
        return Check("core", False, f"not loaded: {error}", remedy)
    if core.__version__ != __version__:
        finding = f"{core.__version__}, expected {__version__}"
        remedy = "install the whole wheel: pip install --force-reinstall --no-deps hotpage-*.whl"
        return Check("core", False, finding, remedy)
    return Check("core", True, core.__version__)


def check_kernels() -> Check:
    """The kernel library is there, loads and has this package's ABI."""
    from hotpage.kernels import _abi, load

    try:
        library = load()
    except KernelUnavailableError as error:
        finding, _, remedy = str(error).rpartition("; ")
        return Check("kernels", False, finding, remedy)
    images = ", ".join(library.architectures)
    return Check("kernels", True, f"ABI {_abi.ABI_VERSION}, images {images}")


def check_gpu() -> Check:
    """A CUDA device is visible that the kernels run on."""
    from hotpage.kernels import load

    remedy = "run on a host with an NVIDIA GPU of Hopper or later and driver 580 or later"
    try:
        library = load()
        num_devices = library.device_count()
        found = [library.check_device(device) for device in range(num_devices)]
    except KernelUnavailableError as error:
        finding, _, cause = str(error).rpartition("; ")
        return Check("gpu", False, f"not asked: {finding}", cause)
    except KernelError as error:
        return Check("gpu", False, error.text, remedy)
    if not found:
        return Check("gpu", False, "no CUDA device", remedy)
    kinds = ", ".join(
        f"{index}: compute {one.compute_major}.{one.compute_minor}, "
        f"{one.num_multiprocessors} multiprocessors"
        for index, one in enumerate(found)
    )
    return Check("gpu", True, f"{num_devices} visible ({kinds})")


def check_torch() -> Check:
    """torch is installed."""
    # NOTE: only whether it is installed: importing torch would take seconds.
    try:
        return Check("torch", True, metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return Check("torch", False, "not installed", "pip install torch, or vLLM, which brings it")


def check_vllm() -> Check:
    """vLLM is installed, and it is a version whose internals are known."""
    from hotpage.vllm import _compat

    try:
        return Check("vllm", True, _compat.check_vllm())
    except UnsupportedVllmError as error:
        finding, _, remedy = str(error).partition("; ")
        return Check("vllm", False, finding, remedy)


def check_plugin() -> Check:
    """vLLM finds the entry point that installs hotpage's hooks."""
    group = "vllm.general_plugins"
    if not any(point.name == "hotpage" for point in metadata.entry_points(group=group)):
        remedy = "install a wheel of hotpage; a folder on PYTHONPATH has no entry points"
        return Check("plugin", False, f"no entry point hotpage in {group}", remedy)
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "hotpage" not in chosen.split(","):
        remedy = "add hotpage to VLLM_PLUGINS, or unset it"
        return Check("plugin", False, f"VLLM_PLUGINS is {chosen!r}, without hotpage", remedy)
    return Check("plugin", True, f"hotpage in {group}")


CHECKS: tuple[Callable[[], Check], ...] = (
    check_package,
    check_core,
    check_kernels,
    check_gpu,
    check_torch,
    check_vllm,
    check_plugin,
)


def diagnose() -> list[Check]:
    """All checks, in the order in which their remedies should be applied."""
    return [check() for check in CHECKS]


def _verdict(checks: list[Check]) -> str:
    ok = {check.name: check.ok for check in checks}
    if all(ok.values()):
        return (
            "Everything is in place to serve under vLLM, one GPU an engine. engine native refuses "
            "settings that it does not serve at start, each with its remedy."
        )
    if ok["core"]:
        return "The embedded commands work here; serving under vLLM does not."
    return "Nothing of hotpage works here."


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what works on this host and how to mend the rest.

    Ends with exit code 0 if everything needed to serve under vLLM is there, else with 1.
    """
    checks = diagnose()
    healthy = all(check.ok for check in checks)
    verdict = _verdict(checks)
    if as_json:
        report = {"ok": healthy, "verdict": verdict, "checks": [asdict(one) for one in checks]}
        print(json.dumps(report, indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{'ok' if check.ok else 'no':<3} {check.name:<{width}}  {check.finding}")
            if check.remedy:
                print(f"{'':<{width + 5}} remedy: {check.remedy}")
        print(verdict)
    raise typer.Exit(0 if healthy else 1)
