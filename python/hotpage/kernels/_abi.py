# SPDX-License-Identifier: Apache-2.0
"""Owns the ctypes mirror of cuda/include/hotpage/abi.h; loads nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

ABI_VERSION = 5

OK = 0
STATUS_STRUCT_SIZE = 1
STATUS_INVALID_ARGUMENT = 2
STATUS_UNSUPPORTED = 3
STATUS_CUDA_BASE = 1000

MAX_REQUESTS = 1024
MAX_GROUP_LAYERS = 8
MAX_ROW_BYTES = 16384

COUNTER_HITS = 0
COUNTER_MISSES = 1
COUNTER_OVERFLOW = 2
NUM_COUNTERS = 3

STRUCTS: dict[str, type[ParameterBlock]] = {}
"""C name of every parameter block -> its mirror."""

LAUNCHERS: dict[str, type[ParameterBlock]] = {}
"""C name of every launcher `status f(const block *, void *stream)` -> its parameter block."""


class ParameterBlock(ctypes.Structure):
    """Base of the mirrors; `struct_size` is filled in on construction."""

    c_name: ClassVar[str]

    def __init__(self, **values: int) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **values)
        for name, kind, *_ in self._fields_:
            # OK because ctypes makes inner blocks without calling their constructor.
            if isinstance(kind, type) and issubclass(kind, ParameterBlock):
                getattr(self, name).struct_size = ctypes.sizeof(kind)

    def __repr__(self) -> str:
        fields: list[tuple[Any, ...]] = self._fields_  # type: ignore[assignment]
        values = ((name, getattr(self, name)) for name, *_ in fields if name != "struct_size")
        return ", ".join(f"{name}={_text(value)}" for name, value in values)


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, ctypes.Array) else str(value)


Block = TypeVar("Block", bound=ParameterBlock)


def mirror(c_name: str, *, launcher: str | None = None) -> Callable[[type[Block]], type[Block]]:
    """Registers a mirror under the struct's C name, and the launcher that takes it."""

    def register(block: type[Block]) -> type[Block]:
        block.c_name = c_name
        STRUCTS[c_name] = block
        if launcher is not None:
            LAUNCHERS[launcher] = block
        return block

    return register


@mirror("hotpage_device_properties")
class DeviceProperties(ParameterBlock):
    """Properties of one device; sizes in bytes, versions as 1000 x major + 10 x minor."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("compute_major", ctypes.c_int32),
        ("compute_minor", ctypes.c_int32),
        ("num_multiprocessors", ctypes.c_int32),
        ("max_threads_per_block", ctypes.c_int32),
        ("registers_per_multiprocessor", ctypes.c_int32),
        ("max_dynamic_shared_bytes_per_block", ctypes.c_int32),
        ("shared_bytes_per_multiprocessor", ctypes.c_int32),
        ("l2_bytes", ctypes.c_int32),
        ("reads_registered_host_memory", ctypes.c_int32),
        ("supports_clusters", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
        ("runtime_version", ctypes.c_int32),
    ]


@mirror("hotpage_fill_params", launcher="hotpage_fill")
class FillParams(ParameterBlock):
    """Range of `num_bytes` at `address` that gets the 32-bit `pattern` repeated."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("pattern", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
    ]


@mirror("hotpage_copy_params", launcher="hotpage_replay_copy")
class CopyParams(ParameterBlock):
    """A copy list and the layers that it is copied for; strides of the list in elements."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_requests", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("row_bytes", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("copy_list_stride", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("block_stride_rows", ctypes.c_int32),
        ("host_row_stride", ctypes.c_int64),
        ("gpu_block_stride", ctypes.c_int64),
        ("copy_host_row", ctypes.c_uint64),
        ("copy_hot_row", ctypes.c_uint64),
        ("copy_count", ctypes.c_uint64),
        ("host_layer", ctypes.c_uint64 * MAX_GROUP_LAYERS),
        ("gpu_layer", ctypes.c_uint64 * MAX_GROUP_LAYERS),
    ]


@mirror("hotpage_resolve_and_copy_params", launcher="hotpage_resolve_and_copy")
class ResolveAndCopyParams(ParameterBlock):
    """Sizes, strides in elements and addresses of one resolve; `copy` holds its copy list."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_rows", ctypes.c_int32),
        ("max_rows_per_request", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("hot_rows", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_state_rows", ctypes.c_int32),
        ("shared_limit_bytes", ctypes.c_int32),
        ("num_physical_rows", ctypes.c_int64),
        ("num_host_rows", ctypes.c_int64),
        ("logical_topk_stride", ctypes.c_int64),
        ("physical_topk_stride", ctypes.c_int64),
        ("residency_stride", ctypes.c_int64),
        ("source_block_table_stride", ctypes.c_int64),
        ("hot_block_table_stride", ctypes.c_int64),
        ("logical_topk", ctypes.c_uint64),
        ("row_request", ctypes.c_uint64),
        ("num_valid_rows", ctypes.c_uint64),
        ("state_row", ctypes.c_uint64),
        ("seq_len", ctypes.c_uint64),
        ("residency", ctypes.c_uint64),
        ("source_block_table", ctypes.c_uint64),
        ("hot_block_table", ctypes.c_uint64),
        ("row_map", ctypes.c_uint64),
        ("last_used", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("physical_topk", ctypes.c_uint64),
        ("valid_counts", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("holders", ctypes.c_uint64),
        ("copy", CopyParams),
    ]


MAX_BLOCK_SIZE = 1024
TILE_TOKENS = 4
CHUNK_ROWS = 4
NUM_LAYER_COLUMNS = 5
NUM_CHUNK_COLUMNS = 4
NUM_STATE_COLUMNS = 4
NUM_MIRROR_COUNTERS = 3
NUM_PAGES_COUNTERS = 2
NUM_STAGE_COUNTERS = 3
STAGE_RAW = 0
STAGE_FP8_TO_BF16 = 1
MAX_STATE_ROWS = 4096


@mirror("hotpage_pools_params")
class PoolsParams(ParameterBlock):
    """Layer table, chunk table and sizes of both pools."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_layers", ctypes.c_int32),
        ("num_chunks", ctypes.c_int32),
        ("num_kv_groups", ctypes.c_int32),
        ("row_bytes", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("num_gpu_blocks", ctypes.c_int64),
        ("num_host_blocks", ctypes.c_int64),
        ("layers", ctypes.c_uint64),
        ("chunks", ctypes.c_uint64),
    ]


@mirror("hotpage_mirror_rows_params", launcher="hotpage_mirror_rows")
class MirrorRowsParams(ParameterBlock):
    """Slot mappings of one step and what a mirror writes; strides in elements."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_tokens", ctypes.c_int32),
        ("resident_slot_stride", ctypes.c_int64),
        ("resident_slot", ctypes.c_uint64),
        ("slot_row", ctypes.c_uint64),
        ("host_row", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("pools", PoolsParams),
    ]


@mirror("hotpage_report_mirrored_params", launcher="hotpage_report_mirrored")
class ReportMirroredParams(ParameterBlock):
    """Host blocks to ask about and where the answer goes."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_blocks", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("num_host_blocks", ctypes.c_int64),
        ("host_block", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
        ("missing_rows", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
    ]


@mirror("hotpage_copy_pages_params", launcher="hotpage_spill_pages")
class CopyPagesParams(ParameterBlock):
    """A page list; both spill_pages and restore_pages take it."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_pages", ctypes.c_int32),
        ("host_block", ctypes.c_uint64),
        ("resident_blocks", ctypes.c_uint64),
        ("num_rows", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("pools", PoolsParams),
    ]


LAUNCHERS["hotpage_restore_pages"] = CopyPagesParams


@mirror("hotpage_stage_prefill_params", launcher="hotpage_stage_prefill")
class StagePrefillParams(ParameterBlock):
    """Requests, tables and layers of one staging; strides of tables in elements."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_rows", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("row_bytes", ctypes.c_int32),
        ("conversion", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_state_rows", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("num_gpu_blocks", ctypes.c_int64),
        ("num_host_blocks", ctypes.c_int64),
        ("gpu_block_bytes", ctypes.c_int64),
        ("host_row_stride", ctypes.c_int64),
        ("workspace_row_stride", ctypes.c_int64),
        ("residency_stride", ctypes.c_int64),
        ("source_block_table_stride", ctypes.c_int64),
        ("row_start", ctypes.c_uint64),
        ("first_position", ctypes.c_uint64),
        ("state_row", ctypes.c_uint64),
        ("residency", ctypes.c_uint64),
        ("source_block_table", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("host_layer", ctypes.c_uint64 * MAX_GROUP_LAYERS),
        ("gpu_layer", ctypes.c_uint64 * MAX_GROUP_LAYERS),
        ("workspace", ctypes.c_uint64 * MAX_GROUP_LAYERS),
    ]


@mirror("hotpage_invalidate_params", launcher="hotpage_invalidate")
class InvalidateParams(ParameterBlock):
    """Id lists, the states of all index groups, and what goes with recycled blocks."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_index_groups", ctypes.c_int32),
        ("num_state_rows", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_recycled", ctypes.c_int32),
        ("num_rewritten", ctypes.c_int32),
        ("num_active", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("max_hot_rows", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("num_host_blocks", ctypes.c_int64),
        ("states", ctypes.c_uint64),
        ("state_row", ctypes.c_uint64),
        ("recycled_host_block", ctypes.c_uint64),
        ("rewritten_host_row", ctypes.c_uint64),
        ("holders", ctypes.c_uint64),
        ("mask", ctypes.c_uint64 * 2),
        ("freed", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64),
    ]


MAX_RANKS = 8
MAX_COOPERATIVE_BLOCKS = 128
CHANNEL_BYTES = 267_008
CHANNEL_SHARED_LAUNCHES = 0
CHANNEL_PRIVATE_LAUNCHES = 1
CHANNEL_SHARED_ROWS = 2
CHANNEL_DIFFERENT_REQUESTS = 3
CHANNEL_FAILED_LAUNCHES = 4
CHANNEL_LOST_RANKS = 5
CHANNEL_DIGEST = 6
CHANNEL_DIGESTED_LAUNCHES = 7
NUM_CHANNEL_COUNTERS = 8


@mirror("hotpage_cooperative_copy_params", launcher="hotpage_cooperative_copy")
class CooperativeCopyParams(ParameterBlock):
    """Ranks of a cooperative copy, where their memory lies, and this rank's copy."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("salt", ctypes.c_uint32),
        ("after_resolve", ctypes.c_int32),
        ("num_state_rows", ctypes.c_int32),
        ("time_limit_ns", ctypes.c_int64),
        ("holders", ctypes.c_uint64),
        ("state_row", ctypes.c_uint64),
        ("channel", ctypes.c_uint64 * MAX_RANKS),
        ("hot_row", ctypes.c_uint64 * MAX_RANKS),
        ("gpu_layer", ctypes.c_uint64 * (MAX_RANKS * MAX_GROUP_LAYERS)),
        ("copy", CopyParams),
    ]


@mirror("hotpage_digest_copies_params", launcher="hotpage_digest_copies")
class DigestCopiesParams(ParameterBlock):
    """A copy list and the sum that its digest is added to; the list's stride in elements."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_requests", ctypes.c_int32),
        ("copy_list_stride", ctypes.c_int32),
        ("salt", ctypes.c_uint32),
        ("copy_host_row", ctypes.c_uint64),
        ("copy_count", ctypes.c_uint64),
        ("digest", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64),
    ]


@mirror("hotpage_reset_states_params", launcher="hotpage_reset_states")
class ResetStatesParams(ParameterBlock):
    """State rows whose row maps become empty in all index groups."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_index_groups", ctypes.c_int32),
        ("num_state_rows", ctypes.c_int32),
        ("num_listed", ctypes.c_int32),
        ("reserved", ctypes.c_int64),
        ("states", ctypes.c_uint64),
        ("state_row", ctypes.c_uint64),
    ]
