# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Launches what Flint's linears may launch, for a tool that watches the launches."""

import torch
from tqdm import tqdm
from vllm.models.flint.ops import dense, fragments, nvfp4_gemv

from gemvbench.shapes import Layer
from gemvbench.weights import Weight

# Fewest, odd and most tokens of every count of token tiles.
TOKENS = (1, 8, 13, 16, 29, 32, 61)


def exercise(layers: list[Layer]) -> None:
    """Runs every kind of weight of each layer at each count of tokens, once."""
    for layer in tqdm(layers, desc="exercise"):
        weight = Weight.random(layer.n, layer.k)
        rows = weight.codes, weight.swizzled()
        own = fragments.to_fragments(weight.codes, weight.scales)
        plain = weight.dequantized()
        nvfp4_gemv.dequantize_rows(*rows)
        scale = weight.global_scale
        rest = scale, scale.item(), layer.silu_mul, layer.fp32_out, True
        for m in TOKENS:
            x = torch.randn(m, layer.k, device="cuda").bfloat16()
            dense.nvfp4_linear(x, *rows, *rest, m, None)
            fragments.fragment_linear(x, *own, *rest, m)
            dense.bf16_linear(x, plain, layer.silu_mul, True, m)
    torch.cuda.synchronize()
