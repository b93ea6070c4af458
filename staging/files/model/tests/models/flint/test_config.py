# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlintConfig accepts what it can serve and refuses contradictions."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm.model_executor.models.registry import ModelRegistry
from vllm.models.flint.configs import FlintConfig
from vllm.transformers_utils.config import get_config

TINY: dict[str, Any] = {
    "architectures": ["FlintForCausalLM"],
    "model_type": "flint",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "mlp_only_layers": [0],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "router_score_function": "sigmoid",
    "norm_topk_prob": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "no_rope_layer_indices": [0, 2],
    "sliding_window": 17,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


def test_config_json_becomes_a_flint_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = get_config(tmp_path, trust_remote_code=False)
    assert type(config) is FlintConfig
    assert config.layer_types == TINY["layer_types"]


def test_layers_without_rope_are_the_full_ones():
    fields = {k: v for k, v in TINY.items() if k != "no_rope_layer_indices"}
    assert FlintConfig(**fields).no_rope_layer_indices == [0, 2]


def test_architecture_is_registered():
    found = ModelRegistry.models["FlintForCausalLM"].load_model_cls()
    assert found.__name__ == "FlintForCausalLM"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 33}, "RoPE needs an even number"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"router_score_function": "softmax"}, "router_score_function is 'softmax'"),
        ({"no_rope_layer_indices": [0, 1]}, "contradicts layer_types"),
        ({"rope_parameters": {}}, "positive rope_theta"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        FlintConfig(**{**TINY, **fields})
