# SPDX-License-Identifier: Apache-2.0
"""Owns what vLLM's connector factory finds under `kv_connector_module_path: hotpage.vllm`.

The class is loaded on first use: importing this module needs neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotpage.vllm.connector import HiSparseConnector

__all__ = ["HiSparseConnector"]


def __getattr__(name: str) -> Any:
    if name != "HiSparseConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hotpage.vllm.connector import HiSparseConnector

    return HiSparseConnector
