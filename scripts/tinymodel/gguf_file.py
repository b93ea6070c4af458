# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Writes a tiny checkpoint as a GGUF file, with the gguf package's own writer."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
)
from numpy.typing import NDArray

from tinymodel.checkpoint import OutputExistsError
from tinymodel.layout import TensorDef, tensor_defs
from tinymodel.nvfp4 import Nvfp4Matrix
from tinymodel.specs import SLIDING, TinySpec
from tinymodel.weights import bf16_bits, matrix, tensor

ARCHITECTURE = "flint"

F32 = GGMLQuantizationType.F32
BF16 = GGMLQuantizationType.BF16
NVFP4 = GGMLQuantizationType.NVFP4

_F32_ROLES = frozenset(("norm", "head_norm", "sinks", "router"))


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: Its name in the file.
        data: Its values for F32 and F16, its raw bytes (uint8, the last axis
            being bytes of a row) for every other type.
        kind: Its GGML type.
    """

    name: str
    data: NDArray[Any]
    kind: GGMLQuantizationType


def _bf16_bytes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return bf16_bits(values).view(np.uint8)


def _stacks(spec: TinySpec) -> Iterator[tuple[str, list[TensorDef]]]:
    """Yields each GGUF name with the tensors it stacks: one, or one an expert."""
    stacks: dict[str, list[TensorDef]] = {}
    for d in tensor_defs(spec):
        stacks.setdefault(d.gguf, []).append(d)
    yield from stacks.items()


def gguf_tensors(spec: TinySpec, seed: int, family: str) -> Iterator[GgufTensor]:
    """Yields the tensors of the GGUF file, one at a time.

    Matrices are NVFP4 with a `.scale` companion, or BF16 in family "bf16"; the
    embedding is BF16; norms, sinks and the router are F32.
    """
    for name, defs in _stacks(spec):
        stacked = defs[0].expert is not None
        if not defs[0].is_matrix:
            data = tensor(spec, seed, family, defs[0])
            if defs[0].role in _F32_ROLES:
                yield GgufTensor(name, data, F32)
            else:
                yield GgufTensor(name, _bf16_bytes(data), BF16)
            continue
        matrices = [matrix(spec, seed, family, d) for d in defs]
        quantized = [m for m in matrices if isinstance(m, Nvfp4Matrix)]
        kind = NVFP4 if quantized else BF16
        rows = [
            m.ggml_bytes() if isinstance(m, Nvfp4Matrix) else _bf16_bytes(m)
            for m in matrices
        ]
        yield GgufTensor(name, np.stack(rows) if stacked else rows[0], kind)
        if quantized:
            scales = np.array([m.tensor_scale for m in quantized], np.float32)
            yield GgufTensor(f"{name.removesuffix('.weight')}.scale", scales, F32)


def add_metadata(writer: GGUFWriter, spec: TinySpec, family: str) -> None:
    """Writes the model's hyperparameters as `flint.*` metadata."""
    quantized = family != "bf16"
    writer.add_name(f"flint-{spec.name}")
    writer.add_file_type(
        LlamaFileType.MOSTLY_NVFP4 if quantized else LlamaFileType.MOSTLY_BF16
    )
    writer.add_quantization_version(2)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_leading_dense_block_count(len(spec.mlp_only_layers))
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_sliding_window(spec.sliding_window)
    writer.add_sliding_window_pattern([kind == SLIDING for kind in spec.layer_types])
    writer.add_expert_count(spec.num_experts)
    writer.add_expert_used_count(spec.num_experts_per_tok)
    writer.add_expert_feed_forward_length(spec.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(spec.shared_expert_intermediate_size)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)


def write_tensors(writer: GGUFWriter, tensors: Iterable[GgufTensor]) -> None:
    """Adds `tensors` to `writer` and writes the whole file."""
    for t in tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()


def write_gguf(
    path: Path,
    spec: TinySpec,
    seed: int = 0,
    family: str = "nvfp4",
    overwrite: bool = False,
) -> None:
    """Writes the GGUF file of a tiny model.

    The file appears under its name when it is whole, or not at all.

    Raises:
        OutputExistsError: If `path` exists and `overwrite` is false.
    """
    if path.exists() and not overwrite:
        raise OutputExistsError(f"{path} exists: choose another path or overwrite it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as stage:
        fresh = Path(stage) / path.name
        writer = GGUFWriter(fresh, ARCHITECTURE)
        try:
            add_metadata(writer, spec, family)
            write_tensors(writer, gguf_tensors(spec, seed, family))
        finally:
            writer.close()
        os.replace(fresh, path)
