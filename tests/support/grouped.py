# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Routed experts: random NVFP4 stacks, grouping, and what a kernel may answer."""

from dataclasses import dataclass

import torch
from vllm.models.flint.ops.experts.align import Groups
from vllm.models.flint.ops.experts.weights import FlintMoEWeights

from contract.nvfp4 import E2M1, E4M3, GROUP, unpack_codes
from support.gemv import Bounds, linear_bounds, normed_output_bounds, silu_mul_bounds


@dataclass(frozen=True)
class Stack:
    """One projection of all experts.

    Attributes:
        codes: uint8 [E, N, K / 2].
        scales: uint8 [E, N, K / 16], not swizzled.
        alpha: FP32 [E].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    alpha: torch.Tensor

    @classmethod
    def random(cls, experts: int, n: int, k: int, generator: torch.Generator):
        """Any codes, scales as trained weights have, global scales that differ."""

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(
                low,
                high,
                shape,
                dtype=torch.uint8,
                device=generator.device,
                generator=generator,
            )

        alpha = torch.linspace(0.9, 1.1, experts, device=generator.device)
        codes = draw(0, 256, experts, n, k // 2)
        return cls(
            codes, draw(0x28, 0x60, experts, n, k // GROUP), alpha / (20 * k**0.5)
        )

    def values(self, expert: int) -> torch.Tensor:
        """Exact weights of one expert, float64 [N, K], without the global scale."""
        device = self.codes.device
        codes = E2M1.to(device)[unpack_codes(self.codes[expert]).long()]
        scales = E4M3.to(device)[self.scales[expert].long()]
        return codes * scales.repeat_interleave(GROUP, dim=-1)


@dataclass(frozen=True)
class Experts:
    """Gate and up, and down, of all experts, also as the kernels take them."""

    first: Stack
    second: Stack
    weights: FlintMoEWeights

    @classmethod
    def random(
        cls, experts: int, hidden: int, width: int, generator: torch.Generator
    ) -> "Experts":
        first = Stack.random(experts, 2 * width, hidden, generator)
        second = Stack.random(experts, hidden, width, generator)
        parts = (first.codes, first.scales, first.alpha)
        parts += (second.codes, second.scales, second.alpha)
        return cls(first, second, FlintMoEWeights.from_modelopt(*parts))

    def routed_bounds(self, x: torch.Tensor, expert: int) -> Bounds:
        """Bounds of one expert's rounded output for BF16 rows x [M, H]."""
        scale = self.first.alpha[expert].item()
        gate_up = linear_bounds(x, self.first.values(expert), scale)
        act = silu_mul_bounds(gate_up, fp32=True).rounded()
        scale = self.second.alpha[expert].item()
        return normed_output_bounds(act, self.second.values(expert), scale)

    def bounds(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        tw: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> Bounds:
        """Bounds of the whole block's output for a few tokens.

        Args:
            x: BF16 [M, H].
            ids: int [M, top_k].
            tw: FP32 [M, top_k].
            shared: BF16 [M, H], or None.
        """
        low = x.new_empty((*ids.shape, x.shape[1]), dtype=torch.float64)
        high = torch.empty_like(low)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            found = self.routed_bounds(x[token], expert)
            low[token, slot], high[token, slot] = found.low, found.high
        weight = tw.double().unsqueeze(-1)
        ends = torch.stack((weight * low, weight * high))
        size = ends.abs().amax(0).sum(1)
        # A product and a sum for each expert.
        slack = 2 * ids.shape[1] * 2.0**-24 * size
        total = Bounds(ends.amin(0).sum(1) - slack, ends.amax(0).sum(1) + slack)
        total = total.rounded()
        if shared is None:
            return total
        shared = shared.double()
        return Bounds(total.low + shared, total.high + shared).rounded()


def check_groups(groups: Groups, ids: torch.Tensor, num_experts: int) -> None:
    """Asserts that each pair lies in one tile of its own expert, in order."""
    flat, block_t = ids.flatten(), groups.block_t
    tiles = groups.pairs.view(-1, block_t)
    assert groups.tile_experts.shape == (tiles.shape[0],)
    used = groups.tile_experts.tolist()
    assert all(-1 <= expert < num_experts for expert in used)
    assert [e for e in used if e >= 0] == sorted(e for e in used if e >= 0)
    for expert in range(num_experts):
        own = (flat == expert).nonzero().flatten()
        found = tiles[groups.tile_experts == expert].flatten().long()
        count = -(-own.numel() // block_t) * block_t
        padding = own.new_full((count - own.numel(),), flat.numel())
        assert torch.equal(found, torch.cat((own, padding)))
