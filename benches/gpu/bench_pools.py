# SPDX-License-Identifier: Apache-2.0
"""Times mirror_rows, spill_pages, restore_pages, stage_prefill and invalidate, beside their roofs.

    python benches/gpu/bench_pools.py [--pool-gb 20] [--only mirror,pages,decode,invalidate,stage]

Every timed launch reads rows that no earlier launch read; results are compared before they are
timed. vLLM's ops run on inputs of the same kind, each set used once, where vLLM is installed or
its op library and its Python sources are named.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from timing import median_us, memcpy_gbps
from vllm_methods import VllmInvalidation, find_sources

from hotpage.kernels.copy_pages import PageList, RestorePages, SpillPages
from hotpage.kernels.invalidate import Holders, Invalidate
from hotpage.kernels.layer_table import LayerTable, PoolLayer
from hotpage.kernels.mirror_rows import MirrorMask, MirrorRows, SlotMappings
from hotpage.kernels.resolve_and_copy import RowState
from hotpage.kernels.stage_prefill import BF16_ROW_WIDTH, StageInputs, StagePrefill
from hotpage.memory import HostPool, PoolLayout

DEVICE = "cuda"
BLOCK_SIZE = 64
ROW_BYTES = 656
# A GLM-5.2-like model: layers of each index group, one index group a KV cache group.
GLM = (1, 1, *([4] * 19), 1)

Cell = tuple[str, str, str]


def stream() -> int:
    """Address of torch's current stream."""
    return torch.cuda.current_stream().cuda_stream


def once_us(run: Callable[[], None]) -> float:
    """Microseconds of one call, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000


class Model:
    """Layers of a model over the front of the host pool and a GPU pool of some pages a group."""

    def __init__(
        self, pool: torch.Tensor, groups: Sequence[int], interleaved: bool, num_pages: int
    ) -> None:
        block_bytes = sum(groups) * BLOCK_SIZE * ROW_BYTES
        self.host_blocks = pool.numel() // block_bytes
        self.layout = PoolLayout(
            tuple(groups), BLOCK_SIZE, ROW_BYTES, self.host_blocks, row_interleaved=interleaved
        )
        self.num_groups, self.num_pages = len(groups), num_pages
        widest = max(groups)
        shape = (1 + num_pages * len(groups), widest, BLOCK_SIZE, ROW_BYTES)
        # A prime number of random bytes, repeated: no two rows are alike.
        some = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8).to(DEVICE)
        num_bytes = math.prod(shape)
        self.gpu = some.repeat(-(-num_bytes // some.numel()))[:num_bytes].view(shape)
        self.layers = []
        for group, size in enumerate(groups):
            for i in range(size):
                place = self.layout.place(len(self.layers))
                stride = place.row_stride
                host = pool.as_strided(
                    (self.host_blocks, BLOCK_SIZE, ROW_BYTES),
                    (BLOCK_SIZE * stride, stride, 1),
                    place.offset,
                )
                self.layers.append(PoolLayer(self.gpu[:, i], host, group))

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return len(self.layers)

    def gpu_blocks(self) -> torch.Tensor:
        """`[pages][groups]` distinct GPU blocks, scattered."""
        ids = torch.randperm(self.num_pages * self.num_groups) + 1
        return ids.view(self.num_pages, self.num_groups).to(torch.int32)

    def host_runs(self, num: int) -> list[torch.Tensor]:
        """`num` sets of distinct host blocks, one a page, scattered over the whole pool."""
        ids = (torch.randperm(self.host_blocks - 1) + 1).to(torch.int32)
        sets = ids.numel() // self.num_pages
        if sets < num:
            raise SystemExit(f"the pool holds {sets} sets of rows, {num} are needed; enlarge it")
        return [ids[i * self.num_pages : (i + 1) * self.num_pages] for i in range(num)]


def rows_equal(model: Model, host_blocks: torch.Tensor, gpu_blocks: torch.Tensor) -> bool:
    """Whether some pages hold the same rows in both pools."""
    for page in (0, model.num_pages // 2, model.num_pages - 1):
        for layer in model.layers[:: max(1, model.num_layers // 5)]:
            on_gpu = layer.gpu[int(gpu_blocks[page, layer.kv_group])].cpu()
            if not torch.equal(on_gpu, layer.host[int(host_blocks[page])]):
                return False
    return True


def bench_mirror(pool: torch.Tensor, groups: Sequence[int], repeats: int) -> list[Cell]:
    """8,192 tokens of all layers, both layouts, all multiprocessors and few."""
    cells, tokens = [], 8192
    for interleaved in (True, False):
        model = Model(pool, groups, interleaved, tokens // BLOCK_SIZE)
        runs = model.host_runs(3 * repeats)
        blocks = model.gpu_blocks()
        offset = torch.arange(BLOCK_SIZE)
        slots = (blocks.t().long()[:, :, None] * BLOCK_SIZE + offset).reshape(len(groups), -1)
        for i, max_blocks in enumerate((0, 32, 16)):
            table = LayerTable(model.layers, max_blocks=max_blocks)
            mask = MirrorMask(model.host_blocks, BLOCK_SIZE, DEVICE)
            times = []
            for run in runs[i * repeats : (i + 1) * repeats]:
                host_row = (run.long()[:, None] * BLOCK_SIZE + offset).reshape(-1)
                mappings = SlotMappings(slots.to(DEVICE), host_row.to(DEVICE), range(len(groups)))
                op = MirrorRows(table, mappings, mask)
                times.append(once_us(lambda op=op: op(tokens, stream())))
            if not rows_equal(model, run, blocks):
                raise SystemExit("mirror_rows copied other rows than it should")
            us = statistics.median(times)
            gbps = tokens * model.num_layers * ROW_BYTES / us / 1e3
            name = "row_interleaved" if interleaved else "layer_major"
            limit = f", {max_blocks} blocks" if max_blocks else ""
            what = f"mirror 8,192 tokens x {model.num_layers} layers, {name}{limit}"
            cells.append((what, f"{gbps:.1f} GB/s ({us:.0f} us)", ">= 47 GB/s"))
    return cells


def bench_pages(pool: torch.Tensor, groups: Sequence[int], repeats: int) -> list[Cell]:
    """128 pages of all layers out and in."""
    cells = []
    for interleaved in (True, False):
        model = Model(pool, groups, interleaved, 128)
        runs = model.host_runs(4 * repeats)
        blocks = model.gpu_blocks()
        pages = PageList.allocate(128, len(groups), DEVICE)
        pages.resident_blocks.copy_(blocks)
        pages.num_rows.fill_(BLOCK_SIZE)
        kinds = [(SpillPages, 0), (SpillPages, 16), (RestorePages, 0), (RestorePages, 16)]
        for i, (kind, max_blocks) in enumerate(kinds):
            op = kind(LayerTable(model.layers, max_blocks=max_blocks), pages)
            times = []
            for run in runs[i * repeats : (i + 1) * repeats]:
                pages.host_block.copy_(run)
                times.append(once_us(lambda op=op: op(128, stream())))
            if not rows_equal(model, run, blocks):
                raise SystemExit(f"{kind.__name__} copied other rows than it should")
            us = statistics.median(times)
            gbps = 128 * BLOCK_SIZE * model.num_layers * ROW_BYTES / us / 1e3
            name = "row_interleaved" if interleaved else "layer_major"
            limit = f", {max_blocks} blocks" if max_blocks else ""
            what = f"{op._entry_point[8:]} 128 pages x {model.num_layers} layers, {name}{limit}"
            cells.append((what, f"{gbps:.1f} GB/s ({us:.0f} us)", ">= 47 GB/s"))
    return cells


def bench_decode(pool: torch.Tensor) -> list[Cell]:
    """A decode step's mirror: few tokens, a launch's own cost."""
    cells = []
    for groups, tokens, target in (((4,), 64, "<= 12 us"), (GLM, 64, ""), (GLM, 256, "")):
        model = Model(pool, groups, True, tokens)
        steps = 8
        runs = model.host_runs(2 * steps)
        blocks = model.gpu_blocks()
        table = LayerTable(model.layers)
        mask = MirrorMask(model.host_blocks, BLOCK_SIZE, DEVICE)
        ops = []
        for i, run in enumerate(runs):
            slots = (blocks.t().long() * BLOCK_SIZE + 3 * i).contiguous().to(DEVICE)
            host_row = (run.long() * BLOCK_SIZE + 3 * i).to(DEVICE)
            mappings = SlotMappings(slots, host_row, range(len(groups)))
            ops.append(MirrorRows(table, mappings, mask))
        us = median_us(
            lambda i, ops=ops, tokens=tokens: ops[i](tokens, stream()),
            [range(steps), range(steps, 2 * steps)],
        )
        what = f"mirror {tokens} tokens x {model.num_layers} layers, one step"
        cells.append((what, f"{us:.1f} us", target))
    return cells


def bench_invalidate(
    sources: Path | None, leaders: int = 61, requests: int = 256, hot_rows: int = 4096
) -> list[Cell]:
    """Four recycled blocks, and a prefill chunk's rows, over all leaders of a model."""
    host_blocks = 100_000
    states = [RowState.allocate(requests, hot_rows, DEVICE) for _ in range(leaders)]
    holders = Holders(host_blocks, requests, DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    # Each request's rows come from host blocks of its own, about 390 of them.
    per_request = (host_blocks - 1) // requests
    first = 1 + per_request * torch.arange(requests, device=DEVICE)
    for state in states:
        inside = torch.randint(
            0, per_request * BLOCK_SIZE, (requests, hot_rows), device=DEVICE, generator=generator
        )
        state.row_map.copy_(first[:, None] * BLOCK_SIZE + inside)
        state.last_used.fill_(1)
        state.epoch.fill_(1)
    for s in range(requests):
        begin = int(first[s])
        bit = 1 << (s % 32)
        bit = bit - (1 << 32) if bit >= 1 << 31 else bit
        holders.words[begin : begin + per_request, s // 32] |= bit
    maps = [state.row_map.clone() for state in states]
    every = torch.arange(requests, device=DEVICE)
    cells: list[Cell] = []
    sets = 16
    ids = (torch.randperm(host_blocks - 1)[: sets * 4] + 1).view(sets, 4)
    vllm_ids = ids.to(torch.int32).to(DEVICE)
    theirs: tuple[float, float] | None = None
    if sources is not None:
        vllm = VllmInvalidation(sources, maps, BLOCK_SIZE)
        eager = [once_us(lambda i=i: vllm.by_blocks(ids[i].tolist(), every)) for i in range(6)]
        graph = median_us(lambda i: vllm.by_slots(vllm_ids[i], every), [[6], [7], [8]])
        theirs = statistics.median(eager), graph
    # 0..8 by both searches: a second invalidation of the same ids frees nothing more.
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    for name, chosen in (("holders", holders), ("every state row", None)):
        ops = [
            Invalidate(states, BLOCK_SIZE, host_blocks, row, nothing, holders=chosen)
            for row in vllm_ids
        ]
        half = range(8) if chosen is not None else range(8, 16)
        us = median_us(lambda i, ops=ops: ops[i](4, 0, stream()), [[i] for i in half])
        target = "<= 30 us" if chosen is not None else ""
        cells.append(
            (f"invalidate 4 blocks, {leaders} x {requests}, {name}", f"{us:.1f} us", target)
        )
        if chosen is not None:
            ours = us
    if theirs is None:
        cells.append(("the same, vLLM's method", "not run: no vLLM", ""))
    else:
        cells.append(("the same, vLLM's invalidate_blocks, eager", f"{theirs[0]:.0f} us", ""))
        cells.append(("the same, vLLM's launches in a graph", f"{theirs[1]:.0f} us", ""))
        cells.append(("vLLM's launches in a graph / ours", f"{theirs[1] / ours:.0f} x", ">= 10 x"))
    # Both freed the blocks that both have seen.
    for state, held in zip(states[:: leaders // 4], maps[:: leaders // 4], strict=True):
        both = [state.row_map] if theirs is None else [state.row_map, held]
        if any(bool(torch.isin(m // BLOCK_SIZE, vllm_ids[:9].flatten()).any()) for m in both):
            raise SystemExit("rows of recycled blocks are still held")
    rewritten = torch.randint(64, host_blocks * BLOCK_SIZE, (8192,), device=DEVICE)
    op = Invalidate(states, BLOCK_SIZE, host_blocks, vllm_ids[0], rewritten, holders=holders)
    us = median_us(lambda i: op(0, 8192, stream()), [[0], [0], [0]])
    cells.append(("invalidate 8,192 scattered rewritten rows, held by all", f"{us:.1f} us", ""))
    tail = torch.arange(8192, device=DEVICE) + (host_blocks - 140) * BLOCK_SIZE
    holders.words[host_blocks - 140 :] = 0
    op = Invalidate(states, BLOCK_SIZE, host_blocks, vllm_ids[0], tail, holders=holders)
    us = median_us(lambda i: op(0, 8192, stream()), [[0], [0], [0]])
    cells.append(("invalidate 8,192 rewritten rows that nobody holds", f"{us:.1f} us", ""))
    return cells


NEW_TOKENS = 753
"""Tokens of a turn behind its context; their rows are still on the GPU alone."""


class Staging:
    """A host-only context and the new tokens behind it, staged chunk by chunk."""

    def __init__(
        self,
        pool: torch.Tensor,
        num_layers: int,
        interleaved: bool,
        upconvert: bool,
        context: int,
        chunk: int,
        max_blocks: int = 0,
    ) -> None:
        num_new = -(-NEW_TOKENS // BLOCK_SIZE) + 1
        self.model = Model(pool, (num_layers,), interleaved, num_new)
        self.context, self.chunk = context, chunk
        self.num_rows = context + NEW_TOKENS
        pages = -(-self.num_rows // BLOCK_SIZE)
        self.host_blocks = torch.randperm(self.model.host_blocks - 1)[:pages].to(torch.int32) + 1
        shape = (chunk, BF16_ROW_WIDTH) if upconvert else (chunk, ROW_BYTES)
        dtype = torch.bfloat16 if upconvert else torch.uint8
        self.out = [torch.empty(shape, dtype=dtype, device=DEVICE) for _ in range(num_layers)]
        table = self.host_blocks[None, :].to(DEVICE)
        # The page in which the context ends and the new tokens begin is on the GPU, too.
        residency = torch.zeros_like(table)
        first_new = context // BLOCK_SIZE
        blocks = self.model.gpu_blocks()[: pages - first_new, 0]
        residency[0, first_new:] = blocks.to(DEVICE)
        zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.bound = []
        for first in range(0, self.num_rows, chunk):
            rows = min(chunk, self.num_rows - first)
            bounds = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
            at = torch.tensor([first], dtype=torch.int32, device=DEVICE)
            counters = torch.zeros(3, dtype=torch.int64, device=DEVICE)
            inputs = StageInputs(bounds, at, zero, residency, table, counters)
            op = StagePrefill(self.model.layers, self.out, inputs, max_blocks=max_blocks)
            self.bound.append((op, rows))

    def run(self) -> None:
        """Stages the context and the new tokens, chunk after chunk."""
        for op, rows in self.bound:
            op(1, rows, stream())

    def check(self) -> None:
        """Stages the chunk of the last host-only row again and compares raw rows with the pool."""
        end = self.context // BLOCK_SIZE * BLOCK_SIZE
        number = (end - 1) // self.chunk
        first = number * self.chunk
        op, rows = self.bound[number]
        op(1, rows, stream())
        torch.cuda.synchronize()
        for position in (first, (first + end) // 2, end - 1):
            block = int(self.host_blocks[position // BLOCK_SIZE])
            for layer, out in zip(self.model.layers, self.out, strict=True):
                wanted = layer.host[block, position % BLOCK_SIZE]
                if not torch.equal(out[position - first].cpu(), wanted):
                    raise SystemExit("stage_prefill staged other rows than it should")


def vllm_staging_us(staging: Staging, upconvert: bool) -> float | None:
    """vLLM 0.33's staging of the same layers, each a whole context, without its allocations.

    Raw rows by `hisparse_gather_plan`; bfloat16 by the gather that converts host rows as it goes.
    """
    gather = getattr(torch.ops._C_cache_ops, "hisparse_gather_plan", None)
    if gather is None:
        return None
    convert = torch.ops._C_cache_ops.cp_gather_and_upconvert_fp8_kv_cache
    pages = -(-staging.context // BLOCK_SIZE)
    blocks = staging.host_blocks[:pages].to(DEVICE)
    rows = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=DEVICE)).flatten()
    row_ids = rows[None, :].to(torch.int32)
    targets = torch.arange(pages * BLOCK_SIZE, dtype=torch.int32, device=DEVICE)[None, :]
    miss, not_resident = torch.ones_like(row_ids), torch.full_like(row_ids, -1)
    staged = torch.empty((pages, BLOCK_SIZE, ROW_BYTES), dtype=torch.uint8, device=DEVICE)
    wide = torch.empty((staging.context, BF16_ROW_WIDTH), dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(pages, dtype=torch.int32, device=DEVICE)[None, :]
    start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    caches = [layer.host.reshape(-1, ROW_BYTES) for layer in staging.model.layers]

    def run() -> None:
        for cache in caches:
            if upconvert:
                convert(staged, wide, table, start, 1, None, cache, row_ids, not_resident)
            else:
                gather(cache, staged, row_ids, targets, miss, None, None, 0)

    us = once_us(run)
    if not upconvert:
        at = staging.context - 1
        block = int(staging.host_blocks[at // BLOCK_SIZE])
        wanted = staging.model.layers[-1].host[block, at % BLOCK_SIZE]
        if not torch.equal(staged.view(-1, ROW_BYTES)[at].cpu(), wanted):
            raise SystemExit("vLLM's gather was given other rows than ours")
    return us


def vllm_median(times: Sequence[float | None]) -> float | None:
    """Median of times after the first, which loads the kernel; None without vLLM."""
    found = [us for us in times[1:] if us is not None]
    return statistics.median(found) if found else None


def stage_cell(name: str, context: int, us: float, target: str) -> Cell:
    """A line of the table: rate of the rows that came over the bus, and the time of four layers."""
    gbps = context * 4 * ROW_BYTES / us / 1e3
    return f"stage {context:,} tokens x 4 layers, {name}", f"{gbps:.1f} GB/s ({us:.0f} us)", target


def bench_stage(pool: torch.Tensor) -> list[Cell]:
    """Host-only contexts, 32K rows of workspace a layer; vLLM stages a layer's whole context."""
    cells: list[Cell] = []
    for upconvert in (False, True):
        # Both kernels are loaded before they are timed.
        Staging(pool, 4, True, upconvert, 64, 64).run()
    for context in (74_160, 131_072, 1_000_000):
        for upconvert in (False, True):
            kind = "to bf16" if upconvert else "raw"
            times: dict[bool, list[float]] = {True: [], False: []}
            vllm_times = []
            for _ in range(3):
                for interleaved, so_far in times.items():
                    staging = Staging(pool, 4, interleaved, upconvert, context, 32_768)
                    so_far.append(once_us(staging.run))
                    if not upconvert:
                        staging.check()
                # Host blocks of their own, which nobody has read.
                vllm_times.append(
                    vllm_staging_us(Staging(pool, 4, False, upconvert, context, 32_768), upconvert)
                )
            ours = {interleaved: statistics.median(them) for interleaved, them in times.items()}
            for interleaved, us in ours.items():
                layout = "row_interleaved" if interleaved else "layer_major"
                cells.append(stage_cell(f"{layout}, {kind}", context, us, ">= 45 GB/s"))
            theirs = vllm_median(vllm_times)
            if theirs is None:
                cells.append((f"vLLM's staging, {kind}", "not run: no vLLM", ""))
            else:
                name = f"vLLM's, layer_major, {kind}"
                faster = f"{theirs / ours[True]:.2f} x ours"
                cells.append(stage_cell(name, context, theirs, faster))
    staging = Staging(pool, 4, True, True, 131_072, 32_768, max_blocks=16)
    cells.append(stage_cell("to bf16, 16 blocks", 131_072, once_us(staging.run), ""))
    return cells


def main() -> int:
    """Runs the chosen parts and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool-gb", type=float, default=20.0)
    parser.add_argument("--layers", choices=["glm", "four"], default="glm")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="mirror,pages,decode,invalidate,stage")
    parser.add_argument("--vllm-library", type=Path, help="vLLM 0.33's _C_stable_libtorch.abi3.so")
    parser.add_argument("--vllm-sources", type=Path, help="folder of vLLM 0.33's Python package")
    parser.add_argument(
        "--ram-gb", type=float, default=None, help="RAM that the machine really has"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        return 1
    parts = args.only.split(",")
    if args.vllm_library is not None:
        torch.ops.load_library(str(args.vllm_library))
    elif importlib.util.find_spec("vllm") is not None:
        importlib.import_module("vllm._custom_ops")
    torch.manual_seed(0)
    unit = PoolLayout((1,), BLOCK_SIZE, ROW_BYTES, int(args.pool_gb * 1e9) // 41_984)
    ram = int(args.ram_gb * 1e9) if args.ram_gb else None
    print(f"{torch.cuda.get_device_name()}, pool of {args.pool_gb:g} GB, rows of {ROW_BYTES} bytes")

    def emit(cells: Sequence[Cell]) -> None:
        for what, figure, target in cells:
            print(f"{what:64} {figure:26} {target}", flush=True)

    with HostPool(unit, ram_bytes=ram) as host_pool:
        pool = host_pool.bytes_tensor()
        scratch = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
        for to_device, name in ((True, "H2D"), (False, "D2H")):
            gbps = memcpy_gbps(pool[: 1 << 30], scratch, to_device)
            emit([(f"roof: memcpy 1 GiB {name}", f"{gbps:.1f} GB/s", "")])
        del scratch
        groups = GLM if args.layers == "glm" else (4,)
        if "mirror" in parts:
            emit(bench_mirror(pool, groups, args.repeats))
        if "pages" in parts:
            emit(bench_pages(pool, groups, args.repeats))
        if "decode" in parts:
            emit(bench_decode(pool))
        if "invalidate" in parts:
            emit(bench_invalidate(find_sources(args.vllm_sources)))
        if "stage" in parts:
            emit(bench_stage(pool))
        torch.cuda.synchronize()
        del pool
    return 0


if __name__ == "__main__":
    sys.exit(main())
