# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Choosing experts: logits that are hard to tell apart, and what may be chosen.

From the rounded logits on there is one right choice. The weights are FP32 results of a
few operations, so what they round to has bounds; the logits have those of any product.
"""

import torch

from contract import ops
from contract.numerics import Numerics
from support.gemv import Bounds, linear_bounds
from support.norm_rope import around, norm_bounds

KINDS = ["random", "ties", "equal", "zeros", "negative", "large", "infinite"]
# What a GPU may make of the exponential of a large number, instead of a tiny one.
_FLUSHED = 2.0**-126


def draw_logits(kind: str, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """BF16 logits of one of `KINDS`, on the generator's device."""
    device = generator.device
    values = torch.randn(shape, generator=generator, device=device)
    if kind == "ties":
        values = (values * 2).round()
    elif kind == "equal":
        values = torch.full_like(values, 1.5)
    elif kind == "zeros":
        # Both zeros are equal, and so are all subnormals of one value.
        values = torch.where(values < 0, -0.0, 0.0)
        values[..., ::5] = 2.0**-130
    elif kind == "negative":
        # Here the sum of six sigmoids is as small as what is added to it.
        values = -values.abs() * 20 - 40
    elif kind == "large":
        values = values * 300
    elif kind == "infinite":
        values[..., ::3] = float("inf")
        values[..., 1::3] = float("-inf")
    return values.bfloat16()


def check_choice(
    logits: torch.Tensor, top_k: int, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    """Asserts the experts of BF16 [M, E] logits, and their weights."""
    # Zeros of both signs are equal, whatever a sort makes of them.
    values = logits.double() + 0.0
    exact, expected = ops.select_experts(values, top_k, Numerics.EXACT)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(ids.long(), expected)
    assert torch.equal(weights, weights.bfloat16().float())
    chosen = values.gather(1, expected)
    # The argument of an exponential is rounded; infinite ones are not.
    size = chosen.abs().clamp(max=128).amax(1, keepdim=True)
    total = torch.sigmoid(chosen).sum(1, keepdim=True) + 1e-20
    slack = exact * (size + 16) * 2.0**-22 + 4 * _FLUSHED / total
    around(exact, slack).check(weights)


def check_route(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    top_k: int,
    logits: torch.Tensor,
    found: tuple[torch.Tensor, ...],
) -> None:
    """Asserts all that a routing launch wrote, each step from the one before.

    Args:
        logits: What it rounded, [M, E].
        found: Normed rows, new residual, ids and weights.
    """
    normed, new_residual, ids, weights = found
    old = torch.zeros_like(x) if residual is None else residual
    norm_bounds(x, norm_weight, eps, old).check(normed)
    _, total = ops.rms_norm(
        x.double(), norm_weight, eps, Numerics.CONTRACT, old.double()
    )
    assert torch.equal(new_residual.double(), total)
    bounds: Bounds = linear_bounds(normed, router.double(), 1.0)
    bounds.rounded().check(logits)
    check_choice(logits, top_k, ids, weights)
