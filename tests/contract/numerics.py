# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Where the contract rounds."""

import enum

import torch


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounds float64 to BF16, half to even, in one step; returns float64.

    PyTorch's own conversion goes through float32, which rounds twice. Rounding
    to float32 by "round to odd" first keeps what the second step must know.
    """
    near = x.float()
    toward_zero = torch.where(
        near.double().abs() > x.abs(),
        torch.nextafter(near, torch.zeros_like(near)),
        near,
    )
    inexact = (toward_zero.double() != x) & x.isfinite()
    odd = toward_zero.view(torch.int32) | inexact.int()
    return odd.view(torch.float32).bfloat16().double()


class Numerics(enum.Enum):
    """How a reference computes: CONTRACT rounds to BF16 where the contract does."""

    CONTRACT = "contract"
    EXACT = "exact"

    def bf16(self, x: torch.Tensor) -> torch.Tensor:
        """Rounds float64 `x` at a rounding point of the contract."""
        return round_bf16(x) if self is Numerics.CONTRACT else x
