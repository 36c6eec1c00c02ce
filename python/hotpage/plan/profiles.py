# SPDX-License-Identifier: Apache-2.0
"""Owns the facts about models and GPUs that a plan may start from, each with its source.

What has no source is None here and is asked for on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotpage.errors import ConfigError


@dataclass(frozen=True)
class Model:
    """A model's cache geometry; rows are as wide as `kv_lora_rank + rope_dim` values.

    `frequency`, `offset` and `pattern` are `index_topk_freq`, `index_skip_topk_offset` and
    `index_topk_pattern` of a configuration and say which layers have an indexer.
    """

    name: str
    layers: int
    top_k: int
    source: str
    frequency: int = 1
    offset: int = 2
    pattern: str | None = None
    kv_lora_rank: int = 512
    rope_dim: int = 64
    index_head_dim: int = 128
    draft_layers: int = 0
    max_positions: int | None = None
    attention_heads: int | None = None
    weights_gib: float | None = None
    weights_source: str = ""
    secondary: bool = False
    """True where the source is not the model's own configuration."""
    params_b: float | None = None
    active_params_b: float | None = None
    """Parameters in all and of one token, in units of 10^9."""
    params_source: str = ""
    experts: int | None = None
    experts_per_token: int | None = None
    """Routed experts of a layer, and how many of them compute a token."""


_PUBLIC_CONFIG = "public config.json; IndexShare rule as in vLLM 0.33's model code"
_GLM_WEIGHTS = "published byte total of the FP8 checkpoint, 755.66 GB"
_GLM_WEIGHTS_GIB = 755.66e9 / 2**30
# The HiSparse paper (arXiv 2608.07009) gives 13.09 GB for a request of 128K tokens, which is 78
# layers of 1,152-byte rows and 128-byte index keys: an indexer in every layer, rows of 512 + 64
# bf16 values.
_GLM5_SOURCE = "secondary: published write-ups and the HiSparse paper's bytes per request"

# Of transformers' GlmMoeDsaConfig. Heads only round the ranks that a refusal advises.
_GLM_HEADS = 64

_GLM_PARAMS = "GLM-5 in the documentation of transformers; experts in NVIDIA Megatron Bridge's"
_GLM_PARAMS_B, _GLM_ACTIVE_B = 744.0, 40.0
_EXPERTS, _EXPERTS_PER_TOKEN = 256, 8


def _glm_with_index_share(name: str) -> Model:
    # Offset 3 and frequency 4: layers 0, 1 and 2 lead, then every fourth (6, 10, ... 74).
    return Model(
        name,
        layers=78,
        top_k=2048,
        source=_PUBLIC_CONFIG,
        frequency=4,
        offset=3,
        draft_layers=1,
        max_positions=1_048_576,
        attention_heads=_GLM_HEADS,
        weights_gib=_GLM_WEIGHTS_GIB,
        weights_source=_GLM_WEIGHTS,
        params_b=_GLM_PARAMS_B,
        active_params_b=_GLM_ACTIVE_B,
        params_source=_GLM_PARAMS,
        experts=_EXPERTS,
        experts_per_token=_EXPERTS_PER_TOKEN,
    )


def _glm_without_index_share(name: str) -> Model:
    return Model(
        name,
        layers=78,
        top_k=2048,
        source=_GLM5_SOURCE,
        attention_heads=_GLM_HEADS,
        secondary=True,
        params_b=_GLM_PARAMS_B,
        active_params_b=_GLM_ACTIVE_B,
        params_source=_GLM_PARAMS,
        experts=_EXPERTS,
        experts_per_token=_EXPERTS_PER_TOKEN,
    )


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        _glm_with_index_share("glm-5.3"),
        _glm_with_index_share("glm-5.2"),
        _glm_without_index_share("glm-5.1"),
        _glm_without_index_share("glm-5"),
        Model(
            "deepseek-v3.2",
            layers=61,
            top_k=2048,
            source=_PUBLIC_CONFIG,
            draft_layers=1,
            max_positions=163_840,
            attention_heads=128,
            params_b=671.0,
            active_params_b=37.0,
            params_source="DeepSeek-V3 technical report (arXiv 2412.19437)",
            experts=_EXPERTS,
            experts_per_token=_EXPERTS_PER_TOKEN,
        ),
    )
}


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory and host link.

    `memory_mib` is what the driver reports, because that is what an engine multiplies with its
    utilisation; the number in a product's name can differ by 7%. `link_gbps` is one direction.
    """

    name: str
    memory_mib: float
    memory_source: str
    link: str
    link_gbps: float
    link_source: str
    secondary: bool = False
    """True where the link's source is not NVIDIA's own."""
    hbm_gbps: float | None = None
    """Rate of the GPU's memory in GB/s, of NVIDIA's data sheets."""
    is_hopper: bool = False

    @property
    def memory_gib(self) -> float:
        """Memory in GiB."""
        return self.memory_mib / 1024


_SMI = "memory.total of nvidia-smi in public logs"
_MLPERF = "MLPerf Inference v4.1, closed/NVIDIA/systems"
_PCIE5 = "32 GT/s x 16 lanes x 128/130"
PCIE5_GBPS = 32 * 16 / 8 * 128 / 130
# A flit of PCIe 6 has 236 bytes of packets in 256.
_PCIE6_GBPS = 64 * 16 / 8 * 236 / 256


def _pcie5(name: str, memory_mib: float, memory: str, source: str, **more: Any) -> Gpu:
    link_source = f"{source}; {_PCIE5}"
    return Gpu(name, memory_mib, memory, "PCIe 5.0 x16", PCIE5_GBPS, link_source, **more)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _pcie5(
            "h100",
            81_559,
            f"{_SMI}; sold as 80 GB ({_MLPERF})",
            _MLPERF,
            hbm_gbps=3_350.0,
            is_hopper=True,
        ),
        _pcie5(
            "h200",
            143_771,
            f"{_SMI}; sold as 141 GB ({_MLPERF})",
            _MLPERF,
            hbm_gbps=4_800.0,
            is_hopper=True,
        ),
        _pcie5("b200", 183_359, f"{_SMI}; sold as 180 GB ({_MLPERF})", _MLPERF, hbm_gbps=8_000.0),
        Gpu(
            "b300",
            275_040,
            f"{_SMI}; sold as 288 GB (NVIDIA NIM support matrix)",
            "PCIe 6.0 x16",
            _PCIE6_GBPS,
            "secondary: write-ups of NVIDIA's GTC 2025; 64 GT/s x 16 lanes x 236/256; a host with"
            " PCIe 5.0 gives half",
            secondary=True,
        ),
        Gpu(
            "gh200",
            153_008_209_920 / 2**20,
            f"cuDeviceTotalMem in public tests; sold as 144 GB ({_MLPERF})",
            "NVLink-C2C",
            450.0,
            f"{_MLPERF} names the link; NVIDIA gives 900 GB/s for both directions together",
            hbm_gbps=4_900.0,
            is_hopper=True,
        ),
        _pcie5(
            "rtx-pro-6000",
            97_887,
            f"{_SMI}; sold as 96 GB",
            "pcie.link.gen and width of nvidia-smi in public logs",
        ),
    )
}


# Names that can only be paths; `organisation/model` can be either.
_PATH_STARTS = ("/", "./", "../", "~")


def _key(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def find_gpu(name: str) -> Gpu:
    """The profile of a GPU.

    Raises:
        ConfigError: there is none of that name.
    """
    gpu = GPUS.get(_key(name))
    if gpu is None:
        known = ", ".join(GPUS)
        raise ConfigError(f"gpu is {name!r}, expected one of {known}; or give --hbm-gib")
    return gpu


def find_model(name: str) -> Model:
    """The profile of a model, or the geometry in a `config.json` (a file or its folder).

    Raises:
        ConfigError: no such profile and no such file, or a configuration that cannot be planned.
    """
    from hotpage.plan.config_json import read_config

    key = _key(name).removeprefix("zai-org/").removeprefix("deepseek-ai/").removesuffix("-fp8")
    if key in MODELS:
        return MODELS[key]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise ConfigError(f"{path} is missing; give the folder of a model, or its config.json")
    if path.exists():
        return read_config(path)
    if path.suffix == ".json" or name.startswith(_PATH_STARTS):
        raise ConfigError(f"{path} does not exist; give the path of a model's config.json")
    known = ", ".join(MODELS)
    raise ConfigError(f"model is {name!r}, expected one of {known} or the path of a config.json")
