# SPDX-License-Identifier: Apache-2.0
"""Owns the options in `kv_connector_extra_config`, and the settings that native refuses.

`host_pool_gib` is among the options but vLLM's own, which asks for it when the weights are loaded;
here a value that is no size is refused earlier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hotpage.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODULE_PATH = "hotpage.vllm"
SIBLINGS_KEY = "hotpage_siblings"
"""Key under which the general plugin notes the connectors beside ours in a MultiConnector."""

# A sibling that never reads or writes host rows lets the pool take any layout.
HOST_BLIND_SIBLINGS = frozenset({"OffloadingConnector"})

_OR_UPSTREAM = 'or set "engine": "upstream" in kv_connector_extra_config'


@dataclass(frozen=True)
class Options:
    """What the user chose for this connector.

    Args:
        engine: `native` runs the Rust Coordinator; `upstream` leaves all to vLLM's own code.
        host_layout: order of rows in the host pool; `auto` follows from the siblings.
        allocate_fast_path: answer allocations that need no block without asking every manager.
        hot_return_steps: steps of full residency after which a hot region is given back.
        metrics_interval: steps between two reports, of the host pool's level and of the device
            counters.
        cooperative_copy: `auto` lets ranks that reach each other's memory fetch misses for each
            other; `off` lets each fetch its own.
        siblings: connectors beside this one in a MultiConnector.
    """

    engine: Literal["native", "upstream"] = "native"
    host_layout: Literal["auto", "row_interleaved", "layer_major"] = "auto"
    allocate_fast_path: bool = False
    hot_return_steps: int = 512
    metrics_interval: int = 200
    cooperative_copy: Literal["auto", "off"] = "auto"
    siblings: tuple[str, ...] = ()

    @property
    def resolved_host_layout(self) -> Literal["row_interleaved", "layer_major"]:
        """`auto` made definite: interleaved wherever no sibling looks at host rows."""
        if self.host_layout != "auto":
            return self.host_layout
        return "layer_major" if self.shares_host_rows else "row_interleaved"

    @property
    def shares_host_rows(self) -> bool:
        """True if a sibling reads or writes host rows, by means and at times of its own."""
        return not HOST_BLIND_SIBLINGS.issuperset(self.siblings)


def parse_options(extra: Mapping[str, Any]) -> Options:
    """Reads the options of one connector entry.

    Raises:
        ConfigError: an unknown option or value; the text names it, the choices and the remedy.
    """
    left = dict(extra)
    _check_host_pool(left.pop("host_pool_gib", None))
    siblings = tuple(left.pop(SIBLINGS_KEY, ()))
    options = Options(
        engine=_choice(left, "engine", ("native", "upstream")),
        host_layout=_choice(left, "host_layout", ("auto", "row_interleaved", "layer_major")),
        allocate_fast_path=_flag(left, "allocate_fast_path", Options.allocate_fast_path),
        hot_return_steps=_steps(left, "hot_return_steps", Options.hot_return_steps),
        metrics_interval=_steps(left, "metrics_interval", Options.metrics_interval),
        cooperative_copy=_choice(left, "cooperative_copy", ("auto", "off")),
        siblings=siblings,
    )
    if left:
        known = (
            "engine, host_layout, allocate_fast_path, hot_return_steps, metrics_interval, "
            "cooperative_copy"
        )
        raise ConfigError(
            f"{min(left)} is no option of hotpage; remove it or use one of host_pool_gib, {known}"
        )
    return options


def native_options(config: VllmConfig) -> Options | None:
    """Options of the entry that selects hotpage's native engine; None if there is none.

    Works before any connector exists: the entry may be the configuration's own or a child of a
    MultiConnector.

    Raises:
        ConfigError: as `parse_options`.
    """
    transfer = config.kv_transfer_config
    if transfer is None:
        return None
    extra = dict(transfer.kv_connector_extra_config or {})
    if transfer.kv_connector_module_path == MODULE_PATH:
        options = parse_options(extra)
        return options if options.engine == "native" else None
    children = extra.get("connectors", ()) if transfer.kv_connector == "MultiConnector" else ()
    for at, child in enumerate(children):
        if child.get("kv_connector_module_path") != MODULE_PATH:
            continue
        others = [other for i, other in enumerate(children) if i != at]
        siblings = [str(other.get("kv_connector")) for other in others]
        own = {**child.get("kv_connector_extra_config", {}), SIBLINGS_KEY: siblings}
        options = parse_options(own)
        if options.engine != "native":
            return None
        for name, other in zip(siblings, others, strict=True):
            check_sibling(name, other.get("kv_connector_extra_config") or {})
        return options
    return None


def check_sibling(name: str, extra: Mapping[str, Any]) -> None:
    """Refuses a connector beside the native one that would load in the middle of a step.

    Args:
        name: of its class.
        extra: its `kv_connector_extra_config`.

    Raises:
        ConfigError: one sentence that names the setting and the remedy.
    """
    if extra.get("sync_load_budget_bytes"):
        raise ConfigError(
            "engine native hears of an import when it has ended, not within a step, as with "
            f"sync_load_budget_bytes; take it out of {name}'s kv_connector_extra_config"
        )


def check_worker(config: VllmConfig) -> None:
    """Refuses what the native worker was not proven to serve, and sizes that its kernels lack.

    Raises:
        ConfigError: one sentence that names the setting and the remedy.
    """
    if config.parallel_config.world_size > 1:
        raise ConfigError(
            f"engine native serves one GPU an engine, got {config.parallel_config.world_size}; "
            f"use data parallel replicas {_OR_UPSTREAM}"
        )
    speculative = config.speculative_config
    if speculative is not None and speculative.use_multi_module_mtp():
        # A module writes the rows of rejected steps anew; a step's mirror brings its own rows.
        raise ConfigError(
            "engine native serves one MTP module, and the draft model has several; "
            f"set num_speculative_tokens to 1 {_OR_UPSTREAM}"
        )
    _check_batch(config)


def _check_batch(config: VllmConfig) -> None:
    """The bounds that the kernels check once they are bound, when the host pool is pinned."""
    from hotpage.kernels._abi import MAX_REQUESTS
    from hotpage.kernels.resolve_and_copy import MAX_ROWS_PER_REQUEST

    scheduler, drafts = config.scheduler_config, config.num_speculative_tokens
    if scheduler.max_num_seqs > MAX_REQUESTS:
        raise ConfigError(
            f"engine native serves {MAX_REQUESTS} requests a batch, got {scheduler.max_num_seqs}; "
            f"lower --max-num-seqs {_OR_UPSTREAM}"
        )
    if drafts >= MAX_ROWS_PER_REQUEST:
        raise ConfigError(
            f"engine native serves {MAX_ROWS_PER_REQUEST - 1} draft tokens, got {drafts}; "
            f"lower num_speculative_tokens {_OR_UPSTREAM}"
        )
    rows = scheduler.max_num_seqs * (1 + drafts)
    if scheduler.max_num_batched_tokens < rows:
        raise ConfigError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, less than the {rows} "
            f"verification rows of {scheduler.max_num_seqs} requests; raise it or lower "
            "--max-num-seqs"
        )


def check_native(config: VllmConfig, options: Options) -> None:
    """Refuses what the native engine cannot serve.

    Raises:
        ConfigError: one sentence that names the setting and the remedy.
    """
    for complaint in _complaints(config, options):
        raise ConfigError(complaint)


def _complaints(config: VllmConfig, options: Options) -> Sequence[str]:
    parallel = config.parallel_config
    found = []
    if parallel.prefill_context_parallel_size > 1:
        found.append(
            "engine native does not serve prefill_context_parallel_size "
            f"{parallel.prefill_context_parallel_size}; set it to 1"
        )
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        found.append(
            "engine native does not serve a step in microbatches; "
            "drop --enable-dbo and --ubatch-size"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        # Each has a scheduler, which hears of its own rank's copies alone, and at its own time.
        found.append(
            "engine native does not serve several ranks of an external launcher; "
            "use --distributed-executor-backend mp"
        )
    if config.cache_config.cache_dtype == "nvfp4_ds_mla":
        found.append("engine native does not serve kv_cache_dtype nvfp4_ds_mla; use fp8_ds_mla")
    model = config.model_config
    if model is not None and getattr(model, "enable_sleep_mode", False):
        found.append(
            f"engine native does not survive sleep mode; drop --enable-sleep-mode {_OR_UPSTREAM}"
        )
    kind = getattr(getattr(model, "hf_config", None), "model_type", None)
    if kind == "deepseek_v4":
        found.append("engine native does not serve DeepSeek V4, whose KV layout it does not know")
    if options.host_layout == "row_interleaved":
        readers = [name for name in options.siblings if name not in HOST_BLIND_SIBLINGS]
        if readers:
            found.append(
                f"host_layout row_interleaved cannot be read by {readers[0]}; "
                "use host_layout layer_major or take the connector out"
            )
    return found


def _check_host_pool(size: Any) -> None:
    """A missing size is left to vLLM's own check: the option is required there."""
    if size is None:
        return
    try:
        gib = float(size)
    except (TypeError, ValueError):
        gib = math.nan
    if not 0 < gib < math.inf:
        raise ConfigError(
            f"host_pool_gib is {size!r}, expected a positive number of GiB; give 384, say"
        )


def _choice(left: dict[str, Any], name: str, choices: tuple[str, ...]) -> Any:
    value = left.pop(name, choices[0])
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}; choose one")
    return value


def _flag(left: dict[str, Any], name: str, default: bool) -> bool:
    value = left.pop(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected true or false; choose one")
    return value


def _steps(left: dict[str, Any], name: str, default: int) -> int:
    value = left.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}, expected at least 1; give a number of steps")
    return value
