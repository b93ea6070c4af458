# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Experts in plain PyTorch, as the launches of Flint's kernels take and give them."""

import torch
from vllm.models.flint.ops.experts.weights import FlintMoEWeights
from vllm.models.flint.ops.gemv_weight import GemvWeight

from contract import ops
from contract.numerics import Numerics
from contract.nvfp4 import Nvfp4Weight, unswizzle_scales
from support.experts import layer_operands

CONTRACT = Numerics.CONTRACT


def dense(
    weight: torch.Tensor | GemvWeight,
    scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
) -> Nvfp4Weight | torch.Tensor:
    """The contract's weight of a launch's operands, row-major."""
    if isinstance(weight, GemvWeight):
        weight, scale, alpha = layer_operands(weight)
    if scale is None or alpha is None:
        return weight
    n, k = weight.shape[0], 2 * weight.shape[1]
    scales = unswizzle_scales(scale.flatten(), n, k // 16)
    return Nvfp4Weight(weight, scales, alpha.item())


def parts(weight: Nvfp4Weight | torch.Tensor) -> list[Nvfp4Weight | torch.Tensor]:
    """Gate rows, and up rows."""
    if isinstance(weight, torch.Tensor):
        return list(weight.chunk(2))
    both = zip(weight.weight.chunk(2), weight.weight_scale.chunk(2))
    return [Nvfp4Weight(*part, weight.global_scale) for part in both]


def expert(stack, index: int) -> Nvfp4Weight | torch.Tensor:
    """One expert of a stack of (weight, scales, alpha)."""
    return dense(*(None if x is None else x[index] for x in stack))


def gate_up(x, ids, w1, w1_sf, alpha, act, wsh, ssh, gssh, sact, pdl=True) -> None:
    """Stands in for the launch of the same name."""
    for pair, index in enumerate(ids.flatten().tolist()):
        gate, up = parts(expert((w1, w1_sf, alpha), index))
        row = x[pair // ids.shape[1]].double()
        product = ops.silu(ops.accumulate(row, gate)) * ops.accumulate(row, up)
        act[pair] = CONTRACT.bf16(product)
    if wsh is not None:
        gate, up = parts(dense(wsh, ssh, gssh))
        x = x.double()
        gated = ops.silu(ops.linear(x, gate, CONTRACT)) * ops.linear(x, up, CONTRACT)
        sact.copy_(CONTRACT.bf16(gated))


def down_combine(
    act, ids, tw, w2, w2_sf, alpha2, sact, wsd, ssd, gssd, out, pdl=True
) -> None:
    """Stands in for the launch of the same name."""
    routed = torch.stack(
        [
            ops.linear(row, expert((w2, w2_sf, alpha2), index), CONTRACT)
            for row, index in zip(act.double(), ids.flatten().tolist(), strict=True)
        ]
    ).unflatten(0, ids.shape)
    shared = torch.zeros_like(out).double()
    if wsd is not None:
        shared = ops.linear(sact.double(), dense(wsd, ssd, gssd), CONTRACT)
    out.copy_(ops.combine(tw.double(), routed, shared, CONTRACT))


def grouped_experts(x, ids, tw, weights: FlintMoEWeights, shared_out) -> torch.Tensor:
    """Stands in for the function of the same name."""
    act = x.new_empty(ids.numel(), weights.intermediate)
    first = weights.w1, weights.w1_scale, weights.alpha1
    second = weights.w2, weights.w2_scale, weights.alpha2
    gate_up(x, ids, *first, act, None, None, None, None)
    out = torch.empty_like(x)
    down_combine(act, ids, tw, *second, None, None, None, None, out)
    return out if shared_out is None else out + shared_out
