# SPDX-License-Identifier: Apache-2.0
"""Owns what vLLM's connector factory finds under `kv_connector_module_path: hotpage.vllm`.

The class is loaded on first use: importing this module needs neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotpage.errors import ConfigError

if TYPE_CHECKING:
    from hotpage.vllm.connector import HiSparseConnector

__all__ = ["HiSparseConnector"]


def __getattr__(name: str) -> Any:
    if name == "HiSparseConnector":
        from hotpage.vllm.connector import HiSparseConnector

        return HiSparseConnector
    # An AttributeError would reach the user as vLLM's own text, which knows no remedy.
    if name.endswith("Connector"):
        raise ConfigError(
            f"hotpage.vllm has no {name}; give kv_connector_module_path to the HiSparseConnector "
            "alone, inside a MultiConnector too, and write that out in the place of "
            "--kv-offloading-size"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
