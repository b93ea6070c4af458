# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A sparse layer for any tokens: which launches serve how many, and what they share.

Up to ``LL_MOE_MAX_TOKENS`` tokens: ``route``, ``gate_up`` and ``down_combine``, each of
which loads its weights while the one before drains. Up to ``DECODE_MAX_TOKENS``: the
last two, on experts that were chosen apart. Beyond: one GEMM over the tokens of each
expert, which reads the same bytes, and the shared expert on its own dense layers.
BF16 experts have no such GEMM here; vLLM's own MoE reads them where they lie.
"""

import torch

from ..linear import gemv_weight
from ..moe_gemv import down_combine, gate_up
from .grouped import grouped_experts
from .route import MAX_ROUTE_TOKENS, route
from .weights import FlintMoEWeights, LLMoEWeights

# Up to how many tokens the three launches are the fastest choice: as many as ``route``
# takes.
LL_MOE_MAX_TOKENS = MAX_ROUTE_TOKENS
# Up to how many tokens an expert is read once for each few of its tokens. On an H200
# the two launches take 142 us at 48 tokens and 175 us at 64, the GEMM 145 and 162 us.
DECODE_MAX_TOKENS = 48
# A step of a whole engine takes 9.3 ms at 16 tokens and 14.8 at 32; with vLLM's MoE on
# the same BF16 experts 10.0 and 14.1.
BF16_DECODE_MAX_TOKENS = 16


def ll_weights_from_layers(
    gate: torch.nn.Module,
    experts: FlintMoEWeights,
    gate_up_proj: torch.nn.Module,
    down_proj: torch.nn.Module,
) -> LLMoEWeights | str:
    """Collect a sparse block's weights, in the memory of its processed layers.

    Args:
        gate: the router, a linear layer without bias.
        experts: the routed experts.
        gate_up_proj: the shared expert's merged gate and up projection.
        down_proj: the shared expert's down projection.

    Returns:
        The weights, or why the shared expert cannot join the experts' launches.

    Raises:
        ValueError: the layers do not fit together.

    """
    shared = []
    for layer in (gate_up_proj, down_proj):
        weight = gemv_weight(layer)
        if isinstance(weight, str):
            return weight
        shared.append(weight)
    return LLMoEWeights(gate.weight.data, experts, *shared)


def flint_moe_ll(
    attn_out: torch.Tensor,
    residual: torch.Tensor | None,
    ln_weight: torch.Tensor,
    eps: float,
    w: LLMoEWeights,
    top_k: int,
    counter: torch.Tensor,
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, norm, route and mix the experts, in three launches.

    Args:
        attn_out: BF16 [M, H], unit inner stride, M <= ``LL_MOE_MAX_TOKENS``.
        residual: BF16 [M, H], the residual stream before it; None for zeros.
        ln_weight: BF16 [H], of the norm.
        eps: of the norm.
        w: the layer's weights.
        top_k: experts of a token.
        counter: see ``make_route_counter``.
        pdl: start each launch while the one before it drains.

    Returns:
        mlp(norm(attn_out + residual)) and attn_out + residual, both BF16 [M, H].

    Raises:
        ValueError: too many tokens, or an argument has the wrong type, shape or layout.

    """
    _check_tokens(attn_out, LL_MOE_MAX_TOKENS)
    normed, new_residual, ids, weights = route(
        attn_out, residual, ln_weight, eps, w.router, top_k, counter, pdl
    )
    return _decode(normed, ids, weights, w.experts, w, pdl), new_residual


def flint_moe(
    x: torch.Tensor,
    choice: tuple[torch.Tensor, torch.Tensor],
    experts: FlintMoEWeights,
    fused: LLMoEWeights | None = None,
    shared_out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Mix the NVFP4 experts of any tokens, and add the shared expert's output.

    Args:
        x: BF16 [M, H], unit inner stride: normed tokens.
        choice: int32 [M, top_k] expert ids and FP32 [M, top_k] weights, rounded to
            BF16; see ``route`` and ``topk_sigmoid``.
        experts: the routed experts, NVFP4.
        fused: the layer's weights: the shared expert joins the launches. At most
            ``DECODE_MAX_TOKENS`` tokens.
        shared_out: BF16 [M, H], what the shared expert made of x, where it does not.
        pdl: start launches while the ones before them drain.

    Returns:
        BF16 [M, H].

    Raises:
        ValueError: an argument has the wrong type, shape or layout, or both or the
            wrong one of ``fused`` and ``shared_out`` were given.

    """
    if experts.is_bf16:
        raise ValueError("flint_moe serves NVFP4 experts, and these are BF16")
    ids, weights = _check_choice(x, choice, experts)
    if fused is not None and shared_out is not None:
        raise ValueError("the shared expert would be added twice")
    if x.shape[0] > DECODE_MAX_TOKENS:
        if fused is not None:
            _check_tokens(x, DECODE_MAX_TOKENS)
        return grouped_experts(x, ids, weights, experts, shared_out)
    out = _decode(x, ids, weights, experts, fused, pdl)
    # Both are rounded, so this is the contract's second rounding.
    return out if shared_out is None else out.add_(shared_out)


def flint_moe_bf16_decode(
    x: torch.Tensor,
    choice: tuple[torch.Tensor, torch.Tensor],
    experts: FlintMoEWeights,
    fused: LLMoEWeights | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Mix the BF16 experts of at most ``BF16_DECODE_MAX_TOKENS`` tokens.

    Arguments, result and errors are those of ``flint_moe``; there is no shared expert
    without ``fused``.
    """
    if not experts.is_bf16:
        raise ValueError("flint_moe_bf16_decode serves BF16 experts; these are NVFP4")
    _check_tokens(x, BF16_DECODE_MAX_TOKENS)
    return _decode(x, *_check_choice(x, choice, experts), experts, fused, pdl)


def _decode(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: FlintMoEWeights,
    fused: LLMoEWeights | None,
    pdl: bool,
) -> torch.Tensor:
    m, top_k = ids.shape
    out = x.new_empty(m, experts.hidden)
    if m == 0:
        return out
    act = x.new_empty(m * top_k, experts.intermediate)
    sact = up = down = None
    if fused is not None:
        sact = x.new_empty(m, fused.shared_down.shape.k)
        up, down = fused.shared_gate_up, fused.shared_down
    first = experts.w1, experts.w1_scale, experts.alpha1
    second = experts.w2, experts.w2_scale, experts.alpha2
    gate_up(x, ids, *first, act, up, None, None, sact, pdl=pdl)
    down_combine(act, ids, weights, *second, sact, down, None, None, out, pdl=pdl)
    return out


def _check_tokens(x: torch.Tensor, most: int) -> None:
    if x.shape[0] > most:
        raise ValueError(f"at most {most} tokens fit, got {x.shape[0]}")


def _check_choice(
    x: torch.Tensor,
    choice: tuple[torch.Tensor, torch.Tensor],
    experts: FlintMoEWeights,
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = choice
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != experts.hidden:
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"x must be BF16 [M, {experts.hidden}], got {got}")
    if ids.dtype != torch.int32 or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        got = f"{ids.dtype} {tuple(ids.shape)}"
        raise ValueError(f"ids must be int32 [{x.shape[0]}, top_k], got {got}")
    if weights.dtype != torch.float32 or weights.shape != ids.shape:
        got = f"{weights.dtype} {tuple(weights.shape)}"
        raise ValueError(f"weights must be FP32 {list(ids.shape)}, got {got}")
    return ids, weights
