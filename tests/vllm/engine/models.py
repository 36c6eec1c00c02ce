# SPDX-License-Identifier: Apache-2.0
"""Owns the models that the engine tests build on the fly: a configuration, and seeded weights.

vLLM's dummy weights are so small that a model repeats its input whatever it attends to. These are
drawn at the scale of a trained model, so that a changed row of the KV cache changes the logits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TOP_K = 2048
UNEVEN = 3.0
"""Query scale at which some rows weigh much more than others: one wrong row shows."""
CALM = 1.0
"""Query scale at which what other kernels round otherwise stays small."""
VOCABULARY = 4096

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    # One warp sweep per row in every norm kernel, whatever the batch.
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_topk": TOP_K,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "moe_intermediate_size": 512,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}


def deepseek_v32(num_layers: int) -> dict[str, Any]:
    """An indexer in every layer."""
    return {
        **_COMMON,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        # Dense throughout: experts have no say in which rows are attended.
        "first_k_dense_replace": num_layers,
        "index_n_heads": 64,
        "n_group": 8,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10_000,
        "topk_group": 4,
        "v_head_dim": 128,
    }


def glm_52(num_layers: int) -> dict[str, Any]:
    """An indexer in layers 0, 1, 2 and then in every fourth, whose followers share its result."""
    return {
        **_COMMON,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": num_layers,
        "index_n_heads": 32,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "n_group": 1,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
        "topk_group": 1,
        "v_head_dim": 256,
    }


MODELS: dict[str, Callable[[int], dict[str, Any]]] = {
    "deepseek-v3.2": deepseek_v32,
    "glm-5.2": glm_52,
}
NUM_LAYERS = {"deepseek-v3.2": 8, "glm-5.2": 11}


def leaders(config: dict[str, Any]) -> list[bool]:
    """Per layer: does it have an indexer, by vLLM's rule for the two keys of IndexShare."""
    every = config.get("index_topk_freq", 1)
    offset = config.get("index_skip_topk_offset", 2)
    layers = range(config["num_hidden_layers"])
    return [max(layer - offset + 1, 0) % every == 0 for layer in layers]


def write_model(name: str, folder: Path, num_layers: int | None = None) -> Path:
    """Writes the configuration of a model into `folder` and returns the folder."""
    config = MODELS[name](num_layers or NUM_LAYERS[name])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def fill_weights(model: torch.nn.Module, seed: int, query_scale: float) -> None:
    """Fills every parameter from its name and the seed, before vLLM derives others from it.

    Matrices keep the variance of what they multiply, but the query's, which has `query_scale` times
    the deviation: the larger it is, the more uneven is attention.
    """
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(device=weight.device).manual_seed(int.from_bytes(digest))
        values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        scale = weight.shape[-1] ** -0.5
        if "embed_tokens" in name:
            scale = 1.0
        elif "q_b_proj" in name:
            scale *= query_scale
        weight.data.copy_(values.normal_(0.0, scale, generator=generator))
