# SPDX-License-Identifier: Apache-2.0
"""Owns `hotpage simulate`: flags in, a sweep over users and policies out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

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
from hotpage.cli.progress import bar
from hotpage.errors import ConfigError

if TYPE_CHECKING:
    from hotpage.simulate.request import Turns

# The built-in conversation.
_TURNS, _FIRST, _LATER, _OUT = 13, 74_160, 753, 220

_MOST_TURNS = 10_000


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{flag} is {text!r}, expected whole numbers with commas between; say 8,16,32"
        ) from None


def _policies(text: str) -> tuple[str, ...]:
    from hotpage.simulate.request import POLICIES

    named = [part.strip() for part in text.split(",")]
    for name in named:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigError(f"--policy is {name!r}, expected some of {known}; correct it")
    return tuple(policy for policy in POLICIES if policy in named)


def _built_in(turns: int, first: int, later: int, out: int) -> tuple[Turns, ...]:
    for flag, value in (
        ("--turns", turns),
        ("--first", first),
        ("--later", later),
        ("--out", out),
    ):
        if value < 1:
            raise ConfigError(f"{flag} is {value}, expected at least 1; raise it")
    if turns > _MOST_TURNS:
        raise ConfigError(f"--turns is {turns}, expected at most {_MOST_TURNS}; lower it")
    return (((first, out), *((later, out) for _ in range(turns - 1))),)


def _conversations(
    workload: str | None, tokenizer: str | None, shape: tuple[int | None, ...]
) -> tuple[Turns, ...]:
    if workload is None:
        if tokenizer is not None:
            raise ConfigError("--tokenizer counts the tokens of a file; give one with --workload")
        defaults = (_TURNS, _FIRST, _LATER, _OUT)
        turns, first, later, out = (
            default if given is None else given
            for given, default in zip(shape, defaults, strict=True)
        )
        return _built_in(turns, first, later, out)
    if any(given is not None for given in shape):
        raise ConfigError(
            "--workload is given beside --turns, --first, --later or --out, expected either; drop "
            "one"
        )
    from hotpage.cli.workload_file import turns_of

    return tuple(tuple(one) for one in turns_of(workload, tokenizer, None))


def simulate(
    model: ModelName = "glm-5.3",
    gpu: GpuName = None,
    hbm_gib: HbmGib = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks of a replica.")] = 1,
    dp: Annotated[int, typer.Option(help="Replicas, which share users evenly.")] = 1,
    concurrency: Annotated[
        str, typer.Option(help="Users at once over all replicas, commas between.")
    ] = "8,16,32,64",
    policy: Annotated[
        str, typer.Option(help="Policies, commas between.")
    ] = "hotpage,preempt,offload",
    turns: Annotated[int | None, typer.Option(help="Turns of a conversation; 13.")] = None,
    first: Annotated[int | None, typer.Option(help="Tokens of its first prompt; 74160.")] = None,
    later: Annotated[int | None, typer.Option(help="New tokens of later ones; 753.")] = None,
    out: Annotated[int | None, typer.Option(help="Tokens of an answer; 220.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="ShareGPT or OpenAI messages file instead.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Hugging Face tokenizer that counts the file's tokens.")
    ] = None,
    conversations: Annotated[
        int | None, typer.Option(help="Conversations of a run; two a user, the whole file.")
    ] = None,
    host_pool_gib: Annotated[
        float | None, typer.Option(help="Host pool of one replica; one conversation a user.")
    ] = None,
    weights_gib: WeightsGib = None,
    kv_dtype: KvDtype = "fp8_ds_mla",
    block_size: BlockSize = 64,
    hot_rows: HotRows = None,
    mtp: Mtp = 0,
    acceptance: Annotated[
        float, typer.Option(help="Chance of a draft to be right behind right ones.")
    ] = 0.7,
    cooperative: Annotated[
        bool, typer.Option("--cooperative", help="Ranks fetch misses for each other.")
    ] = False,
    layout: HostLayoutName = "row_interleaved",
    link_gbps: LinkGbps = None,
    hbm_gbps: Annotated[float | None, typer.Option(help="Memory rate of one GPU.")] = None,
    prefill_tflops: Annotated[
        float | None,
        typer.Option(help="Rate of one GPU: 2 x active parameters x prompt tokens/s."),
    ] = None,
    params_b: Annotated[float | None, typer.Option(help="Parameters, in 10^9.")] = None,
    active_params_b: Annotated[
        float | None, typer.Option(help="Parameters that compute a token, in 10^9.")
    ] = None,
    expert_share: Annotated[
        float | None, typer.Option(help="Routed experts of a token over all of a layer.")
    ] = None,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Replicas share one set of experts.")
    ] = False,
    overhead_ms: Annotated[
        float, typer.Option(help="Fixed cost of a step: launches, collectives, sampling.")
    ] = 0.0,
    gpu_memory_utilization: GpuMemoryUtilization = 0.92,
    runtime_gib: RuntimeGib = 15.0,
    kv_gib: KvGib = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request admitted; the longest conversation.")
    ] = None,
    batched_tokens: BatchedTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    seed: Annotated[int, typer.Option(help="Seed of the drafts that are right.")] = 1,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    plot: PlotFile = None,
) -> None:
    """Model how many conversations a deployment serves at once, and how fast.

    The real Coordinator and block pools serve multi-turn conversations of real length under each
    policy; a cost model with measured constants says how long a step takes.
    """
    from hotpage.plan import Request, find_gpu, find_model
    from hotpage.simulate import Simulated
    from hotpage.simulate.request import prepare, run, shape

    if as_json and as_csv:
        raise ConfigError("--json and --csv are both given, expected one; drop the other")
    machine = Request(
        model=find_model(model),
        gpu=find_gpu(gpu) if gpu is not None else None,
        hbm_gib=hbm_gib,
        tp=tp,
        dp=dp,
        weights_gib=weights_gib,
        runtime_gib=runtime_gib,
        kv_gib=kv_gib,
        kv_dtype=kv_dtype,
        block_size=block_size,
        hot_rows=hot_rows,
        mtp=mtp,
        host_pool_gib=host_pool_gib,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        batched_tokens=batched_tokens,
        max_num_seqs=max_num_seqs,
        link_gbps=link_gbps,
        layout=layout,
    )
    prepared = prepare(
        Simulated(
            machine=machine,
            conversations=_conversations(workload, tokenizer, (turns, first, later, out)),
            concurrency=_numbers("--concurrency", concurrency),
            policies=_policies(policy),
            num_conversations=conversations,
            acceptance=acceptance,
            cooperative=cooperative,
            hbm_gbps=hbm_gbps,
            prefill_tflops=prefill_tflops,
            params_b=params_b,
            active_params_b=active_params_b,
            expert_share=expert_share,
            expert_parallel=expert_parallel,
            overhead_ms=overhead_ms,
            seed=seed,
        )
    )
    if plot is not None:
        from hotpage.simulate import plots

        plots.check(plot)
    with bar() as show:
        runs = run(prepared, show)
    if plot is not None:
        plots.draw(prepared, runs, plot)
    if as_json:
        print(json.dumps(shape(prepared, runs), indent=2))
        return
    from hotpage.simulate import report

    print(report.table_csv(runs) if as_csv else report.text(prepared, runs), end="")
    if not as_csv:
        print()
