# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A checkpoint that lacks a tensor, or has one of another shape, is refused."""

import pytest
import torch

from vllm.models.flint.checkpoint import CheckpointTracker, expected_tensors
from vllm.models.flint.configs import FlintConfig
from vllm.models.flint.errors import FlintCheckpointError

CONFIG = FlintConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=32,
    mlp_only_layers=[0],
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    router_score_function="sigmoid",
    norm_topk_prob=True,
    layer_types=["full_attention", "sliding_attention"],
    sliding_window=9,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    rms_norm_eps=1e-6,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    max_position_embeddings=256,
)


def whole() -> dict[str, torch.Tensor]:
    return {name: torch.empty(s) for name, s in expected_tensors(CONFIG).items()}


def test_whole_checkpoint_passes_through():
    tracker = CheckpointTracker(CONFIG)
    assert dict(tracker.check(whole().items())).keys() == whole().keys()
    tracker.finish()


def test_missing_tensor_is_named():
    weights = whole()
    del weights["lm_head.weight"]
    tracker = CheckpointTracker(CONFIG)
    list(tracker.check(weights.items()))
    with pytest.raises(FlintCheckpointError, match="missing: lm_head.weight"):
        tracker.finish()


def test_other_shape_is_refused():
    tracker = CheckpointTracker(CONFIG)
    with pytest.raises(FlintCheckpointError, match=r"has shape \[3\]"):
        list(tracker.check([("model.norm.weight", torch.ones(3))]))
