# SPDX-License-Identifier: Apache-2.0
"""Owns the time of decode steps in a real engine: ours and vLLM's HiSparse, one after the other.

    python benches/vllm/bench_engine.py --json FILE [--model deepseek-v3.2] [--requests 8]

Needs vLLM 0.33 and a Hopper GPU. Every engine serves the same requests as vLLM does by default,
with CUDA graphs and a scheduler that runs ahead (`--eager`: without graphs): first with a pool that
holds all contexts, then with one that holds the tails and hot regions and little more, so that most
attended rows come from the host pool. Timed are the steps in which as many requests decode as ever
and none prefills, from the end of one step to the end of the next, and nothing waits for the device
in between but what vLLM waits for. Each line of FILE is `{engine, model, requests, context,
gpu_blocks, mtp, graphs, running, steps, step_ms, step_ms_p90, hot_misses_a_step, answer_tokens_s}`:
how many those requests and steps were, median and 90th percentile in ms, rows copied from the host
pool for attention (all layers of an index group count once), and the answers' tokens over the time
of all steps, those that prefill counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

from engine.launch import BLOCK, Engine, EngineSpec, require_gpu, set_environment
from engine.models import MODELS, VOCABULARY, write_model

WARM_UP = 8


def measure(engine: Engine, requests: int, context: int, steps: int) -> dict[str, Any]:
    """Serves the requests and times the steps in which as many as ever decode, and nothing else."""
    import torch

    from vllm import SamplingParams

    draw = random.Random(5)
    llm = engine.llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
    for at in range(requests):
        tokens = [draw.randrange(2, VOCABULARY) for _ in range(context)]
        llm.add_request(f"r{at}", {"prompt_token_ids": tokens}, sampling)
    scheduled: list[Any] = []
    schedule = engine.scheduler.schedule

    def noting(*arguments: Any, **more: Any) -> Any:
        output = schedule(*arguments, **more)
        scheduled.append(output)
        return output

    engine.scheduler.schedule = noting
    ends: list[tuple[int, float]] = []
    """Of each step: requests that decode, or none if one prefills, and when it ended."""
    spans: list[tuple[int, int, torch.Tensor]] = []
    """Of steps of as many requests: the requests, the first step, misses until its end."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        while llm.has_unfinished_requests():
            scheduled.clear()
            llm.step()
            counts = [n for output in scheduled for n in output.num_scheduled_tokens.values()]
            decodes = bool(counts) and max(counts) <= 1 + engine.spec.mtp
            running = len(counts) if decodes else 0
            if not ends or ends[-1][0] != running:
                spans.append((running, len(ends), _misses(engine)))
            ends.append((running, time.perf_counter()))
    finally:
        del engine.scheduler.schedule
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    spans.append((0, len(ends), _misses(engine)))
    most = max(count for count, _ in ends)
    chosen = [at for at in range(1, len(ends)) if most == ends[at][0] == ends[at - 1][0]][WARM_UP:]
    if not chosen:
        raise SystemExit("answers end before all prompts are read: use more --steps")
    times = sorted(1e3 * (ends[at][1] - ends[at - 1][1]) for at in chosen)
    within = [(one, after) for one, after in itertools.pairwise(spans) if one[0] == most]
    missed = sum(int(after[2]) - int(one[2]) for one, after in within)
    return {
        "running": most,
        "steps": len(times),
        "step_ms": round(statistics.median(times), 2),
        "step_ms_p90": round(times[int(0.9 * (len(times) - 1))], 2),
        "hot_misses_a_step": round(missed / sum(after[1] - one[1] for one, after in within)),
        "answer_tokens_s": round(requests * steps / seconds, 1),
    }


def _misses(engine: Engine) -> Any:
    """Misses so far in hot regions, on the device and without waiting for it."""
    import torch

    if engine.spec.engine == "native":
        counts = [state.counters[1] for state in engine.worker.states]
    else:
        counts = [group.hisparse_group.swap_stats.view(torch.int64)[1] for group in engine.groups]
    return torch.stack(counts).sum()


def main() -> None:
    """Runs both engines with both pools and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the results, one a line")
    parser.add_argument("--model", choices=tuple(MODELS), default="deepseek-v3.2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=16_000, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--small", type=int, default=7000, help="GPU blocks of the small pool")
    parser.add_argument("--mtp", type=int, default=0, help="draft tokens")
    parser.add_argument("--hot-rows", type=int, default=4096)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--host-pool-gib", type=float, default=4.0)
    arguments = parser.parse_args()
    require_gpu()
    # The engine as it is served, not as the tests want it.
    os.environ.setdefault("VLLM_BATCH_INVARIANT", "0")
    set_environment()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(arguments.model, Path(folder) / arguments.model)
        ample = 3 * arguments.requests * (arguments.context // BLOCK + 64) * 5
        for name in ("native", "upstream"):
            for blocks in (ample, arguments.small):
                spec = EngineSpec(
                    model,
                    name,
                    blocks,
                    host_pool_gib=arguments.host_pool_gib,
                    hot_rows=arguments.hot_rows,
                    max_model_len=arguments.context + arguments.steps + BLOCK,
                    max_num_seqs=arguments.requests,
                    mtp=arguments.mtp,
                    graphs=not arguments.eager,
                    async_scheduling=True,
                )
                engine = Engine(spec)
                found = measure(engine, arguments.requests, arguments.context, arguments.steps)
                engine.close()
                line = {
                    "engine": name,
                    "model": arguments.model,
                    "requests": arguments.requests,
                    "context": arguments.context,
                    "gpu_blocks": blocks,
                    "mtp": arguments.mtp,
                    "graphs": not arguments.eager,
                    **found,
                }
                lines.append(line)
                print(line, flush=True)
                arguments.json.write_text("".join(json.dumps(one) + "\n" for one in lines))


if __name__ == "__main__":
    main()
