# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Random weights and tokens of a sparse block, and what it makes of them."""

from dataclasses import dataclass

import torch

from enginebench.models import FLINT
from gemvbench.weights import Weight, weight_bytes
from tinymodel.specs import TinySpec

# E4M3 bytes of 1 to 3.75: with E2M1 codes an rms of about 6.
_SCALES = (0x38, 0x48)
_RMS = 6.0
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Of a sparse block on one rank.

    Attributes:
        hidden: width of a token.
        experts: routed experts.
        top_k: experts of a token.
        width: between a routed expert's projections.
        shared: between the shared expert's.
    """

    hidden: int
    experts: int
    top_k: int
    width: int
    shared: int

    @classmethod
    def of(cls, spec: TinySpec = FLINT, tp: int = 1) -> "Sizes":
        return cls(
            spec.hidden_size,
            spec.num_experts,
            spec.num_experts_per_tok,
            spec.moe_intermediate_size // tp,
            spec.shared_expert_intermediate_size // tp,
        )

    def n_bytes(self, experts: float) -> float:
        """Bytes of weights that a step reads which meets so many routed experts."""
        router = 2 * self.experts * self.hidden
        shared = 3 * weight_bytes(self.shared, self.hidden, False)
        return (
            router + shared + experts * 3 * weight_bytes(self.width, self.hidden, False)
        )


def _nvfp4(rows: int, k: int, device: str) -> Weight:
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device)
    shape = (rows, k // 16)
    scales = torch.randint(*_SCALES, shape, dtype=torch.uint8, device=device)
    return Weight(codes, scales, torch.full((1,), 1 / _RMS / k**0.5, device=device))


@dataclass(frozen=True)
class BlockWeights:
    """A sparse block's weights, as a ModelOpt checkpoint has them.

    Attributes:
        sizes: of the block.
        norm: BF16 [H].
        router: BF16 [E, H].
        w1: uint8 [E, 2 * I, H / 2], gate rows and up rows of each expert.
        w1_scale: uint8 [E, 2 * I, H / 16], E4M3 bytes.
        alpha1: FP32 [E].
        w2: uint8 [E, H, I / 2].
        w2_scale: uint8 [E, H, I / 16].
        alpha2: FP32 [E].
        gate_up: the shared expert's gate rows, then its up rows.
        down: its down rows.
    """

    sizes: Sizes
    norm: torch.Tensor
    router: torch.Tensor
    w1: torch.Tensor
    w1_scale: torch.Tensor
    alpha1: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    alpha2: torch.Tensor
    gate_up: Weight
    down: Weight

    @classmethod
    def random(cls, sizes: Sizes, device: str = "cuda") -> "BlockWeights":
        """Values of such a size that every projection keeps that of its input."""
        e, h, i = sizes.experts, sizes.hidden, sizes.width
        first, second = _nvfp4(e * 2 * i, h, device), _nvfp4(e * h, i, device)
        return cls(
            sizes,
            torch.rand(h, device=device).add_(0.5).bfloat16(),
            torch.randn(e, h, device=device).div_(h**0.5).bfloat16(),
            first.codes.view(e, 2 * i, -1),
            first.scales.view(e, 2 * i, -1),
            first.global_scale.repeat(e),
            second.codes.view(e, h, -1),
            second.scales.view(e, h, -1),
            second.global_scale.repeat(e),
            _nvfp4(2 * sizes.shared, h, device),
            _nvfp4(h, sizes.shared, device),
        )

    def named(self) -> dict[str, torch.Tensor]:
        """Tensors by the ends of their names in vLLM's sparse block."""
        found = {
            "gate.weight": self.router,
            "w13_weight": self.w1,
            "w13_weight_scale": self.w1_scale,
            "w13_weight_scale_2": self.alpha1[:, None].expand(-1, 2),
            "w2_weight": self.w2,
            "w2_weight_scale": self.w2_scale,
            "w2_weight_scale_2": self.alpha2,
            "w13_input_scale": torch.ones(()),
            "w2_input_scale": torch.ones(()),
        }
        for name, weight in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            found[f"{name}.weight"] = weight.codes
            found[f"{name}.weight_scale"] = weight.scales
            found[f"{name}.weight_scale_2"] = weight.global_scale
            found[f"{name}.input_scale"] = torch.ones(())
        return found


@dataclass(frozen=True)
class Tokens:
    """What a block gets: the attention's output, and the residual stream before it.

    Attributes:
        x: BF16 [M, H].
        residual: likewise.
    """

    x: torch.Tensor
    residual: torch.Tensor

    @classmethod
    def random(cls, m: int, hidden: int, device: str = "cuda") -> "Tokens":
        x, residual = torch.randn(2, m, hidden, device=device).bfloat16()
        return cls(x, residual)

    def normed(self, weights: BlockWeights) -> torch.Tensor:
        """BF16 [M, H], what the router and the experts read."""
        total = self.x.float() + self.residual.float()
        rms = total.square().mean(-1, keepdim=True).add_(EPS).rsqrt_()
        return (total * rms * weights.norm.float()).bfloat16()


def chosen(normed: torch.Tensor, weights: BlockWeights) -> torch.Tensor:
    """Expert ids, [M, top_k], of logits that are rounded to BF16."""
    logits = (normed.float() @ weights.router.float().T).bfloat16()
    return (
        logits.float()
        .sort(dim=-1, descending=True, stable=True)
        .indices[:, : weights.sizes.top_k]
    )


def met(ids: torch.Tensor) -> int:
    """How many experts some tokens meet."""
    return len(ids.unique())


def expected(tokens: Tokens, weights: BlockWeights) -> torch.Tensor:
    """FP32 [M, H] that the block adds to the residual stream, without roundings."""
    normed = tokens.normed(weights)
    ids = chosen(normed, weights)
    scores = (normed.float() @ weights.router.float().T).gather(-1, ids).sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    rows = []
    for token, experts, parts in zip(normed.float(), ids.tolist(), shares):
        out = _mlp(token, weights.gate_up, weights.down)
        for expert, part in zip(experts, parts):
            alpha1, alpha2 = weights.alpha1[expert], weights.alpha2[expert]
            first = Weight(weights.w1[expert], weights.w1_scale[expert], alpha1[None])
            second = Weight(weights.w2[expert], weights.w2_scale[expert], alpha2[None])
            out = out + part * _mlp(token, first, second)
        rows.append(out)
    return torch.stack(rows)


def _mlp(x: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    gate, up = (_dense(gate_up) @ x).chunk(2)
    return _dense(down) @ (torch.nn.functional.silu(gate) * up)


def _dense(weight: Weight) -> torch.Tensor:
    return weight.dequantized().float() * weight.global_scale
