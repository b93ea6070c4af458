# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Launches what Flint's sparse layers may launch, for a tool that watches the launches.

Such a tool makes a kernel a hundred times slower: there are few experts, of real width.
"""

import itertools
from dataclasses import replace

import torch
from vllm.models.flint.ops import moe, moe_gemv
from vllm.models.flint.ops.experts import grouped
from vllm.models.flint.ops.experts.grouped_config import picked_configs
from vllm.models.flint.ops.experts.route import MAX_ROUTE_TOKENS
from vllm.models.flint.ops.gemv_weight import GemvWeight

from gemvbench.exercise import Part, as_layers_hold
from moebench.weights import EPS, BlockWeights, Sizes

_SIZES = Sizes.of()
# Several groups of 8 tokens an expert, from 32 tokens on.
_FEW_EXPERTS = replace(_SIZES, experts=16)


def _route(device: str, counts: list[int]) -> None:
    gain = torch.ones(_SIZES.hidden, dtype=torch.bfloat16, device=device)
    router = torch.randn(_SIZES.experts, _SIZES.hidden, device=device).bfloat16()
    counter = moe.make_route_counter(device)
    for m in counts:
        x, stream = torch.randn(2, m, _SIZES.hidden, device=device).bfloat16()
        for residual in (stream, None):
            moe.route(x, residual, gain, EPS, router, _SIZES.top_k, counter)


def _topk(device: str, counts: list[int]) -> None:
    for m in counts:
        logits = torch.randn(m, _SIZES.experts, device=device).bfloat16()
        moe.topk_sigmoid(logits, _SIZES.top_k)


def _inputs(
    device: str, m: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Tokens, and their choice of the few experts."""
    x = torch.randn(m, _SIZES.hidden, device=device).bfloat16()
    logits = torch.randn(m, _FEW_EXPERTS.experts, device=device)
    scores, ids = logits.topk(_SIZES.top_k)
    return x, (ids.int(), scores.softmax(-1).bfloat16().float())


def _decode(
    device: str,
    m: int,
    experts: moe.FlintMoEWeights,
    shared: tuple[GemvWeight, GemvWeight] | None,
) -> None:
    x, (ids, shares) = _inputs(device, m)
    act = x.new_empty((ids.numel(), experts.intermediate))
    sact = up = down = None
    if shared is not None:
        up, down = shared
        sact = x.new_empty((m, shared[1].shape.k))
    first = experts.w1, experts.w1_scale, experts.alpha1
    moe_gemv.gate_up(x, ids, *first, act, up, None, None, sact)
    second = experts.w2, experts.w2_scale, experts.alpha2
    out = torch.empty_like(x)
    moe_gemv.down_combine(act, ids, shares, *second, sact, down, None, None, out)


def _experts(
    device: str,
) -> tuple[moe.FlintMoEWeights, list[tuple[GemvWeight, GemvWeight] | None]]:
    """NVFP4 experts, and the shared one in each form that its layers may have."""
    weights = BlockWeights.random(_FEW_EXPERTS, device)
    experts = moe.FlintMoEWeights.from_modelopt(
        weights.w1,
        weights.w1_scale,
        weights.alpha1,
        weights.w2,
        weights.w2_scale,
        weights.alpha2,
    )
    shared = zip(as_layers_hold(weights.gate_up), as_layers_hold(weights.down))
    return experts, [None, *shared]


def _nvfp4(device: str, counts: list[int]) -> None:
    experts, shared_forms = _experts(device)
    for m, shared in itertools.product(counts, shared_forms):
        _decode(device, m, experts, shared)


def _packed(device: str, counts: list[int]) -> None:
    experts, shared_forms = _experts(device)
    packed = experts.packed()
    for m, shared in itertools.product(counts, shared_forms):
        _decode(device, m, packed, shared)
    for m in counts:
        x, choice = _inputs(device, m)
        grouped.grouped_experts(x, *choice, packed, None)


def _bf16(device: str, counts: list[int]) -> None:
    sizes, dtype = _FEW_EXPERTS, torch.bfloat16
    up, down = (2 * sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
    w1 = torch.randn(sizes.experts, *up, device=device, dtype=dtype)
    w2 = torch.randn(sizes.experts, *down, device=device, dtype=dtype)
    experts = moe.FlintMoEWeights(w1, None, None, w2, None, None)
    up, down = (2 * sizes.shared, sizes.hidden), (sizes.hidden, sizes.shared)
    shared = tuple(
        GemvWeight.bf16(torch.randn(shape, device=device, dtype=dtype))
        for shape in (up, down)
    )
    for m, form in itertools.product(counts, (shared, None)):
        _decode(device, m, experts, form)


def _grouped(device: str, counts: list[int]) -> None:
    experts, _ = _experts(device)
    for m in counts:
        x, choice = _inputs(device, m)
        grouped.grouped_experts(x, *choice, experts, torch.randn_like(x))
    x, choice = _inputs(device, min(counts, default=0))
    for config in picked_configs():
        grouped.grouped_experts(x, *choice, experts, None, config)


PARTS = {
    "route": Part(_route, (1, 2, 16), MAX_ROUTE_TOKENS),
    "topk": Part(_topk, (1, 2, 16, 70)),
    "nvfp4": Part(_nvfp4, (1, 2, 8, 9, 32, 40), moe.DECODE_MAX_TOKENS),
    "packed": Part(_packed, (1, 2, 8, 9, 32, 40), moe.DECODE_MAX_TOKENS),
    "bf16": Part(_bf16, (1, 2, 9, 16), moe.BF16_DECODE_MAX_TOKENS),
    "grouped": Part(_grouped, (33, 200)),
}
