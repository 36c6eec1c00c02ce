# SPDX-License-Identifier: Apache-2.0
"""The pinned host pool: its layout, placement, registration and end."""

from hotpage.memory.layout import PoolLayout, RowPlace
from hotpage.memory.pool import HostPool
from hotpage.memory.shared import SharedHostPool, open_host_pool, why_not_shared

__all__ = [
    "HostPool",
    "PoolLayout",
    "RowPlace",
    "SharedHostPool",
    "open_host_pool",
    "why_not_shared",
]
