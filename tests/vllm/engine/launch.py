# SPDX-License-Identifier: Apache-2.0
"""Owns the start and the end of an engine in this process, and the way to the objects inside it."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from engine.models import UNEVEN, fill_weights

EngineName = Literal["native", "upstream", "none"]
"""`none`: without HiSparse, all KV resident, vLLM's other kernels."""

ENVIRONMENT = {
    # Hooks reach scheduler and worker only if they live in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A row's result must not depend on who else is in its batch.
    "VLLM_BATCH_INVARIANT": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
}

BLOCK = 64


def set_environment() -> None:
    """To be called before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def require_gpu() -> None:
    """Ends the process with one sentence if no engine can start here."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing was run")


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    Args:
        model: folder with the configuration.
        engine: whose worker side serves.
        gpu_blocks: GPU blocks of the shared pool, the null block counted.
        host_pool_gib: size of the host pool.
        hot_rows: rows of a request's hot region; `index_topk` at least.
        max_model_len: longest request in tokens.
        max_num_seqs: running requests at most.
        max_num_batched_tokens: tokens of a step at most.
        mtp: speculative tokens of the MTP layer; 0 for none.
        graphs: whether vLLM captures graphs, by its default mode: whole decode steps for every
            batch size, and the parts between attention layers for steps that prefill.
        kv_cache_dtype: `fp8` for fp8_ds_mla rows, or `bfloat16`.
        async_scheduling: whether the scheduler runs ahead of the worker.
        siblings: connectors beside the HiSparse one, as entries of a MultiConnector.
        seed: of the weights.
        query_scale: of the weights, as in `models.fill_weights`.
        options: further keys of `kv_connector_extra_config`.
    """

    model: Path
    engine: EngineName
    gpu_blocks: int
    host_pool_gib: float = 1.0
    hot_rows: int = 3072
    max_model_len: int = 10_240
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    mtp: int = 0
    graphs: bool = False
    kv_cache_dtype: Literal["fp8", "bfloat16"] = "fp8"
    async_scheduling: bool = False
    siblings: tuple[dict[str, Any], ...] = ()
    seed: int = 7
    query_scale: float = UNEVEN
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Keywords of `vllm.LLM`."""
        from vllm.config import AttentionConfig, HiSparseConfig, KVTransferConfig

        arguments: dict[str, Any] = {
            "model": str(self.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "kv_cache_dtype": self.kv_cache_dtype,
            "block_size": BLOCK,
            "attention_backend": "FLASHMLA_SPARSE",
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "num_gpu_blocks_override": self.gpu_blocks,
            "gpu_memory_utilization": 0.5,
            "enforce_eager": not self.graphs,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "async_scheduling": self.async_scheduling,
            "seed": 0,
        }
        if self.graphs:
            sizes = [(1 + self.mtp) * requests for requests in range(1, self.max_num_seqs + 1)]
            arguments["compilation_config"] = {
                # No torch.compile.
                "mode": 0,
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "cudagraph_capture_sizes": [*sizes, *(s for s in (256, 2048) if s > sizes[-1])],
            }
        if self.mtp:
            arguments["speculative_config"] = {
                "method": "mtp",
                "num_speculative_tokens": self.mtp,
            }
        if self.engine == "none":
            arguments["attention_config"] = AttentionConfig(sparse_mla_force_mqa=True)
            return arguments
        extra: dict[str, Any] = {"host_pool_gib": self.host_pool_gib}
        ours = {}
        if self.engine == "native":
            ours = {"kv_connector_module_path": "hotpage.vllm"}
            extra |= {"engine": "native", **self.options}
        arguments["attention_config"] = AttentionConfig(
            hisparse_config=HiSparseConfig(device_buffer_size=self.hot_rows)
        )
        entry: dict[str, Any] = {
            "kv_connector": "HiSparseConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
            **ours,
        }
        if self.siblings:
            entry = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [entry, *self.siblings]},
            }
        arguments["kv_transfer_config"] = KVTransferConfig(**entry)
        return arguments


class Engine:
    """A started engine; `close` gives its memory back.

    vLLM's private structure is known here and nowhere else in these tests.
    """

    def __init__(self, spec: EngineSpec) -> None:
        set_environment()
        if spec.engine == "native":
            from hotpage.vllm import plugin

            plugin.activate()
        _seed_weights(spec.seed, spec.query_scale)
        from vllm import LLM

        started = time.perf_counter()
        self.spec = spec
        self.llm: Any = LLM(**spec.arguments())
        self.seconds_to_start = time.perf_counter() - started

    @cached_property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @cached_property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self.core.model_executor.driver_worker.worker.model_runner

    @cached_property
    def connector(self) -> Any:
        """The worker side's HiSparse connector."""
        return _hisparse_of(self.runner.kv_connector.kv_connector)

    @property
    def worker(self) -> Any:
        """What moves the bytes."""
        return self.connector.connector_worker

    @property
    def coordinator(self) -> Any:
        """The scheduler side's coordinator."""
        return _hisparse_of(self.scheduler.connector).connector_scheduler.coordinator

    @cached_property
    def layers(self) -> list[Any]:
        """Attention layers with a HiSparse cache, in the order of the model."""
        return [
            module
            for module in self.runner.model.modules()
            if getattr(module, "hisparse_cache", None) is not None
        ]

    @cached_property
    def draft_layers(self) -> list[Any]:
        """The same of the drafter."""
        speculator = self.runner.speculator
        modules = [] if speculator is None else speculator.model.modules()
        return [m for m in modules if getattr(m, "hisparse_cache", None) is not None]

    @cached_property
    def groups(self) -> list[Any]:
        """Index groups in the order of the model."""
        return self.groups_of(self.layers)

    def groups_of(self, layers: list[Any]) -> list[Any]:
        """Index groups of these layers, in their order."""
        found: list[Any] = []
        for layer in layers:
            if all(layer.impl.index_group is not group for group in found):
                found.append(layer.impl.index_group)
        return found

    def recapture(self) -> None:
        """Captures all graphs again, with what has been hooked into the layers meanwhile."""
        if not self.spec.graphs:
            return
        from vllm.config import set_current_vllm_config

        speculator = self.runner.speculator
        managers = [self.runner.cudagraph_manager]
        if speculator is not None:
            managers += [speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager]
        # Their memory pool ends with its last graph, and the managers go on naming it.
        kept = [dict(manager.graphs) for manager in managers]
        for manager in managers:
            manager.release_graphs()
        with set_current_vllm_config(self.runner.vllm_config):
            self.runner.capture_model()
        del kept

    def drain(self, max_steps: int = 200) -> None:
        """Steps until no request and no transfer is left, and forgets all prefixes."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                break
            self.llm.llm_engine.step()
        else:
            raise AssertionError(f"work is left after {max_steps} steps")
        assert self.llm.llm_engine.reset_prefix_cache(), "prefixes are still in use"
        self.connector.reset_capture_state()

    def close(self) -> None:
        """Ends the engine. The next one may start afterwards."""
        import torch

        self.llm.llm_engine.engine_core.shutdown()
        for name in ("core", "runner", "connector", "layers", "draft_layers", "groups"):
            self.__dict__.pop(name, None)
        del self.llm
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()
        torch.cuda.empty_cache()


def _hisparse_of(connector: Any) -> Any:
    """The HiSparse connector itself, or among those of a MultiConnector."""
    every = getattr(connector, "_connectors", (connector,))
    (found,) = (one for one in every if type(one).__name__ == "HiSparseConnector")
    return found


def _seed_weights(seed: int, query_scale: float) -> None:
    """Makes the dummy loader draw ours."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        fill_weights(model, seed, query_scale)

    DummyModelLoader.load_weights = load_weights
