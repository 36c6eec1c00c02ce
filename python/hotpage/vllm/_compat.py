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
    "distributed/kv_transfer/kv_connector/v1/multi_connector.py",
    "model_executor/layers/attention/mla_attention.py",
    "model_executor/layers/attention/sparse_mla_attention.py",
    "models/deepseek_v32/attention.py",
    "v1/attention/backends/mla/flashmla_sparse.py",
    "v1/attention/backends/mla/index_group.py",
    "v1/core/block_pool.py",
    "v1/core/kv_cache_coordinator.py",
    "v1/core/kv_cache_manager.py",
    "v1/core/sched/scheduler.py",
    "v1/core/single_type_kv_cache_manager.py",
    "v1/hisparse/binding.py",
    "v1/hisparse/block_pool.py",
    "v1/hisparse/coordinator.py",
    "v1/hisparse/layout.py",
    "v1/hisparse/runtime.py",
    "v1/hisparse/types.py",
    "v1/worker/gpu/block_table.py",
    "v1/worker/gpu/kv_connector.py",
    "v1/worker/gpu/model_runner.py",
    "v1/worker/gpu/states.py",
)
"""Files whose private members, or whose ways of calling, the adapter relies on."""

FINGERPRINTS: dict[str, dict[str, str]] = {
    "0.33.0": dict(
        zip(
            FILES,
            (
                "78610e02ebdd622dc8272a98d75c2a75a41d8b19ce1e72ac582bdedd19d11f13",
                "1ea9f7634c7a32ae55604047a7ecf9922beb8b2dda7cca277b004c448f9bf9eb",
                "af3300b09fda788591861cff8f59ef2d41b02f17164763647d75f33330406f0d",
                "c2ca75bfe12b33bb26c3ec3d9fe735cd2ddc68c245d6c76788af2632b9528b77",
                "35e7c3d648d22d753926624296619ec70470cea3d66f9c761109b70ecaab9db1",
                "2fdaa4f410e3723dc77f2d812320dbb9ebbeb6b31eef9485a0af25d6047d2713",
                "16832938427dbf56e15050eaca0387914f06263b9a02ceaa56da0cfb3e9ceabd",
                "64d304d2b431a6ce9a0a0425610122354e1ac11b6aff1ca7d467d4218183774c",
                "6bf7583c5fd3fb85a99437eb3d7f3eddd319314ff93737e847d071fda59383e3",
                "39ae1c1564a034fd59736a92d962bfab5a0af03529e01349b765422dbd5a355d",
                "d76cc22257550972137df9c893505d0bd0f5d482374691e6eca4372772de501a",
                "4b8c34ff759855b94a5a3a4a3a1b4784077f27077539e01509c1b3f72e75455f",
                "64963a4e7b401a4d1424d2c64432e47845f26ae010ee710bb6845015c650b8da",
                "eaa39a8f6f3bd723064228bc56d8bf3bee0264b9363d025ff6ac13c68e37db59",
                "530a488c60c3411e53eab42a8fe0624454de942204da304391a4f1c295b30666",
                "42b8d9c6c7df5588ab541976afc0e62003d87652f943c0868876acb15e9b9c62",
                "a6ad68edbf1790c9e48712dd53c1f4f444b77f6f223a9c9f131e2f2f5de1cca1",
                "ea48874e93e834510867c896e5a594d7399fbece7e7afb01631888fd6ad4a5c7",
                "3433729cad5aa5fceb312e0a8d9ffabb3f7327dbdd18966d576e64d090313020",
                "bb70716b5ed291af5e54e2ffa9ca4b549d51e92355fa65f3f88253c9500daeb4",
                "9145e2601f9e93db5e6c7e648c6741cff55f2a49f046800f79311e4977550121",
                "ae5d600c17fbad3a529a27b234ca48ffd3ffe21a99e6866c9570906a76f3115f",
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
        raise UnsupportedVllmError(f"vLLM is not installed; install vllm=={supported}") from None
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
