# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of a model's geometry from its `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotpage.errors import ConfigError
from hotpage.plan.profiles import Model
from hotpage.user_files import BadFileError, parse_json, read_text

_MAX_COUNT = 2**31 - 1

MAX_LAYERS = 4096
"""More layers than any model has; a list of layers is made for each."""

# A pebibyte, the planner's own bound of a size; a file that says more is not believed.
_MAX_TOTAL_BYTES = 2**50


def _load(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_text(path))
    except BadFileError as error:
        raise ConfigError(f"{path}: {error}; give the model's config.json") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no object; give the model's config.json")
    return found


def _number(
    config: dict[str, Any], name: str, default: int | None = None, most: int = _MAX_COUNT
) -> int:
    value = config.get(name, default)
    if value is None:
        raise ConfigError(f"{name} is missing in config.json; give the model's own file")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} is {_short(value)} in config.json, expected a count; correct it")
    if value > most:
        raise ConfigError(
            f"{name} is {_short(value)} in config.json, expected at most {most}; correct it"
        )
    return value


def _short(value: Any) -> str:
    """A value as it is written, cut where it would not fit into a sentence."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _pattern(config: dict[str, Any]) -> str | None:
    value = config.get("index_topk_pattern")
    if value is None:
        return None
    if not isinstance(value, str | list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"index_topk_pattern is {_short(value)}, expected letters; correct it")
    if any(len(one) != 1 for one in value):
        raise ConfigError("index_topk_pattern has words, expected one letter a layer; correct it")
    return "".join(value)


def _if_known(config: dict[str, Any], name: str) -> int | None:
    return _number(config, name) if config.get(name) is not None else None


def _weights_gib(folder: Path) -> float | None:
    """Bytes of the checkpoint that lies beside the configuration, in GiB."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    metadata = _load(index).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    known = isinstance(total, int | float) and 0 < total <= _MAX_TOTAL_BYTES
    return total / 2**30 if known else None


def read_config(path: Path) -> Model:
    """The geometry that a `config.json` states, under the field names that vLLM 0.33 reads.

    Raises:
        ConfigError: a field is missing or impossible, or the model cannot be planned for.
    """
    config = _load(path)
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = nested
    kind = str(config.get("model_type", ""))
    if kind.startswith("deepseek_v4"):
        raise ConfigError(
            f"model_type is {_short(kind)}, expected one with plain sparse MLA; none helps"
        )
    if "index_topk" not in config:
        raise ConfigError(
            "index_topk is missing in config.json, so the model has no indexer, expected sparse "
            "attention; serve it with ordinary residency"
        )
    pooled = _number(config, "index_kpool", 1)
    if pooled > 1:
        raise ConfigError(
            f"index_kpool is {pooled}, expected 1: the recurrent layers that come with pooled "
            "indexers are not modelled; plan from the engine's log"
        )
    weights_gib = _weights_gib(path.parent)
    return Model(
        name=path.parent.name or path.stem,
        layers=_number(config, "num_hidden_layers", most=MAX_LAYERS),
        top_k=_number(config, "index_topk"),
        source=path.name,
        frequency=_number(config, "index_topk_freq", 1),
        offset=_number(config, "index_skip_topk_offset", 2),
        pattern=_pattern(config),
        kv_lora_rank=_number(config, "kv_lora_rank"),
        rope_dim=_number(config, "qk_rope_head_dim"),
        index_head_dim=_number(config, "index_head_dim"),
        draft_layers=_number(config, "num_nextn_predict_layers", 0),
        max_positions=_number(config, "max_position_embeddings"),
        attention_heads=_if_known(config, "num_attention_heads"),
        experts=_if_known(config, "n_routed_experts"),
        experts_per_token=_if_known(config, "num_experts_per_tok"),
        weights_gib=weights_gib,
        weights_source="model.safetensors.index.json beside it" if weights_gib else "",
    )
