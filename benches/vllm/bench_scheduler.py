# SPDX-License-Identifier: Apache-2.0
"""Owns the comparison of scheduler-side cost: vLLM's coordinator and ours, in one process.

    python benches/vllm/bench_scheduler.py --json FILE [--quick]

Both sides run through `KVCacheManager` and `build_connector_meta`, the pickling of the metadata
included. Needs an environment with vLLM; no GPU. Each line of FILE is
`{case, groups, mtp, vllm_ms, hotpage_ms, floor_ms, ratio}`: medians in ms of this thread's CPU
time, so that other work on the machine counts little; `floor_ms` is what vLLM's own pool methods
take for the same blocks, page by page from the first one, measured on vLLM's side, or 0 in cases
that have no such floor; `ratio` is vllm_ms / hotpage_ms. The cases `unpin_alone_*` are that method
alone on each side's blocks in the order in which the side's finish released them: the time of a
finish that did nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

from sides import (
    HOTPAGE,
    VLLM,
    Shape,
    Side,
    make_request,
    make_side,
    pickled,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

BLOCK = 64
K = 1024
CHUNK = 8 * K
WARM_UP = 5

_now = time.thread_time


def main() -> None:
    """Runs every case and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the results, one a line")
    parser.add_argument("--quick", action="store_true", help="few requests and short contexts")
    arguments = parser.parse_args()
    scale = 8 if arguments.quick else 1
    lines = []
    for groups in (6, 21):
        for mtp in (0, 3):
            lines += decode(groups, mtp, 256 // scale, 128 * K // scale, steps=60)
    for groups in (6, 21):
        for tokens in (128 * K, 512 * K):
            lines += one_off(groups, tokens // scale)
        lines += prefill(groups, K * K // scale)
    arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        floor = f"{line['floor_ms']:7.3f} ms" if line["floor_ms"] else f"{'-':>10}"
        print(
            f"{line['case']:34} G={line['groups']:<3} mtp={line['mtp']} "
            f"vllm {line['vllm_ms']:9.3f} ms  hotpage {line['hotpage_ms']:8.3f} ms  "
            f"floor {floor}  {line['ratio']:6.1f}x"
        )


def decode(groups: int, mtp: int, num_requests: int, tokens: int, steps: int) -> list[dict]:
    """Steady decode with host-backed history: the step, and vLLM's allocation loop."""
    times: dict[tuple[str, str], list[float]] = {}
    for name, fast_path in ((VLLM, False), (HOTPAGE, True)):
        side = _loaded(name, groups, mtp, num_requests, tokens, fast_path)
        with _quiet_gc():
            for part, spent in _decode_steps(side, mtp, steps):
                times.setdefault((name, part), []).append(spent)
        del side
        gc.unfreeze()
        gc.collect()
    label = f"{num_requests}x{tokens // K}k"
    return [
        _line(
            f"{part}_{label}",
            groups,
            mtp,
            statistics.median(times[VLLM, part]),
            statistics.median(times[HOTPAGE, part]),
        )
        for part in ("decode_step", "allocate_loop")
    ]


def _loaded(
    name: str, groups: int, mtp: int, num_requests: int, tokens: int, fast_path: bool
) -> Side:
    hot_blocks = 160 if mtp else 64
    pages = tokens // BLOCK + 8
    shape = Shape(
        num_groups=groups,
        block_size=BLOCK,
        hot_blocks=hot_blocks,
        num_blocks=num_requests * (pages + groups * (hot_blocks + 6)) + 2000,
        host_blocks=num_requests * (pages + 2) + 100,
        max_model_len=tokens + K,
        max_in_flight_tokens=2 * CHUNK,
        num_speculative_tokens=mtp,
    )
    side = make_side(name, shape, fast_path=fast_path)
    for index in range(num_requests):
        # Page boundaries are spread over the steps.
        length = tokens - 37 * (index % 64) - 1
        request = make_request(f"request-{index:04}", [1] * length, BLOCK, cheap_hashes=True)
        computed = length - 1
        external = {"num_external_computed_tokens": computed, "delay_cache_blocks": True}
        assert side.manager.allocate_slots(request, 0, **external) is not None
        request.num_computed_tokens = computed
        side.admit(request)
        side.report((), (), finished_recving={request.request_id})
        side.manager.cache_blocks(request, computed)
    # The restores of the imported tails.
    ids = side.transfers(side.plan([]))
    side.report(ids, ids)
    return side


def _decode_steps(side: Side, mtp: int, steps: int) -> Iterator[tuple[str, float]]:
    requests = list(side.requests.values())
    rows = 1 + mtp
    last: list[int] = []
    for step in range(WARM_UP + steps):
        started = _now()
        new_blocks = []
        for request in requests:
            blocks = side.manager.allocate_slots(request, rows, num_lookahead_tokens=mtp)
            assert blocks is not None
            new_blocks.append(blocks.get_block_ids(allow_none=True))
        allocated = _now()
        for request in requests:
            request.num_output_placeholders = rows if mtp else 0
        drafts = {r.request_id: [1] * mtp for r in requests} if mtp else {}
        batch = [(request.request_id, rows) for request in requests]
        before = _now()
        metadata = side.plan(batch, drafts, new_blocks)
        pickled(metadata)
        planned = _now()
        for request in requests:
            request.num_computed_tokens += rows
            request.append_output_token_ids([1] * rows)
        ids = side.transfers(metadata)
        reported = _now()
        side.report(ids, last)
        done = _now()
        last = ids
        if step >= WARM_UP:
            yield "decode_step", (planned - before) + (done - reported)
            yield "allocate_loop", allocated - started


def one_off(groups: int, tokens: int) -> list[dict]:
    """Finish of a resident request, and a prefix hit on what it leaves."""
    times: dict[tuple[str, str], list[float]] = {}
    floors: dict[str, list[float]] = {}
    for name in (VLLM, HOTPAGE):
        side = make_side(name, _resident_shape(groups, tokens))
        with _quiet_gc():
            for at in range(3):
                request = make_request(f"donor-{at}", [at, *[1] * (tokens - 1)], BLOCK)
                for _ in _prefill(side, request):
                    pass
                if name == VLLM:
                    for method, spent in _pool_floor(side, request):
                        floors.setdefault(method, []).append(spent)
                request.status = RequestStatus.FINISHED_STOPPED
                resident = _resident_blocks(side, request)
                _flush_caches()
                with _pool_time() as pool:
                    started = _now()
                    side.manager.free(request)
                    total = _now() - started
                times.setdefault((name, "unpin_alone"), []).append(_unpin_again(side, resident))
                times.setdefault((name, "finish"), []).append(total)
                times.setdefault((name, "finish_outside_pool"), []).append(total - pool[0])
                del side.requests[request.request_id]
                total, outside = _prefix_hit(side, f"hit-{at}", request.prompt_token_ids)
                times.setdefault((name, "prefix_hit"), []).append(total)
                times.setdefault((name, "prefix_hit_outside_pool"), []).append(outside)
        del side
        gc.unfreeze()
        gc.collect()
    floor = {method: statistics.median(spent) for method, spent in floors.items()}
    label = f"{tokens // K}k"
    return [
        _line(
            f"{part}_{label}",
            groups,
            0,
            statistics.median(times[VLLM, part]),
            statistics.median(times[HOTPAGE, part]),
            floor[method] if method else 0.0,
        )
        for part, method in (
            ("finish", "unpin_blocks"),
            ("unpin_alone", "unpin_blocks"),
            ("finish_outside_pool", None),
            ("prefix_hit", "touch"),
            ("prefix_hit_outside_pool", None),
        )
    ]


def prefill(groups: int, tokens: int) -> list[dict]:
    """One request in 8K-token chunks to `tokens`: time of a chunk, allocation included."""
    times = {}
    for name, fast_path in ((VLLM, False), (HOTPAGE, True)):
        side = make_side(name, _prefill_shape(groups, tokens), fast_path=fast_path)
        request = make_request("prefill", [1] * tokens, BLOCK)
        with _quiet_gc():
            times[name] = list(_prefill(side, request))
        gc.unfreeze()
    label = f"prefill_chunk_to_{tokens // K}k"
    return [
        _line(label, groups, 0, statistics.median(times[VLLM]), statistics.median(times[HOTPAGE]))
    ]


def _resident_shape(groups: int, tokens: int) -> Shape:
    """Pools so large that a request of `tokens` tokens stays resident on both sides."""
    pages = tokens // BLOCK + 24
    return Shape(
        num_groups=groups,
        block_size=BLOCK,
        hot_blocks=64,
        num_blocks=5 * pages * (groups + 1) // 2 + 64 * groups + 1000,
        host_blocks=2 * pages + 200,
        max_model_len=tokens + K,
        max_in_flight_tokens=tokens + K,
    )


def _prefill_shape(groups: int, tokens: int) -> Shape:
    """A GPU pool of few chunks, so that a long prefill moves to the host as it goes."""
    pages = tokens // BLOCK + 8
    return Shape(
        num_groups=groups,
        block_size=BLOCK,
        hot_blocks=64,
        num_blocks=2 * pages + groups * (2 * 64 + 4 * CHUNK // BLOCK) + 500,
        host_blocks=2 * pages + 200,
        max_model_len=tokens + K,
        max_in_flight_tokens=2 * CHUNK,
    )


def _prefill(side: Side, request: Any) -> Iterator[float]:
    side.admit(request)
    last: list[int] = []
    tokens = request.num_tokens
    while request.num_computed_tokens < tokens:
        count = min(CHUNK, tokens - request.num_computed_tokens)
        started = _now()
        blocks = side.manager.allocate_slots(request, count)
        if blocks is None:
            raise RuntimeError(f"{side.name}: no room at token {request.num_computed_tokens}")
        metadata = side.plan(
            [(request.request_id, count)],
            new_blocks=[blocks.get_block_ids(allow_none=True)],
        )
        pickled(metadata)
        planned = _now()
        request.num_computed_tokens += count
        ids = side.transfers(metadata)
        reported = _now()
        side.report(ids, last)
        yield (planned - started) + (_now() - reported)
        last = ids
    side.report((), last)


def _prefix_hit(side: Side, name: str, tokens: list[int]) -> tuple[float, float]:
    request = make_request(name, list(tokens), BLOCK)
    side.admit(request)
    _flush_caches()
    with _pool_time() as pool:
        blocks, num_computed, _ = side.manager.get_computed_blocks(request)
        count = request.num_tokens - num_computed
        looked_up = _now()
        assert num_computed == (len(tokens) - 1) // BLOCK * BLOCK
        pool[0] = 0.0
        new = side.manager.allocate_slots(
            request, count, num_new_computed_tokens=num_computed, new_computed_blocks=blocks
        )
        assert new is not None
        request.num_computed_tokens = num_computed
        metadata = side.plan([(name, count)], new_blocks=[new.get_block_ids(allow_none=True)])
        pickled(metadata)
        total = _now() - looked_up
    ids = side.transfers(metadata)
    side.report(ids, ids)
    request.status = RequestStatus.FINISHED_STOPPED
    side.manager.free(request)
    del side.requests[name]
    return total, total - pool[0]


def _pool_floor(side: Side, request: Any) -> Iterator[tuple[str, float]]:
    """Unpinning and touching all resident blocks of a request once, page by page as both sides
    do, with nothing of them in the CPU's caches; leaves the pool as it was."""
    pool = side.manager.block_pool
    blocks = _resident_blocks(side, request)
    _flush_caches()
    started = _now()
    pool.unpin_blocks(blocks, lambda block: None)
    yield "unpin_blocks", _now() - started
    _flush_caches()
    started = _now()
    pool.touch(blocks)
    yield "touch", _now() - started


def _resident_blocks(side: Side, request: Any) -> list[Any]:
    """Blocks of a request, page by page."""
    tables = [m.req_to_blocks[request.request_id] for m in side.coordinator.resident_managers]
    return [block for page in zip(*tables, strict=True) for block in page]


def _unpin_again(side: Side, blocks: list[Any]) -> float:
    """Touches the blocks of a request that has left and times their release in the order in which
    they went; leaves the pool as it was."""
    pool = side.manager.block_pool
    members = {block.block_id for block in blocks}
    released: list[Any] = []
    block = pool.free_block_queue.fake_free_list_tail.prev_free_block
    while len(released) < len(members):
        if block.block_id in members:
            released.append(block)
        block = block.prev_free_block
    released.reverse()
    pool.touch(released)
    for block_id in members:
        watcher = pool._reuse_watchers.pop(block_id)
    _flush_caches()
    started = _now()
    pool.unpin_blocks(released, watcher)
    return _now() - started


def _flush_caches() -> None:
    np.ones(1 << 24).sum()


@contextmanager
def _pool_time() -> Iterator[list[float]]:
    """Seconds spent in the pool methods that move whole pages, while the context lasts."""
    spent, depth = [0.0], [0]
    names = ("touch", "free_blocks", "unpin_blocks", "get_new_blocks")
    originals = {name: getattr(BlockPool, name) for name in names}

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            depth[0] += 1
            started = _now()
            try:
                return method(*arguments)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += _now() - started

        return call

    for name, method in originals.items():
        setattr(BlockPool, name, timed(method))
    try:
        yield spent
    finally:
        for name, method in originals.items():
            setattr(BlockPool, name, method)


@contextmanager
def _quiet_gc() -> Iterator[None]:
    """vLLM freezes what it has built before it serves; so do both sides here."""
    gc.collect()
    gc.freeze()
    yield


def _line(
    case: str, groups: int, mtp: int, vllm: float, hotpage: float, floor: float = 0.0
) -> dict[str, Any]:
    return {
        "case": case,
        "groups": groups,
        "mtp": mtp,
        "vllm_ms": round(1e3 * vllm, 4),
        "hotpage_ms": round(1e3 * hotpage, 4),
        "floor_ms": round(1e3 * floor, 4),
        "ratio": round(vllm / hotpage, 2),
    }


if __name__ == "__main__":
    main()
