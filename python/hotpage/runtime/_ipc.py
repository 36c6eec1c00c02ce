# SPDX-License-Identifier: Apache-2.0
"""Owns the CUDA driver calls between processes: memory and events of other ranks."""

from __future__ import annotations

import ctypes
from typing import Protocol

from hotpage.errors import ConfigError
from hotpage.memory._driver import SUCCESS, CudaDriver

HANDLE_BYTES = 64

_EVENT_DISABLE_TIMING = 2
_EVENT_INTERPROCESS = 4
_LAZY_ENABLE_PEER_ACCESS = 1
_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED"""


class _Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, which are passed by value."""

    _fields_ = [("data", ctypes.c_char * HANDLE_BYTES)]


class IpcError(Exception):
    """A driver call failed; the text says which and why."""


class EventDriver(Protocol):
    """What `WriteOrder` asks of CUDA; tests put a stand-in in its place. Failures are IpcError."""

    def create_event(self) -> tuple[int, bytes]:
        """An event that other processes can open: its address here and its handle."""

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""

    def record_event(self, event: int, stream: int) -> None:
        """Records the event on a stream."""

    def wait_event(self, event: int, stream: int) -> None:
        """Lets a stream wait for what the event's last record stands for."""

    def destroy_event(self, event: int) -> None:
        """Ends an event, one's own or an opened one."""


class MemoryDriver(Protocol):
    """What `Peers` asks of CUDA; tests put a stand-in in its place. Failures are IpcError."""

    def pci_bus_id(self) -> str | None:
        """PCI address of this rank's device."""

    def why_no_access(self, pci_bus_id: str) -> str | None:
        """Why this device cannot write to and swap words with another; None if it can."""

    def export_memory(self, address: int) -> tuple[bytes, int]:
        """Handle of the allocation that an address lies in, and the offset in it."""

    def open_memory(self, handle: bytes) -> int:
        """Address of another process's allocation."""

    def close_memory(self, address: int) -> None:
        """Ends what `open_memory` began."""


class CudaIpc(CudaDriver):
    """libcuda of this process, on the primary context of one device, which torch uses as well.

    Args:
        device: CUDA ordinal.

    Raises:
        ConfigError: there is no driver or no such device.
    """

    def _call(self, name: str, *arguments: object) -> None:
        status = self._enter()
        if status == SUCCESS:
            status = int(getattr(self._cuda, name)(*arguments))
            self._leave()
        if status != SUCCESS:
            raise IpcError(f"{name}: {self.status_text(status)}")

    def create_event(self) -> tuple[int, bytes]:
        """An event that other processes can open: its address here and its handle."""
        event, handle = ctypes.c_void_p(), _Handle()
        flags = ctypes.c_uint(_EVENT_DISABLE_TIMING | _EVENT_INTERPROCESS)
        self._call("cuEventCreate", ctypes.byref(event), flags)
        self._call("cuIpcGetEventHandle", ctypes.byref(handle), event)
        return event.value or 0, ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""
        event = ctypes.c_void_p()
        self._call("cuIpcOpenEventHandle", ctypes.byref(event), _handle_of(handle))
        return event.value or 0

    def record_event(self, event: int, stream: int) -> None:
        """Records the event on a stream."""
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait_event(self, event: int, stream: int) -> None:
        """Lets a stream wait for what the event's last record stands for."""
        arguments = ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0)
        self._call("cuStreamWaitEvent", *arguments)

    def destroy_event(self, event: int) -> None:
        """Ends an event, one's own or an opened one."""
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def why_no_access(self, pci_bus_id: str) -> str | None:
        """Why this device cannot write to and swap words with another; None if it can."""
        other, value = ctypes.c_int(), ctypes.c_int()
        own = self._device
        try:
            name = ctypes.c_char_p(pci_bus_id.encode())
            self._call("cuDeviceGetByPCIBusId", ctypes.byref(other), name)
            if other.value == own.value:
                return None
            self._call("cuDeviceCanAccessPeer", ctypes.byref(value), own, other)
            if not value.value:
                return f"no peer access to {pci_bus_id}"
            attribute = ctypes.c_int(_NATIVE_ATOMICS)
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(value), attribute, own, other)
        except IpcError as error:
            return f"{pci_bus_id}: {error}"
        return None if value.value else f"no atomics across the link to {pci_bus_id}"

    def export_memory(self, address: int) -> tuple[bytes, int]:
        """Handle of the allocation that an address lies in, and the offset in it."""
        base, size, handle = ctypes.c_void_p(), ctypes.c_size_t(), _Handle()
        pointer = ctypes.c_void_p(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return (
            ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES),
            address - (base.value or 0),
        )

    def open_memory(self, handle: bytes) -> int:
        """Address of another process's allocation."""
        pointer, flags = ctypes.c_void_p(), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _handle_of(handle), flags)
        return pointer.value or 0

    def close_memory(self, address: int) -> None:
        """Ends what `open_memory` began."""
        self._call("cuIpcCloseMemHandle", ctypes.c_void_p(address))


def _handle_of(data: bytes) -> _Handle:
    if len(data) != HANDLE_BYTES:
        raise ConfigError(f"an IPC handle has {len(data)} bytes, expected {HANDLE_BYTES}")
    handle = _Handle()
    ctypes.memmove(ctypes.byref(handle), data, HANDLE_BYTES)
    return handle
