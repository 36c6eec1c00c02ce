# SPDX-License-Identifier: Apache-2.0
"""Owns the constants of the simulator's cost model, each with its unit and its source.

What was measured, was measured on one H200 behind PCIe 5.0 x16; tables are in `benches`. What was
not has a flag, and its value is printed with every answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotpage.errors import ConfigError
from hotpage.plan.profiles import PCIE5_GBPS, Gpu

_TABLES = "measured on one H200"

# DeepSeek publishes 73,700 prompt tokens a second of a node of 8 H800, 56.3% of them found in a
# cache, for a model of 37 x 10^9 active parameters.
_PREFILL_TFLOPS = 73_700 * (1 - 0.563) * 2 * 37e9 / 8 / 1e12
_PREFILL_SOURCE = (
    "DeepSeek's published 73.7K prompt tokens/s of 8 H800, 56.3% cached, 37B active parameters; "
    "--prefill-tflops"
)


@dataclass(frozen=True)
class Constant:
    """A constant of the cost model."""

    value: float | tuple[float, float] | None
    unit: str
    source: str


def of_gpu(
    gpu: Gpu | None, hbm_gbps: float | None, prefill_tflops: float | None
) -> dict[str, Constant]:
    """Rates of a GPU's memory and arithmetic.

    Raises:
        ConfigError: one of them has neither a source nor a value that was given.
    """
    name = gpu.name if gpu else "the GPU"
    source = "given"
    if hbm_gbps is None and gpu is not None:
        hbm_gbps, source = gpu.hbm_gbps, "NVIDIA's data sheet, the peak rate; --hbm-gbps"
    if hbm_gbps is None:
        raise ConfigError(f"the memory rate of {name} is not known; give --hbm-gbps (of one GPU)")
    computed = "given"
    if prefill_tflops is None and gpu is not None and gpu.is_hopper:
        prefill_tflops, computed = round(_PREFILL_TFLOPS), _PREFILL_SOURCE
    if prefill_tflops is None:
        raise ConfigError(
            f"the prefill rate of {name} is not known; give --prefill-tflops (of one GPU: 2 x "
            "active parameters x prompt tokens a second)"
        )
    return {
        "hbm_gbps": Constant(hbm_gbps, "GB/s", source),
        "compute_tflops": Constant(prefill_tflops, "TFLOP/s", computed),
    }


def of_link(link_gbps: float, cooperative: bool) -> dict[str, Constant]:
    """Rates of copies over a host link; a link that was not measured gets the same share of its
    rate as the one that was.
    """
    share = link_gbps / PCIE5_GBPS
    source = _TABLES if link_gbps == PCIE5_GBPS else f"{_TABLES}, by the share of the link's rate"
    found = {
        "stage_gbps": Constant(49.0 * share, "GB/s", f"context staged for prefill, {source}"),
        "restore_gbps": Constant(49.9 * share, "GB/s", f"whole pages to the GPU, {source}"),
        "mirror_gbps": Constant(51.8 * share, "GB/s", f"rows to the host, {source}"),
        # 23 us for 0.79 MB that take 16 us at the rate of large copies.
        "copy_us": Constant(7.0, "us", f"a copy of misses beside its bytes, {_TABLES}"),
        "peers": Constant(None, "", "each rank fetches every miss; --cooperative"),
    }
    if cooperative:
        # 36.4 us for 1,024 misses of a group of four layers, 483 us for 17,536.
        found["peers"] = Constant(
            (355.0, 10.0), "GB/s, us", "ranks fetch for each other, measured on two H200 alone"
        )
    return found


def of_step(mtp: int, overhead_ms: float) -> dict[str, Constant]:
    """Times of a step that depend on no size."""
    # A leader's resolve at 128 requests: 14.9 us at one verification row, 23.6 at four.
    verified = f"a leader's resolve and each verification row, {_TABLES}"
    return {
        "resolve_us": Constant((12.0, 3.0), "us", verified),
        "resident_resolve_us": Constant((4.0, 1.0), "us", f"with all resident: {verified}"),
        # A step at 256 requests and 21 groups with its allocation loop: 3.1 ms, 5.0 with 3 drafts.
        "scheduler_us": Constant(
            19.4 if mtp else 12.0,
            "us",
            "of a running request, measured on two CPU cores with allocate_fast_path",
        ),
        "overhead_us": Constant(
            overhead_ms * 1e3, "us", "a step beside everything else, not measured; --overhead-ms"
        ),
    }
