# SPDX-License-Identifier: Apache-2.0
"""Owns the CUDA driver calls of the host pool; tests put a stand-in in its place."""

from __future__ import annotations

import ctypes
from typing import Protocol

from hotpage.errors import ConfigError

SUCCESS = 0

GONE_STATUSES = frozenset({3, 4, 201, 700, 709, 714, 715, 716, 717, 718, 719})
"""What unregistering returns once there is no context left that could hold the memory: not
initialised, shutting down, invalid or destroyed, or dead after a device fault."""

_REGISTER_PORTABLE = 1
_REGISTER_DEVICEMAP = 2


class Driver(Protocol):
    """What the host pool asks of CUDA. Statuses are CUresult values, 0 is success."""

    def register(self, address: int, num_bytes: int) -> int:
        """Pins a range and maps it for every device; returns a status."""

    def unregister(self, address: int) -> int:
        """Undoes `register` of the range that starts there; returns a status."""

    def status_text(self, status: int) -> str:
        """Text of a status."""

    def pci_bus_id(self) -> str | None:
        """PCI address of the device, "0000:1b:00.0" say; None if not known."""


class CudaDriver:
    """libcuda of this process, on the primary context of one device, which torch uses as well.

    Args:
        device: CUDA ordinal.

    Raises:
        ConfigError: there is no driver or no such device.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                f"the CUDA driver cannot be loaded ({error}); a pinned host pool needs a GPU"
            ) from error
        self._device = ctypes.c_int()
        context = ctypes.c_void_p()
        for status in (
            self._cuda.cuInit(0),
            self._cuda.cuDeviceGet(ctypes.byref(self._device), device),
            self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device),
        ):
            if status != SUCCESS:
                raise ConfigError(
                    f"CUDA device {device} cannot be used: {self.status_text(status)}"
                )
        self._context = context

    def _enter(self) -> int:
        # Registering belongs to a context, and the thread that ends the pool may have none.
        return int(self._cuda.cuCtxPushCurrent_v2(self._context))

    def _leave(self) -> None:
        self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def register(self, address: int, num_bytes: int) -> int:
        """Pins a range and maps it for every device; returns a status."""
        status = self._enter()
        if status != SUCCESS:
            return status
        flags = _REGISTER_PORTABLE | _REGISTER_DEVICEMAP
        status = self._cuda.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(flags)
        )
        self._leave()
        return int(status)

    def unregister(self, address: int) -> int:
        """Undoes `register` of the range that starts there; returns a status."""
        status = self._enter()
        if status != SUCCESS:
            return status
        status = self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))
        self._leave()
        return int(status)

    def status_text(self, status: int) -> str:
        """Text of a status."""
        text = ctypes.c_char_p()
        if self._cuda.cuGetErrorString(status, ctypes.byref(text)) != SUCCESS or not text.value:
            return f"CUDA status {status}"
        return text.value.decode()

    def pci_bus_id(self) -> str | None:
        """PCI address of the device; None if the driver does not say."""
        name = ctypes.create_string_buffer(32)
        status = self._cuda.cuDeviceGetPCIBusId(name, len(name), self._device)
        return name.value.decode().lower() if status == SUCCESS else None
