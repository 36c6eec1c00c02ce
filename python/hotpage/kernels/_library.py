# SPDX-License-Identifier: Apache-2.0
"""Owns the loading of libhotpage_cuda.so and the calls through its C ABI.

Imports without the Rust core, torch and vLLM; neither importing nor loading touches a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path

from hotpage.errors import KernelError, KernelUnavailableError
from hotpage.kernels import _abi

LIBRARY_NAME = "libhotpage_cuda.so"

_REMEDY = (
    "install a wheel that `make wheel` built with "
    "`pip install --force-reinstall --no-deps dist/hotpage-*.whl`, or run "
    "`HOTPAGE_CUDA=1 pip install --force-reinstall --no-deps .` in the source checkout"
)


class Library:
    """The loaded kernel library, its ABI checked against the mirrors of this package.

    Args:
        path: the shared library.

    Raises:
        KernelUnavailableError: missing, not loadable, or built from another abi.h.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise KernelUnavailableError(
                "this installation was built without the CUDA kernels "
                f"(no {LIBRARY_NAME}); {_REMEDY}"
            )
        try:
            handle = ctypes.CDLL(str(path))
            self._declare(handle)
        except (OSError, AttributeError) as error:
            raise KernelUnavailableError(f"{path} cannot be loaded: {error}; {_REMEDY}") from error
        self.path = path
        self._handle = handle
        self._check_abi()
        self.architectures = tuple(handle.hotpage_architectures().decode().split(","))
        """Images in the library: sm_* is machine code, compute_* is PTX."""

    @staticmethod
    def _declare(handle: ctypes.CDLL) -> None:
        """Gives every entry point its types; a missing one is an AttributeError."""
        int32_p = ctypes.POINTER(ctypes.c_int32)
        properties_p = ctypes.POINTER(_abi.DeviceProperties)
        signatures: dict[str, tuple[object, list[object]]] = {
            "hotpage_abi_version": (ctypes.c_int32, []),
            "hotpage_architectures": (ctypes.c_char_p, []),
            "hotpage_struct_size": (ctypes.c_uint32, [ctypes.c_char_p]),
            "hotpage_status_text": (ctypes.c_char_p, [ctypes.c_int32]),
            "hotpage_device_count": (ctypes.c_int32, [int32_p]),
            "hotpage_is_pinned": (ctypes.c_int32, [ctypes.c_uint64]),
            "hotpage_query_device": (ctypes.c_int32, [properties_p]),
        }
        for name, block in _abi.LAUNCHERS.items():
            signatures[name] = (ctypes.c_int32, [ctypes.POINTER(block), ctypes.c_void_p])
        # The version comes first: a library of another version may lack the entry points after it.
        for name, (result, arguments) in signatures.items():
            function = getattr(handle, name)
            function.restype, function.argtypes = result, arguments
            if name == "hotpage_abi_version" and function() != _abi.ABI_VERSION:
                raise OSError(f"its ABI version is {function()}, expected {_abi.ABI_VERSION}")

    def _check_abi(self) -> None:
        for name, block in _abi.STRUCTS.items():
            got, expected = self._handle.hotpage_struct_size(name.encode()), ctypes.sizeof(block)
            if got != expected:
                raise KernelUnavailableError(
                    f"{name} has {got} bytes in {self.path}, expected {expected}; {_REMEDY}"
                )

    def status_text(self, status: int) -> str:
        """The library's text for a status."""
        return self._handle.hotpage_status_text(status).decode()

    def _check(self, op: str, status: int, params: str = "") -> None:
        if status != _abi.OK:
            raise KernelError(op, status, self.status_text(status), params)

    def launch(self, name: str, params: _abi.ParameterBlock, stream: int) -> None:
        """Enqueues one operation.

        Args:
            name: a key of `_abi.LAUNCHERS`, e.g. "hotpage_fill".
            params: its parameter block; read before the call returns.
            stream: address of the cudaStream_t (torch's `stream.cuda_stream`); 0 is the default.

        Raises:
            KernelError: the launcher refused the parameters or the launch failed.
        """
        status = getattr(self._handle, name)(ctypes.byref(params), stream)
        if status != _abi.OK:
            self._check(name.removeprefix("hotpage_"), status, repr(params))

    def device_count(self) -> int:
        """Number of CUDA devices that the driver shows.

        Raises:
            KernelError: no driver, or one older than the library's runtime.
        """
        count = ctypes.c_int32()
        self._check("device_count", self._handle.hotpage_device_count(ctypes.byref(count)))
        return count.value

    def is_pinned(self, address: int, num_bytes: int) -> bool:
        """Whether kernels can reach a range of host memory at its host address.

        Asks the driver about both ends, so memory that was registered, by whom ever, counts.
        """
        ends = (address, address + max(num_bytes, 1) - 1)
        return all(self._handle.hotpage_is_pinned(end) == 1 for end in ends)

    def query_device(self, device: int) -> _abi.DeviceProperties:
        """Properties of a device, as bounds are checked against.

        Raises:
            KernelError: there is no such device.
        """
        properties = _abi.DeviceProperties(device=device)
        status = self._handle.hotpage_query_device(ctypes.byref(properties))
        self._check("query_device", status, f"device={device}")
        return properties

    def check_device(self, device: int) -> _abi.DeviceProperties:
        """Properties of a device that an image in this library can run on.

        Raises:
            KernelError: there is no such device.
            KernelUnavailableError: no image fits it.
        """
        properties = self.query_device(device)
        capability = (properties.compute_major, properties.compute_minor)
        if not any(image_runs_on(image, capability) for image in self.architectures):
            major, minor = capability
            raise KernelUnavailableError(
                f"device {device} has compute capability {major}.{minor} and the kernels are built "
                f"for {', '.join(self.architectures)}; use a Hopper or later GPU"
            )
        return properties


def image_runs_on(image: str, capability: tuple[int, int]) -> bool:
    """Whether the driver can run an image such as "sm_90a" on a compute capability.

    CUDA's rules: PTX runs on its own capability and all later ones, machine code within one major
    version from its minor version on, and an "a" image on exactly its own.
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)", image)
    if found is None:
        return False
    kind, own = found[1], (int(found[2]), int(found[3]))
    if found[4]:
        return own == capability
    if kind == "compute":
        return own <= capability
    return own[0] == capability[0] and own[1] <= capability[1]


def library_path() -> Path:
    """Where the library is expected: HOTPAGE_CUDA_LIBRARY if set, else inside the package."""
    named = os.environ.get("HOTPAGE_CUDA_LIBRARY")
    return Path(named) if named else Path(__file__).parent.parent / "lib" / LIBRARY_NAME


@functools.cache
def load() -> Library:
    """The library of this process, loaded on the first call.

    Raises:
        KernelUnavailableError: it is missing, not loadable, or of another ABI.
    """
    return Library(library_path())
