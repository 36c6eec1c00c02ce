# SPDX-License-Identifier: Apache-2.0
"""Owns what the host pool asks of Linux: how much RAM there is, where it lies, its first touch."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hotpage.memory.layout import PAGE_BYTES

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_TOUCH_BYTES = 256 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def total_ram_bytes(root: Path = Path("/")) -> int | None:
    """RAM that this process may use: the machine's, or its cgroup's limit if that is lower.

    Args:
        root: where proc and sys are looked for.
    """
    found = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / "sys/fs/cgroup" / name).read_text().strip()
        except OSError:
            continue
        # "max", or a number so large that it means none.
        if text.isdecimal() and int(text) < 1 << 60:
            found.append(int(text))
    return min(found, default=None)


def numa_node_of(pci_bus_id: str | None, root: Path = Path("/")) -> int | None:
    """NUMA node that a PCI device hangs on; None if the kernel does not say."""
    if pci_bus_id is None:
        return None
    try:
        text = (root / "sys/bus/pci/devices" / pci_bus_id / "numa_node").read_text()
        node = int(text)
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Asks for a range's pages on a node, before their first touch; False if that is refused.

    A preference, not a must: a full node gives slower memory and no failure.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = node // bits + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // bits] = 1 << (node % bits)
    # The kernel reads one bit fewer than it is told.
    status = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_long(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(words * bits + 1),
        ctypes.c_uint(0),
    )
    return status == 0


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Asks for huge pages, which take less time to pin; False if the kernel has none."""
    status = _libc.madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(_MADV_HUGEPAGE)
    )
    return status == 0


def address_of(buffer: Any) -> int:
    """Address of writable memory that has the buffer protocol."""
    # The exported view ends with this expression, so that a mapping can be closed later.
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _touch_range(address: int, num_bytes: int) -> None:
    status = _libc.madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(_MADV_POPULATE_WRITE)
    )
    if status == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number))
    # Kernels before 5.14 do not know the advice. ctypes lets other threads run meanwhile.
    ctypes.memset(address, 0, num_bytes)


def touch(address: int, num_bytes: int, num_threads: int) -> None:
    """Makes every page of a fresh range real, by several threads; its bytes become zeros.

    Raises:
        OSError: memory ran out.
    """
    step = _TOUCH_BYTES // PAGE_BYTES * PAGE_BYTES
    starts = range(0, num_bytes, step)
    with ThreadPoolExecutor(max_workers=max(1, num_threads)) as threads:
        # Consuming the results raises what a thread raised.
        list(
            threads.map(
                lambda start: _touch_range(address + start, min(step, num_bytes - start)), starts
            )
        )
