# SPDX-License-Identifier: Apache-2.0
"""Owns the op stage_prefill: context rows of requests into workspace, raw or as bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._tensors import ROW_UNIT_BYTES, check_contiguous, check_list, check_tensor
from hotpage.kernels.layer_table import PoolLayer, check_layer
from hotpage.kernels.replay_copy import usable_library

if TYPE_CHECKING:
    import torch

SCALED_VALUES = 512
SCALE_GROUPS = 4
ROPE_VALUES = 64
FP8_ROW_BYTES = SCALED_VALUES + 4 * SCALE_GROUPS + 2 * ROPE_VALUES
BF16_ROW_WIDTH = SCALED_VALUES + ROPE_VALUES


@dataclass(frozen=True)
class StageInputs:
    """What a staging reads besides rows: persistent buffers. All int32, on the device."""

    row_start: torch.Tensor
    """`[max requests + 1]`, ascending from 0: first workspace row of each request; the entry after
    the last request is the number of rows."""
    first_position: torch.Tensor
    """`[max requests]`: context position of each request's first workspace row."""
    state_row: torch.Tensor
    """`[max requests]`: row of residency; -1 for a request with nothing resident."""
    residency: torch.Tensor
    """`[state rows][pages]`: GPU block of each page, 0 if host-only."""
    source_block_table: torch.Tensor
    """`[max requests][pages]`: host block of each page, 0 for none."""
    counters: torch.Tensor
    """int64 `[3]`: rows from the GPU, rows from the host, rows that neither has; they only grow."""


class StagePrefill:
    """stage_prefill bound to the layers of one index group, or to one layer.

    All checks happen here; a call enqueues one launch. The tensors are kept alive. The workspace
    bounds a call: the caller stages a context in chunks that fit it.

    Args:
        layers: layers whose rows have the same strides in both pools, in the order of the group.
        workspace: per layer `[max rows][row width]`: the layer's own dtype, or bfloat16 of width
            576 for rows of fp8_ds_mla, which are then converted: 512 fp8 values times the float
            scale of their 128, and 64 that are bfloat16 already.
        inputs: read by every call.
        max_blocks: most thread blocks of a launch, 0 for the library's choice.

    Raises:
        ConfigError: a tensor that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(
        self,
        layers: Sequence[PoolLayer],
        workspace: Sequence[torch.Tensor],
        inputs: StageInputs,
        *,
        max_blocks: int = 0,
    ) -> None:
        if not 1 <= len(layers) <= _abi.MAX_GROUP_LAYERS or len(layers) != len(workspace):
            raise ConfigError(
                f"got {len(layers)} layers and {len(workspace)} workspaces, expected the same "
                f"number of both, 1 to {_abi.MAX_GROUP_LAYERS}"
            )
        if max_blocks < 0:
            raise ConfigError(f"max_blocks is {max_blocks}, expected 0 (no limit) or more")
        first = layers[0]
        for i, layer in enumerate(layers):
            check_layer(f"layer {i}", layer, first)
            same = layer.host_row_stride == first.host_row_stride
            if not same or layer.gpu.stride(0) != first.gpu.stride(0):
                raise ConfigError(f"layer {i} has other strides than layer 0")
        self._device, self._first = first.gpu.device, first
        self.params = _abi.StagePrefillParams(
            num_layers=len(layers),
            row_bytes=first.row_bytes,
            block_size=first.gpu.shape[1],
            max_blocks=max_blocks,
            num_gpu_blocks=first.gpu.shape[0],
            num_host_blocks=first.host.shape[0],
            gpu_block_bytes=first.gpu.stride(0) * first.gpu.element_size(),
            host_row_stride=first.host_row_stride,
        )
        for i, layer in enumerate(layers):
            self.params.gpu_layer[i] = layer.gpu.data_ptr()
            self.params.host_layer[i] = layer.host.data_ptr()
        self._bind_workspace(first, workspace)
        self._bind_inputs(inputs)
        self._library, _ = usable_library(self._device)
        self._tensors = (tuple(layers), tuple(workspace), inputs)

    def _bind_workspace(self, first: PoolLayer, workspace: Sequence[torch.Tensor]) -> None:
        rows = workspace[0]
        row_bytes = int(rows.shape[-1]) * rows.element_size()
        upconverts = (
            str(rows.dtype) == "torch.bfloat16"
            and rows.shape[-1] == BF16_ROW_WIDTH
            and first.row_bytes == FP8_ROW_BYTES
        )
        if not upconverts and row_bytes != first.row_bytes:
            raise ConfigError(
                f"the workspace has rows of {row_bytes} bytes, expected {first.row_bytes}, or "
                f"bfloat16 of width {BF16_ROW_WIDTH} for rows of {FP8_ROW_BYTES} bytes"
            )
        self.max_rows = int(rows.shape[0])
        for i, one in enumerate(workspace):
            dtype = str(rows.dtype).removeprefix("torch.")
            check_tensor(f"workspace {i}", one, dtype, tuple(rows.shape), self._device)
            stride = one.stride(0) * one.element_size()
            if one.data_ptr() % ROW_UNIT_BYTES or stride % ROW_UNIT_BYTES:
                raise ConfigError(f"workspace {i} is not aligned to {ROW_UNIT_BYTES} bytes")
            if one.stride(0) != rows.stride(0):
                raise ConfigError(f"workspace {i} has another row stride than workspace 0")
            self.params.workspace[i] = one.data_ptr()
        self.params.conversion = _abi.STAGE_FP8_TO_BF16 if upconverts else _abi.STAGE_RAW
        self.params.workspace_row_stride = rows.stride(0) * rows.element_size()

    def _bind_inputs(self, inputs: StageInputs) -> None:
        params, device = self.params, self._device
        self._max_requests = min(int(inputs.state_row.shape[0]), _abi.MAX_REQUESTS)
        self._bound_requests = self._max_requests
        check_list("row_start", inputs.row_start, "int32", self._max_requests + 1, device)
        check_list("first_position", inputs.first_position, "int32", self._max_requests, device)
        check_list("state_row", inputs.state_row, "int32", self._max_requests, device)
        check_tensor("residency", inputs.residency, "int32", (None, None), device)
        num_pages = int(inputs.residency.shape[1])
        shape = (int(inputs.source_block_table.shape[0]), num_pages)
        check_tensor("source_block_table", inputs.source_block_table, "int32", shape, device)
        if shape[0] < self._max_requests:
            raise ConfigError(
                f"source_block_table has {shape[0]} rows, expected at least {self._max_requests}"
            )
        check_tensor("counters", inputs.counters, "int64", (_abi.NUM_STAGE_COUNTERS,), device)
        check_contiguous("counters", inputs.counters)
        params.num_pages = num_pages
        params.num_state_rows = int(inputs.residency.shape[0])
        params.residency_stride = inputs.residency.stride(0)
        params.source_block_table_stride = inputs.source_block_table.stride(0)
        for name in (
            "row_start", "first_position", "state_row", "residency", "source_block_table",
            "counters",
        ):  # fmt: skip
            setattr(params, name, getattr(inputs, name).data_ptr())

    def set_chunk(
        self,
        workspace: Sequence[torch.Tensor],
        row_start: torch.Tensor,
        state_row: torch.Tensor,
        source_block_table: torch.Tensor,
    ) -> None:
        """Stages these requests into this workspace from now on; a captured graph keeps its own.

        Args:
            workspace: as in the constructor, of the same dtype and width.
            row_start: int32 `[requests + 1]`.
            state_row: int32 `[requests]`, no more requests than were bound.
            source_block_table: int32 `[requests][pages]`, as many pages as were bound.

        Raises:
            ConfigError: a tensor that the kernel does not take, or more requests than were bound.
        """
        requests = int(state_row.shape[0])
        if not 1 <= requests <= self._bound_requests:
            raise ConfigError(
                f"the chunk has {requests} requests, expected 1 to {self._bound_requests}"
            )
        if len(workspace) != self.params.num_layers:
            raise ConfigError(f"got {len(workspace)} workspaces, expected {self.params.num_layers}")
        self._bind_workspace(self._first, workspace)
        params, device = self.params, self._device
        check_list("row_start", row_start, "int32", requests + 1, device)
        check_list("state_row", state_row, "int32", requests, device)
        shape = (requests, params.num_pages)
        check_tensor("source_block_table", source_block_table, "int32", shape, device)
        params.row_start, params.state_row = row_start.data_ptr(), state_row.data_ptr()
        params.source_block_table = source_block_table.data_ptr()
        params.source_block_table_stride = source_block_table.stride(0)
        self._max_requests = requests
        self._chunk = (tuple(workspace), row_start, state_row, source_block_table)

    def __call__(self, num_requests: int, num_rows: int, stream: int) -> None:
        """Enqueues the staging of one chunk.

        Args:
            num_requests: requests of the chunk.
            num_rows: workspace rows of the chunk, `row_start[num_requests]` or more; rows between
                the two stay as they are.
            stream: address of the CUDA stream (torch's `stream.cuda_stream`). May be capturing.

        Raises:
            ConfigError: more requests or rows than were bound.
            KernelError: the launch failed.
        """
        if not 1 <= num_requests <= self._max_requests:
            raise ConfigError(f"num_requests is {num_requests}, expected 1 to {self._max_requests}")
        if not 0 <= num_rows <= self.max_rows:
            raise ConfigError(f"num_rows is {num_rows}, expected 0 to {self.max_rows}")
        self.params.num_requests, self.params.num_rows = num_requests, num_rows
        self._library.launch("hotpage_stage_prefill", self.params, stream)
