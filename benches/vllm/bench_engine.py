# SPDX-License-Identifier: Apache-2.0
"""Owns the time of decode steps in a real engine: ours and vLLM's HiSparse, one after the other.

    python benches/vllm/bench_engine.py --json FILE [--model glm-5.2] [--requests 8]

Needs vLLM 0.33 and a Hopper GPU. Every engine serves the same requests in eager mode: first with a
pool that holds all contexts, then with one that holds the tails and hot regions and little more, so
that most attended rows come from the host pool. A step is timed from the call of the engine to its
return, the device idle at both ends; steps that prefill are left out. Each line of FILE is
`{engine, model, requests, context, gpu_blocks, steps, step_ms, step_ms_p90, hot_misses_a_step,
running, answer_tokens_s}`: median and 90th percentile in ms of the steps in which as many requests
decoded as ever, how many those were, and the answers' tokens over the time of all steps, those that
prefill counted.
"""

from __future__ import annotations

import argparse
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

from engine.counters import hot_counts
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
    timed: list[tuple[int, float, int]] = []
    seconds = 0.0
    try:
        while llm.has_unfinished_requests():
            scheduled.clear()
            misses = hot_counts(engine)[1]
            torch.cuda.synchronize()
            began = time.perf_counter()
            llm.step()
            torch.cuda.synchronize()
            taken = time.perf_counter() - began
            seconds += taken
            counts = [n for output in scheduled for n in output.num_scheduled_tokens.values()]
            if counts and max(counts) == 1:
                timed.append((len(counts), taken * 1e3, hot_counts(engine)[1] - misses))
    finally:
        del engine.scheduler.schedule
    most = max(count for count, _, _ in timed)
    chosen = [line for line in timed if line[0] == most][WARM_UP:]
    times = sorted(taken for _, taken, _ in chosen)
    if not times:
        raise SystemExit("answers end before all prompts are read: use more --steps")
    return {
        "steps": len(times),
        "step_ms": round(statistics.median(times), 2),
        "step_ms_p90": round(times[int(0.9 * (len(times) - 1))], 2),
        "hot_misses_a_step": round(statistics.mean(missed for _, _, missed in chosen)),
        "running": most,
        "answer_tokens_s": round(requests * steps / seconds, 1),
    }


def main() -> None:
    """Runs both engines with both pools and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the results, one a line")
    parser.add_argument("--model", choices=tuple(MODELS), default="glm-5.2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=16_000, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--small", type=int, default=3600, help="GPU blocks of the small pool")
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
                    hot_rows=4096,
                    max_model_len=arguments.context + arguments.steps + BLOCK,
                    max_num_seqs=arguments.requests,
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
                    **found,
                }
                lines.append(line)
                print(line, flush=True)
                arguments.json.write_text("".join(json.dumps(one) + "\n" for one in lines))


if __name__ == "__main__":
    main()
