# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A config folder of Flint's size, in BF16 or in NVFP4, without weights."""

import json
import math
from pathlib import Path
from typing import Any

from tinymodel.layout import tensor_defs
from tinymodel.specs import FULL, SLIDING, TinySpec, config_json

_NUM_LAYERS = 49
_FULL_LAYERS = (0, 1, *range(5, 48, 4), 48)

# Flint itself, in the terms of the tiny models.
FLINT = TinySpec(
    name="flint",
    hidden_size=2048,
    layer_types=tuple(
        FULL if i in _FULL_LAYERS else SLIDING for i in range(_NUM_LAYERS)
    ),
    mlp_only_layers=(0, 1),
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    sliding_window=513,
    intermediate_size=6144,
    num_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=1024,
    max_position_embeddings=262144,
    sink_range=(0.0, 4.0),
    vocab_size=150144,
)


def nvfp4_modules(spec: TinySpec) -> set[str]:
    """Checkpoint names of the modules that an NVFP4 checkpoint quantizes, head too."""
    from vllm.models.flint.gguf_checkpoint import module_of

    modules = (module_of(d.name) for d in tensor_defs(spec) if d.is_matrix)
    return {module for module in modules if module is not None}


def write_config(folder: Path, spec: TinySpec, nvfp4: bool) -> dict[str, Any]:
    """Writes the model's config.json, quantized as the GGUF route does; returns it."""
    config = config_json(spec) | {"eos_token_id": 2, "pad_token_id": 0}
    if nvfp4:
        from vllm.models.flint.gguf_config import quantization_config

        config["quantization_config"] = quantization_config(nvfp4_modules(spec))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config


def weight_bytes(spec: TinySpec, nvfp4: bool) -> int:
    """Bytes of the model's weights, about."""
    total = 0.0
    for tensor in tensor_defs(spec):
        of_matrix = 9 / 16 if nvfp4 and tensor.is_matrix else 2
        total += math.prod(tensor.shape) * of_matrix
    return int(total)


def kv_cache_bytes(spec: TinySpec, batch: int, context: int) -> int:
    """Bytes of BF16 keys and values that so many requests hold, about."""
    a_token = spec.num_key_value_heads * 2 * spec.head_dim * 2
    window = min(context, spec.sliding_window)
    tokens = sum(context if kind == FULL else window for kind in spec.layer_types)
    return batch * tokens * a_token
