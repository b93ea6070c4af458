# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""FlintConfig accepts both published forms and refuses what it cannot serve."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.models.flint.configs import FlintConfig
from vllm.transformers_utils.config import get_config

from tinymodel.specs import SPECS, config_json

TINY = config_json(SPECS["tiny"])
ABSENT = object()


def changed(**fields: Any) -> dict[str, Any]:
    config = {**TINY, **fields}
    return {k: v for k, v in config.items() if v is not ABSENT}


def test_checkpoint_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = get_config(tmp_path, trust_remote_code=False)
    assert type(config) is FlintConfig
    for name in ("head_dim", "layer_types", "sliding_window", "rope_parameters"):
        assert getattr(config, name) == TINY[name]


def test_transformers_form() -> None:
    config = FlintConfig(
        **changed(
            no_rope_layer_indices=ABSENT,
            router_score_function=ABSENT,
            attention_dropout=0.0,
            decoder_sparse_step=1,
            output_router_logits=False,
        )
    )
    assert config.no_rope_layer_indices == [0, 1, 4]
    assert config.router_score_function == "sigmoid"


def test_flint_itself() -> None:
    full = [0, 1, *range(5, 48, 4), 48]
    kinds = ["full_attention" if i in full else "sliding_attention" for i in range(49)]
    config = FlintConfig(
        vocab_size=150144,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=49,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        layer_types=kinds,
        sliding_window=513,
        rope_parameters={"rope_type": "default", "rope_theta": 10000},
        max_position_embeddings=262144,
        mlp_only_layers=[0, 1],
        num_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=1024,
        rms_norm_eps=1e-6,
    )
    assert config.no_rope_layer_indices == full


def test_round_trip(tmp_path: Path) -> None:
    FlintConfig(**TINY).save_pretrained(tmp_path)
    assert FlintConfig.from_pretrained(tmp_path).to_dict() == (
        FlintConfig(**TINY).to_dict()
    )


REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "max_position_embeddings",
    "mlp_only_layers",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "rms_norm_eps",
]


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field(name: str) -> None:
    with pytest.raises(ValueError, match=f"config.json lacks {name};"):
        FlintConfig(**changed(**{name: ABSENT}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "128"}, "hidden_size is '128', but has to be a positive"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"head_dim": True}, "head_dim is True"),
        ({"head_dim": 33}, "RoPE needs an even number"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than"),
        ({"rms_norm_eps": 1}, "rms_norm_eps is 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"router_score_function": "softmax"}, "router_score_function is 'softmax'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"layer_types": ["full_attention"] * 4}, "has to list 5 layers"),
        ({"layer_types": ["linear_attention"] * 5}, "names linear_attention"),
        ({"no_rope_layer_indices": [0, 1, 2]}, "contradicts layer_types"),
        ({"no_rope_layer_indices": [0, 1, 7]}, "has to list layer indices below 5"),
        ({"mlp_only_layers": [0, -1]}, "mlp_only_layers is"),
        ({"rope_parameters": {}}, "positive rope_theta"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "positive rope_theta"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
            "only 'default' is implemented",
        ),
    ],
)
def test_contradicting_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlintConfig(**changed(**fields))
