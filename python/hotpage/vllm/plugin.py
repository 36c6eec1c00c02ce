# SPDX-License-Identifier: Apache-2.0
"""Owns the `vllm.general_plugins` entry point, which vLLM runs in every one of its processes.

It changes two things, and only for configurations that name our module: the children of a
MultiConnector are told which connectors stand beside them, and the native engine's host pool, which
vLLM makes before any connector exists, is hotpage's. Beside that, hotpage logs where vLLM does.

vLLM starts, whatever it is to serve, only if this does not raise: a version without the places to
hook into gets no hooks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotpage.vllm.options import MODULE_PATH, SIBLINGS_KEY, check_sibling, native_options

if TYPE_CHECKING:
    from vllm.v1.hisparse.runtime import HiSparseHostPool

logger = logging.getLogger(__name__)

_MARK = "_hotpage_wrapped"
_CHILDREN, _POOL = "_get_connector_classes_and_configs", "allocate"
"""Names of the methods that are hooked."""


def activate() -> None:
    """Installs the hooks, all or none; calling it again changes nothing."""
    places = _places()
    if places is None:
        logger.debug("this vLLM has no places for hotpage's hooks")
        return
    connector, pool = places
    # vLLM configures its own loggers alone: below them, hotpage's are heard where vLLM's are.
    logging.getLogger("hotpage").parent = logging.getLogger("vllm")
    _tell_children(connector)
    _make_host_pool(pool)


def _places() -> tuple[Any, Any] | None:
    """The classes that are hooked into, None if this vLLM has one of them not, or otherwise."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
        from vllm.v1.hisparse.runtime import HiSparseHostPool
    except ImportError:
        return None
    is_class_method = hasattr(MultiConnector.__dict__.get(_CHILDREN), "__func__")
    if not is_class_method or not hasattr(HiSparseHostPool, _POOL):
        return None
    return MultiConnector, HiSparseHostPool


def _make_host_pool(holder: Any) -> None:
    original = getattr(holder, _POOL)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def allocate(self: HiSparseHostPool, size: int) -> Any:
        if self.backing is None and native_options(self.vllm_config) is not None:
            from hotpage.vllm import host_pool

            host_pool.allocate(self, size)
        return original(self, size)

    setattr(allocate, _MARK, True)
    setattr(holder, _POOL, allocate)


def _tell_children(connector: Any) -> None:
    hook = connector.__dict__[_CHILDREN]
    if hasattr(hook.__func__, _MARK):
        return
    original = hook.__func__

    @functools.wraps(original)
    def classes_and_configs(cls: type, vllm_config: Any) -> Any:
        children = original(cls, vllm_config)
        for at, (_, config) in enumerate(children):
            transfer = config.kv_transfer_config
            if _is_ours(transfer.kv_connector_module_path):
                others = [
                    other.kv_transfer_config
                    for index, (_, other) in enumerate(children)
                    if index != at
                ]
                # A fresh dict: the child shares this one with the configuration of the user.
                extra: Mapping[str, Any] = transfer.kv_connector_extra_config
                siblings = [other.kv_connector for other in others]
                transfer.kv_connector_extra_config = {**extra, SIBLINGS_KEY: siblings}
                if native_options(config) is not None:
                    for other in others:
                        check_sibling(other.kv_connector, other.kv_connector_extra_config)
        return children

    setattr(classes_and_configs, _MARK, True)
    setattr(connector, _CHILDREN, classmethod(classes_and_configs))


def is_active() -> bool:
    """True once `activate` has installed its hooks in this process."""
    places = _places()
    return places is not None and hasattr(getattr(places[1], _POOL), _MARK)


def _is_ours(module_path: str | None) -> bool:
    return module_path == MODULE_PATH
