# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tensors that a Flint checkpoint holds, and checks against that list."""

from collections.abc import Generator, Iterable

import torch

from .configs import FlintConfig
from .errors import FlintCheckpointError

_NAMES_SHOWN = 5


def expected_tensors(config: FlintConfig) -> dict[str, tuple[int, ...]]:
    """List the checkpoint's tensors.

    Args:
        config: The model's configuration.

    Returns:
        Shape of every tensor by its name in Flint's safetensors; the routed experts
        are one tensor an expert and projection.

    """
    hidden = config.hidden_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }

    def add_mlp(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, width)

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q_size, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_size, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_size, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q_size),
            f"{layer}.self_attn.q_norm.weight": (config.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (config.head_dim,),
            f"{layer}.self_attn.softmax_offset": (config.num_attention_heads,),
        }
        if i in config.mlp_only_layers:
            add_mlp(f"{layer}.mlp", config.intermediate_size)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (config.num_experts, hidden)
        add_mlp(f"{layer}.mlp.shared_expert", config.shared_expert_intermediate_size)
        for expert in range(config.num_experts):
            add_mlp(f"{layer}.mlp.experts.{expert}", config.moe_intermediate_size)
    return shapes


def join_names(names: Iterable[str]) -> str:
    """Name a few tensors and count the rest, for an error message."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMES_SHOWN])
    rest = len(ordered) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


class CheckpointTracker:
    """Watches the tensors that a load passes on to the model.

    vLLM's own loader does not notice an absent weight of a linear layer, or an absent
    scale of NVFP4 codes, which would then be whatever its memory held.

    Args:
        config: The model's configuration.

    """

    def __init__(self, config: FlintConfig) -> None:
        self._config = config
        # Names of the first load; none before it, nor with dummy weights.
        self._needed: set[str] = set()
        self._seen: set[str] = set()
        self._finished = False

    def check(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Pass tensors through.

        Args:
            weights: Pairs of a checkpoint name and its tensor.

        Yields:
            The same pairs.

        Raises:
            FlintCheckpointError: A tensor that Flint has comes in another shape.

        """
        expected = expected_tensors(self._config)
        if not self._finished:
            self._needed |= expected.keys()
        for name, tensor in weights:
            if name in expected:
                _check_shape(name, tensor, expected[name])
            if not self._finished:
                self._seen.add(name)
                if name in expected and tensor.dtype == torch.uint8:
                    self._needed |= {f"{name}_scale", f"{name}_scale_2"}
            yield name, tensor

    def finish(self, skip_experts: bool = False) -> None:
        """End the first load.

        Args:
            skip_experts: Whether experts of other ranks were left out on purpose.

        Raises:
            FlintCheckpointError: Tensors were loaded, but not all that the model needs.

        """
        missing = [
            name
            for name in self._needed - self._seen
            if not (skip_experts and ".mlp.experts." in name)
        ]
        self._finished = True
        self._needed, self._seen = set(), set()
        if missing:
            raise FlintCheckpointError(
                f"Flint checkpoint: tensors are missing: {join_names(missing)}; "
                "download it again"
            )


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    # Packed NVFP4 codes hold two values a byte.
    width = 2 if tensor.dtype == torch.uint8 else 1
    shape = tuple(tensor.shape)
    shape = (*shape[:-1], *(size * width for size in shape[-1:]))
    if shape != expected:
        raise FlintCheckpointError(
            f"Flint checkpoint: {name} has shape {list(shape)}, but the config asks "
            f"for {list(expected)}; do config.json and weights belong together?"
        )
