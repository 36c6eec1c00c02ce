# SPDX-License-Identifier: Apache-2.0
"""Owns a simulation request: the planner's machine, a workload, and the settings of each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hotpage.errors import CapacityError, ConfigError
from hotpage.plan.request import Request, compute, model_arguments, resolve
from hotpage.simulate import constants
from hotpage.simulate.constants import Constant

if TYPE_CHECKING:
    from hotpage._core import Simulation

POLICIES = ("hotpage", "preempt", "offload")

HOT_RETURN_STEPS = 512
"""Default of the adapter's option of that name."""

IN_FLIGHT_BATCHES = 2
"""Batches that vLLM 0.33 has under way at once with asynchronous scheduling."""

# Steps between two looks at the keyboard and the progress bar.
_STEPS_PER_CALL = 256

Turns = tuple[tuple[int, int], ...]
"""`(prompt_tokens, output_tokens)` of each turn of a conversation."""


@dataclass(frozen=True)
class Simulated:
    """Everything that `hotpage simulate` can be told; None where a default applies."""

    machine: Request
    conversations: tuple[Turns, ...]
    concurrency: tuple[int, ...]
    policies: tuple[str, ...] = POLICIES
    num_conversations: int | None = None
    acceptance: float = 0.7
    cooperative: bool = False
    hbm_gbps: float | None = None
    prefill_tflops: float | None = None
    params_b: float | None = None
    active_params_b: float | None = None
    expert_share: float | None = None
    expert_parallel: bool = False
    overhead_ms: float = 0.0
    seed: int = 1


def tokens(turns: Turns) -> int:
    """Tokens of a whole conversation."""
    return sum(prompt + output for prompt, output in turns)


def _at_least(flag: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigError(f"{flag} is {value}, expected at least {least}; raise it")


def check(asked: Simulated) -> None:
    """Checks what neither the planner nor the core checks.

    Raises:
        ConfigError: a setting is out of its bounds.
    """
    dp = asked.machine.dp
    for users in asked.concurrency:
        _at_least("--concurrency", users, 1)
        if dp > 0 and users % dp:
            raise ConfigError(
                f"--concurrency is {users}, expected a multiple of {dp} (dp), since replicas share "
                "users evenly; change one of them"
            )
    if asked.num_conversations is not None:
        _at_least("--conversations", asked.num_conversations, 1)
    for turns in asked.conversations:
        for prompt, output in turns:
            _at_least("prompt tokens of a turn", prompt, 1)
            _at_least("output tokens of a turn", output, 1)
    if not 0 <= asked.acceptance <= 1:
        raise ConfigError(f"--acceptance is {asked.acceptance:g}, expected 0 to 1; give a chance")
    if asked.cooperative and asked.machine.tp < 2:
        raise ConfigError("--cooperative is given, expected --tp of 2 or more; drop one of them")
    if asked.expert_parallel and dp < 2:
        raise ConfigError(
            "--expert-parallel is given, expected --dp of 2 or more; drop one of them"
        )
    if not 0 <= asked.seed < 2**64:
        raise ConfigError(f"--seed is {asked.seed}, expected 0 to 2^64-1; choose one")
    if not (math.isfinite(asked.overhead_ms) and asked.overhead_ms >= 0):
        raise ConfigError(f"--overhead-ms is {asked.overhead_ms:g}, expected 0 or more; raise it")
    for flag, value in (
        ("--hbm-gbps", asked.hbm_gbps),
        ("--prefill-tflops", asked.prefill_tflops),
        ("--params-b", asked.params_b),
        ("--active-params-b", asked.active_params_b),
        ("--expert-share", asked.expert_share),
    ):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{flag} is {value:g}, expected a number above 0; raise it")


def resolve_machine(asked: Simulated) -> Request:
    """The planner's request with every default filled in, for the longest conversation.

    A host pool that was not given holds a conversation of the longest length for every user.

    Raises:
        ConfigError: something is missing that has neither a default nor a source.
    """
    longest = max(tokens(turns) for turns in asked.conversations)
    machine = asked.machine
    if machine.max_model_len is None and machine.model.max_positions is not None:
        _fits(longest, machine.model.max_positions, f"positions of {machine.model.name}")
    if machine.max_model_len is not None:
        _fits(longest, machine.max_model_len, "--max-model-len")
    # One block at least: the planner wants no shorter context.
    context = max(longest, machine.block_size)
    machine = resolve(replace(machine, contexts=(context,), output=0))
    if machine.link_gbps is None:
        raise ConfigError("the host link is not known; give --link-gbps (one direction)")
    if machine.weights_gib is None:
        raise ConfigError(
            "the size of the weights is not known, and a step reads them; give --weights-gib (one "
            "replica)"
        )
    return machine


def _fits(longest: int, limit: int, of: str) -> None:
    if longest > limit:
        raise ConfigError(
            f"the longest conversation has {longest} tokens, expected at most {limit} ({of}); "
            "shorten it"
        )


def _weights(asked: Simulated, machine: Request) -> tuple[dict[str, Constant], dict[str, float]]:
    """What is printed of the weights, and what the core is told: bytes and parameters."""
    model = machine.model
    params_b = asked.params_b or model.params_b
    active_b = asked.active_params_b or model.active_params_b
    if params_b is None or active_b is None:
        missing = "--params-b" if params_b is None else "--active-params-b"
        raise ConfigError(
            f"the parameters of {model.name} are not known; give {missing} (in units of 10^9)"
        )
    if active_b > params_b:
        raise ConfigError(
            f"--active-params-b is {active_b:g}, expected at most {params_b:g} (all); correct one"
        )
    share, source = asked.expert_share, "given"
    if share is None and model.experts and model.experts_per_token:
        share, source = model.experts_per_token / model.experts, model.params_source or model.source
    if share is None:
        share, source = 1.0, "experts are not known, so a step reads all weights; --expert-share"
    if share < 1 and share > active_b / params_b:
        raise ConfigError(
            f"--expert-share is {share:g}, expected at most {active_b / params_b:g} (active over "
            "all parameters); correct one"
        )
    if asked.expert_parallel and share >= 1:
        raise ConfigError(
            f"the experts of {model.name} are not known; give --expert-share beside "
            "--expert-parallel"
        )
    assert machine.weights_gib is not None
    weight_bytes = machine.weights_gib * 2**30
    of_params = "given" if asked.active_params_b else model.params_source
    shown = {
        "params_b": Constant(
            params_b, "x 10^9", "given" if asked.params_b else model.params_source
        ),
        "active_params_b": Constant(active_b, "x 10^9", of_params),
        "expert_share": Constant(min(share, 1.0), "", source),
    }
    return shown, {
        "weight_bytes": weight_bytes,
        "active_params": active_b * 1e9,
        "active_bytes": weight_bytes * active_b / params_b,
        "expert_share": min(share, 1.0),
    }


@dataclass(frozen=True)
class Prepared:
    """A resolved request, the planner's answer for the longest conversation, and the constants."""

    asked: Simulated
    machine: Request
    plan: dict[str, Any]
    constants: dict[str, Constant]
    host_pool_gib: float
    settings: dict[str, Any]
    """What the core is told in every run."""


def prepare(asked: Simulated) -> Prepared:
    """Fills in every default.

    Raises:
        ConfigError: an input is missing or out of its bounds.
        CapacityError: the machine is too small for the longest conversation.
    """
    check(asked)
    machine = resolve_machine(asked)
    assert machine.link_gbps is not None
    assert machine.batched_tokens is not None
    weights, told = _weights(asked, machine)
    step = constants.of_step(machine.mtp, asked.overhead_ms)
    rates = constants.of_gpu(machine.gpu, asked.hbm_gbps, asked.prefill_tflops)
    link = constants.of_link(machine.link_gbps, asked.cooperative)
    plan = compute(machine)
    told |= {name: one.value for name, one in (rates | link | step).items()}
    told |= {"ranks": machine.tp, "expert_replicas": machine.dp if asked.expert_parallel else 1}
    settings, copies, host_pool_gib = _sizes(asked, machine, plan)
    acceptance = Constant(asked.acceptance, "", "drafts right behind right ones; --acceptance")
    shown = weights | rates | copies | link | step
    if machine.mtp:
        shown["acceptance"] = acceptance
    return Prepared(asked, machine, plan, shown, host_pool_gib, told | settings)


def _sizes(
    asked: Simulated, machine: Request, plan: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Constant], float]:
    """Sizes for the core, rates of copies by layers of a group, and the host pool in GiB."""
    from hotpage import _core

    assert machine.batched_tokens is not None
    packing = plan["packing"]
    geometry = model_arguments(machine.model, machine.kv_dtype, machine.max_model_len)
    longest = max(tokens(turns) for turns in asked.conversations)
    stride = packing["host_block_stride_shared" if machine.tp > 1 else "host_page_bytes"]
    host_bytes = int((machine.host_pool_gib or 0) * 2**30)
    if machine.host_pool_gib is None:
        pages = -(-longest // packing["block_size"])
        users = max(asked.concurrency) // machine.dp
        # Dense offloading keeps the indexer's rows there, too.
        page_bytes = stride + packing["indexer_page_bytes"]
        host_bytes = (users * pages + 3) * page_bytes
    groups = [layers for group in packing["groups"] for layers in group]
    rates = {
        layers: _core.copy_gbps(machine.link_gbps, machine.layout, layers)
        for layers in sorted(set(groups))
    }
    source = f"misses of a group of so many layers, {machine.layout}, measured on one H200"
    shown = {
        f"copy_gbps_{layers}": Constant(rate, "GB/s", source) for layers, rate in rates.items()
    }
    settings = {
        "packing": packing["groups"],
        "block_size": packing["block_size"],
        "row_bytes": geometry["row_bytes"],
        "indexer_row_bytes": geometry["indexer_row_bytes"],
        "kv_bytes": plan["points"][0]["kv_bytes"],
        "block_bytes": packing["block_bytes"],
        "ordinary_block_bytes": packing["ordinary_block_bytes"],
        "host_pool_bytes": host_bytes,
        "host_block_bytes": stride,
        "indexer_page_bytes": packing["indexer_page_bytes"],
        "top_k": machine.model.top_k,
        "hot_rows": packing["hot_rows"],
        "num_draft_tokens": machine.mtp,
        "acceptance_ppm": round(asked.acceptance * 1e6),
        "step_tokens": machine.batched_tokens,
        "in_flight_tokens": IN_FLIGHT_BATCHES * machine.batched_tokens,
        "max_model_len": machine.max_model_len or longest,
        "hot_return_steps": HOT_RETURN_STEPS,
        "copy_gbps": [rates[layers] for layers in groups],
        "conversations": [list(turns) for turns in asked.conversations],
        "seed": asked.seed,
    }
    return settings, shown, host_bytes / 2**30


def run(
    prepared: Prepared, show: Callable[[str, float], None] = lambda name, fraction: None
) -> list[dict[str, Any]]:
    """One report for each policy and number of users, in their order.

    `show` is told the policy and the share of all runs that is done. A policy whose pool does not
    hold one conversation has `refused`, a sentence, in place of everything but `policy` and
    `concurrency`.

    Raises:
        ConfigError: a setting is out of the core's bounds.
        CapacityError: no policy can hold one conversation.
    """
    asked = prepared.asked
    points = [(policy, users) for policy in asked.policies for users in asked.concurrency]
    runs = []
    for at, (policy, users) in enumerate(points):
        head = {"policy": policy, "concurrency": users}
        try:
            report = _run_one(prepared, policy, users, _part(show, policy, at, len(points)))
        except CapacityError as error:
            runs.append(head | {"refused": str(error)})
            continue
        runs.append(head | _over_replicas(report, prepared.machine))
    if all("refused" in one for one in runs):
        raise CapacityError(str(runs[0]["refused"]))
    return runs


def _part(
    show: Callable[[str, float], None], policy: str, at: int, of: int
) -> Callable[[float], None]:
    return lambda fraction: show(policy, (at + fraction) / of)


def _run_one(
    prepared: Prepared, policy: str, users: int, show: Callable[[float], None]
) -> dict[str, Any]:
    from hotpage import _core

    machine, asked = prepared.machine, prepared.asked
    assert machine.max_num_seqs is not None
    of_replica = users // machine.dp
    wanted = asked.num_conversations or max(2 * users, len(asked.conversations))
    simulation: Simulation = _core.Simulation(
        policy=policy,
        num_users=of_replica,
        num_conversations=-(-wanted // machine.dp),
        max_running=min(machine.max_num_seqs, of_replica),
        **prepared.settings,
    )
    while not simulation.advance(_STEPS_PER_CALL):
        show(simulation.fraction)
    return dict(simulation.report())


# Counts of one replica that add up over all of them.
_ADD_UP = (
    "running_mean",
    "running_max",
    "conversations",
    "turns",
    "preemptions",
    "prefilled_tokens",
    "recomputed_tokens",
    "prefix_hit_tokens",
    "prompt_tokens",
    "output_tokens",
    "rejected_rows",
)


def _over_replicas(report: dict[str, Any], machine: Request) -> dict[str, Any]:
    """The report with counts over all replicas, which are alike, and rates of one GPU."""
    counts = {name: report[name] * machine.dp for name in _ADD_UP}
    rates = {
        "output_tokens_per_second_per_gpu": report["output_tokens_per_second"] / machine.tp,
        "tokens_per_second_per_gpu": report["tokens_per_second"] / machine.tp,
    }
    dropped = ("policy", "num_users", "output_tokens_per_second", "tokens_per_second")
    return {name: value for name, value in report.items() if name not in dropped} | counts | rates


def answer(
    asked: Simulated, show: Callable[[str, float], None] = lambda name, fraction: None
) -> dict[str, Any]:
    """The answer as `hotpage simulate --json` prints it.

    Keys: `inputs`, `constants` (value, unit and source by name), `plan` (what `hotpage plan` says
    of the longest conversation), `runs` (one for each policy and number of users; requests and
    tokens over all replicas, bytes and blocks of one replica's rank, seconds) and `notes`.

    Raises:
        ConfigError: an input is missing or out of its bounds.
        CapacityError: the machine is too small for one conversation.
    """
    prepared = prepare(asked)
    return shape(prepared, run(prepared, show))


def shape(prepared: Prepared, runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The printed form of runs."""
    asked, machine = prepared.asked, prepared.machine
    point = prepared.plan["points"][0]
    return {
        "inputs": {
            "model": machine.model.name,
            "gpu": machine.gpu.name if machine.gpu else None,
            "tp": machine.tp,
            "dp": machine.dp,
            "expert_parallel": asked.expert_parallel,
            "kv_dtype": machine.kv_dtype,
            "kv_gib": point["kv_bytes"] / 2**30,
            "hot_rows": prepared.plan["packing"]["hot_rows"],
            "mtp": machine.mtp,
            "host_pool_gib": prepared.host_pool_gib,
            "link_gbps": machine.link_gbps,
            "layout": machine.layout,
            "max_num_batched_tokens": machine.batched_tokens,
            "max_num_seqs": machine.max_num_seqs,
            "longest_conversation": max(tokens(turns) for turns in asked.conversations),
            "concurrency": list(asked.concurrency),
            "policies": list(asked.policies),
            "seed": asked.seed,
        },
        "constants": {
            name: {"value": one.value, "unit": one.unit, "source": one.source}
            for name, one in prepared.constants.items()
        },
        "plan": {name: point[name] for name in ("context", "ordinary", "hotpage")}
        | {"hit_rate": prepared.plan["hit_rate"]},
        "runs": list(runs),
        "notes": notes(prepared),
    }


def notes(prepared: Prepared) -> list[str]:
    """What a reader must know of the model behind the numbers."""
    from hotpage.plan.request import notes as unserved

    lines = [
        "This is a model and no forecast: weights, rows and arithmetic at the rates below, and "
        "nothing for what has no constant there. Users answer at once; all begin together.",
        "Misses follow the published curve of GLM-5.1 at top-k 2,048 (LRU), which ends at 4 x "
        "top-k; nothing hides their copies or the staging of contexts for prefill.",
        "Restores of dense offloading and copies to the host run beside the pass, and no CPU time "
        "of offloading is counted: both in its favour.",
    ]
    if prepared.asked.overhead_ms == 0:
        lines.append(
            "A step has no fixed cost: what launches, collectives and sampling take is not "
            "measured. Short steps of few requests gain most by that, so give --overhead-ms."
        )
    if prepared.asked.expert_parallel:
        lines.append("Replicas share the experts and step together, each with the same batch.")
    if prepared.machine.mtp:
        lines.append("Drafting takes no time here, only the rows that verify drafts do.")
    if prepared.asked.cooperative and prepared.machine.tp > 2:
        lines.append("Ranks that fetch for each other were measured on two GPUs, not on more.")
    return lines + unserved(prepared.machine)
