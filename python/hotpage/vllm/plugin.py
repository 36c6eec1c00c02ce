# SPDX-License-Identifier: Apache-2.0
"""Owns the `vllm.general_plugins` entry point, which vLLM runs in every one of its processes.

It changes two things, and only for configurations that name our module: the children of a
MultiConnector are told which connectors stand beside them, and the native engine's host pool, which
vLLM makes before any connector exists, is hotpage's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hotpage.vllm.options import MODULE_PATH, SIBLINGS_KEY, native_options

_MARK = "_hotpage_wrapped"


def activate() -> None:
    """Installs the hooks; calling it again changes nothing."""
    _tell_children()
    _make_host_pool()


def _make_host_pool() -> None:
    from vllm.v1.hisparse.runtime import HiSparseHostPool

    original = HiSparseHostPool.allocate
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def allocate(self: HiSparseHostPool, size: int) -> Any:
        if self.backing is None and native_options(self.vllm_config) is not None:
            from hotpage.vllm import host_pool

            host_pool.allocate(self, size)
        return original(self, size)

    setattr(allocate, _MARK, True)
    HiSparseHostPool.allocate = allocate  # type: ignore[method-assign]


def _tell_children() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    hook = MultiConnector.__dict__["_get_connector_classes_and_configs"]
    if hasattr(hook.__func__, _MARK):
        return
    original = hook.__func__

    @functools.wraps(original)
    def classes_and_configs(cls: type, vllm_config: Any) -> Any:
        children = original(cls, vllm_config)
        for at, (_, config) in enumerate(children):
            transfer = config.kv_transfer_config
            if _is_ours(transfer.kv_connector_module_path):
                siblings = [
                    other.kv_transfer_config.kv_connector
                    for index, (_, other) in enumerate(children)
                    if index != at
                ]
                # A fresh dict: the child shares this one with the configuration of the user.
                extra: Mapping[str, Any] = transfer.kv_connector_extra_config
                transfer.kv_connector_extra_config = {**extra, SIBLINGS_KEY: siblings}
        return children

    setattr(classes_and_configs, _MARK, True)
    MultiConnector._get_connector_classes_and_configs = classmethod(classes_and_configs)


def is_active() -> bool:
    """True once `activate` has run in this process."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    hook = MultiConnector.__dict__["_get_connector_classes_and_configs"]
    return hasattr(hook.__func__, _MARK)


def _is_ours(module_path: str | None) -> bool:
    return module_path == MODULE_PATH
