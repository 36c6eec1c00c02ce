# SPDX-License-Identifier: Apache-2.0
"""Owns the pinned host pool from its first page to its last: nothing else registers memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from typing import TYPE_CHECKING, Any

from hotpage.errors import CapacityError, ConfigError
from hotpage.memory import _host
from hotpage.memory._driver import GONE_STATUSES, SUCCESS, CudaDriver, Driver
from hotpage.memory.layout import PAGE_BYTES, PoolLayout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_RAM_SHARE = 0.95
"""Part of the RAM that a pool may take; the rest is for the processes themselves."""

CHUNK_BYTES = 64 << 30
"""Bytes pinned by one call: larger ranges are slow to undo and were not tested everywhere."""


def check_ram(num_bytes: int, ram_bytes: int | None) -> None:
    """Refuses a pool that would leave the machine without memory.

    Raises:
        CapacityError: the pool takes more than 95% of the RAM.
    """
    if ram_bytes is not None and num_bytes > MAX_RAM_SHARE * ram_bytes:
        raise CapacityError(
            f"the host pool takes {num_bytes / 2**30:.1f} GiB, and 95% of the RAM are "
            f"{MAX_RAM_SHARE * ram_bytes / 2**30:.1f} GiB; lower host_pool_gib"
        )


class HostPool:
    """Pinned memory that kernels read and write at its host address.

    Born whole or not at all: if a step of the set-up fails, what came before is undone. `close`
    ends it; the streams that use it must be idle by then.

    Args:
        layout: sizes.
        device: CUDA ordinal of the device whose NUMA node gets the memory.
        buffer: memory to use instead of a private mapping, writable, page-aligned and as large as
            the pool: a mapping that several ranks share, say. It is touched and placed by whoever
            made it, and stays open on `close`.
        driver: the CUDA driver, by default this process's own.
        chunk_bytes: bytes to pin by one call, about; no host block lies in two chunks.
        num_threads: threads of the first touch, by default one a CPU up to 16.
        ram_bytes: RAM to check against, by default what the machine or its cgroup has.

    Raises:
        CapacityError: more than 95% of the RAM, or memory that cannot be had or pinned.
        ConfigError: no driver, or a buffer that does not fit.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        device: int = 0,
        buffer: Any = None,
        driver: Driver | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        num_threads: int | None = None,
        ram_bytes: int | None = None,
    ) -> None:
        self.layout = layout
        self.num_bytes = layout.num_bytes
        self.numa_node: int | None = None
        """Node that the memory was asked for on; None where it is not known or not ours."""
        self._registered: list[int] = []
        self._driver = driver if driver is not None else CudaDriver(device)
        chunks = layout.chunks(chunk_bytes)
        with contextlib.ExitStack() as undo:
            self._mapping: mmap.mmap | None = None
            if buffer is None:
                check_ram(self.num_bytes, ram_bytes or _host.total_ram_bytes())
                self._mapping = buffer = self._map()
                undo.callback(self._unmap)
            self._buffer = buffer
            self.address = self._check_buffer(buffer)
            if self._mapping is not None:
                self._place_and_touch(num_threads)
            undo.callback(self._unregister)
            self._register(chunks)
            undo.pop_all()

    def _map(self) -> mmap.mmap:
        try:
            mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"{self.num_bytes / 2**30:.1f} GiB for the host pool cannot be mapped: {error}"
            ) from error
        # A fork would copy every pinned page for the child: the parent's must stay where they are.
        mapping.madvise(mmap.MADV_DONTFORK)
        return mapping

    def _check_buffer(self, buffer: Any) -> int:
        try:
            size, address = memoryview(buffer).nbytes, _host.address_of(buffer)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the host pool's buffer is not writable memory: {error}") from error
        if size < self.num_bytes or address % PAGE_BYTES:
            raise ConfigError(
                f"the host pool's buffer has {size} bytes at address {address:#x}, expected "
                f"{self.num_bytes} or more, aligned to {PAGE_BYTES}"
            )
        return address

    def _place_and_touch(self, num_threads: int | None) -> None:
        node = _host.numa_node_of(self._driver.pci_bus_id())
        if node is not None and _host.prefer_node(self.address, self.num_bytes, node):
            self.numa_node = node
        _host.advise_huge_pages(self.address, self.num_bytes)
        threads = num_threads or min(16, os.cpu_count() or 1)
        try:
            _host.touch(self.address, self.num_bytes, threads)
        except OSError as error:
            raise CapacityError(
                f"{self.num_bytes / 2**30:.1f} GiB for the host pool cannot be had: {error}; lower "
                "host_pool_gib"
            ) from error

    def _register(self, chunks: list[tuple[int, int]]) -> None:
        for i, (start, end) in enumerate(chunks):
            status = self._driver.register(self.address + start, end - start)
            if status != SUCCESS:
                raise CapacityError(
                    f"chunk {i + 1} of {len(chunks)} of the host pool, "
                    f"{(end - start) / 2**30:.1f} GiB, cannot be pinned: "
                    f"{self._driver.status_text(status)}; lower host_pool_gib or raise the "
                    "memlock limit"
                )
            self._registered.append(self.address + start)

    def _unregister(self) -> None:
        """Undoes every registration, the last one first; a context that is gone holds none."""
        while self._registered:
            address = self._registered.pop()
            status = self._driver.unregister(address)
            if status in GONE_STATUSES:
                logger.warning(
                    "the host pool's CUDA context is gone (%s); its memory is unmapped as it is",
                    self._driver.status_text(status),
                )
                self._registered.clear()
            elif status != SUCCESS:
                logger.error(
                    "host memory at %#x stays pinned: %s", address, self._driver.status_text(status)
                )

    def _unmap(self) -> None:
        mapping, self._mapping = self._mapping, None
        self._buffer = None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            # Somebody still holds a view. The last one frees the memory, which is not pinned now.
            logger.info("views of the host pool outlive it; its memory is freed with them")

    @property
    def is_open(self) -> bool:
        """Whether the memory is there."""
        return self._buffer is not None

    def close(self) -> None:
        """Unregisters and frees. May be called again, from any thread, and after a device fault."""
        self._unregister()
        self._unmap()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def bytes_tensor(self) -> torch.Tensor:
        """The pool as uint8 `[num_bytes]`, without a copy. The memory lives as long as a tensor of
        it does.

        Raises:
            ConfigError: the pool is closed.
        """
        import torch

        if self._buffer is None:
            raise ConfigError("the host pool is closed")
        # torch keeps the object and not its export, so that the mapping could be closed under a
        # tensor; an array of ctypes keeps the export.
        held = (ctypes.c_uint8 * self.num_bytes).from_buffer(self._buffer)
        return torch.frombuffer(held, dtype=torch.uint8)

    def layer_rows(self, layer: int) -> torch.Tensor:
        """A layer's rows as uint8 `[host blocks][block size][row_bytes]`, without a copy.

        Raises:
            ConfigError: the pool is closed or has no such layer.
        """
        place, layout = self.layout.place(layer), self.layout
        shape = (layout.num_host_blocks, layout.block_size, layout.row_bytes)
        strides = (layout.block_size * place.row_stride, place.row_stride, 1)
        return self.bytes_tensor().as_strided(shape, strides, place.offset)
