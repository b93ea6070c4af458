# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The engines that are compared, and the points at which they are timed."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Engine:
    """How one engine differs from vLLM's defaults.

    Attributes:
        title: Its name in tables.
        options: Arguments of `LLM`.
        env: Environment variables of its processes.
    """

    title: str
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


_OFF = {"additional_config": {"flint_kernels": False}}
# Marlin and Humming run on vLLM's stock layers; torch.compile is on in every engine.
ENGINES = {
    "flint": Engine("Flint's kernels", {"additional_config": {"flint_kernels": True}}),
    "off": Engine("kernels off", _OFF),
    "stock-marlin": Engine(
        "stock, Marlin", _OFF | {"moe_backend": "marlin", "linear_backend": "marlin"}
    ),
    "stock-humming": Engine(
        "stock, Humming", _OFF | {"moe_backend": "humming", "linear_backend": "humming"}
    ),
}


@dataclass(frozen=True)
class Points:
    """What is timed.

    Attributes:
        decode: Batch and context of each decode point.
        prompts: Prompt lengths whose first token is timed.
        graph: The decode point whose CUDA graphs are timed on the GPU, too.
    """

    decode: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    graph: tuple[int, int]

    @property
    def max_batch(self) -> int:
        return max(batch for batch, _ in self.decode)

    @property
    def max_tokens(self) -> int:
        """The longest prompt."""
        return max(*(context for _, context in self.decode), *self.prompts)


_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_PROMPTS = (128, 1024, 8192)
_LONG = (32768, 100000)

POINTS = {
    # Batch 1 at every context, and every batch at one.
    "quick": Points(
        (*((b, 1024) for b in _BATCHES), *((1, c) for c in (128, *_LONG))),
        _PROMPTS,
        (1, 1024),
    ),
    # The short contexts first: what a cut run keeps.
    "full": Points(
        tuple((b, c) for c in (1024, 128, *_LONG) for b in _BATCHES),
        _PROMPTS,
        (1, 1024),
    ),
}
