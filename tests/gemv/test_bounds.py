# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The bounds that the GEMV is judged by: right answers pass, wrong ones do not."""

import pytest
import torch

from support.gemv import Bounds, QuantizedLinear, output_bounds

SILU_MINIMUM = -1.2784645


def emulated(
    x: torch.Tensor, values: torch.Tensor, scale: float, silu_mul: bool
) -> torch.Tensor:
    """FP32 sums in PyTorch's order, and what the kernel makes of them."""
    y = (x.float() @ values.float().T) * scale
    if not silu_mul:
        return y.bfloat16()
    gate, up = y.bfloat16().float().chunk(2, dim=1)
    return (gate / (1 + torch.exp(-gate)) * up).bfloat16()


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_fp32_sums_pass(seed: int, silu_mul: bool):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 2048, generator=generator).bfloat16()
    weight = QuantizedLinear.random(512, 2048, generator)
    bounds = output_bounds(x, weight.values, 0.0123, silu_mul)
    bounds.check(emulated(x, weight.values, 0.0123, silu_mul))


def test_silu_minimum_inside_the_slack():
    """Both ends of a gate's bounds give a larger silu than the middle does."""
    gate = torch.tensor([[SILU_MINIMUM]], dtype=torch.float64)
    bounds = Bounds(
        torch.cat([gate - 0.16, gate * 0 + 64], dim=1),
        torch.cat([gate + 0.16, gate * 0 + 64], dim=1),
    )
    from support.gemv import silu_mul_bounds

    middle = (gate * torch.sigmoid(gate) * 64).bfloat16()
    silu_mul_bounds(bounds).rounded().check(middle)


@pytest.mark.parametrize("silu_mul", [False, True])
def test_one_wrong_step_fails(silu_mul: bool):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (4, 128), generator=generator).bfloat16()
    values = torch.randint(-3, 4, (64, 128), generator=generator).double()
    scale = 2.0**-5
    bounds = output_bounds(x, values, scale, silu_mul, exact=True)
    right = emulated(x, values, scale, silu_mul)
    bounds.check(right)
    wrong = right.clone()
    place = right.abs().argmax()
    wrong.view(torch.int16).view(-1)[place] += 1
    with pytest.raises(AssertionError, match="1 of "):
        bounds.check(wrong)
    with pytest.raises(AssertionError):
        bounds.check(torch.full_like(right, float("nan")))


def test_silu_rounded_twice_fails():
    """Silu rounded before the product is vLLM's kernel, not the contract."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (16, 128), generator=generator).bfloat16()
    values = torch.randint(-3, 4, (256, 128), generator=generator).double()
    scale = 2.0**-5
    gate, up = emulated(x, values, scale, False).float().chunk(2, dim=1)
    twice = ((gate * torch.sigmoid(gate)).bfloat16().float() * up).bfloat16()
    with pytest.raises(AssertionError):
        output_bounds(x, values, scale, True, exact=True).check(twice)
