# SPDX-License-Identifier: Apache-2.0
"""The pinned host pool: its layout, placement, registration and end."""

from hotpage.memory.layout import PoolLayout, RowPlace
from hotpage.memory.pool import HostPool

__all__ = ["HostPool", "PoolLayout", "RowPlace"]
