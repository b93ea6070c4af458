# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What a linear layer may answer: bounds in float64, from the contract alone.

A kernel adds in FP32, in an order of its own, so its sum may differ from the exact one
by a bounded amount. What it rounds to BF16 may then be any value between the roundings
of the two ends; nothing else is accepted.
"""

from dataclasses import dataclass

import torch

from contract.numerics import round_bf16
from contract.nvfp4 import (
    E2M1,
    E4M3,
    GROUP,
    fragment_scales,
    fragment_weight,
    swizzle_scales,
    unpack_codes,
    unswizzle_scales,
)

# Where silu is smallest, and the BF16 neighbours of that.
_SILU_MINIMUM = -1.2784645427610738
_SILU_MINIMUM_BF16 = (-1.28125, -1.2734375)
# Below this sigmoid is no normal FP32 number and may be 0.
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class QuantizedLinear:
    """An NVFP4 weight: contract.nvfp4's layout, swizzled scales, exact values.

    Attributes:
        codes: uint8 [N, K / 2].
        scales: uint8, swizzled and flat.
        values: float64 [N, K], without the global scale.
        global_scale: FP32 [1].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor
    global_scale: torch.Tensor

    @classmethod
    def of(
        cls, codes: torch.Tensor, scales: torch.Tensor, global_scale: float = 1.0
    ) -> "QuantizedLinear":
        """From ModelOpt codes [N, K / 2] and scale bytes [N, K / 16]."""
        device = codes.device
        values = E2M1.to(device)[unpack_codes(codes).long()]
        factors = E4M3.to(device)[scales.long()]
        return cls(
            codes,
            swizzle_scales(scales),
            values * factors.repeat_interleave(GROUP, dim=-1),
            torch.full((1,), global_scale, device=device),
        )

    @classmethod
    def random(
        cls, n: int, k: int, generator: torch.Generator, global_scale: float = 0.0123
    ) -> "QuantizedLinear":
        """Any codes, and scales of the size that trained weights have."""

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(
                low,
                high,
                shape,
                dtype=torch.uint8,
                device=generator.device,
                generator=generator,
            )

        return cls.of(
            draw(0, 256, n, k // 2), draw(0x28, 0x60, n, k // 16), global_scale
        )

    def fragments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales in the order of quack's GEMM; N is a multiple of 64."""
        n, half_k = self.codes.shape
        scales = unswizzle_scales(self.scales, n, half_k // 8)
        return fragment_weight(self.codes), fragment_scales(scales)


@dataclass(frozen=True)
class Bounds:
    """Every answer between `low` and `high`, float64 of one shape, is right."""

    low: torch.Tensor
    high: torch.Tensor

    def rounded(self) -> "Bounds":
        """What BF16 rounding makes of the values in between."""
        return Bounds(round_bf16(self.low), round_bf16(self.high))

    def check(self, actual: torch.Tensor) -> None:
        """Asserts that all of `actual` is right."""
        actual = actual.double()
        assert actual.shape == self.low.shape
        wrong = ~((self.low <= actual) & (actual <= self.high))
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{int(wrong.sum())} of {wrong.numel()} wrong, the first at {place}: "
                f"{actual[place].item()!r} is not in [{self.low[place].item()!r}, "
                f"{self.high[place].item()!r}]"
            )


def linear_bounds(
    x: torch.Tensor, values: torch.Tensor, scale: float, exact: bool = False
) -> Bounds:
    """Bounds of the scaled FP32 sums of x @ values.T.

    Args:
        x: [M, K], BF16 values.
        values: float64 [N, K], exact BF16 weights.
        scale: Multiplies the sum, in FP32.
        exact: Whether all partial sums fit FP32, in any order.
    """
    x = x.double()
    y = (x @ values.T) * scale
    if exact:
        return Bounds(y, y)
    # Any order of K additions; the product with the scale is one rounding more.
    slack = (x.shape[1] + 1) * 2.0**-24 * (x.abs() @ values.abs().T) * abs(scale)
    return Bounds(y - slack, y + slack)


def silu_mul_bounds(gate_up: Bounds, fp32: bool = False) -> Bounds:
    """Bounds of silu(gate) * up, unrounded, for [gate | up] not yet rounded.

    Args:
        gate_up: What they may be.
        fp32: Whether they stay FP32, instead of being rounded to BF16 first.
    """
    both = gate_up if fp32 else gate_up.rounded()
    gate_low, up_low = both.low.chunk(2, dim=1)
    gate_high, up_high = both.high.chunk(2, dim=1)
    ends = [_silu(gate_low), _silu(gate_high)]
    for point in (_SILU_MINIMUM,) if fp32 else _SILU_MINIMUM_BF16:
        inside = (gate_low <= point) & (point <= gate_high)
        ends.append(
            torch.where(inside, _silu(torch.full_like(ends[0], point)), ends[0])
        )
    silu_low, silu_high = torch.stack(ends).amin(0), torch.stack(ends).amax(0)
    corners = torch.stack(
        [a * b for a in (silu_low, silu_high) for b in (up_low, up_high)]
    )
    low, high = corners.amin(0), corners.amax(0)
    # exp(-gate) in FP32: its argument is rounded, then the function, sum, quotient and
    # products are.
    gate = torch.maximum(gate_low.abs(), gate_high.abs())
    up = torch.maximum(up_low.abs(), up_high.abs())
    relative, least = (gate + 8) * 2.0**-23, gate * up * _SMALLEST_NORMAL * 4
    return Bounds(
        low - low.abs() * relative - least, high + high.abs() * relative + least
    )


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def output_bounds(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: float = 1.0,
    silu_mul: bool = False,
    fp32_out: bool = False,
    exact: bool = False,
) -> Bounds:
    """Bounds of a linear layer's output; arguments as in `linear_bounds`."""
    found = linear_bounds(x, values, scale, exact)
    if silu_mul:
        found = silu_mul_bounds(found)
    if not fp32_out:
        return found.rounded()
    # One FP32 rounding.
    return Bounds(
        found.low - found.low.abs() * 2.0**-23, found.high + found.high.abs() * 2.0**-23
    )


def normed_output_bounds(
    normed: Bounds, values: torch.Tensor, scale: float = 1.0
) -> Bounds:
    """Bounds of a linear layer's BF16 output where x itself was rounded by a kernel.

    Args:
        normed: What each of x [M, K] may be.
        values: float64 [N, K], exact BF16 weights.
        scale: Multiplies the sum, in FP32.
    """
    middle, half = (normed.low + normed.high) / 2, (normed.high - normed.low) / 2
    found = linear_bounds(middle, values, scale)
    slack = half @ values.abs().T * abs(scale)
    return Bounds(found.low - slack, found.high + slack).rounded()
