# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configuration of Flint, validated before any weight is read."""

from typing import TYPE_CHECKING, Any

from transformers.configuration_utils import PreTrainedConfig

from .errors import FlintCheckpointError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

_POSITIVE_INTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


class FlintConfig(PreTrainedConfig):
    """Flint's hyperparameters, from a checkpoint's or transformers' config.json.

    Every field that shapes the model is required: a missing field is an error,
    never a silent default, since a wrong guess gives a model that talks nonsense.
    The two forms differ in three fields, each of which may be left out:
    `no_rope_layer_indices` (then derived from `layer_types`),
    `router_score_function` and `norm_topk_prob`.

    Args:
        vocab_size: Size of the vocabulary.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the dense MLPs.
        num_hidden_layers: Number of decoder layers.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key-value heads; divides the query heads.
        head_dim: Channels a head.
        layer_types: `"full_attention"` or `"sliding_attention"`, one a layer.
        sliding_window: Tokens that a sliding layer sees, the current one included.
        no_rope_layer_indices: Layers without positional encoding: exactly the
            full-attention layers.
        rope_parameters: RoPE of the sliding layers; `rope_theta` is required.
        max_position_embeddings: Longest context in tokens.
        mlp_only_layers: Layers that have a dense MLP instead of experts.
        num_experts: Routed experts a layer.
        num_experts_per_tok: Experts that a token is routed to.
        moe_intermediate_size: Width of a routed expert.
        shared_expert_intermediate_size: Width of the shared expert.
        router_score_function: `"sigmoid"`.
        norm_topk_prob: Whether the chosen experts' scores are scaled to sum to 1.
        rms_norm_eps: Epsilon of every RMSNorm.
        hidden_act: `"silu"`.
        attention_bias: False; Flint's projections have no bias.
        tie_word_embeddings: False; Flint's head has weights of its own.
        **kwargs: Passed on to `PreTrainedConfig`.

    Raises:
        FlintCheckpointError: A field is missing, of the wrong kind, or contradicts
            another.

    """

    model_type = "flint"
    keys_to_ignore_at_inference = ["past_key_values"]

    if TYPE_CHECKING:
        # What the fields are once they have been checked.
        vocab_size: int
        hidden_size: int
        intermediate_size: int
        num_hidden_layers: int
        num_attention_heads: int
        num_key_value_heads: int
        head_dim: int
        layer_types: list[str]
        sliding_window: int
        no_rope_layer_indices: list[int]
        rope_parameters: dict[str, Any]
        max_position_embeddings: int
        mlp_only_layers: list[int]
        num_experts: int
        num_experts_per_tok: int
        moe_intermediate_size: int
        shared_expert_intermediate_size: int
        router_score_function: str
        norm_topk_prob: bool
        rms_norm_eps: float
        hidden_act: str
        attention_bias: bool

    def __init__(
        self,
        *,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_hidden_layers: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        layer_types: list[str] | None = None,
        sliding_window: int | None = None,
        no_rope_layer_indices: list[int] | None = None,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        mlp_only_layers: list[int] | None = None,
        num_experts: int | None = None,
        num_experts_per_tok: int | None = None,
        moe_intermediate_size: int | None = None,
        shared_expert_intermediate_size: int | None = None,
        router_score_function: str = "sigmoid",
        norm_topk_prob: bool = True,
        rms_norm_eps: float | None = None,
        hidden_act: str = "silu",
        attention_bias: bool = False,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        fields = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": head_dim,
            "layer_types": layer_types,
            "sliding_window": sliding_window,
            "no_rope_layer_indices": no_rope_layer_indices,
            "rope_parameters": rope_parameters,
            "max_position_embeddings": max_position_embeddings,
            "mlp_only_layers": mlp_only_layers,
            "num_experts": num_experts,
            "num_experts_per_tok": num_experts_per_tok,
            "moe_intermediate_size": moe_intermediate_size,
            "shared_expert_intermediate_size": shared_expert_intermediate_size,
            "router_score_function": router_score_function,
            "norm_topk_prob": norm_topk_prob,
            "rms_norm_eps": rms_norm_eps,
            "hidden_act": hidden_act,
            "attention_bias": attention_bias,
        }
        for name, value in fields.items():
            setattr(self, name, value)

        # transformers builds one config without arguments, to diff against.
        if not self._is_blank():
            self._check_required()
            if self.no_rope_layer_indices is None:
                self.no_rope_layer_indices = self._full_attention_layers()
            self._check_values()
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        if tie_word_embeddings:
            raise FlintCheckpointError(
                "Flint config: tie_word_embeddings is true, but Flint's lm_head "
                "has weights of its own; set it to false"
            )

    def _is_blank(self) -> bool:
        return all(getattr(self, name) is None for name in _POSITIVE_INTS)

    def _full_attention_layers(self) -> list[int]:
        return [i for i, t in enumerate(self.layer_types) if t == FULL_ATTENTION]

    def _check_required(self) -> None:
        required = (
            *_POSITIVE_INTS,
            "layer_types",
            "rope_parameters",
            "mlp_only_layers",
            "rms_norm_eps",
        )
        missing = [name for name in required if getattr(self, name) is None]
        if missing:
            raise FlintCheckpointError(
                f"Flint config: config.json lacks {', '.join(missing)}; take the "
                "file from the checkpoint's own repository"
            )

    def _check_values(self) -> None:
        for name in _POSITIVE_INTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                _fail(f"{name} is {value!r}, but has to be a positive integer")
        if not isinstance(self.rms_norm_eps, float) or not 0 < self.rms_norm_eps < 1:
            _fail(f"rms_norm_eps is {self.rms_norm_eps!r}, but has to be a small float")
        if self.num_attention_heads % self.num_key_value_heads:
            _fail(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple "
                f"of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            _fail(f"head_dim is {self.head_dim}, but RoPE needs an even number")
        if self.num_experts_per_tok > self.num_experts:
            _fail(
                f"num_experts_per_tok ({self.num_experts_per_tok}) is more than "
                f"num_experts ({self.num_experts})"
            )
        for name, wanted in (
            ("router_score_function", "sigmoid"),
            ("hidden_act", "silu"),
            ("attention_bias", False),
        ):
            if (value := getattr(self, name)) != wanted:
                _fail(f"{name} is {value!r}, but only {wanted!r} is implemented")
        if not isinstance(self.norm_topk_prob, bool):
            _fail(f"norm_topk_prob is {self.norm_topk_prob!r}, but has to be a bool")
        self._check_layers()
        self._check_rope()

    def _check_layers(self) -> None:
        kinds = self.layer_types
        if not isinstance(kinds, list) or len(kinds) != self.num_hidden_layers:
            _fail(
                f"layer_types has to list {self.num_hidden_layers} layers "
                "(num_hidden_layers)"
            )
        unknown = sorted({str(k) for k in kinds} - {FULL_ATTENTION, SLIDING_ATTENTION})
        if unknown:
            _fail(f"layer_types names {', '.join(unknown)}, which Flint does not have")
        for name in ("mlp_only_layers", "no_rope_layer_indices"):
            indices = getattr(self, name)
            if not isinstance(indices, list) or not all(
                isinstance(i, int) and 0 <= i < self.num_hidden_layers for i in indices
            ):
                _fail(
                    f"{name} is {indices!r}, but has to list layer indices below "
                    f"{self.num_hidden_layers}"
                )
        full = self._full_attention_layers()
        if sorted(self.no_rope_layer_indices) != full:
            _fail(
                f"no_rope_layer_indices {sorted(self.no_rope_layer_indices)} "
                f"contradicts layer_types, whose full-attention layers are {full}"
            )

    def _check_rope(self) -> None:
        rope = self.rope_parameters
        theta = rope.get("rope_theta") if isinstance(rope, dict) else None
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            _fail(
                f"rope_parameters is {rope!r}, but has to hold a positive rope_theta "
                "for the sliding layers"
            )
        if (kind := rope.get("rope_type", "default")) != "default":
            _fail(f"rope_type is {kind!r}, but only 'default' is implemented")


def _fail(problem: str) -> None:
    raise FlintCheckpointError(f"Flint config: {problem}")
