# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Experts with random weights, and what their kernels may answer, in float64.

The bounds come from the contract alone, as in `support.gemv`.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from vllm.models.flint.ops.gemv.config import FRAGMENT_BLOCK
from vllm.models.flint.ops.gemv_weight import GemvWeight

from contract.nvfp4 import E2M1, E4M3, GROUP, swizzle_scales, unpack_codes
from support.gemv import (
    Bounds,
    QuantizedLinear,
    linear_bounds,
    output_bounds,
    silu_mul_bounds,
)

# Of BF16 weights.
_STD = 0.03

SharedKind: TypeAlias = Literal["row_major", "fragments", "bf16"]


@dataclass(frozen=True)
class Experts:
    """One matrix of each expert.

    Attributes:
        weight: uint8 [E, N, K / 2], ModelOpt bytes, or BF16 [E, N, K].
        raw_scales: uint8 [E, N, K / 16], not swizzled; None for BF16.
        scales: uint8 [E, N * K / 16], swizzled; None for BF16.
        alpha: FP32 [E], global scales; None for BF16.
    """

    weight: torch.Tensor
    raw_scales: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    alpha: torch.Tensor | None = None

    @classmethod
    def random(
        cls, count: int, n: int, k: int, generator: torch.Generator, bf16: bool = False
    ) -> "Experts":
        """Weights that keep values near one; N is a multiple of 128."""
        device = generator.device
        if bf16:
            shape = (count, n, k)
            dense = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return cls(dense.normal_(0, _STD, generator=generator))

        def draw(low: int, high: int, width: int) -> torch.Tensor:
            return torch.randint(
                low,
                high,
                (count, n, width),
                dtype=torch.uint8,
                device=device,
                generator=generator,
            )

        codes, raw = draw(0, 256, k // 2), draw(0x28, 0x60, k // GROUP)
        # Whole blocks of rows: one swizzle serves all experts.
        swizzled = swizzle_scales(raw.flatten(0, 1)).view(count, -1)
        alpha = torch.rand(count, device=device, generator=generator) * 0.002 + 0.0002
        return cls(codes, raw, swizzled, alpha)

    @property
    def count(self) -> int:
        return self.weight.shape[0]

    def values(self, expert: int) -> torch.Tensor:
        """An expert's exact weights, float64 [N, K], without the global scale."""
        if self.raw_scales is None:
            return self.weight[expert].double()
        device = self.weight.device
        codes = E2M1.to(device)[unpack_codes(self.weight[expert]).long()]
        factors = E4M3.to(device)[self.raw_scales[expert].long()]
        return codes * factors.repeat_interleave(GROUP, dim=-1)

    def scale(self, expert: int) -> float:
        return 1.0 if self.alpha is None else self.alpha[expert].item()


@dataclass(frozen=True)
class SharedLinear:
    """The shared expert's matrix in one of the layouts.

    Attributes:
        operands: weight, scales, global scale, as a dense layer holds them.
        values: float64 [N, K], exact, without the global scale.
        scale: The global scale.
    """

    operands: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
    values: torch.Tensor
    scale: float

    @classmethod
    def random(
        cls, kind: SharedKind, n: int, k: int, generator: torch.Generator
    ) -> "SharedLinear":
        if kind == "bf16":
            device = generator.device
            dense = torch.empty(n, k, dtype=torch.bfloat16, device=device)
            dense.normal_(0, _STD, generator=generator)
            return cls((dense, None, None), dense.double(), 1.0)
        linear = QuantizedLinear.random(n, k, generator, 0.00123)
        own = linear.codes, linear.scales
        if kind == "fragments":
            own = linear.fragments()
        operands = (*(x.contiguous() for x in own), linear.global_scale)
        return cls(operands, linear.values, linear.global_scale.item())


def layer_operands(
    weight: GemvWeight,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Give back the tensors that a ``GemvWeight`` was made of, as views.

    Returns:
        BF16 [N, K], None, None; or codes, uint8 block scales and the FP32 [1] global
        scale: row-major [N, K / 2] and flat, or [N / 64, K / 64, 128, 16] and
        [N / 64, K / 64, 32, 4, 2] in fragment order.

    """
    if weight.scales is None:
        return weight.words.view(torch.bfloat16), None, None
    codes, scales = weight.words.view(torch.uint8), weight.scales.view(torch.uint8)
    if weight.shape.layout == "fragments":
        blocks = weight.shape.n // FRAGMENT_BLOCK, weight.shape.k // FRAGMENT_BLOCK
        codes, scales = codes.view(*blocks, 128, 16), scales.view(*blocks, 32, 4, 2)
    return codes, scales, weight.global_scale


def gate_up_bounds(x: torch.Tensor, ids: torch.Tensor, experts: Experts) -> Bounds:
    """Bounds of the routed experts' activations, [M * top_k, I].

    Args:
        x: BF16 [M, H].
        ids: [M, top_k].
        experts: Their [gate | up].
    """
    width = experts.weight.shape[1] // 2
    low = x.new_empty((ids.numel(), width), dtype=torch.float64)
    high = torch.empty_like(low)
    for expert in ids.unique().tolist():
        pairs = (ids.flatten() == expert).nonzero().flatten()
        rows = x[pairs // ids.shape[1]]
        sums = linear_bounds(rows, experts.values(expert), experts.scale(expert))
        found = silu_mul_bounds(sums, fp32=True).rounded()
        low[pairs], high[pairs] = found.low, found.high
    return Bounds(low, high)


def down_bounds(
    act: torch.Tensor,
    ids: torch.Tensor,
    tw: torch.Tensor,
    experts: Experts,
    shared: tuple[torch.Tensor, SharedLinear] | None,
) -> Bounds:
    """Bounds of the combined output, [M, H].

    Args:
        act: BF16 [M * top_k, I], what the kernel is given.
        ids: [M, top_k].
        tw: FP32 [M, top_k], none negative.
        experts: Their down projections.
        shared: The shared expert's activations, BF16 [M, Ish], and down projection.
    """
    top_k, width = ids.shape[1], experts.weight.shape[1]
    low = act.new_empty((ids.numel(), width), dtype=torch.float64)
    high = torch.empty_like(low)
    for expert in ids.unique().tolist():
        pairs = (ids.flatten() == expert).nonzero().flatten()
        scale = experts.scale(expert)
        found = output_bounds(act[pairs], experts.values(expert), scale)
        low[pairs], high[pairs] = found.low, found.high
    weights = tw.double().unsqueeze(-1)
    low = low.view(-1, top_k, width) * weights
    high = high.view(-1, top_k, width) * weights
    # Each product and each addition is rounded to FP32.
    most = torch.maximum(low.abs(), high.abs()).sum(1)
    slack = (top_k + 1) * 2.0**-24 * most
    total = Bounds(low.sum(1) - slack, high.sum(1) + slack).rounded()
    if shared is None:
        return total
    own = output_bounds(shared[0], shared[1].values, shared[1].scale)
    return Bounds(total.low + own.low, total.high + own.high).rounded()


def random_routes(
    tokens: int, count: int, top_k: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts of each token, int32, and BF16 weights as FP32."""
    device = generator.device
    scores = torch.rand(tokens, count, device=device, generator=generator)
    ids = scores.topk(top_k).indices.int()
    tw = torch.rand(tokens, top_k, device=device, generator=generator)
    return ids, (tw / tw.sum(1, keepdim=True)).bfloat16().float()
