# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A whole Flint model by the contract: token ids in, logits out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from contract import ops
from contract.attention import attention
from contract.numerics import Numerics
from contract.ops import Weight


def reference_forward(
    weights: Mapping[str, Weight],
    config: Mapping[str, Any],
    token_ids: Sequence[int],
    numerics: Numerics,
) -> torch.Tensor:
    """Returns the logits, float64 [T, vocab], of one sequence.

    Args:
        weights: Tensors by safetensors name; matrices plain or quantized.
        config: The fields of the checkpoint's config.json.
        token_ids: T token ids, from position 0 on.
        numerics: CONTRACT for an engine that computes in BF16, EXACT for one
            that computes in float32.
    """
    eps = config["rms_norm_eps"]
    table = ops.rope_table(
        len(token_ids), config["head_dim"], config["rope_parameters"]["rope_theta"]
    )
    residual = _plain(weights, "model.embed_tokens.weight").double()[
        torch.tensor(token_ids)
    ]
    update = torch.zeros_like(residual)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norm = _plain(weights, f"{name}.input_layernorm.weight")
        normed, residual = ops.rms_norm(update, norm, eps, numerics, residual)
        update = _attention(weights, config, layer, normed, table, numerics)
        norm = _plain(weights, f"{name}.post_attention_layernorm.weight")
        normed, residual = ops.rms_norm(update, norm, eps, numerics, residual)
        if layer in config["mlp_only_layers"]:
            parts = _projections(weights, f"{name}.mlp")
            update = ops.dense_mlp(normed, *parts, numerics)
        else:
            update = sparse_block(weights, config, f"{name}.mlp", normed, numerics)
    norm = _plain(weights, "model.norm.weight")
    normed, _ = ops.rms_norm(update, norm, eps, numerics, residual)
    return ops.head(normed, weights["lm_head.weight"])


def _plain(weights: Mapping[str, Weight], name: str) -> torch.Tensor:
    weight = weights[name]
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name} is never quantized")
    return weight


def _projections(
    weights: Mapping[str, Weight], name: str
) -> tuple[Weight, Weight, Weight]:
    gate, up, down = (
        weights[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down")
    )
    return gate, up, down


def _attention(
    weights: Mapping[str, Weight],
    config: Mapping[str, Any],
    layer: int,
    x: torch.Tensor,
    table: torch.Tensor,
    numerics: Numerics,
) -> torch.Tensor:
    name = f"model.layers.{layer}.self_attn"
    dim, eps = config["head_dim"], config["rms_norm_eps"]
    q, k, v = (
        ops.linear(x, weights[f"{name}.{part}_proj.weight"], numerics).unflatten(
            -1, (-1, dim)
        )
        for part in "qkv"
    )
    rows = None if layer in config["no_rope_layer_indices"] else table
    q_norm, k_norm = (_plain(weights, f"{name}.{part}_norm.weight") for part in "qk")
    sliding = config["layer_types"][layer] == "sliding_attention"
    mixed = attention(
        ops.qk_norm_rope(q, q_norm, eps, numerics, rows),
        ops.qk_norm_rope(k, k_norm, eps, numerics, rows),
        v,
        _plain(weights, f"{name}.softmax_offset"),
        dim**-0.5,
        numerics,
        config["sliding_window"] if sliding else None,
    )
    return ops.linear(mixed.flatten(1), weights[f"{name}.o_proj.weight"], numerics)


def sparse_block(
    weights: Mapping[str, Weight],
    config: Mapping[str, Any],
    name: str,
    x: torch.Tensor,
    numerics: Numerics,
) -> torch.Tensor:
    """Returns what the sparse MLP `name` makes of normed rows [T, hidden]."""
    top_k = config["num_experts_per_tok"]
    scores, chosen = ops.route(
        x, weights[f"{name}.gate.weight"], top_k, numerics, config["norm_topk_prob"]
    )
    routed = x.new_zeros(x.shape[0], top_k, x.shape[1])
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        parts = _projections(weights, f"{name}.experts.{expert}")
        routed[token, slot] = ops.routed_expert(x[token], *parts, numerics)
    shared = ops.dense_mlp(x, *_projections(weights, f"{name}.shared_expert"), numerics)
    return ops.combine(scores, routed, shared, numerics)
