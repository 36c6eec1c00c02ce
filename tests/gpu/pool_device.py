# SPDX-License-Identifier: Apache-2.0
"""Owns the twin of the reference's pools on the device, and a mirror bound to it."""

from __future__ import annotations

import numpy as np
import torch
from reference import Pools
from resolve_device import DEVICE, same

from hotpage.kernels.copy_pages import PageList
from hotpage.kernels.layer_table import LayerTable, PoolLayer
from hotpage.kernels.mirror_rows import MirrorMask, MirrorRows, SlotMappings

GUARD_BYTES = 256
GUARD = 0xA5


class DevicePools:
    """A copy of reference pools in device and pinned memory, with guard bytes behind both."""

    def __init__(self, pools: Pools) -> None:
        self.reference = pools
        self._host = torch.full((pools.host.size + GUARD_BYTES,), GUARD, dtype=torch.uint8)
        self._host[: pools.host.size] = torch.from_numpy(pools.host)
        self._host = self._host.pin_memory()
        self._gpu = torch.full((pools.gpu.size + GUARD_BYTES,), GUARD, dtype=torch.uint8)
        self._gpu[: pools.gpu.size] = torch.from_numpy(pools.gpu)
        self._gpu = self._gpu.to(DEVICE)
        self.layers = [
            PoolLayer(
                self._twin(self._gpu, pools.gpu, pools.gpu_layers[i]),
                self._twin(self._host, pools.host, pools.host_layers[i]),
                kv_group,
            )
            for i, kv_group in enumerate(pools.kv_group_of_layer)
        ]
        self.num_kv_groups = len(pools.packing)

    @staticmethod
    def _twin(pool: torch.Tensor, whole: np.ndarray, view: np.ndarray) -> torch.Tensor:
        start = view.ctypes.data - whole.ctypes.data
        return pool.as_strided(view.shape, view.strides, start)

    def table(self, layers: list[int] | None = None, max_blocks: int = 0) -> LayerTable:
        """Table of some layers, of all by default."""
        chosen = self.layers if layers is None else [self.layers[i] for i in layers]
        return LayerTable(chosen, num_kv_groups=self.num_kv_groups, max_blocks=max_blocks)

    def bytes_now(self) -> tuple[np.ndarray, np.ndarray]:
        """GPU and host pool, guards checked."""
        torch.cuda.synchronize()
        gpu, host = self._gpu.cpu().numpy(), self._host.numpy()
        for name, pool in (("GPU", gpu), ("host", host)):
            assert (pool[-GUARD_BYTES:] == GUARD).all(), f"guard bytes of the {name} pool"
        return gpu[:-GUARD_BYTES], host[:-GUARD_BYTES]

    def check(self, where: str) -> None:
        """Compares every byte of both pools with the reference."""
        gpu, host = self.bytes_now()
        same(gpu, self.reference.gpu, f"{where}: GPU pool (byte)")
        same(host, self.reference.host, f"{where}: host pool (byte)")


class DeviceMirror:
    """Slot mappings, mask and bound op over some layers of the pools."""

    def __init__(
        self,
        pools: DevicePools,
        max_tokens: int,
        layers: list[int] | None = None,
        max_blocks: int = 0,
    ) -> None:
        groups = pools.num_kv_groups
        # Rows of other groups lie between: the op is told which rows are the resident groups'.
        rows = [2 * group + 1 for group in range(groups)]
        slots = torch.full((2 * groups + 1, max_tokens), 77, dtype=torch.int64, device=DEVICE)
        host_row = torch.full((max_tokens,), -1, dtype=torch.int64, device=DEVICE)
        self.slots = SlotMappings(slots, host_row, rows)
        reference = pools.reference
        self.mask = MirrorMask(reference.host_blocks, reference.block_size, DEVICE)
        self.op = MirrorRows(pools.table(layers, max_blocks), self.slots, self.mask)

    def load(self, resident_slot: np.ndarray, host_row: np.ndarray) -> None:
        """Writes a step's mappings into the first columns of the persistent buffers."""
        n = len(host_row)
        for row, slots in zip(self.slots.slot_rows, np.atleast_2d(resident_slot), strict=True):
            self.slots.resident_slot[row, :n] = torch.from_numpy(slots.astype(np.int64))
        self.slots.host_row[:n] = torch.from_numpy(np.asarray(host_row).astype(np.int64))

    def run(self, num_tokens: int) -> None:
        """Enqueues the mirror on the current stream."""
        self.op(num_tokens, stream())

    def mask_words(self) -> list[int]:
        """Words of the mask as unsigned numbers, flat."""
        return self.mask.words.cpu().numpy().view(np.uint64).reshape(-1).tolist()


def stream() -> int:
    """Address of torch's current stream."""
    return torch.cuda.current_stream().cuda_stream


def load_pages(
    pages: PageList, host_block: np.ndarray, resident: np.ndarray, num_rows: np.ndarray
) -> None:
    """Writes the first pages of a list."""
    n = len(host_block)
    pages.host_block[:n] = torch.from_numpy(np.asarray(host_block, np.int32))
    pages.resident_blocks[:n] = torch.from_numpy(np.asarray(resident, np.int32))
    pages.num_rows[:n] = torch.from_numpy(np.asarray(num_rows, np.int32))
