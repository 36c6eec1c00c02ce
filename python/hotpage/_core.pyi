# SPDX-License-Identifier: Apache-2.0
"""Types of the Rust extension module; rust/python owns the definitions.

Arrays passed in are C-contiguous numpy arrays (or other buffers) of the dtype stated here and are
copied; every other dtype, dimension, layout or length is a `ProtocolError`. Arrays that come out
of a plan are read-only views of the plan's bytes. G is the number of KV cache groups.

Each event is all or nothing: a call that raises `ProtocolError` leaves the state as it was.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, final

import numpy as np
import numpy.typing as npt

_Int32: TypeAlias = npt.NDArray[np.int32]
_Int64: TypeAlias = npt.NDArray[np.int64]
_UInt8: TypeAlias = npt.NDArray[np.uint8]

__version__: str
"""Version of the crates, equal to `hotpage.__version__`."""

PAGE_DIRTY: Final[int]
PAGE_SPILLING: Final[int]
PAGE_ENQUEUED: Final[int]
PAGE_CLEAN: Final[int]
PAGE_UNPINNED: Final[int]
PAGE_HOST_ONLY: Final[int]
PAGE_IMPORTING: Final[int]

TRANSFER_SPILL: Final[int]
TRANSFER_MIRRORED: Final[int]
TRANSFER_RESTORE: Final[int]
TRANSFER_HOST_COPY: Final[int]

PREFIX_HOST: Final[int]
"""Published host pages; host-only where they bring no GPU blocks."""
PREFIX_GPU: Final[int]
"""Pages found in the GPU prefix cache; no host pool."""
PREFIX_IMPORT: Final[int]
"""Host pages that a sibling connector is about to fill with `prefix_tokens` tokens."""
PREFIX_PARTIAL_IMPORT: Final[int]
"""Published host pages, then pages that a sibling is about to fill up to `prefix_tokens`."""

_Admitted: TypeAlias = tuple[_Int32, _UInt8, _Int32, _Int32, _Int32, _Int32]
"""`(requests [n], prefix_kind [n], prefix_tokens [n], page_offsets [n + 1], host_blocks [pages],
resident_blocks [pages, G])`; either block array may be empty, null blocks stand for none."""

_Allocated: TypeAlias = tuple[_Int32, _Int32, _Int32, _Int32, _Int32]
"""`(requests [n], first_page [n], page_offsets [n + 1], host_blocks [pages], resident_blocks
[pages, G])`; `host_blocks` is empty without a host pool."""

_HotRegions: TypeAlias = tuple[_Int32, _Int32]
"""`(requests [n], blocks [n, hot_region_blocks])`."""

_Scheduled: TypeAlias = tuple[_Int32, _Int32, _Int32, _Int32]
"""`(requests, num_computed_tokens, num_scheduled_tokens, num_draft_tokens)`, each [n]."""

_Acks: TypeAlias = tuple[_Int64, _Int32]
"""`(transfer_ids [n], counts [n])`: how many ranks said so in this batch."""

class _Settings(TypedDict):
    block_size: int
    num_kv_groups: int
    gpu_blocks: int
    host_blocks: int
    other_blocks_per_page: int
    hot_rows: int
    top_k: int
    verification_rows: int
    num_ranks: int
    num_host_writers: int
    host_copy: Literal["none", "mirrored", "spilled"]
    release_point: Literal["enqueued", "completed"]
    transition: bool
    transition_watermark: int | None
    hot_return_steps: int
    admission_window_pages: int
    num_reprefillable_tokens: int
    max_model_len: int

@final
class AdmissionCost:
    """What admitting a request takes from the pools."""

    @property
    def gpu_blocks(self) -> int: ...
    @property
    def host_blocks(self) -> int: ...
    @property
    def hot_region(self) -> bool: ...

@final
class Refusal:
    """Why a request was not admitted or could not get a hot region; `str` gives the sentence."""

    @property
    def never_fits(self) -> bool: ...
    @property
    def pool(self) -> Literal["gpu", "host"]: ...
    @property
    def need(self) -> int: ...
    @property
    def have(self) -> int: ...
    @property
    def reclaiming(self) -> bool: ...

@final
class StepPlan:
    """What the engine and the workers must do for one step; apply in the order of the lists."""

    @property
    def step(self) -> int: ...
    @property
    def num_kv_groups(self) -> int: ...
    @property
    def touch_gpu(self) -> _Int32: ...
    @property
    def touch_host(self) -> _Int32: ...
    @property
    def publish_request(self) -> _Int32: ...
    @property
    def publish_num_pages(self) -> _Int32: ...
    @property
    def unpin_gpu(self) -> _Int32: ...
    @property
    def free_gpu(self) -> _Int32: ...
    @property
    def free_host(self) -> _Int32: ...
    @property
    def hot_regions_wanted(self) -> _Int32: ...
    @property
    def hot_regions_returned(self) -> _Int32: ...
    @property
    def hot_region_request(self) -> _Int32: ...
    @property
    def hot_region_blocks(self) -> _Int32:
        """[n, blocks of a hot region]"""
    @property
    def recycled_host_blocks(self) -> _Int32: ...
    @property
    def transfer_id(self) -> _Int64: ...
    @property
    def transfer_kind(self) -> _UInt8:
        """0 spill, 1 mirrored (acknowledge only), 2 restore, 3 host copy."""
    @property
    def transfer_after_forward(self) -> _UInt8: ...
    @property
    def transfer_host_block(self) -> _Int32: ...
    @property
    def transfer_source_host_block(self) -> _Int32: ...
    @property
    def transfer_num_rows(self) -> _Int32: ...
    @property
    def transfer_resident_blocks(self) -> _Int32:
        """[n, G]"""
    @property
    def residency_cleared(self) -> _Int32: ...
    @property
    def residency_request(self) -> _Int32: ...
    @property
    def residency_page(self) -> _Int32: ...
    @property
    def residency_blocks(self) -> _Int32:
        """[n, G], null blocks where the page is host-only."""
    @property
    def all_context_resident(self) -> bool: ...
    @property
    def replay_row_request(self) -> _Int32: ...
    @property
    def replay_row_position(self) -> _Int32: ...
    @property
    def replay_row_provisional(self) -> _UInt8: ...
    @property
    def replay_request(self) -> _Int32: ...
    @property
    def replay_first_row(self) -> _Int32:
        """[requests + 1], empty without verification rows."""
    @property
    def replay_union_bound(self) -> _Int32: ...
    @property
    def replay_dropped_request(self) -> _Int32: ...
    @property
    def replay_dropped_position(self) -> _Int32: ...
    @property
    def replay_dropped_rows(self) -> _Int32: ...
    @property
    def lost_pages(self) -> _Int32:
        """[n, 2]: request, page."""
    @property
    def refusals(self) -> list[tuple[int, Refusal]]: ...
    @property
    def retired(self) -> _Int32: ...
    def nonempty(self, *names: str) -> dict[str, list[int]]:
        """The lists among `names` that have elements, flat, by name."""
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> StepPlan:
        """Raises `ProtocolError` for bytes that `to_bytes` of this version did not write."""

@final
class FreePlan:
    """What the engine must do with the blocks of a request that leaves."""

    @property
    def publish_pages(self) -> int: ...
    @property
    def unpin_gpu(self) -> _Int32: ...
    @property
    def free_gpu(self) -> _Int32: ...
    @property
    def free_host(self) -> _Int32:
        """Empty but at shutdown: host blocks of a request are the engine's to free."""
    @property
    def retired(self) -> bool: ...
    def nonempty(self, *names: str) -> dict[str, list[int]]:
        """The lists among `names` that have elements, flat, by name."""
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> FreePlan:
        """Raises `ProtocolError` for bytes that `to_bytes` of this version did not write."""

@final
class Coordinator:
    """The one owner of page states, leases and transfers.

    Every setting must be given, but for `transition_watermark`. With `engine_checks_pools` the
    pools are not held against the longest request: the engine has done that by rules of its own.
    Raises `ConfigError` or `CapacityError`.
    """

    def __new__(
        cls,
        *,
        engine_checks_pools: bool = False,
        block_size: int,
        num_kv_groups: int,
        gpu_blocks: int,
        host_blocks: int,
        other_blocks_per_page: int,
        hot_rows: int,
        top_k: int,
        verification_rows: int,
        num_ranks: int,
        num_host_writers: int,
        host_copy: Literal["none", "mirrored", "spilled"],
        release_point: Literal["enqueued", "completed"],
        transition: bool,
        transition_watermark: int | None = None,
        hot_return_steps: int,
        admission_window_pages: int,
        num_reprefillable_tokens: int,
        max_model_len: int,
    ) -> Coordinator: ...
    def step(
        self,
        *,
        gpu_free: int,
        host_free: int,
        scheduled: _Scheduled | None = None,
        reused_blocks: _Int32 | None = None,
        admitted: _Admitted | None = None,
        allocated: _Allocated | None = None,
        hot_regions: _HotRegions | None = None,
        prefix_host_pages: _Int32 | None = None,
        known_tokens: _Int32 | None = None,
    ) -> StepPlan:
        """Absorbs one scheduling step's events in the order reused, admitted, allocated, hot
        regions, then builds the plan of the coming forward pass.

        `gpu_free` and `host_free` are the blocks that the pools could hand out now, unpinned and
        evictable ones counted. Arrays are checked before the first event is absorbed; of events
        that contradict the state, those before the failing one stay absorbed.

        `prefix_host_pages` `[admitted]` counts the published pages of partial imports.
        `known_tokens` `[scheduled]` are the tokens that are certain now, where an asynchronous
        engine schedules ahead of them: pages with later ones are not sealed.
        """
    def on_worker_output(
        self,
        enqueued: _Acks | None = None,
        completed: _Acks | None = None,
        failed: _Acks | None = None,
    ) -> None:
        """Absorbs all that the workers report after a step; all three lists or nothing."""
    def absorb_worker_output(
        self,
        reused_blocks: _Int32 | None = None,
        enqueued: _Acks | None = None,
        completed: _Acks | None = None,
        failed: _Acks | None = None,
    ) -> StepPlan:
        """`on_blocks_reused`, `on_worker_output` and `build_due_plan` in one call."""
    def build_due_plan(self) -> StepPlan:
        """Packages what needs no forward pass: restores, copies made again, releases,
        publications, retired requests. Its transfers belong before the next forward pass."""
    def take_residency(self, requests: _Int32) -> StepPlan:
        """Packages the residency of live requests as the next step's plan would."""
    def on_admitted(
        self,
        requests: _Int32,
        prefix_kind: _UInt8,
        prefix_tokens: _Int32,
        page_offsets: _Int32,
        host_blocks: _Int32,
        resident_blocks: _Int32,
        prefix_host_pages: _Int32 | None = None,
    ) -> None: ...
    def on_blocks_allocated(
        self,
        requests: _Int32,
        first_page: _Int32,
        page_offsets: _Int32,
        host_blocks: _Int32,
        resident_blocks: _Int32,
    ) -> None: ...
    def on_blocks_reused(self, blocks: _Int32) -> None: ...
    def on_hot_region_allocated(self, request: int, blocks: _Int32) -> None: ...
    def on_import_finished(self, request: int, num_tokens: int | None) -> int:
        """Returns the pages that the block table keeps; `None` tokens mean that it failed."""
    def on_host_block_redirected(
        self, request: int, page: int, host_block: int, resident_blocks: _Int32 | None = None
    ) -> None: ...
    def on_mirror_lost(self, request: int, page: int) -> None: ...
    def on_prefix_cache_reset(self) -> None: ...
    def on_transfers_enqueued(self, transfer_ids: _Int64, counts: _Int32) -> None: ...
    def on_transfers_completed(self, transfer_ids: _Int64, counts: _Int32) -> None: ...
    def on_transfers_failed(self, transfer_ids: _Int64, counts: _Int32) -> None: ...
    def on_freed(
        self, request: int, reason: Literal["finished", "preempted", "aborted"]
    ) -> FreePlan: ...
    def shutdown(self) -> FreePlan:
        """Releases every lease that is left; later events are refused."""
    def try_admit(
        self,
        *,
        num_tokens: int,
        host_prefix_pages: int,
        gpu_prefix_pages: int,
        gpu_free: int,
        host_free: int,
    ) -> AdmissionCost | Refusal: ...
    @property
    def config(self) -> _Settings: ...
    @property
    def hot_region_blocks(self) -> int: ...
    @property
    def watermark(self) -> int: ...
    @property
    def num_live(self) -> int: ...
    @property
    def num_transfers(self) -> int: ...
    def has_pending_work(self) -> bool: ...
    def has_pending_reclamation(self, gpu_free: int, host_free: int) -> bool: ...
    def num_pages(self, request: int) -> int: ...
    def page_states(self, request: int) -> bytes:
        """One `PAGE_*` number for each page."""
    def durable_pages(self, request: int) -> bytes:
        """One byte for each page: 1 if every writer has completed its host copy."""
    def residency_row(self, request: int) -> list[int]:
        """GPU blocks `[pages x G]`, the null block where only the host copy is valid."""
    def resident_blocks(self, request: int, page: int) -> list[int]: ...
    def durable_prefix(self, request: int) -> int: ...
    def has_hot_region(self, request: int) -> bool: ...
    def readable_copies(self, host_blocks: _Int32) -> list[list[int] | None]: ...
    def stats(self) -> dict[str, int]: ...
    def state_digest(self) -> int:
        """Changes with everything the Coordinator decides by; O(pools), for tests."""

@final
class RequestInterner:
    """Dense ids for the strings that an engine calls its requests by."""

    def __new__(cls) -> RequestInterner: ...
    def bind(self, name: str) -> int:
        """Gives `name` an id that nothing else uses; `ProtocolError` if the name has one."""
    def get(self, name: str) -> int | None: ...
    def name(self, request: int) -> str | None: ...
    def unbind(self, name: str) -> int | None:
        """Takes `name` off its id, which stays in use until it is retired."""
    def retire(self, requests: _Int32) -> None:
        """Lets unbound ids be used again; all of them or, with `ProtocolError`, none."""
    @property
    def num_in_use(self) -> int: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...

class PolicyReport(TypedDict):
    """What one policy of a demonstration came to; bytes count indexer pages too."""

    running_mean: float
    running_max: int
    bytes_gpu_to_host: int
    bytes_host_to_gpu: int
    hot_hit_rate: float | None
    gpu_blocks: int
    host_blocks: int
    steps: int
    events: int
    busy_steps: int
    arrived: int
    finished: int
    aborted: int
    preemptions: int
    lost_page_preemptions: int
    prefilled_tokens: int
    recomputed_tokens: int
    decoded_tokens: int
    rejected_rows: int
    prefix_hit_tokens: int
    failed_copies: int
    leaked_blocks: int
    rows_checked: int
    mismatches: int
    first_mismatch: str | None
    states_seen: list[str]
    traffic_bytes: dict[str, int]
    """By reason. To the host: `mirrored`, `spilled`, `indexer_to_host`; to the GPU: `restored`,
    `missed`, `staged`, `indexer_to_gpu`. Each direction adds up to its total above."""
    refusals: dict[str, int]

class DemoReport(TypedDict):
    """What a demonstration came to; these two classes exist for type checkers only."""

    rows_checked: int
    mismatches: int
    states_seen: list[str]
    policies: dict[str, PolicyReport]

@final
class Demo:
    """One workload served under each policy from the same memory, every attended row compared.

    Settings that are not given suit the workload. Raises `ConfigError` or `CapacityError`.
    `conversations` holds `(prompt_tokens, output_tokens)` of each turn of each conversation.
    """

    def __new__(
        cls,
        *,
        conversations: Sequence[Sequence[tuple[int, int]]] | None = None,
        scale: float | None = None,
        num_conversations: int | None = None,
        gpu_pool_bytes: int | None = None,
        host_pool_bytes: int | None = None,
        top_k: int | None = None,
        hot_rows: int | None = None,
        block_size: int | None = None,
        row_bytes: int | None = None,
        host_layout: Literal["row_interleaved", "layer_major"] | None = None,
        host_copy: Literal["mirrored", "spilled"] | None = None,
        release_point: Literal["enqueued", "completed"] | None = None,
        num_ranks: int | None = None,
        chunk_tokens: int | None = None,
        num_draft_tokens: int | None = None,
        system_tokens: int | None = None,
        stagger_steps: int | None = None,
        think_steps: int | None = None,
        seed: int | None = None,
        plant_wrong_row: bool | None = None,
        policies: Sequence[Literal["hotpage", "preempt", "offload"]] | None = None,
    ) -> Demo: ...
    def advance(self, max_steps: int) -> bool:
        """Runs up to `max_steps` steps without holding the interpreter; True when it is done."""
    @property
    def policy(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def fraction(self) -> float: ...
    def report(self) -> DemoReport: ...

class SimulationReport(TypedDict):
    """What one policy and number of users came to on one replica; for type checkers only.

    Times in seconds, bytes of one rank. A latency is `{"p50": ..., "p90": ...}`, None without
    samples.
    """

    policy: str
    num_users: int
    gpu_blocks: int
    host_blocks: int
    seconds: float
    steps: int
    conversations: int
    turns: int
    running_mean: float
    running_max: int
    preemptions: int
    prefilled_tokens: int
    recomputed_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    output_tokens: int
    rejected_rows: int
    bytes_gpu_to_host: int
    bytes_host_to_gpu: float
    missed_bytes: float
    staged_bytes: float
    restored_bytes: int
    misses: float
    between_tokens: dict[str, float] | None
    first_token: dict[str, float] | None
    later_first_token: dict[str, float] | None
    output_tokens_per_second: float
    tokens_per_second: float
    user_tokens_per_second: float | None
    time: dict[str, float]
    """Seconds of all steps: `steps` is the sum, the others are its parts."""
    refusals: dict[str, int]
    leaked_blocks: int

@final
class Simulation:
    """One policy serving one number of users on one replica, in time that a cost model gives.

    Raises `ConfigError` or `CapacityError`. `packing` holds the layers of each index group by KV
    cache group, `copy_gbps` a rate for each index group in that order, `conversations`
    `(prompt_tokens, output_tokens)` of each turn; conversations are taken in turn. GB are 10^9
    bytes, rates those of one GPU. `resolve_us` and `resident_resolve_us` are a leader's own time
    and that of a verification row; `peers` is the rate at which ranks write to each other and the
    microseconds that they take to meet.
    """

    def __new__(
        cls,
        *,
        policy: Literal["hotpage", "preempt", "offload"],
        packing: Sequence[Sequence[int]],
        block_size: int,
        row_bytes: int,
        kv_bytes: int,
        block_bytes: int,
        ordinary_block_bytes: int,
        host_pool_bytes: int,
        host_block_bytes: int,
        indexer_page_bytes: int,
        top_k: int,
        hot_rows: int,
        num_draft_tokens: int,
        acceptance_ppm: int,
        step_tokens: int,
        in_flight_tokens: int,
        max_running: int,
        max_model_len: int,
        hot_return_steps: int,
        conversations: Sequence[Sequence[tuple[int, int]]],
        num_users: int,
        num_conversations: int,
        seed: int,
        ranks: int,
        weight_bytes: float,
        active_params: float,
        active_bytes: float,
        expert_share: float,
        expert_replicas: int,
        hbm_gbps: float,
        compute_tflops: float,
        indexer_row_bytes: float,
        copy_gbps: Sequence[float],
        resolve_us: tuple[float, float],
        resident_resolve_us: tuple[float, float],
        copy_us: float,
        stage_gbps: float,
        restore_gbps: float,
        mirror_gbps: float,
        scheduler_us: float,
        overhead_us: float,
        peers: tuple[float, float] | None = None,
    ) -> Simulation: ...
    def advance(self, max_steps: int) -> bool:
        """Runs up to `max_steps` steps without holding the interpreter; True when it is done."""
    @property
    def fraction(self) -> float: ...
    def report(self) -> SimulationReport: ...

def copy_gbps(
    link_gbps: float, layout: Literal["row_interleaved", "layer_major"], layers: int
) -> float:
    """GB/s of row copies in an index group of `layers` layers over a host link."""

def _sample_errors() -> list[tuple[str, Any]]:
    """One exception of each family of core errors, by the family's name; for tests."""

def plan_capacity(**arguments: Any) -> dict[str, Any]:
    """A capacity plan. Arguments, all by keyword (`hotpage.plan.request` fills them in):

    `leaders` (bool for each layer), `draft_layers`, `row_bytes`, `block_align_bytes`,
    `indexer_row_bytes`, `tokens_per_indexer_row`, `top_k`, `max_positions`, `attention_heads`
    (may be None), `request_groups` ((page bytes, blocks a request) pairs); `hbm_gib`,
    `gpu_memory_utilization`, `weights_gib`, `runtime_gib`, `kv_gib`; `gpus`, `tp`, `dp`,
    `block_size`, `hot_rows`, `mtp`, `host_pool_gib`, `offload_gib`, `registration_gib`, `contexts`
    (tokens), `output`, `max_model_len`, `batched_tokens`, `max_num_seqs`, `hit_rate`,
    `link_gbps`, `layout`.

    Raises:
        ConfigError: an argument is missing, unknown or out of its bounds.
        CapacityError: the machine is too small.
    """

def pack_layers(**arguments: Any) -> dict[str, Any]:
    """The packing of layers into groups, from the model's arguments and `block_size`, `hot_rows`
    and `mtp`; sizes in bytes.

    Raises:
        ConfigError: an argument is missing, unknown or out of its bounds.
    """

def layers_with_indexer(
    layers: int, frequency: int, offset: int, pattern: str | None = None
) -> list[bool]:
    """Which layers have an indexer of their own, by vLLM 0.33's rule.

    Raises:
        ConfigError: `frequency` is 0.
    """
