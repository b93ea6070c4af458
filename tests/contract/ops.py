# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The blocks of Flint, one function each, in float64.

Inputs are float64 (BF16 or float32 values widened), outputs are float64, rounded
to BF16 where `Numerics.CONTRACT` says so.
"""

from typing import TypeAlias

import torch

from contract.numerics import Numerics
from contract.nvfp4 import Nvfp4Weight, dequantize

Weight: TypeAlias = torch.Tensor | Nvfp4Weight


def accumulate(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Returns x @ weight.T with the global scale applied to the sum, unrounded.

    Args:
        x: [..., K].
        weight: [N, K], plain or quantized.
    """
    if isinstance(weight, Nvfp4Weight):
        values = dequantize(weight.weight, weight.weight_scale)
        return x @ values.T * weight.global_scale
    return x @ weight.double().T


def linear(x: torch.Tensor, weight: Weight, numerics: Numerics) -> torch.Tensor:
    """Returns x @ weight.T with one rounding. Shapes as in `accumulate`."""
    return numerics.bf16(accumulate(x, weight))


def silu(x: torch.Tensor) -> torch.Tensor:
    """Returns x * sigmoid(x), exactly."""
    return x * torch.sigmoid(x)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    numerics: Numerics,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms the last axis.

    Returns:
        The normed rows, rounded once, and the new residual: x + residual rounded.
        The norm is taken of that sum before it is rounded.
    """
    total = x if residual is None else x + residual
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return numerics.bf16(total * scale * weight.double()), numerics.bf16(total)


def rope_table(positions: int, dim: int, theta: float) -> torch.Tensor:
    """Returns the FP32 table [positions, dim]: cosines, then sines.

    The table is an input of the contract, not a result: angles are FP32 products,
    as every engine makes them, and so are not exact at high positions.
    """
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def rotate(x: torch.Tensor, table_rows: torch.Tensor) -> torch.Tensor:
    """Applies NeoX rotary embedding to all channels, unrounded.

    Args:
        x: [T, heads, dim].
        table_rows: [T, dim], the rows of `rope_table` for the T positions.
    """
    cos, sin = table_rows.double().unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def qk_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    numerics: Numerics,
    table_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms each head of [T, heads, dim], then rotates it, with one rounding.

    Args:
        weight: [dim].
        table_rows: [T, dim] as in `rotate`; None on layers without positions.
    """
    normed, _ = rms_norm(x, weight, eps, Numerics.EXACT)
    return numerics.bf16(normed if table_rows is None else rotate(normed, table_rows))


def route(
    x: torch.Tensor,
    weight: Weight,
    top_k: int,
    numerics: Numerics,
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks the experts of each token.

    Args:
        x: [T, hidden].
        weight: [experts, hidden].

    Returns:
        Weights [T, top_k], rounded, and expert ids, int64 [T, top_k], best first.
        Of equal (rounded) logits the lower expert index wins.
    """
    return select_experts(linear(x, weight, numerics), top_k, numerics, renormalize)


def select_experts(
    logits: torch.Tensor, top_k: int, numerics: Numerics, renormalize: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the part of `route` after the rounded logits, [T, experts]."""
    order = logits.sort(dim=-1, descending=True, stable=True)
    score = torch.sigmoid(order.values[:, :top_k])
    if renormalize:
        score = score / (score.sum(-1, keepdim=True) + 1e-20)
    return numerics.bf16(score), order.indices[:, :top_k]


def routed_expert(
    x: torch.Tensor, gate: Weight, up: Weight, down: Weight, numerics: Numerics
) -> torch.Tensor:
    """Returns one routed expert's output [T, hidden], not yet weighted.

    Gate and up stay unrounded until their product is.
    """
    act = numerics.bf16(silu(accumulate(x, gate)) * accumulate(x, up))
    return linear(act, down, numerics)


def dense_mlp(
    x: torch.Tensor, gate: Weight, up: Weight, down: Weight, numerics: Numerics
) -> torch.Tensor:
    """Returns a dense block's, or the shared expert's, output [T, hidden].

    Gate and up are rounded first, as the output of a linear layer is.
    """
    gated = silu(linear(x, gate, numerics)) * linear(x, up, numerics)
    return linear(numerics.bf16(gated), down, numerics)


def combine(
    weights: torch.Tensor,
    routed: torch.Tensor,
    shared: torch.Tensor,
    numerics: Numerics,
) -> torch.Tensor:
    """Adds up a sparse block.

    Args:
        weights: [T, top_k] from `route`.
        routed: [T, top_k, hidden], the chosen experts' outputs.
        shared: [T, hidden], the shared expert's output.
    """
    total = numerics.bf16((weights.unsqueeze(-1) * routed).sum(1))
    return numerics.bf16(total + shared)


def head(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Returns the logits of normed rows [T, hidden]; they are never rounded."""
    return accumulate(x, weight)
