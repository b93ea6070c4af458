# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The experts on quack's grouped BF16 GEMM, to time the grouped GEMM beside.

What many tokens could do instead: dequantize all experts, then multiply in BF16. Gate,
up and the outputs are rounded before the global scale here, so this is a yardstick for
time, not for numerics. Importing this needs quack.
"""

import torch
from quack.gemm_interface import gemm
from vllm.models.flint.ops.experts.weights import FlintMoEWeights
from vllm.models.flint.ops.norm import silu_and_mul
from vllm.models.flint.ops.nvfp4_gemv import dequantize_rows


def dense_experts(weights: FlintMoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantizes all experts: BF16 [E, 2 * I, H] and [E, H, I], no global scales."""
    assert weights.w1_scale is not None
    assert weights.w2_scale is not None
    stacks = (weights.w1, weights.w1_scale), (weights.w2, weights.w2_scale)
    first, second = (
        dequantize_rows(codes.flatten(0, 1), scales.flatten()).unflatten(
            0, codes.shape[:2]
        )
        for codes, scales in stacks
    )
    return first, second


def quack_grouped(
    x: torch.Tensor,
    ids: torch.Tensor,
    tw: torch.Tensor,
    weights: FlintMoEWeights,
    dense: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Does what `grouped_experts` does without a shared expert.

    Args:
        x: BF16 [M, H], contiguous.
        ids: int32 [M, top_k].
        tw: FP32 [M, top_k].
        weights: NVFP4 experts.
        dense: `dense_experts(weights)`, to leave the dequantization out of a time.

    Returns:
        BF16 [M, H].
    """
    assert weights.alpha1 is not None
    assert weights.alpha2 is not None
    first, second = dense or dense_experts(weights)
    chosen, order = ids.flatten().sort(stable=True)
    experts = torch.arange(weights.num_experts + 1, device=x.device, dtype=ids.dtype)
    starts = torch.searchsorted(chosen, experts).int()
    token = (order // ids.shape[1]).int()
    gate_up = gemm(x, first.mT, cu_seqlens_m=starts, A_idx=token, tuned=False)
    gate_up *= weights.alpha1[chosen].unsqueeze(1)
    y = gemm(silu_and_mul(gate_up), second.mT, cu_seqlens_m=starts, tuned=False)
    y *= weights.alpha2[chosen].unsqueeze(1)
    routed = torch.empty_like(y)
    routed[order] = y
    routed = routed.unflatten(0, ids.shape)
    return (routed * tw.unsqueeze(-1)).sum(1).bfloat16()
