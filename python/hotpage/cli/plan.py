# SPDX-License-Identifier: Apache-2.0
"""Owns `hotpage plan`: how many requests a machine runs at each context length, and why."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from hotpage.cli.machine import (
    AsCsv,
    AsJson,
    BatchedTokens,
    BlockSize,
    GpuMemoryUtilization,
    GpuName,
    HbmGib,
    HostLayoutName,
    HotRows,
    KvDtype,
    KvGib,
    LinkGbps,
    MaxNumSeqs,
    ModelName,
    Mtp,
    PlotFile,
    RuntimeGib,
    WeightsGib,
)
from hotpage.errors import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_LENGTH = re.compile("([0-9_]+)([KM]?)")

# Digits as the tool's own table groups them, which could as well be two lengths.
_GROUPED = re.compile("(?<![0-9_])[0-9]{1,3},[0-9]{3}(?![0-9_KM])")


def _contexts(text: str | None) -> tuple[int, ...]:
    """Lengths in tokens; K is 1,024 and M 1,048,576, as in the help text and on a plot's axis."""
    if text is None:
        return ()
    if _GROUPED.search(text.upper()):
        raise ConfigError(
            f"context is {text!r}, expected commas between lengths alone; write one length as "
            "131072 or 128K, and a space after a comma between two short ones"
        )
    try:
        return tuple(_length(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"context is {text!r}, expected numbers of tokens with commas between; say 65536,128K"
        ) from None


def _length(text: str) -> int:
    found = _LENGTH.fullmatch(text.strip().upper())
    if found is None:
        raise ValueError(text)
    return int(found[1]) * _UNITS[found[2]]


def plan(
    model: ModelName = "glm-5.3",
    gpu: GpuName = None,
    hbm_gib: HbmGib = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs in all: tp x dp.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel ranks; gpus / dp.")] = None,
    dp: Annotated[int, typer.Option(help="Data parallel replicas.")] = 1,
    weights_gib: WeightsGib = None,
    kv_dtype: KvDtype = "fp8_ds_mla",
    block_size: BlockSize = 64,
    hot_rows: HotRows = None,
    mtp: Mtp = 0,
    host_pool_gib: Annotated[
        float | None, typer.Option(help="Host pool of one replica; sized to need.")
    ] = None,
    offload_gib: Annotated[
        float | None, typer.Option(help="Dense offloading's pool of one replica.")
    ] = None,
    gpu_memory_utilization: GpuMemoryUtilization = 0.92,
    context: Annotated[
        str | None, typer.Option(help="Context lengths, commas between, K = 1,024; 8K to 1M.")
    ] = None,
    output: Annotated[int, typer.Option(help="Tokens that a request generates.")] = 0,
    hit_rate: Annotated[
        float | None, typer.Option(help="Selected rows found hot; the published rate.")
    ] = None,
    layout: HostLayoutName = "row_interleaved",
    link_gbps: LinkGbps = None,
    runtime_gib: RuntimeGib = 15.0,
    kv_gib: KvGib = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request admitted; each context in turn.")
    ] = None,
    batched_tokens: BatchedTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    registration_gib: Annotated[
        float, typer.Option(help="Most memory that one pinned registration holds.")
    ] = 256.0,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    plot: PlotFile = None,
) -> None:
    """Say how many requests run at each context length, and what limits them.

    With expert parallelism over replicas a GPU holds fewer weights than a share of one replica:
    give --kv-gib from an engine's log.
    """
    from hotpage.plan import Request, find_gpu, find_model
    from hotpage.plan.report import table_csv, text
    from hotpage.plan.request import compute, resolve, shape

    if as_json and as_csv:
        raise ConfigError("--json and --csv are both given, expected one; drop the other")
    request = resolve(
        Request(
            model=find_model(model),
            gpu=find_gpu(gpu) if gpu is not None else None,
            hbm_gib=hbm_gib,
            gpus=gpus,
            tp=_ranks(tp, gpus, dp),
            dp=dp,
            weights_gib=weights_gib,
            runtime_gib=runtime_gib,
            kv_gib=kv_gib,
            kv_dtype=kv_dtype,
            block_size=block_size,
            hot_rows=hot_rows,
            mtp=mtp,
            host_pool_gib=host_pool_gib,
            offload_gib=offload_gib,
            registration_gib=registration_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            contexts=_contexts(context),
            output=output,
            max_model_len=max_model_len,
            batched_tokens=batched_tokens,
            max_num_seqs=max_num_seqs,
            hit_rate=hit_rate,
            link_gbps=link_gbps,
            layout=layout,
        )
    )
    found = compute(request)
    if plot is not None:
        from hotpage.plan.plots import draw

        draw(request, found, plot)
    if as_json:
        print(json.dumps(shape(request, found), indent=2))
    elif as_csv:
        print(table_csv(shape(request, found)), end="")
    else:
        print(text(request, found))


def _ranks(tp: int | None, gpus: int | None, dp: int) -> int:
    """Ranks of a replica; GPUs that replicas cannot share evenly are refused by the planner."""
    if tp is not None:
        return tp
    return max(gpus // dp, 1) if gpus is not None and dp > 0 else 1
