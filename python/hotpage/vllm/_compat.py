# SPDX-License-Identifier: Apache-2.0
"""Owns what is known about versions of vLLM: which ones, and how their files are recognised.

Nothing else in the package asks for vLLM's version.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from hotpage.errors import UnsupportedVllmError

FILES = (
    "distributed/kv_transfer/kv_connector/v1/hisparse/connector.py",
    "v1/core/block_pool.py",
    "v1/core/kv_cache_coordinator.py",
    "v1/core/kv_cache_manager.py",
    "v1/core/single_type_kv_cache_manager.py",
    "v1/hisparse/block_pool.py",
    "v1/hisparse/coordinator.py",
    "v1/hisparse/types.py",
)
"""Files whose private members the scheduler side calls or replaces."""

FINGERPRINTS: dict[str, dict[str, str]] = {
    "0.33.0": dict(
        zip(
            FILES,
            (
                "78610e02ebdd622dc8272a98d75c2a75a41d8b19ce1e72ac582bdedd19d11f13",
                "64d304d2b431a6ce9a0a0425610122354e1ac11b6aff1ca7d467d4218183774c",
                "6bf7583c5fd3fb85a99437eb3d7f3eddd319314ff93737e847d071fda59383e3",
                "39ae1c1564a034fd59736a92d962bfab5a0af03529e01349b765422dbd5a355d",
                "4b8c34ff759855b94a5a3a4a3a1b4784077f27077539e01509c1b3f72e75455f",
                "eaa39a8f6f3bd723064228bc56d8bf3bee0264b9363d025ff6ac13c68e37db59",
                "530a488c60c3411e53eab42a8fe0624454de942204da304391a4f1c295b30666",
                "ea48874e93e834510867c896e5a594d7399fbece7e7afb01631888fd6ad4a5c7",
            ),
            strict=True,
        )
    ),
}
"""Version -> file -> SHA-256 of its bytes."""


@functools.cache
def check_vllm() -> str:
    """The version of the installed vLLM, whose internals are known.

    Raises:
        UnsupportedVllmError: names the installed and the supported versions, or the changed file.
    """
    supported = ", ".join(FINGERPRINTS)
    remedy = f'install vllm=={supported} or set "engine": "upstream" in kv_connector_extra_config'
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        raise UnsupportedVllmError(f"vLLM is not installed; {remedy}") from None
    known = FINGERPRINTS.get(installed.partition("+")[0])
    if known is None:
        raise UnsupportedVllmError(
            f"vLLM {installed} is installed, hotpage knows {supported}; {remedy}"
        )
    root = _root()
    for file, expected in known.items():
        path = root / file
        if not path.is_file() or fingerprint(path) != expected:
            raise UnsupportedVllmError(
                f"{file} of the installed vLLM {installed} is not the one of its release, so its "
                f"internals are not known; {remedy}"
            )
    return installed


def fingerprint(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _root() -> Path:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedVllmError("vLLM is not installed; install it beside hotpage")
    return Path(spec.submodule_search_locations[0])
