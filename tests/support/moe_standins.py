# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Float64 functions of the contract in the places of a sparse block's kernels."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.models.flint import mlp
from vllm.models.flint.ops import moe_layer

from contract import ops
from contract.numerics import Numerics
from contract.nvfp4 import Nvfp4Weight, unswizzle_scales
from support.experts import layer_operands
from support.packing import unpack_words

EPS = 1e-6
CONTRACT = Numerics.CONTRACT


def expert(weight: torch.Tensor, scale: Any, alpha: Any, index: int) -> ops.Weight:
    """One expert's matrix, as the kernels' arguments describe it."""
    if scale is None:
        return weight[index]
    if weight.dtype == torch.int32:
        weight = unpack_words(weight)
    rows, width = weight.shape[1:]
    scales = unswizzle_scales(scale[index], rows, width // 8)
    return Nvfp4Weight(weight[index], scales, alpha[index].item())


class Kernels:
    """Stand-ins that note their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.shared_reason: str | None = None

    def gate_up(
        self, x, ids, w1, w1_sf, alpha, act, wsh, ssh, gssh, sact, pdl=True
    ) -> None:
        self.calls.append("gate_up")
        for pair, index in enumerate(ids.flatten().tolist()):
            token = x[pair // ids.shape[1]].double()
            both = ops.accumulate(token, expert(w1, w1_sf, alpha, index))
            gate, up = both.chunk(2, dim=-1)
            act[pair] = CONTRACT.bf16(ops.silu(gate) * up)
        if wsh is not None:
            shared = layer_operands(wsh)[0]
            gate, up = ops.linear(x.double(), shared, CONTRACT).chunk(2, dim=-1)
            sact.copy_(CONTRACT.bf16(ops.silu(gate) * up))

    def down_combine(
        self, act, ids, tw, w2, w2_sf, alpha2, sact, wsd, ssd, gssd, out, pdl=True
    ) -> None:
        self.calls.append("down_combine")
        y = torch.stack(
            [
                ops.linear(a.double(), expert(w2, w2_sf, alpha2, index), CONTRACT)
                for a, index in zip(act, ids.flatten().tolist(), strict=True)
            ]
        )
        shared = torch.zeros(out.shape, dtype=torch.float64)
        if wsd is not None:
            shared = ops.linear(sact.double(), layer_operands(wsd)[0], CONTRACT)
        y = y.unflatten(0, ids.shape)
        out.copy_(ops.combine(tw.double(), y, shared, CONTRACT))

    def grouped(self, x, ids, tw, weights, shared_out) -> torch.Tensor:
        self.calls.append("grouped")
        act = x.new_empty(ids.numel(), weights.intermediate)
        out = torch.empty_like(x)
        first = weights.w1, weights.w1_scale, weights.alpha1
        second = weights.w2, weights.w2_scale, weights.alpha2
        mark = len(self.calls)
        self.gate_up(x, ids, *first, act, None, None, None, None)
        self.down_combine(act, ids, tw, *second, None, None, None, None, out)
        del self.calls[mark:]
        return out if shared_out is None else out + shared_out

    def route(self, x, residual, norm, eps, router, top_k, counter, pdl=True):
        self.calls.append("route")
        assert counter is COUNTER
        normed, total = add_rms_norm(x, residual, norm, eps)
        logits = torch.nn.functional.linear(normed, router)
        return normed, total, *topk_sigmoid(logits, top_k)

    def vllms_moe(self, method, layer, x, tw, ids, *rest) -> torch.Tensor:
        self.calls.append("vllm")
        weights = moe_layer.FlintMoEWeights(
            layer.w13_weight.data, None, None, layer.w2_weight.data, None, None
        )
        mark = len(self.calls)
        out = self.grouped(x, ids, tw, weights, None)
        del self.calls[mark:]
        return out

    def shared(self, block: mlp.FlintSparseMoeBlock) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            self.calls.append("shared")
            gate, up = block.shared_expert.gate_up_proj.weight.chunk(2)
            down = block.shared_expert.down_proj.weight
            return ops.dense_mlp(x.double(), gate, up, down, CONTRACT).bfloat16()

        return forward


COUNTER = torch.zeros(1, dtype=torch.int32)


def add_rms_norm(x, residual, weight, eps):
    normed, total = ops.rms_norm(x.double(), weight, eps, CONTRACT, residual.double())
    return normed.bfloat16(), total.bfloat16()


def topk_sigmoid(logits, top_k):
    weights, ids = ops.select_experts(logits.double(), top_k, CONTRACT)
    return ids.int(), weights.float()
