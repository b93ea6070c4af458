# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A sparse block on the overlay's kernels, on the path that its tokens take."""

from dataclasses import replace

import torch
from vllm.models.flint.ops import moe
from vllm.models.flint.ops.fragments import missing_quack, to_fragments
from vllm.models.flint.ops.gemv.packing import pack_codes
from vllm.models.flint.ops.gemv_weight import GemvWeight
from vllm.models.flint.ops.norm import add_rms_norm

from gemvbench.peers import Ours as OurLinear
from gemvbench.shapes import Layer
from gemvbench.weights import Weight
from moebench.weights import EPS, BlockWeights, Tokens


def gemv_weight(weight: Weight) -> GemvWeight:
    """A dense weight as the layer of this GPU holds it."""
    if missing_quack() is None:
        parts = to_fragments(weight.codes, weight.scales)
        return GemvWeight.fragments(*parts, weight.global_scale)
    return GemvWeight.row_major(weight.codes, weight.swizzled(), weight.global_scale)


class Ours:
    """`__call__` maps tokens to the block's output and the new residual stream."""

    name = "ours"

    def __init__(self, weights: BlockWeights, packed: bool = False) -> None:
        sizes = weights.sizes
        self._weights, self._top_k = weights, sizes.top_k
        experts = moe.FlintMoEWeights.from_modelopt(
            weights.w1,
            weights.w1_scale,
            weights.alpha1,
            weights.w2,
            weights.w2_scale,
            weights.alpha2,
        )
        if packed:
            experts = replace(
                experts, w1=pack_codes(experts.w1), w2=pack_codes(experts.w2)
            )
        shared = gemv_weight(weights.gate_up), gemv_weight(weights.down)
        self.layer = moe.LLMoEWeights(weights.router, experts, *shared)
        self.counter = moe.make_route_counter(weights.router.device)
        up = Layer(2 * sizes.shared, sizes.hidden, silu_mul=True)
        self._gate_up = OurLinear(up, weights.gate_up)
        self._down = OurLinear(Layer(sizes.hidden, sizes.shared), weights.down)

    def __call__(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        norm, m = self._weights.norm, tokens.x.shape[0]
        x = tokens.x, tokens.residual
        if m <= moe.LL_MOE_MAX_TOKENS:
            more = EPS, self.layer, self._top_k, self.counter
            return moe.flint_moe_ll(*x, norm, *more)
        normed, residual = add_rms_norm(*x, norm, EPS)
        logits = torch.nn.functional.linear(normed, self._weights.router)
        choice = moe.topk_sigmoid(logits, self._top_k)
        if m <= moe.DECODE_MAX_TOKENS:
            return moe.flint_moe(
                normed, choice, self.layer.experts, fused=self.layer
            ), residual
        shared = self._down(self._gate_up(normed))
        return moe.flint_moe(
            normed, choice, self.layer.experts, shared_out=shared
        ), residual
