# SPDX-License-Identifier: Apache-2.0
"""Owns a planning request: its defaults, its checks of what is missing, and the answer's shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hotpage.errors import ConfigError
from hotpage.plan.profiles import Gpu, Model

FP8_DS_MLA = "fp8_ds_mla"
BF16 = "bf16"
KV_DTYPES = (FP8_DS_MLA, BF16)
LAYOUTS = ("row_interleaved", "layer_major")

DEFAULT_CONTEXTS = tuple(2**power for power in range(13, 21))
"""8K to 1M tokens; a plan without --context takes those that the model has positions for."""

RUNTIME_GIB = 15.0
"""What vLLM's published HiSparse calculator reserves beside weights and KV on one GPU."""

REGISTRATION_GIB = 256.0
"""vLLM 0.33 splits a host pool so that no registration is larger."""

MAX_GIB = 2.0**20
"""Largest size that the planner takes, a pebibyte."""


@dataclass(frozen=True)
class Request:
    """Everything that `hotpage plan` can be told; sizes in GiB, None where a default applies."""

    model: Model
    gpu: Gpu | None = None
    hbm_gib: float | None = None
    gpus: int | None = None
    tp: int = 1
    dp: int = 1
    weights_gib: float | None = None
    runtime_gib: float = RUNTIME_GIB
    kv_gib: float | None = None
    kv_dtype: str = FP8_DS_MLA
    block_size: int = 64
    hot_rows: int | None = None
    mtp: int = 0
    host_pool_gib: float | None = None
    offload_gib: float | None = None
    registration_gib: float = REGISTRATION_GIB
    gpu_memory_utilization: float = 0.92
    contexts: tuple[int, ...] = ()
    output: int = 0
    max_model_len: int | None = None
    batched_tokens: int | None = None
    max_num_seqs: int | None = None
    hit_rate: float | None = None
    link_gbps: float | None = None
    layout: str = LAYOUTS[0]


def _batch_defaults(memory_gib: float | None) -> tuple[int, int]:
    """`max_num_batched_tokens` and `max_num_seqs` that vLLM 0.33's server takes for a GPU."""
    if memory_gib is None or memory_gib < 70:
        return 2048, 256
    return (16384 if memory_gib >= 160 else 8192), 1024


def _memory_gib(request: Request) -> float | None:
    if request.hbm_gib is not None:
        return request.hbm_gib
    return request.gpu.memory_gib if request.gpu else None


def _check_draft_layers(request: Request) -> None:
    if request.mtp > 0 and request.model.draft_layers == 0:
        raise ConfigError(
            f"mtp is {request.mtp}, expected 0, since no draft layers of {request.model.name} are "
            "known; use --mtp 0 or the model's config.json"
        )


def _check_contexts(request: Request) -> None:
    for tokens in request.contexts:
        if tokens < request.block_size:
            raise ConfigError(
                f"context is {tokens}, expected at least {request.block_size} (one block); give a "
                "longer one"
            )


def resolve(request: Request) -> Request:
    """The request with every default filled in.

    Raises:
        ConfigError: something is missing that has neither a default nor a source.
    """
    model = request.model
    memory_gib = _memory_gib(request)
    if memory_gib is None and request.kv_gib is None:
        raise ConfigError("the GPU is missing; give --gpu, --hbm-gib or --kv-gib")
    weights_gib = request.weights_gib
    if weights_gib is None:
        weights_gib = model.weights_gib
    if weights_gib is None and request.kv_gib is None:
        raise ConfigError(
            f"the size of the weights of {model.name} is not known; give --weights-gib (one "
            "replica), or --kv-gib as an engine prints it at start"
        )
    if model.max_positions is None and request.max_model_len is None:
        raise ConfigError(f"the positions of {model.name} are not known; give --max-model-len")
    if request.kv_dtype not in KV_DTYPES:
        known = " or ".join(KV_DTYPES)
        raise ConfigError(f"kv_dtype is {request.kv_dtype!r}, expected {known}; choose one")
    batched_tokens, max_num_seqs = _batch_defaults(memory_gib)
    if request.batched_tokens is not None:
        batched_tokens = request.batched_tokens
    if request.max_num_seqs is not None:
        max_num_seqs = request.max_num_seqs
    link_gbps = request.link_gbps
    if link_gbps is None and request.gpu is not None:
        link_gbps = request.gpu.link_gbps
    _check_draft_layers(request)
    _check_contexts(request)
    return replace(
        request,
        hbm_gib=memory_gib,
        weights_gib=weights_gib,
        contexts=request.contexts or _default_contexts(request),
        batched_tokens=batched_tokens,
        max_num_seqs=max_num_seqs,
        link_gbps=link_gbps,
    )


def longest_context(request: Request) -> int:
    """Longest context in tokens that positions, admission, output and host pool leave.

    A host pool holds the pages of one request and two more; 0 or less if it holds none.
    """
    limits = [request.model.max_positions, request.max_model_len]
    gib = request.host_pool_gib
    # A size out of its bounds limits nothing: the planner refuses it with a sentence.
    if gib is not None and 0 < gib <= MAX_GIB and request.max_model_len is None:
        packing = pack(request)
        stride = packing["host_block_stride_shared" if request.tp > 1 else "host_page_bytes"]
        pages = int(gib * 2**30) // stride - 2
        limits.append(pages * packing["block_size"])
    return min(limit for limit in limits if limit is not None) - request.output


def _default_contexts(request: Request) -> tuple[int, ...]:
    longest = longest_context(request)
    known = tuple(one for one in DEFAULT_CONTEXTS if one <= longest)
    if not known:
        # The planner says what is wrong if not even this fits.
        return (max(longest, 1),)
    return known if known[-1] == longest else (*known, longest)


def pack(request: Request) -> dict[str, Any]:
    """How the model's layers share blocks, as `_core.pack_layers` returns it.

    Raises:
        ConfigError: the block size or the hot rows are out of their bounds.
    """
    from hotpage import _core

    return _core.pack_layers(
        **model_arguments(request.model, request.kv_dtype, request.max_model_len),
        block_size=request.block_size,
        hot_rows=request.hot_rows,
        mtp=request.mtp,
    )


def model_arguments(model: Model, kv_dtype: str, max_model_len: int | None) -> dict[str, Any]:
    """The geometry as `_core.pack_layers` takes it; bytes, counts and tokens.

    `fp8_ds_mla` rows are 512 quantised values, 16 bytes of scales and 64 bf16 rope values (vLLM
    0.33), so only a model of that shape has them.

    Raises:
        ConfigError: the model's rows do not have the width that `fp8_ds_mla` is made for.
    """
    from hotpage import _core

    width = model.kv_lora_rank + model.rope_dim
    if kv_dtype == FP8_DS_MLA and (model.kv_lora_rank, model.rope_dim) != (512, 64):
        raise ConfigError(f"rows have {width} values, expected 512 + 64; use --kv-dtype bf16")
    row_bytes = 512 + 16 + 128 if kv_dtype == FP8_DS_MLA else 2 * width
    return {
        "leaders": _core.layers_with_indexer(
            model.layers, model.frequency, model.offset, model.pattern
        ),
        "draft_layers": model.draft_layers,
        "row_bytes": row_bytes,
        # FlashMLA sparse keeps the blocks of unquantised caches whole rows apart.
        "block_align_bytes": row_bytes if kv_dtype == BF16 else 1,
        "indexer_row_bytes": model.index_head_dim + model.index_head_dim // 128 * 4,
        "tokens_per_indexer_row": 1,
        "top_k": model.top_k,
        "max_positions": model.max_positions or max_model_len or 0,
        "attention_heads": model.attention_heads,
        "request_groups": [],
    }


def compute(request: Request) -> dict[str, Any]:
    """The raw plan of a resolved request, as `_core.plan_capacity` returns it.

    Raises:
        ConfigError: an input is out of its bounds.
        CapacityError: the machine is too small for an input.
    """
    from hotpage import _core

    return _core.plan_capacity(
        **model_arguments(request.model, request.kv_dtype, request.max_model_len),
        hbm_gib=request.hbm_gib,
        gpu_memory_utilization=request.gpu_memory_utilization,
        weights_gib=request.weights_gib,
        runtime_gib=request.runtime_gib,
        kv_gib=request.kv_gib,
        gpus=request.gpus,
        tp=request.tp,
        dp=request.dp,
        block_size=request.block_size,
        hot_rows=request.hot_rows,
        mtp=request.mtp,
        host_pool_gib=request.host_pool_gib,
        offload_gib=request.offload_gib,
        registration_gib=request.registration_gib,
        contexts=list(request.contexts),
        output=request.output,
        max_model_len=request.max_model_len,
        batched_tokens=request.batched_tokens,
        max_num_seqs=request.max_num_seqs,
        hit_rate=request.hit_rate,
        link_gbps=request.link_gbps,
        layout=request.layout,
    )


_POINT_KEYS = (
    "context",
    "ordinary",
    "hotpage",
    "offload",
    "binds",
    "bytes_per_request",
    "min_host_pool_gib",
    "pcie_ms_per_step",
)


def answer(request: Request) -> dict[str, Any]:
    """The plan as `hotpage plan --json` prints it.

    Keys: `inputs` (resolved, with sources), `model` (geometry and packing), `points` (one for each
    context; requests over all replicas, bytes of one request, GiB of one replica's host pool,
    milliseconds of one GPU's link), `crossover_context` (tokens, or None) and `notes` (sentences).

    Raises:
        ConfigError: an input is missing or out of its bounds.
        CapacityError: the machine is too small for an input.
    """
    request = resolve(request)
    return shape(request, compute(request))


def shape(request: Request, plan: dict[str, Any]) -> dict[str, Any]:
    """The printed form of a resolved request and its raw plan."""
    return {
        "inputs": _inputs(request, plan),
        "model": _model(request.model, plan["packing"]),
        "points": [{key: point[key] for key in _POINT_KEYS} for point in plan["points"]],
        "crossover_context": plan["crossover_context"],
        "notes": notes(request),
    }


def notes(request: Request) -> list[str]:
    """What `engine: native` of the vLLM adapter does not serve of the plan; empty if nothing."""
    limits = (
        (request.tp > 1, f"tp {request.tp}", "one GPU an engine"),
        (request.block_size != 64, f"blocks of {request.block_size} tokens", "blocks of 64"),
    )
    asked = [what for beyond, what, _ in limits if beyond]
    takes = [bound for beyond, _, bound in limits if beyond]
    if not asked:
        return []
    return [
        f"engine: native does not serve {' and '.join(asked)} yet: it takes {' and '.join(takes)}."
    ]


def _inputs(request: Request, plan: dict[str, Any]) -> dict[str, Any]:
    gpu = request.gpu
    return {
        "model": request.model.name,
        "gpu": gpu.name if gpu else None,
        "gpus": request.tp * request.dp,
        "tp": request.tp,
        "dp": request.dp,
        "hbm_gib": request.hbm_gib,
        "gpu_memory_utilization": request.gpu_memory_utilization,
        "weights_gib": request.weights_gib,
        "runtime_gib": request.runtime_gib,
        "kv_gib": request.kv_gib,
        "kv_dtype": request.kv_dtype,
        "block_size": request.block_size,
        "hot_rows": plan["packing"]["hot_rows"],
        "mtp": request.mtp,
        "host_pool_gib": request.host_pool_gib,
        "host_blocks": plan["host_blocks"],
        "host_physical_gib": plan["host_physical_gib"],
        "host_registrations": plan["host_registrations"],
        "registration_gib": request.registration_gib,
        "offload_gib": request.offload_gib,
        "contexts": list(request.contexts),
        "output": request.output,
        "max_model_len": request.max_model_len,
        "max_num_batched_tokens": request.batched_tokens,
        "max_num_seqs": request.max_num_seqs,
        "hit_rate": plan["hit_rate"],
        "layout": request.layout,
        "link_gbps": request.link_gbps,
        "sources": _sources(request),
    }


def _sources(request: Request) -> dict[str, str]:
    gpu, model = request.gpu, request.model
    given = "given"
    sources = {"model": model.source}
    if request.kv_gib is not None:
        sources["kv_gib"] = given
    else:
        from_gpu = gpu is not None and request.hbm_gib == gpu.memory_gib
        sources["hbm_gib"] = gpu.memory_source if gpu and from_gpu else given
        from_model = request.weights_gib == model.weights_gib
        sources["weights_gib"] = model.weights_source if from_model else given
        default = request.runtime_gib == RUNTIME_GIB
        sources["runtime_gib"] = "vLLM's published HiSparse calculator" if default else given
    if request.link_gbps is not None:
        from_gpu = gpu is not None and request.link_gbps == gpu.link_gbps
        sources["link_gbps"] = f"{gpu.link}: {gpu.link_source}" if gpu and from_gpu else given
        sources["pcie_ms_per_step"] = (
            "row copies measured on one H200 over PCIe 5.0 x16; other links get the same share of "
            "their rate"
        )
    if request.hit_rate is None:
        sources["hit_rate"] = "published for GLM-5.1 at top-k 2,048, LRU, by hot rows over top-k"
    else:
        sources["hit_rate"] = given
    return sources


def _model(model: Model, packing: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": model.name,
        "source": model.source,
        "secondary_source": model.secondary,
        "top_k": model.top_k,
        "max_positions": model.max_positions,
        "layers": packing["num_layers"],
        "indexer_layers": packing["num_leaders"],
        "kv_cache_groups": packing["num_kv_cache_groups"],
        "resident_groups": packing["num_groups"],
        "index_groups": packing["groups"],
        "tokens_per_block": packing["block_size"],
        "layer_page_bytes": packing["layer_page_bytes"],
        "indexer_page_bytes": packing["indexer_page_bytes"],
        "bytes_per_block": packing["block_bytes"],
        "ordinary_bytes_per_block": packing["ordinary_block_bytes"],
        "host_page_bytes": packing["host_page_bytes"],
        "hot_blocks_per_request": packing["hot_blocks_per_request"],
    }
