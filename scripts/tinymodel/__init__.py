# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tiny Flint checkpoints for tests and the quick start.

A tiny checkpoint has every structural feature of Flint (full and sliding layers,
attention sinks, dense and sparse blocks, a shared expert) at a size that a CPU
serves in seconds. Its weights follow from a seed alone, on every platform.
"""

from tinymodel.checkpoint import write_safetensors
from tinymodel.gguf_file import write_gguf
from tinymodel.specs import SPECS, TinySpec
from tinymodel.weights import FAMILIES, matrix, tensor

__all__ = [
    "FAMILIES",
    "SPECS",
    "TinySpec",
    "matrix",
    "tensor",
    "write_gguf",
    "write_safetensors",
]
