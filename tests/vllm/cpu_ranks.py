# SPDX-License-Identifier: Apache-2.0
"""Owns the ranks of one engine as real processes: native workers on a CPU over one shared pool.

The memory, the meeting of the ranks and vLLM's tensor parallel group are real. Devices are those of
`cpu_streams`: what rank 0 writes to the pool runs as late as CUDA could run it, also for the other
ranks, and ranks are late and early at random.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import pickle
import random
import re
import signal
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_attention import Attention, Batch, Part
from cpu_graph_attention import GraphAttention
from cpu_graphs import GraphStreams
from cpu_peers import STUCK_S, DeviceEvents, PeerMemory
from cpu_streams import Streams
from sides import pickled
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import HiSparseConnector
from vllm.v1.hisparse import binding
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from worker_on_cpu import BLOCK, CpuWorker, Model, row_bytes

from hotpage.kernels.cooperative_copy import Channel
from hotpage.runtime import events, peers
from hotpage.vllm import cooperation

GRAPH_SIZES = (2, 4, 6)
"""Requests of the graphs."""

_MODULE = "cpu_ranks"
_CONTEXT = multiprocessing.get_context("forkserver")
_GRACE_S = 1.5
"""Seconds in which the other ranks may say what they think of a failure."""


@dataclass(frozen=True)
class Setup:
    """Ranks to start.

    Args:
        model: the layers.
        library: path of the kernels for a CPU.
        folder: empty, for what the ranks share.
        num_ranks: of the tensor parallel group.
        sizes: of `CpuWorker`.
        seed: of all that is drawn.
        slow: a rank that is late between the start of each step and its reads.
        slow_s: how late.
        late: copies to the host run when somebody waits for them; otherwise at once.
        executor: of `CpuWorker`.
        cooperative: ranks reach each other's memory. Copies to the host then run at once: a rank
            that waits inside a launch lets nothing else run here, unlike a GPU.
        graphs: decode batches replay captured graphs; for models without a drafter.
        fault: called in each process before it makes the pool.
    """

    model: Model
    library: str
    folder: Path
    num_ranks: int = 2
    sizes: dict[str, Any] = field(default_factory=dict)
    seed: int = 1
    slow: int | None = None
    slow_s: float = 0.03
    late: bool = True
    executor: str = "mp"
    cooperative: bool = False
    graphs: bool = False
    fault: Callable[[RankProcess], None] | None = None


class RankProcess:
    """One rank: carries out what the test sends."""

    def __init__(self, setup: Setup, rank: int, pipe: Any) -> None:
        self.setup, self.rank, self.pipe = setup, rank, pipe
        self.num_steps = self.num_replays = 0
        self.patch = pytest.MonkeyPatch()
        self._chance = random.Random(100 * setup.seed + rank)
        streams = GraphStreams if setup.graphs else Streams
        self.streams = streams(late=setup.late, haste=30, seed=setup.seed + rank)
        self.events = DeviceEvents(setup.folder / "words", rank, self.streams)
        self.patch.setattr(events, "CudaIpc", lambda _: self.events)
        self.memory_of_peers = PeerMemory(rank, reachable=setup.cooperative)
        self.patch.setattr(peers, "CudaIpc", lambda _: self.memory_of_peers)
        self.patch.setattr(cooperation, "Channel", self._channel)
        # The device goes on while the host waits for another rank's call.
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: self.events.go_on())
        self.patch.setattr(events, "time", clock)
        _join_group(setup, rank)
        self.cpu = CpuWorker(
            setup.model, ctypes.CDLL(setup.library), self.patch, streams=self.streams,
            register=False, num_ranks=setup.num_ranks, executor=setup.executor, **setup.sizes,
        )  # fmt: skip

    def open(self) -> None:
        """Makes the pool, as vLLM does while it profiles, and hands the real caches over."""
        if self.setup.fault is not None:
            self.setup.fault(self)
        self.cpu.bind()
        context = self.cpu.config.compilation_config.static_forward_context
        binding.release_hisparse_profiling_cache(context)
        self.cpu.bind()
        assert self.cpu.driver.num_registered == 1, "profiling's pool is the real one"
        if self.setup.cooperative:
            self._share_memory()
        self.cpu.worker.register_kv_caches(self.cpu.kv_caches)
        self.cpu.gpu_pool.fill_(0xA5)
        self.attention = Attention(self.cpu, self.setup.seed)
        if self.setup.graphs:
            self.attention = GraphAttention(self.cpu, self.setup.seed, GRAPH_SIZES)
            self.attention.capture()
            self.cpu.worker.reset_hot_state()

    def _share_memory(self) -> None:
        layers = self.cpu.config.compilation_config.static_forward_context.values()
        tensors = [layer.hisparse_cache.view.cache for layer in layers]
        for layer in layers:
            shared = layer.hisparse_cache.runtime.index_group.shared_topk
            tensors.append(shared.swap_device_physical_rows)
        for tensor in {tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values():
            self.memory_of_peers.share(tensor)

    def _channel(self, device: Any) -> Channel:
        channel = Channel(device)
        self.memory_of_peers.share(channel.memory)
        return channel

    def serve(self) -> None:
        """Carries out messages until the last one."""
        while True:
            while not self.pipe.poll(0.0005):
                self.events.go_on()
            kind, *arguments = self.pipe.recv()
            self.pipe.send((kind, getattr(self, kind)(*arguments)))
            if kind == "end":
                return

    def step(self, metadata: bytes, parts: list[Part], pages: bool, draft_seed: int) -> Any:
        """One step of vLLM's runner; its output."""
        worker, cpu = self.cpu.worker, self.cpu
        self.num_steps += 1
        assert not self.setup.graphs or not cpu.model.drafts
        self._linger()
        if not parts:
            worker.start_step(pickle.loads(metadata), None, None, 0)
            self._linger()
            worker.finish_forward()
        else:
            batch = Batch(cpu, parts)
            graph = self._stage(batch)
            worker.start_step(
                pickle.loads(metadata), batch.state_rows, batch.names, batch.num_tokens
            )
            self._linger()
            if self.rank == self.setup.slow:
                time.sleep(self.setup.slow_s)
            self._run_target(batch, pages, graph)
            worker.finish_forward()
            if cpu.model.drafts:
                self._draft(batch, pages, draft_seed)
        connector: Any = SimpleNamespace(connector_worker=worker)
        meta = HiSparseConnector.build_connector_worker_meta(connector)
        return ModelRunnerOutput.with_kv_conn_output_only(
            KVConnectorOutput(kv_connector_worker_meta=meta)
        )

    def _stage(self, batch: Batch) -> int | None:
        """Requests of the graph that serves a batch, whose inputs are then written; else None."""
        attention = self.attention
        if not isinstance(attention, GraphAttention):
            return None
        size = attention.size_for(batch.parts, attention.rows)
        if size is not None:
            attention.stage(batch)
        return size

    def _run_target(self, batch: Batch, pages: bool, graph: int | None) -> None:
        attention, worker = self.attention, self.cpu.worker
        if graph is None:
            attention.run(batch, batch.metadata(), drafts=False, pages=pages)
            return
        assert isinstance(attention, GraphAttention)
        padded = attention.padded(graph)
        worker.prepare_forward({layer.name: padded for layer in worker.caches.layers})
        attention.replay(batch, graph, drafts=False)
        self.num_replays += 1

    def _draft(self, batch: Batch, pages: bool, seed: int) -> None:
        self.streams.computing.put(lambda: None)
        self.attention.run(batch, batch.metadata(), drafts=True, pages=pages)
        slots = self.cpu.tables.slot_mappings
        drawn = torch.Generator().manual_seed(seed)
        slots.copy_(torch.randint(BLOCK, 4 * BLOCK, slots.shape, generator=drawn))

    def _linger(self) -> None:
        if self._chance.random() < 0.3:
            end = time.monotonic() + 0.006 * self._chance.random()
            while time.monotonic() < end:
                self.events.go_on()

    def fill(self, blocks: list[int], values: list[int]) -> None:
        """A sibling writes host rows on all layers, one after the other from the first block on."""
        at = torch.arange(len(values))
        where = torch.tensor(blocks)[at // BLOCK]
        for number, layer, _ in self.attention.layers:
            rows = row_bytes(values, number, self.attention.width)
            self.cpu.host_rows(layer.name)[where, at % BLOCK] = rows

    def holds(self, block: int, values: list[int]) -> bool:
        """Whether a host block starts with these rows on all layers."""
        return all(
            torch.equal(
                self.cpu.host_rows(layer.name)[block, : len(values)],
                row_bytes(values, number, self.attention.width),
            )
            for number, layer, _ in self.attention.layers
        )

    def memory(self) -> list[str]:
        """Inodes of the host pools that the process maps."""
        maps = Path("/proc/self/maps").read_text()
        return sorted(set(re.findall(r"(\d+)\s+/memfd:hotpage-pool", maps)))

    def end(self) -> dict[str, Any]:
        """What the rank has seen and done; afterwards its worker is shut down."""
        worker = self.cpu.worker
        mirrors = worker._mirrors
        summary = {
            "rows": self.attention.num_rows,
            "replays": self.num_replays,
            "row maps": zlib.crc32(b"".join(s.row_map.numpy().tobytes() for s in worker.states)),
            "hits": sum(int(state.counters[0]) for state in worker.states),
            "misses": sum(int(state.counters[1]) for state in worker.states),
            "unresolved": sum(int(state.counters[2]) for state in worker.states),
            "staged from nowhere": int(worker.staged_counters[2]),
            "lost": sum(int(mask.counters[2]) for mask in mirrors.masks) if mirrors else 0,
            "repaired": worker.num_repaired_pages,
            "waiting": len(worker._acks),
            "launches": worker.launch_counts(),
            "compared": worker._cooperation and worker._cooperation.divergence.num_compared,
            "diverged": worker._cooperation and worker._cooperation.divergence.diverged,
            "together": worker._cooperation and asdict(worker._cooperation.channel.counts()),
        }
        self.cpu.close()
        summary["pinned"] = len(self.cpu.driver.pinned)
        return summary


def _join_group(setup: Setup, rank: int) -> None:
    """vLLM's own tensor parallel group of these processes."""
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            setup.num_ranks, rank, f"file://{setup.folder / 'store'}", rank, "gloo"
        )
        parallel_state.initialize_model_parallel(setup.num_ranks)


def _main(setup: Setup, rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        process = RankProcess(setup, rank, pipe)
        process.open()
        pipe.send(("ready", None))
        process.serve()
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


class RankFailuresError(AssertionError):
    """Ranks that failed, and why: rank -> text, empty for one that was killed."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__(f"ranks failed: {failures}")
        self.failures = failures


class Ranks:
    """The processes, as a test sees them."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        (setup.folder / "words").write_bytes(bytes(mmap.PAGESIZE))
        self._pipes, self._processes = [], []
        self._replies: list[deque[Any]] = [deque() for _ in range(setup.num_ranks)]
        self._failures: dict[int, str] = {}
        for rank in range(setup.num_ranks):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_main, args=(setup, rank, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def send(self, kind: str, *arguments: Any, to: int | None = None) -> None:
        """Lets one rank, or all, do something."""
        for rank, pipe in enumerate(self._pipes):
            if to in (None, rank):
                with contextlib.suppress(OSError):
                    pipe.send((kind, *arguments))

    def step(
        self, metadata: Any, parts: list[Part], *, pages: bool = True, draft_seed: int = 0
    ) -> None:
        """Sends a step to all ranks."""
        self.send("step", pickled(metadata), parts, pages, draft_seed)

    def receive(self, kind: str, rank: int) -> Any:
        """What a rank answers next.

        Raises:
            RankFailuresError: some rank failed, or none answers.
        """
        deadline = time.monotonic() + 2 * STUCK_S
        while not self._replies[rank]:
            if self._failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not self._pump(0.2) and time.monotonic() > deadline:
                raise RankFailuresError(self._failures or {rank: "does not answer"})
            if len(self._failures) == len(self._pipes):
                raise RankFailuresError(self._failures)
            if self._failures and time.monotonic() > deadline:
                raise RankFailuresError(self._failures)
        got, value = self._replies[rank].popleft()
        assert got == kind
        return value

    def receive_all(self, kind: str) -> list[Any]:
        """What all ranks answer next."""
        return [self.receive(kind, rank) for rank in range(len(self._pipes))]

    def _pump(self, seconds: float) -> bool:
        live = [pipe for rank, pipe in enumerate(self._pipes) if rank not in self._failures]
        ready = wait(live, seconds)
        for pipe in ready:
            rank = self._pipes.index(pipe)
            try:
                reply = pipe.recv()
            except (EOFError, OSError):
                self._failures[rank] = ""
                continue
            if reply[0] == "error":
                self._failures[rank] = reply[1]
            else:
                self._replies[rank].append(reply)
        return bool(ready)

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def ranks(setup: Setup, *, opened: bool = True) -> Iterator[Ranks]:
    """Starts ranks and waits until all of them have their pool.

    Args:
        opened: False leaves the waiting to the test.
    """
    import sys

    here = Path(__file__).resolve().parent
    with pytest.MonkeyPatch.context() as patch:
        # The server from which ranks are forked has imported vLLM once for all of them.
        search = [str(here), str(here.parent / "unit"), *filter(None, sys.path)]
        patch.setenv("PYTHONPATH", os.pathsep.join(search))
        _CONTEXT.set_forkserver_preload([_MODULE])
        running = Ranks(setup)
    try:
        if opened:
            running.receive_all("ready")
        yield running
    finally:
        running.close()


def die() -> None:
    """Ends this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)
