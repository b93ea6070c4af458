# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Launches what Flint's linears may launch, for a tool that watches the launches."""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from vllm.models.flint.ops import dense, fragments, nvfp4_gemv
from vllm.models.flint.ops.gemv_weight import GemvWeight

from gemvbench.shapes import Layer
from gemvbench.weights import Weight

# Fewest, odd and most tokens of every count of token tiles.
TOKENS = (1, 8, 13, 16, 29, 32, 61)


def _run_layer(layer: Layer, device: str, counts: list[int]) -> None:
    """Runs every kind of weight of a layer at each count of tokens, once."""
    weight = Weight.random(layer.n, layer.k, device)
    rows = weight.codes, weight.swizzled()
    own = fragments.to_fragments(weight.codes, weight.scales)
    plain = weight.dequantized()
    nvfp4_gemv.dequantize_rows(*rows)
    scale = weight.global_scale
    rest = scale, layer.silu_mul, layer.fp32_out, True
    for m in counts:
        x = torch.randn(m, layer.k, device=device).bfloat16()
        dense.nvfp4_linear(x, *rows, *rest, m, None)
        fragments.fragment_linear(x, *own, *rest, m)
        dense.bf16_linear(x, plain, layer.silu_mul, True, m)


def parts_of(layers: list[Layer]) -> dict[str, "Part"]:
    """A part for each layer, by a name such as 12288x2048-silu."""
    return {
        layer.name.replace(" x ", "x").replace(" ", "-"): Part(
            functools.partial(_run_layer, layer), TOKENS
        )
        for layer in layers
    }


def as_layers_hold(weight: Weight) -> list[GemvWeight]:
    """A weight in each layout that a dense layer may have, and dequantized."""
    scale = weight.global_scale
    found = [
        GemvWeight.bf16(weight.dequantized()),
        GemvWeight.row_major(weight.codes, weight.swizzled(), scale),
    ]
    if nvfp4_gemv.decode_form() == "mul":
        own = fragments.to_fragments(weight.codes, weight.scales)
        found.append(GemvWeight.fragments(*own, scale))
    return found


@dataclass(frozen=True)
class Part:
    """Launches that can be watched apart from others.

    Attributes:
        run: takes the device and counts of tokens, and launches.
        tokens: what it gets where the user names none.
        most: tokens that it takes.
    """

    run: Callable[[str, list[int]], None]
    tokens: tuple[int, ...]
    most: int = 1 << 14


def run_parts(
    parts: dict[str, Part],
    names: Collection[str],
    tokens: list[int] | None,
    device: str = "cuda",
) -> None:
    """Runs some of `parts`, at counts of tokens of their own or at these.

    Raises:
        ValueError: A name is none of a part.
    """
    unknown = [name for name in names if name not in parts]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: parts are {', '.join(parts)}")
    for name in names:
        part = parts[name]
        counts = [m for m in tokens or part.tokens if m <= part.most]
        print(f"{name} at {counts} tokens", flush=True)
        part.run(device, counts)
        if device == "cuda":
            torch.cuda.synchronize()
