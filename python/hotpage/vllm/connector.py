# SPDX-License-Identifier: Apache-2.0
"""Owns the class that vLLM loads as its HiSparseConnector, and the choice of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import connector as upstream

from hotpage.errors import ConfigError
from hotpage.vllm import plugin
from hotpage.vllm._compat import check_vllm
from hotpage.vllm.metadata import HotPageConnectorMetadata
from hotpage.vllm.options import Options, check_native, check_worker, parse_options
from hotpage.vllm.scheduler import NativeConnectorScheduler
from hotpage.vllm.wiring import CoordinatorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HiSparseConnector(upstream.HiSparseConnector):
    """vLLM's connector with the Rust Coordinator inside, or vLLM's own under `engine: upstream`.

    The name is vLLM's: it recognises HiSparse by it, and a MultiConnector keys stats by it.

    Raises:
        ConfigError: an option or a setting that cannot work; one sentence with the remedy.
        UnsupportedVllmError: native on a vLLM whose internals are not known.
    """

    options: Options

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        self.options = parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        native = self.options.engine == "native"
        if native:
            _check(vllm_config, role, self.options)
        super().__init__(vllm_config, role, kv_cache_config)
        if native and role == KVConnectorRole.WORKER:
            from hotpage.vllm.worker import NativeConnectorWorker

            self.connector_worker = NativeConnectorWorker(
                vllm_config, kv_cache_config, self.options
            )
        elif native:
            self.connector_scheduler = NativeConnectorScheduler(
                settings=_settings(vllm_config, self.options),
                allocate_fast_path=self.options.allocate_fast_path,
                metrics_interval=self.options.metrics_interval,
            )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """As vLLM's, which asks while it makes its configuration: minutes of loading weights come
        after that.

        Raises:
            ConfigError: an option that cannot work.
        """
        parse_options(extra_config)
        return super().requires_piecewise_for_cudagraph(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """As vLLM's.

        The engine core asks before its workers profile memory, in the course of which they may pin
        the host pool. What can be refused by then is refused here.

        Raises:
            ConfigError: as the constructor.
            UnsupportedVllmError: as the constructor.
        """
        assert vllm_config.kv_transfer_config is not None
        options = parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if options.engine == "native":
            _check(vllm_config, KVConnectorRole.SCHEDULER, options)
            check_worker(vllm_config)
        return super().get_required_kvcache_layout(vllm_config)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Installs the coordinator before the first request."""
        if isinstance(self.connector_scheduler, NativeConnectorScheduler):
            self.connector_scheduler.bind_kv_cache_manager(kv_cache_manager)
        else:
            super().bind_kv_cache_manager(kv_cache_manager)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Hands the step's plans to the worker, before the forward pass."""
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, HotPageConnectorMetadata):
            super().start_load_kv(forward_context, **kwargs)
            return
        worker = self.connector_worker
        assert worker is not None
        worker.start_step(
            metadata,
            kwargs.get("request_state_indices"),
            kwargs.get("request_ids"),
            num_tokens=int(kwargs.get("num_tokens") or 0),
        )
        worker.prepare_forward(kwargs.get("attn_metadata"))


def _check(config: VllmConfig, role: KVConnectorRole, options: Options) -> None:
    check_vllm()
    check_native(config, options)
    if not plugin.is_active():
        raise ConfigError(
            "engine native needs hotpage's entry point of the group vllm.general_plugins; "
            "install the wheel and add hotpage to VLLM_PLUGINS if that is set"
        )
    if role == KVConnectorRole.WORKER:
        check_worker(config)


def _settings(config: VllmConfig, options: Options) -> CoordinatorSettings:
    from vllm.v1.hisparse.runtime import use_shared_hisparse_host_pool

    num_ranks = config.parallel_config.world_size
    return CoordinatorSettings(
        num_ranks=num_ranks,
        num_host_writers=1 if use_shared_hisparse_host_pool(config) else num_ranks,
        top_k=config.model_config.hf_config.index_topk,
        verification_rows=1 + config.num_speculative_tokens,
        hot_return_steps=options.hot_return_steps,
        step_tokens=config.scheduler_config.max_num_batched_tokens,
    )
