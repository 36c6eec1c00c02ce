# SPDX-License-Identifier: Apache-2.0
"""A whole engine on a CPU whose request gives its hot region back and gets another one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

import torch
from cpu_graph_serving import CpuServingGraphs
from cpu_graphs import GraphStreams
from cpu_serving import CpuServing
from serving import Life, Traffic
from sides import make_request
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus
from worker_on_cpu import BLOCK, ONE_EACH, CpuWorker, release_all

pytestmark = pytest.mark.vllm

PROMPT = [5] * (5 * BLOCK)
QUIET = Traffic(
    seed=4, num_requests=0, max_prompt=2, max_output=1, chunk=2 * BLOCK, abort=0, reset=0
)


@pytest.fixture(params=[CpuServing, CpuServingGraphs], ids=["eager", "graphs"])
def serving(
    request: pytest.FixtureRequest, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CpuServing]:
    """An engine with room for everything, to which nobody talks."""
    cpu = CpuWorker(
        ONE_EACH, kernels, monkeypatch, streams=GraphStreams(), num_blocks=120, max_pages=8
    )
    cpu.gpu_pool.fill_(0xA5)
    yield request.param(cpu, QUIET, hot_return_steps=3)
    release_all()


def arrive(serving: CpuServing, name: str, num_output: int) -> Life:
    """A request with the prompt of all."""
    request = make_request(name, PROMPT, BLOCK)
    request.status = RequestStatus.WAITING
    life = Life(name, PROMPT, num_output, False, request, len(PROMPT))
    serving.waiting.append(life)
    return life


def step_until(serving: CpuServing, done: Callable[[], bool]) -> None:
    """Serves whoever is there; attention compares every row that it reads."""
    for _ in range(40):
        if done():
            return
        serving.step += 1
        serving._execute(serving._schedule())
    raise AssertionError(f"nothing of it in 40 steps: {serving.seen}")


class Stranger:
    """Somebody else's rows in GPU blocks that the pool has handed out."""

    def __init__(self, serving: CpuServing) -> None:
        self._pool = serving.side.manager.block_pool
        self._caches = [layer.handle.view.cache for layer in serving.cpu.worker.caches.layers]
        self.blocks: list[KVCacheBlock] = []

    def take_all_but(self, num_free: int) -> None:
        """Takes what is free and writes into it."""
        taken = self._pool.get_new_blocks(self._pool.get_num_free_blocks() - num_free)
        for cache in self._caches:
            cache.view(torch.uint8)[[block.block_id for block in taken]] = 0x3C
        self.blocks += taken

    def finds_its_rows(self) -> bool:
        """Whether nobody has written into its blocks."""
        ids = [block.block_id for block in self.blocks]
        return all(bool((cache.view(torch.uint8)[ids] == 0x3C).all()) for cache in self._caches)


def test_the_blocks_of_a_region_given_back_are_left_to_their_next_owner(
    serving: CpuServing,
) -> None:
    seen = serving.seen
    arrive(serving, "first", 1)
    coordinator = serving.side.coordinator
    step_until(serving, lambda: "first" in serving.finished and not coordinator.has_pending_work())
    arrive(serving, "hit", 90)
    step_until(serving, lambda: seen["hot regions"] == 1)
    step_until(serving, lambda: bool(serving._returned))
    first_region = [table[:] for table in serving._tables["hit"][-3:]]
    stranger = Stranger(serving)
    stranger.take_all_but(9)
    assert {id for ids in first_region for id in ids} <= {b.block_id for b in stranger.blocks}
    step_until(serving, lambda: seen["hot regions in the place of another"] == 1)
    # The pages that the request gives up go to the stranger, too: their rows come from the host.
    stranger.take_all_but(6)
    misses = serving.misses
    step_until(serving, lambda: serving.misses > misses + 30)
    assert stranger.finds_its_rows()
    assert serving._tables["hit"][-3:] == first_region, "vLLM's tables only grow"
