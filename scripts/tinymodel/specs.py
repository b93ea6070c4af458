# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The shapes of the tiny models and their config.json."""

from dataclasses import dataclass
from typing import Any

from tinymodel import vocab

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class TinySpec:
    """Shape of one tiny Flint model.

    Attributes:
        name: What the command line calls it.
        layer_types: `FULL` or `SLIDING`, one a layer.
        mlp_only_layers: Layers with a dense MLP; the others are sparse.
        sliding_window: Tokens a sliding layer sees, the current one included.
        sink_range: Lowest and highest attention sink logit. It brackets the
            log-sum-exp of a typical row of scores, so that sinks take a share
            of the softmax that no test can overlook.
    """

    name: str
    hidden_size: int
    layer_types: tuple[str, ...]
    mlp_only_layers: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    max_position_embeddings: int
    sink_range: tuple[float, float]
    vocab_size: int = vocab.SIZE
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` has routed experts."""
        return layer not in self.mlp_only_layers


SPECS = {
    spec.name: spec
    for spec in (
        TinySpec(
            name="tiny",
            hidden_size=128,
            layer_types=(FULL, FULL, SLIDING, SLIDING, FULL),
            mlp_only_layers=(0, 1),
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=17,
            intermediate_size=128,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            max_position_embeddings=4096,
            sink_range=(0.0, 5.0),
        ),
        # Flint's own head layout and window, in a narrow and shallow model.
        TinySpec(
            name="heads",
            hidden_size=256,
            layer_types=(FULL, SLIDING, SLIDING, FULL),
            mlp_only_layers=(0,),
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            sliding_window=513,
            intermediate_size=256,
            num_experts=16,
            num_experts_per_tok=6,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=128,
            max_position_embeddings=4096,
            sink_range=(3.0, 9.0),
        ),
    )
}


def config_json(spec: TinySpec) -> dict[str, Any]:
    """Returns the checkpoint's config.json, with every field that Flint's has."""
    full = [i for i, kind in enumerate(spec.layer_types) if kind == FULL]
    return {
        "architectures": ["FlintForCausalLM"],
        "model_type": "flint",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "mlp_only_layers": list(spec.mlp_only_layers),
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "shared_expert_intermediate_size": spec.shared_expert_intermediate_size,
        "router_score_function": "sigmoid",
        "norm_topk_prob": True,
        "layer_types": list(spec.layer_types),
        "no_rope_layer_indices": full,
        "sliding_window": spec.sliding_window,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": spec.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": list(vocab.EOS_IDS),
        "pad_token_id": vocab.PAD_ID,
        "dtype": "bfloat16",
    }


def generation_config_json() -> dict[str, Any]:
    """Returns generation_config.json: Flint's stop tokens and sampling values."""
    return {
        "do_sample": True,
        "eos_token_id": list(vocab.EOS_IDS),
        "pad_token_id": vocab.PAD_ID,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
