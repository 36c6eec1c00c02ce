# SPDX-License-Identifier: Apache-2.0
"""Owns the host pool that the ranks of one host share, from its first page to its last.

The memory is a file without a name (memfd) whose descriptor rank 0 hands to the others, so a rank
that dies at any moment leaves nothing behind, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os

from hotpage.errors import CapacityError, ConfigError, HotPageError, RankError
from hotpage.memory import _host
from hotpage.memory._driver import CudaDriver, Driver
from hotpage.memory.layout import PAGE_BYTES, PoolLayout
from hotpage.memory.pool import CHUNK_BYTES, HostPool, check_ram
from hotpage.runtime.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


class SharedHostPool(HostPool):
    """One pinned pool of a replica, mapped by all of its local ranks.

    Rank 0 writes (mirrors, spills), every rank reads; `hotpage.runtime.events.WriteOrder` keeps
    them in order. The RAM is checked once, by rank 0. Each rank touches a part of the memory first,
    near its own GPU, and pins its own mapping. All ranks make the pool at the same time, and it is
    born on all of them or on none: a rank that fails or dies ends the others' set-up at once.

    Args:
        layout: sizes, the same on all ranks.
        rendezvous: of the local ranks.
        device: CUDA ordinal of this rank's device.
        driver: the CUDA driver, by default this process's own.
        chunk_bytes: as in `HostPool`.
        num_threads: threads of this rank's first touch; by default the CPUs are shared out.
        ram_bytes: RAM to check against, by default what the machine or its cgroup has.

    Raises:
        CapacityError: this rank lacks memory, or cannot map or pin it.
        ConfigError: no driver, or ranks that disagree about the layout.
        RankError: another rank failed; the text says which and why.
    """

    def __init__(
        self,
        layout: PoolLayout,
        rendezvous: Rendezvous,
        *,
        device: int = 0,
        driver: Driver | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        num_threads: int | None = None,
        ram_bytes: int | None = None,
    ) -> None:
        self.is_writer = rendezvous.rank == 0
        """Whether this rank writes to the pool."""
        self._shared: mmap.mmap | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_shared)
            try:
                if driver is None:
                    driver = CudaDriver(device)
                _agree(layout, rendezvous)
                self._shared = _map_shared(layout, rendezvous, ram_bytes)
                node = _touch_part(self._shared, layout, rendezvous, driver, num_threads)
                rendezvous.barrier()
                super().__init__(
                    layout,
                    device=device,
                    buffer=self._shared,
                    driver=driver,
                    chunk_bytes=chunk_bytes,
                )
                undo.callback(super().close)
                self.numa_node = node
                rendezvous.barrier()
            except BaseException as error:
                # Before anything is undone, which may take long: others are waiting.
                rendezvous.fail(str(error))
                raise
            undo.pop_all()

    def _close_shared(self) -> None:
        shared, self._shared = self._shared, None
        if shared is None:
            return
        try:
            shared.close()
        except BufferError:
            logger.info("views of the host pool outlive it; its memory is freed with them")

    def close(self) -> None:
        """Unregisters and unmaps; the memory ends with the last rank that maps it."""
        super().close()
        self._close_shared()


def _agree(layout: PoolLayout, rendezvous: Rendezvous) -> None:
    """Raises ConfigError unless all ranks have this layout."""
    own = [*layout.index_groups, layout.block_size, layout.row_bytes]
    own += [layout.num_host_blocks, int(layout.row_interleaved)]
    layouts = rendezvous.all_gather(own)
    if any(other != layouts[0] for other in layouts):
        raise ConfigError("the ranks have different layouts of the host pool; give them the same")


def _map_shared(layout: PoolLayout, rendezvous: Rendezvous, ram_bytes: int | None) -> mmap.mmap:
    fd = None
    try:
        if rendezvous.rank == 0:
            check_ram(layout.num_bytes, ram_bytes or _host.total_ram_bytes())
            fd = os.memfd_create("hotpage-pool", os.MFD_CLOEXEC)
            os.ftruncate(fd, layout.num_bytes)
        fd = rendezvous.share_fd(fd)
        return mmap.mmap(fd, layout.num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(
            f"{layout.num_bytes / 2**30:.1f} GiB for the shared host pool cannot be mapped: {error}"
        ) from error
    finally:
        if fd is not None:
            os.close(fd)


def _touch_part(
    shared: mmap.mmap,
    layout: PoolLayout,
    rendezvous: Rendezvous,
    driver: Driver,
    num_threads: int | None,
) -> int | None:
    """Makes this rank's part real, near its GPU if the kernel allows; the node, if so."""
    pages = -(-layout.num_bytes // PAGE_BYTES)
    first, end = (
        min(pages * part // rendezvous.num_ranks * PAGE_BYTES, layout.num_bytes)
        for part in (rendezvous.rank, rendezvous.rank + 1)
    )
    if first == end:
        return None
    address = _host.address_of(shared) + first
    node = _host.numa_node_of(driver.pci_bus_id())
    if node is not None and not _host.prefer_node(address, end - first, node):
        node = None
    _host.advise_huge_pages(address, end - first)
    threads = num_threads or max(1, min(16, (os.cpu_count() or 1) // rendezvous.num_ranks))
    try:
        _host.touch(address, end - first, threads)
    except OSError as error:
        raise CapacityError(
            f"{layout.num_bytes / 2**30:.1f} GiB for the shared host pool cannot be had: {error}; "
            "lower host_pool_gib"
        ) from error
    return node


def open_host_pool(
    layout: PoolLayout,
    rendezvous: Rendezvous | None,
    *,
    device: int = 0,
    driver: Driver | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    ram_bytes: int | None = None,
) -> HostPool:
    """The host pool of a rank: shared where the ranks can share one, else its own.

    Without shared memory every rank takes as much memory as the pool has bytes, so that each is
    checked against its part of the RAM; one log line of rank 0 says so.

    Args:
        layout: sizes, the same on all ranks.
        rendezvous: of the local ranks; None if there is only this one.
        device: CUDA ordinal of this rank's device.
        driver: the CUDA driver, by default this process's own.
        chunk_bytes: as in `HostPool`.
        ram_bytes: RAM to check against, by default what the machine or its cgroup has.

    Raises:
        HotPageError: as `HostPool` and `SharedHostPool` do.
    """
    if rendezvous is None or rendezvous.num_ranks == 1:
        return HostPool(
            layout, device=device, driver=driver, chunk_bytes=chunk_bytes, ram_bytes=ram_bytes
        )
    reason = why_not_shared(rendezvous)
    if not reason:
        return SharedHostPool(
            layout,
            rendezvous,
            device=device,
            driver=driver,
            chunk_bytes=chunk_bytes,
            ram_bytes=ram_bytes,
        )
    if rendezvous.rank == 0:
        logger.warning(
            "the ranks do not share the host pool (%s): each has its own, %d times %.1f GiB",
            reason,
            rendezvous.num_ranks,
            layout.num_bytes / 2**30,
        )
    ram = ram_bytes or _host.total_ram_bytes()
    try:
        pool = HostPool(
            layout,
            device=device,
            driver=driver,
            chunk_bytes=chunk_bytes,
            ram_bytes=ram and ram // rendezvous.num_ranks,
        )
    except HotPageError as error:
        rendezvous.fail(str(error))
        raise
    try:
        rendezvous.barrier()
    except RankError:
        pool.close()
        raise
    return pool


def why_not_shared(rendezvous: Rendezvous) -> str:
    """Why some rank cannot make or map memory for all; empty if every rank can.

    All ranks ask at the same time and get the same answer.

    Raises:
        RankError: a rank failed meanwhile.
    """
    return next((reason for reason in rendezvous.all_gather(_why_not_here()) if reason), "")


def _why_not_here() -> str:
    """Why this process cannot make or map memory for several processes; empty if it can."""
    try:
        os.close(os.memfd_create("hotpage-probe", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as error:
        return f"no memfd: {error}"
    return ""
