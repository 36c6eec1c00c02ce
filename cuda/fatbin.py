# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of device images out of an ELF file; it needs no CUDA tool.

The PyPI compiler packages hold no cuobjdump, so the container is read here. Layout, as found in
what nvcc 13.0 writes (little-endian): a container header {u32 magic, u16 version, u16 header bytes,
u64 body bytes}, then entries {u16 kind, u16 version, u32 header bytes, u64 payload bytes, ...} with
the architecture number at byte 28 and flags at byte 40 of an entry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_ELF_MAGIC = b"\x7fELF"
_CONTAINER_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_ARCH_OFFSET = 28
_FLAGS_OFFSET = 40
_KIND_NAMES = {1: "compute", 2: "sm"}
_SUFFIX_FLAGS = {0x0010_0000: "a", 0x0020_0000: "f"}


class FatbinError(ValueError):
    """The file is no ELF file, or a container in it is not of the known layout."""


def _section(data: bytes, wanted: str) -> bytes | None:
    """Contents of the named section of a 64-bit little-endian ELF file."""
    if data[:6] != _ELF_MAGIC + b"\x02\x01":
        raise FatbinError("not a 64-bit little-endian ELF file")
    table, entry_bytes, num_entries, names_index = struct.unpack_from("<Q10xHHH", data, 40)

    def header(index: int) -> tuple[int, int, int]:
        at = table + index * entry_bytes
        (name,) = struct.unpack_from("<I", data, at)
        offset, num_bytes = struct.unpack_from("<QQ", data, at + 24)
        return name, offset, num_bytes

    _, names_at, _ = header(names_index)
    for index in range(num_entries):
        name, offset, num_bytes = header(index)
        start = names_at + name
        if data[start : data.index(b"\0", start)].decode() == wanted:
            return data[offset : offset + num_bytes]
    return None


def _containers(section: bytes) -> Iterator[bytes]:
    """Bodies of the containers of a `.nv_fatbin` section, which pads between them with zeros."""
    at = 0
    while at + _CONTAINER.size <= len(section):
        magic, _, header_bytes, body_bytes = _CONTAINER.unpack_from(section, at)
        if magic == 0:
            at += 8
            continue
        if magic != _CONTAINER_MAGIC:
            raise FatbinError(f"unknown container magic {magic:#x} at byte {at}")
        start = at + header_bytes
        yield section[start : start + body_bytes]
        at = start + body_bytes


def _images(body: bytes) -> Iterator[str]:
    at = 0
    while at + _ENTRY.size <= len(body):
        kind, _, header_bytes, payload_bytes = _ENTRY.unpack_from(body, at)
        if kind not in _KIND_NAMES:
            raise FatbinError(f"unknown image kind {kind} at byte {at}")
        (arch,) = struct.unpack_from("<I", body, at + _ARCH_OFFSET)
        (flags,) = struct.unpack_from("<I", body, at + _FLAGS_OFFSET)
        suffix = "".join(letter for bit, letter in _SUFFIX_FLAGS.items() if flags & bit)
        yield f"{_KIND_NAMES[kind]}_{arch}{suffix}"
        at += header_bytes + payload_bytes


def list_images(path: Path) -> list[frozenset[str]]:
    """Images of each container (one per compiled source), e.g. {"sm_90a", "compute_90"}.

    Raises:
        FatbinError: `path` is not what `cuda/build.py` makes.
    """
    section = _section(path.read_bytes(), ".nv_fatbin")
    if section is None:
        raise FatbinError(f"{path} holds no device code")
    return [frozenset(_images(body)) for body in _containers(section)]
