# SPDX-License-Identifier: Apache-2.0
"""Owns the op resolve_and_copy: an index group's top-k becomes physical rows, misses are copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._tensors import ROW_UNIT_BYTES, check_contiguous, check_tensor
from hotpage.kernels.replay_copy import CopyList, LayerRows, fill_copy_params, usable_library

if TYPE_CHECKING:
    import torch

MAX_TOP_K = 4096
MAX_ROWS_PER_REQUEST = 10
MAX_HOT_ROWS = 32768
MIN_BLOCK_SIZE = 2
HOT_ROWS_UNIT = 4
MAX_BLOCK_SIZE = 128
MAX_POSITIONS = 2**25


@dataclass(frozen=True)
class RowState:
    """Hot row map and row LRU of one index group, kept between steps. Only resolve writes it."""

    row_map: torch.Tensor
    """int32 `[state rows][hot rows]`: host row of each hot slot, -1 if free."""
    last_used: torch.Tensor
    """uint16 or int16 `[state rows][hot rows]`: epoch of the last use, 0 if free."""
    epoch: torch.Tensor
    """int32 `[state rows]`: epoch of the last resolve that met a host-only page."""
    counters: torch.Tensor
    """int64 `[3]`: hits, misses, misses without a hot slot; they only grow."""

    @classmethod
    def allocate(cls, num_state_rows: int, hot_rows: int, device: torch.device | str) -> RowState:
        """A state in which every hot slot is free: 6 bytes a hot slot."""
        import torch

        shape = (num_state_rows, hot_rows)
        return cls(
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int16, device=device),
            torch.zeros(num_state_rows, dtype=torch.int32, device=device),
            torch.zeros(_abi.NUM_COUNTERS, dtype=torch.int64, device=device),
        )

    def reset(self) -> None:
        """Frees every hot slot, on the current stream."""
        self.row_map.fill_(-1)
        self.last_used.zero_()
        self.epoch.zero_()


@dataclass(frozen=True)
class ResolveInputs:
    """What a resolve reads: persistent buffers that every step writes anew. All int32."""

    logical_topk: torch.Tensor
    """`[rows][top_k]`: positions that the indexer selected, -1 for nothing."""
    row_request: torch.Tensor
    """`[rows]`: batch request of each verification row, -1 for padding; a request's rows are
    adjacent."""
    num_valid_rows: torch.Tensor
    """`[1]`: rows from this number on are padding."""
    state_row: torch.Tensor
    """`[requests]`: state row of each batch request, -1 for padding."""
    seq_len: torch.Tensor
    """`[rows]`: tokens whose rows exist for the verification row."""
    residency: torch.Tensor
    """`[state rows][pages]`: GPU block of each page in the group's KV cache group, 0 if
    host-only."""
    source_block_table: torch.Tensor
    """`[requests][pages]`: host block of each page, 0 for none."""
    hot_block_table: torch.Tensor
    """`[requests][at least hot rows / block size]`: GPU blocks of the hot region, 0 for none."""


@dataclass(frozen=True)
class ResolveOutputs:
    """What a resolve writes besides its state."""

    physical_topk: torch.Tensor
    """int32 `[rows][top_k]`: physical rows, valid ones first in the order of the top-k, then -1.
    Must not overlap the logical top-k."""
    valid_counts: torch.Tensor
    """int32 `[rows]`: valid physical rows."""
    copies: CopyList
    """The misses, as long as verification rows x top-k at least."""


@dataclass(frozen=True)
class ResolveShape:
    """Sizes that are no tensor's."""

    max_rows_per_request: int
    """Verification rows of one request at most: 1 + speculative tokens."""
    block_size: int
    """Tokens per block."""
    block_stride_rows: int
    """Physical rows from one GPU block to the next."""
    num_host_blocks: int
    """Blocks of the host pool, the null block counted."""
    num_gpu_blocks: int
    """Blocks of the GPU pool, the null block counted."""

    @property
    def num_host_rows(self) -> int:
        """Rows of a layer in the host pool."""
        return self.num_host_blocks * self.block_size

    @property
    def num_physical_rows(self) -> int:
        """Physical rows up to the last of the last block."""
        return (self.num_gpu_blocks - 1) * self.block_stride_rows + self.block_size


def _check_bound(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}, expected {low} to {high}")


def _check_shape(shape: ResolveShape, top_k: int, hot_rows: int, num_pages: int) -> None:
    """Raises ConfigError unless the kernel's bounds hold, which it does not check again."""
    _check_bound("max_rows_per_request", shape.max_rows_per_request, 1, MAX_ROWS_PER_REQUEST)
    _check_bound("top_k", top_k, 1, MAX_TOP_K)
    _check_bound("hot_rows", hot_rows, shape.max_rows_per_request * top_k, MAX_HOT_ROWS)
    _check_bound("block_size", shape.block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
    if hot_rows % shape.block_size or hot_rows % HOT_ROWS_UNIT:
        raise ConfigError(
            f"hot_rows is {hot_rows}, expected a multiple of {HOT_ROWS_UNIT} and of the block size "
            f"{shape.block_size}"
        )
    _check_bound("block_stride_rows", shape.block_stride_rows, shape.block_size, 2**31 - 1)
    _check_bound("positions of a request", num_pages * shape.block_size, 1, MAX_POSITIONS)
    _check_bound("num_host_rows", shape.num_host_rows, 1, 2**31 - 1)
    _check_bound("num_physical_rows", shape.num_physical_rows, 1, 2**31 - 1)


class ResolveAndCopy:
    """resolve_and_copy bound to the buffers of one index group.

    All checks happen here; a call enqueues the resolve and, with layers, the copy. The kernels
    allocate nothing, never synchronise and can be captured. The tensors are kept alive.

    Args:
        inputs: read by every call.
        state: read and written; a state row belongs to one request at a time.
        outputs: written by every call, padding rows included.
        shape: the other sizes.
        layers: the layers whose missed rows the call copies, leader first; None copies nothing,
            and `ReplayCopy` does it.
        max_copy_blocks: as in `ReplayCopy`.
        holders: int32 `[host blocks][ceil(state rows / 32)]`, the words of the `Holders` that the
            step's invalidation reads; the resolve marks whose row map gets a row of which block.

    Raises:
        ConfigError: a tensor or size that the kernel does not take, or a hot region that could
            be smaller than a request's union.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(
        self,
        inputs: ResolveInputs,
        state: RowState,
        outputs: ResolveOutputs,
        shape: ResolveShape,
        layers: LayerRows | None = None,
        *,
        max_copy_blocks: int = 0,
        holders: torch.Tensor | None = None,
    ) -> None:
        device = inputs.logical_topk.device
        self._tensors = (inputs, state, outputs, layers)
        self._topk: object = inputs.logical_topk
        self._max_requests = int(inputs.state_row.shape[0])
        self._shape = tuple(inputs.logical_topk.shape)
        self._device = device
        self.params = _abi.ResolveAndCopyParams()
        self._fill_sizes(inputs, state, shape)
        self._fill_inputs(inputs)
        self._fill_state(state)
        self._fill_outputs(outputs)
        self._fill_copy(outputs.copies, layers, shape, max_copy_blocks)
        self._fill_holders(holders)
        self._library, properties = usable_library(device)
        self.params.shared_limit_bytes = properties.max_dynamic_shared_bytes_per_block

    def _fill_sizes(self, inputs: ResolveInputs, state: RowState, shape: ResolveShape) -> None:
        check_tensor("logical_topk", inputs.logical_topk, "int32", (None, None), self._device)
        num_rows, top_k = self._shape
        num_state_rows, hot_rows = state.row_map.shape
        num_pages = int(inputs.residency.shape[1])
        _check_shape(shape, top_k, hot_rows, num_pages)
        params = self.params
        params.num_rows, params.top_k, params.num_pages = num_rows, top_k, num_pages
        params.num_state_rows, params.hot_rows = num_state_rows, hot_rows
        params.max_rows_per_request = shape.max_rows_per_request
        params.copy.block_size = shape.block_size
        params.copy.block_stride_rows = shape.block_stride_rows
        params.num_host_rows = shape.num_host_rows
        params.num_physical_rows = shape.num_physical_rows

    def _fill_inputs(self, inputs: ResolveInputs) -> None:
        params, device = self.params, self._device
        num_requests = int(inputs.state_row.shape[0])
        hot_blocks = params.hot_rows // params.copy.block_size
        check_tensor("row_request", inputs.row_request, "int32", (params.num_rows,), device)
        check_tensor("num_valid_rows", inputs.num_valid_rows, "int32", (1,), device)
        check_tensor("state_row", inputs.state_row, "int32", (num_requests,), device)
        check_tensor("seq_len", inputs.seq_len, "int32", (params.num_rows,), device)
        residency_shape = (params.num_state_rows, params.num_pages)
        check_tensor("residency", inputs.residency, "int32", residency_shape, device)
        table_shape = (num_requests, params.num_pages)
        check_tensor("source_block_table", inputs.source_block_table, "int32", table_shape, device)
        check_tensor(
            "hot_block_table", inputs.hot_block_table, "int32", (num_requests, None), device
        )
        _check_bound("width of hot_block_table", inputs.hot_block_table.shape[1], hot_blocks, 2**31)
        params.copy.num_requests = num_requests
        params.logical_topk_stride = inputs.logical_topk.stride(0)
        params.residency_stride = inputs.residency.stride(0)
        params.source_block_table_stride = inputs.source_block_table.stride(0)
        params.hot_block_table_stride = inputs.hot_block_table.stride(0)
        for name in (
            "logical_topk", "row_request", "num_valid_rows", "state_row", "seq_len", "residency",
            "source_block_table", "hot_block_table",
        ):  # fmt: skip
            setattr(params, name, getattr(inputs, name).data_ptr())

    def _fill_state(self, state: RowState) -> None:
        params, device = self.params, self._device
        shape = (params.num_state_rows, params.hot_rows)
        check_tensor("row_map", state.row_map, "int32", shape, device)
        check_tensor("last_used", state.last_used, ("int16", "uint16"), shape, device)
        check_tensor("epoch", state.epoch, ("int32", "uint32"), (params.num_state_rows,), device)
        counters = (_abi.NUM_COUNTERS,)
        check_tensor("counters", state.counters, ("int64", "uint64"), counters, device)
        for name in ("row_map", "last_used", "epoch", "counters"):
            tensor = getattr(state, name)
            check_contiguous(name, tensor)
            setattr(params, name, tensor.data_ptr())

    def _fill_outputs(self, outputs: ResolveOutputs) -> None:
        params, device = self.params, self._device
        check_tensor("physical_topk", outputs.physical_topk, "int32", self._shape, device)
        check_tensor("valid_counts", outputs.valid_counts, "int32", (params.num_rows,), device)
        params.physical_topk_stride = outputs.physical_topk.stride(0)
        params.physical_topk = outputs.physical_topk.data_ptr()
        params.valid_counts = outputs.valid_counts.data_ptr()

    def _fill_copy(
        self, copies: CopyList, layers: LayerRows | None, shape: ResolveShape, max_blocks: int
    ) -> None:
        params = self.params
        num_requests = params.copy.num_requests
        if copies.count.shape[0] != num_requests:
            raise ConfigError(
                f"the copy list has {copies.count.shape[0]} requests, expected {num_requests}"
            )
        union = params.max_rows_per_request * params.top_k
        _check_bound("length of the copy list", copies.host_row.shape[1], union, 2**31 - 1)
        if layers is not None:
            fill_copy_params(params.copy, copies, layers, max_blocks)
            if (
                layers.block_size != shape.block_size
                or layers.block_stride_rows != shape.block_stride_rows
                or layers.gpu[0].shape[0] < shape.num_gpu_blocks
                or any(rows.shape[0] < shape.num_host_rows for rows in layers.host)
            ):
                raise ConfigError(
                    f"the layers do not have the resolve's {shape.num_gpu_blocks} GPU blocks of "
                    f"{shape.block_size} tokens, stride {shape.block_stride_rows}, and "
                    f"{shape.num_host_rows} host rows"
                )
            return
        for name, tensor in (("host_row", copies.host_row), ("hot_row", copies.hot_row)):
            list_shape = (num_requests, copies.host_row.shape[1])
            check_tensor(f"copies.{name}", tensor, "int32", list_shape, self._device)
            check_contiguous(f"copies.{name}", tensor)
        check_tensor("copies.count", copies.count, "int32", (num_requests,), self._device)
        # The list alone: a width and a stride that say nothing but are well formed.
        params.copy.row_bytes = params.copy.host_row_stride = ROW_UNIT_BYTES
        params.copy.gpu_block_stride = ROW_UNIT_BYTES * shape.block_size
        params.copy.copy_list_stride = copies.host_row.shape[1]
        params.copy.copy_host_row = copies.host_row.data_ptr()
        params.copy.copy_hot_row = copies.hot_row.data_ptr()
        params.copy.copy_count = copies.count.data_ptr()

    def _fill_holders(self, holders: torch.Tensor | None) -> None:
        if holders is None:
            return
        params = self.params
        num_blocks = -(-params.num_host_rows // params.copy.block_size)
        check_tensor("holders", holders, "int32", (None, None), self._device)
        check_contiguous("holders", holders)
        words = (params.num_state_rows + 31) // 32
        if holders.shape[1] != words or holders.shape[0] < num_blocks:
            raise ConfigError(
                f"holders has shape {tuple(holders.shape)}, expected {num_blocks} or more x {words}"
            )
        params.holders = holders.data_ptr()
        self._holders = holders

    def set_batch(
        self,
        logical_topk: torch.Tensor,
        row_request: torch.Tensor,
        num_valid_rows: torch.Tensor,
        num_requests: int,
    ) -> None:
        """Serves the first rows and requests of the bound batch, from these inputs, from now on.

        Outputs of later rows, and the copy lists of later requests, stay as they are. A captured
        graph keeps its own.

        Args:
            logical_topk: int32 `[rows][top_k]`, at most as many rows as were bound.
            row_request: int32 `[at least rows]`.
            num_valid_rows: int32 `[1]`.
            num_requests: batch requests that the rows belong to, at most as many as were bound.

        Raises:
            ConfigError: another dtype or device, or more than was bound.
        """
        num_rows = int(logical_topk.shape[0])
        check_tensor("logical_topk", logical_topk, "int32", (None, self._shape[1]), self._device)
        check_tensor("row_request", row_request, "int32", (None,), self._device)
        check_tensor("num_valid_rows", num_valid_rows, "int32", (1,), self._device)
        _check_bound("rows of the batch", num_rows, 1, self._shape[0])
        _check_bound("entries of row_request", int(row_request.shape[0]), num_rows, 2**31 - 1)
        _check_bound("num_requests", num_requests, 1, self._max_requests)
        params = self.params
        params.num_rows, params.copy.num_requests = num_rows, num_requests
        params.logical_topk = logical_topk.data_ptr()
        params.logical_topk_stride = logical_topk.stride(0)
        params.row_request = row_request.data_ptr()
        params.num_valid_rows = num_valid_rows.data_ptr()
        self._topk = (logical_topk, row_request, num_valid_rows)

    def __call__(self, stream: int) -> None:
        """Enqueues the resolve, and the copy if layers are bound.

        Args:
            stream: address of the CUDA stream (torch's `stream.cuda_stream`). May be capturing.

        Raises:
            KernelError: the launch failed.
        """
        self._library.launch("hotpage_resolve_and_copy", self.params, stream)
