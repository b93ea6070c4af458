# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Models of Flint's size: its config, and a synthetic NVFP4 GGUF of 23 GB."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from tinymodel.gguf_file import ARCHITECTURE, GgufTensor, add_metadata, write_tensors
from tinymodel.layout import TensorDef, tensor_defs
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


def write_config(folder: Path) -> dict[str, Any]:
    """Writes Flint's config.json and returns it."""
    config = config_json(FLINT) | {"eos_token_id": 2, "pad_token_id": 0}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config


def write_synthetic_gguf(path: Path) -> None:
    """Writes random NVFP4 weights of Flint's shapes.

    Matrices of one shape share their random bytes, so this takes no longer than the
    disk does. Their values have the size of a real model's; their text has no sense.
    """
    writer = GGUFWriter(path, ARCHITECTURE)
    try:
        add_metadata(writer, FLINT, "nvfp4")
        write_tensors(writer, _tensors())
    finally:
        writer.close()


def _tensors() -> Iterator[GgufTensor]:
    rng = np.random.default_rng(0)
    blocks: dict[tuple[int, ...], np.ndarray] = {}
    stacked: dict[str, list[TensorDef]] = {}
    for tensor in tensor_defs(FLINT):
        stacked.setdefault(tensor.gguf, []).append(tensor)
    for name, parts in stacked.items():
        first = parts[0]
        if not first.is_matrix:
            data = rng.uniform(0.5, 1.0, first.shape).astype(np.float32)
            if first.role in ("embed", "router"):
                data -= 0.75
            yield GgufTensor(name, data, GGMLQuantizationType.F32)
            continue
        shape = (len(parts), *first.shape)[first.expert is None :]
        if shape not in blocks:
            blocks[shape] = _random_blocks(rng, shape)
        yield GgufTensor(name, blocks[shape], GGMLQuantizationType.NVFP4)
        # Codes and scales multiply to about 3 * 2.
        scale = np.float32(1.0 / 6.0 / np.sqrt(first.shape[1]))
        count = len(parts) if first.expert is not None else 1
        yield GgufTensor(
            f"{name.removesuffix('.weight')}.scale",
            np.full(count, scale, np.float32),
            GGMLQuantizationType.F32,
        )


def _random_blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random NVFP4 blocks, uint8 [..., K / 64 * 36], with scales from 1 to 4."""
    count = int(np.prod(shape)) // 64
    raw = np.frombuffer(rng.bytes(count * 36), np.uint8).reshape(count, 36).copy()
    raw[:, :4] = 0x38 + (raw[:, :4] & 0xF)
    return raw.reshape(*shape[:-1], shape[-1] // 64 * 36)
