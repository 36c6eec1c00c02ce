# SPDX-License-Identifier: Apache-2.0
"""Owns vLLM's own asynchronous scheduler over our connector, with unkind users and a worker that
moves values: what was read is compared, and nothing may be left at the end.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms
from engine.models import deepseek_v32
from serving import row_values
from sides import HOTPAGE, Shape
from toy_worker import ToyWorker
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import connector as upstream
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

BLOCK = 16
MAX_MODEL_LEN = 512


class HopperOnPaper(CpuPlatform):
    """Lets vLLM accept a configuration that asks for CUDA."""

    def is_cuda(self) -> bool:
        """As vLLM's platforms have it."""
        return True

    def is_cpu(self) -> bool:
        """As vLLM's platforms have it."""
        return False

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Nothing to update."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """As vLLM's platforms have it."""
        return True

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        """As vLLM's platforms have it."""
        return DeviceCapability(9, 0)


@dataclass(frozen=True)
class Setting:
    """What a user may set, and the pools.

    Args:
        updates: pauses, drains, resets the prefix cache with requests running, and goes on with
            other weights, now and then.
        drafts: tokens of an MTP drafter.
    """

    policy: str = "fcfs"
    caching: bool = True
    max_num_seqs: int = 8
    step_tokens: int = 48
    prefill_threshold: int = 0
    fast_path: bool = False
    num_blocks: int = 90
    host_blocks: int = 120
    updates: bool = False
    drafts: int = 0

    def config(self, folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> VllmConfig:
        """vLLM's configuration with further options of ours; the model is a file in `folder`."""
        (folder / "config.json").write_text(json.dumps(deepseek_v32(4)))
        extra = {
            "host_pool_gib": 1,
            "hot_return_steps": 4,
            "allocate_fast_path": self.fast_path,
            **options,
        }
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, load_format="dummy",
            max_model_len=MAX_MODEL_LEN, kv_cache_dtype="fp8_ds_mla",
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.step_tokens,
            scheduling_policy=self.policy, enable_prefix_caching=self.caching,
            long_prefill_token_threshold=self.prefill_threshold,
            speculative_config=(
                {"method": "mtp", "num_speculative_tokens": self.drafts} if self.drafts else None
            ),
            kv_transfer_config={
                "kv_connector": "HiSparseConnector", "kv_connector_module_path": "hotpage.vllm",
                "kv_role": "kv_both", "kv_connector_extra_config": extra,
            },
        )  # fmt: skip
        with patch.context() as platform:
            platform.setattr(vllm.platforms, "_current_platform", HopperOnPaper())
            config = arguments.create_engine_config()
        assert config.scheduler_config.async_scheduling, "it is vLLM's default"
        mode = config.compilation_config.cudagraph_mode
        assert mode == CUDAGraphMode.FULL_AND_PIECEWISE, "it is vLLM's default"
        config.model_config.hf_config.index_topk = 2 * BLOCK
        config.cache_config.num_gpu_blocks = self.num_blocks
        config.cache_config.block_size = BLOCK
        return config


@dataclass
class Flight:
    """A step that was scheduled and has not run."""

    output: Any
    hosts: dict[str, list[int]]
    tokens: dict[str, list[int]]
    entries: dict[str, Any]
    """What the coordinator had of each request, one object an admission."""


class RealScheduler:
    """Serves random traffic; every choice comes from a seed."""

    def __init__(
        self, setting: Setting, seed: int, folder: Path, patch: pytest.MonkeyPatch
    ) -> None:
        patch.setattr(upstream, "get_hisparse_steady_state_concurrency", lambda *_: 1.0)
        self.setting, self._rng = setting, random.Random(seed)
        shape = Shape(
            num_groups=3, block_size=BLOCK, hot_blocks=2 * (1 + setting.drafts),
            num_blocks=setting.num_blocks, host_blocks=setting.host_blocks,
            max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=2 * setting.step_tokens,
        )  # fmt: skip
        grammars: Any = SimpleNamespace(
            should_advance=lambda _: False,
            grammar_init=lambda _: None,
            accept_tokens=lambda *_: True,
        )
        self.scheduler = AsyncScheduler(
            vllm_config=setting.config(folder, patch), kv_cache_config=shape.cache_config(),
            structured_output_manager=grammars, block_size=BLOCK, hash_block_size=BLOCK,
            log_stats=True,
        )  # fmt: skip
        connector: Any = self.scheduler.connector
        self.coordinator = connector.connector_scheduler.coordinator
        side: Any = SimpleNamespace(
            name=HOTPAGE, shape=shape, coordinator=self.coordinator,
            manager=self.scheduler.kv_cache_manager,
        )  # fmt: skip
        self._worker = ToyWorker(side)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._flights: deque[Flight] = deque()
        self._acks: dict[int, int] = {}
        self._weights = 0
        self._step = 0
        self.seen: Counter[str] = Counter()

    def run(self, num_requests: int, max_steps: int) -> None:
        """Steps until all requests have left."""
        made, requests = 0, self.scheduler.requests
        while made < num_requests or requests or self._flights or self.scheduler.has_requests():
            self._step += 1
            assert self._step < max_steps, f"not done: {self.seen}"
            if made < num_requests and self._chance(40):
                self.scheduler.add_request(self._arrival(made))
                made += 1
            self._disturb()
            if self.scheduler.has_requests():
                self._schedule()
            if len(self._flights) > 1 or not (self._flights and self._flights[-1].tokens):
                self._land()

    def _chance(self, percent: int) -> bool:
        return self._rng.randrange(100) < percent

    def _request(self, name: str, tokens: list[int], resumable: bool) -> Request:
        params = SamplingParams(max_tokens=self._rng.randint(1, 25))
        params.update_from_generation_config({}, eos_token_id=-1)
        return Request(
            request_id=name, prompt_token_ids=tokens, sampling_params=params, pooling_params=None,
            block_hasher=self._hasher, resumable=resumable, priority=self._rng.randint(0, 3),
            arrival_time=float(self._step),
        )  # fmt: skip

    def _arrival(self, at: int) -> Request:
        length = self._rng.randint(1, 260)
        shared = self._rng.randint(0, length)
        tail = [1000 + 100 * at + position % 90 for position in range(length - shared)]
        # A session without input holds its blocks, so that no cache can be reset.
        resumable = self._chance(30) and not self.setting.updates
        return self._request(f"r{at}", [self._rng.randrange(3)] * shared + tail, resumable)

    # Users.

    def _disturb(self) -> None:
        scheduler = self.scheduler
        if scheduler.requests and self._chance(3):
            name = self._rng.choice(list(scheduler.requests))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.seen["aborts"] += 1
        for name, request in list(scheduler.requests.items()):
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ and self._chance(50):
                self._go_on(name, request)
        if self._chance(3):
            self._reset(self._chance(50))
        if self.setting.updates and self._chance(4):
            self._update_weights()

    def _go_on(self, name: str, request: Request) -> None:
        if request.num_tokens > 350 or self._chance(30):
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            return
        more = [700 + position for position in range(self._rng.randint(1, 60))]
        self.scheduler.add_request(self._request(name, more, True))
        self.seen["sessions gone on"] += 1

    def _reset(self, running: bool) -> None:
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError:
            # vLLM's own answer while steps and copies are in flight.
            self.seen["resets that came too early"] += 1

    def _update_weights(self) -> None:
        """Nothing computed by the weights before may be read after."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._flights or self.scheduler.has_requests():
            self._step += 1
            if self.scheduler.has_requests():
                self._schedule()
                assert not self._flights[-1].tokens, "paused"
            while self._flights:
                self._land()
        assert not self.coordinator.has_pending_work()
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._weights += 1
        self.seen["updates"] += 1
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    # Steps.

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        self.seen["preemptions"] += len(output.preempted_req_ids or ())
        self._flights.append(
            Flight(
                output,
                {name: self._worker.host_blocks(name) for name in names},
                {name: list(self.scheduler.requests[name].all_token_ids) for name in names},
                {name: self.coordinator._tracked[name] for name in names},
            )
        )

    def _land(self) -> None:
        if not self._flights:
            return
        flight = self._flights.popleft()
        output, metadata = flight.output, flight.output.kv_connector_metadata
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        names = list(flight.tokens)
        self._worker.start(metadata, names)
        for name in names:
            self._forward(flight, name, starts[name], output.num_scheduled_tokens[name])
        self._worker.finish(metadata)
        sampled = [
            self._sample(flight, name, starts[name] + output.num_scheduled_tokens[name])
            for name in names
        ]
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=self._words(metadata)),
        )  # fmt: skip
        self.scheduler.update_from_output(output, result)

    def _sample(self, flight: Flight, name: str, end: int) -> list[int]:
        """Tokens that a step which has computed `end` tokens of a request gives."""
        return [self._rng.randrange(50)] if end >= len(flight.tokens[name]) else []

    def _words(self, metadata: Any) -> Any:
        ids = [int(id) for plan in metadata.plans for id in plan.transfer_id.tolist()]
        self._acks.update((id, self._step + self._rng.randrange(3)) for id in ids)
        done = [id for id, due in self._acks.items() if due <= self._step]
        for id in done:
            del self._acks[id]
        return upstream.HiSparseConnectorWorkerMetadata(
            dict.fromkeys(ids, 1), dict.fromkeys(done, 1)
        )

    def _forward(self, flight: Flight, name: str, start: int, count: int) -> None:
        tokens, end = flight.tokens[name], start + count
        request = self.scheduler.requests.get(name)
        now = list(request.all_token_ids) if request is not None else []
        if now[: len(tokens)] == tokens:
            # What the step before has sampled is known to the device.
            tokens = now
        tokens = tokens[:end] + [9] * (end - len(tokens))
        values = row_values([-self._weights, *tokens])[1:]
        hosts = flight.hosts[name]
        # The step of a request that has left since runs all the same, and nobody reads its result.
        current = self.coordinator._tracked.get(name) is flight.entries[name]
        if current:
            self._worker.check_context(name, values, start, hosts)
        self._worker.write(name, values[start:], start, hosts)
        if current:
            self._worker.check_context(name, values, end, hosts)
        self.seen["rows compared" if current else "stale rows"] += count
        self.seen["rows on the host"] += any(
            0 in blocks for blocks in self._worker.tables[name].values()
        )
