# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Choosing experts: add, RMSNorm, router and top-k in one launch; or top-k alone.

Numerics: the norm is FP32, of the unrounded sum, and rounded once; what was rounded is
what the router multiplies. Its FP32 sums are rounded to BF16; equal logits go to the
lower index. Sigmoid and s / (sum + 1e-20), j ascending, are FP32; the weights are
rounded to BF16. Logits that are no numbers choose some of the experts, never others.

``route``: a program takes one token and a few experts, whose rows it loads before it
waits for the previous kernel. All of a token's programs norm it, since 8 KiB out of L2
cost less than a launch; the last of them to arrive at the token's counter chooses. A
program waits for no other, so any number of them may be resident.

Both let the next kernel start after their own wait only: it may take it that all that
came before them is done.

Bytes: the router's weight once (1 MiB) and little else. Floor: two dependent sums, an
atomic and top_k dependent maxima, 2 to 3 us. Past ``MAX_ROUTE_TOKENS`` tokens, L2 would
read the weight once for each; a GEMM and ``topk_sigmoid`` are cheaper.
"""

import functools

import torch

from vllm.triton_utils import tl, triton

from ..triton_launch import Constants
from .chain import can_chain, chain, chained

# Tokens of one launch, and counters of a launch.
MAX_ROUTE_TOKENS = 16
# Experts of a program: 2 to 4 take as long for one token, and longer for more.
_SLICE = 8
# Tokens that a program of ``topk_sigmoid`` takes, one a warp, when there are many.
_TOKENS_OF_MANY = 4
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _choose(
    logits, num_experts, TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr
):
    """The best experts of BF16 [T, EXPERTS] logits, and their FP32 weights.

    A logit and its index make one integer: a larger logit is a larger integer, and so
    is a lower index of equal ones. No two are equal, so each maximum is one expert.
    """
    expert = tl.arange(0, EXPERTS)[None, :]
    bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
    bits = tl.where((bits & 0x7FFF) == 0, 0, bits)
    order = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    key = tl.where(expert < num_experts, order * 65536 + (65535 - expert), _LOWEST)
    slot = tl.arange(0, SLOTS)[None, :]
    ids = tl.zeros([logits.shape[0], SLOTS], tl.int32)
    scores = tl.zeros([logits.shape[0], SLOTS], tl.float32)
    total = tl.zeros([logits.shape[0], 1], tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(key, axis=1, keep_dims=True)
        key = tl.where(key == best, _LOWEST, key)
        order = best >> 16
        bits = tl.where(order < 0, order ^ 0x7FFF, order) << 16
        logit = bits.to(tl.float32, bitcast=True)
        # A small sigmoid keeps its digits, and exp does not overflow.
        small = tl.exp(-tl.abs(logit))
        score = tl.where(logit < 0, small, 1.0) / (1.0 + small)
        total += score
        ids = tl.where(slot == j, 65535 - (best & 0xFFFF), ids)
        scores = tl.where(slot == j, score, scores)
    return ids, (scores / (total + 1e-20)).to(tl.bfloat16).to(tl.float32)


# Any count of tokens is the same kernel, compiled once.
@triton.jit(do_not_specialize=["tokens"])
def _topk_kernel(
    logits,
    ids_out,
    weights_out,
    tokens,
    num_experts,
    stride,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    chain(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (token < tokens) & (expert < num_experts)
    loaded = tl.load(logits + token * stride + expert, mask=inside, other=0.0)
    ids, weights = _choose(loaded, num_experts, TOP_K, SLOTS, EXPERTS)
    slot = tl.arange(0, SLOTS)[None, :]
    place = token * TOP_K + slot
    kept = (token < tokens) & (slot < TOP_K)
    tl.store(ids_out + place, ids, mask=kept)
    tl.store(weights_out + place, weights, mask=kept)


@triton.jit
def _route_kernel(
    x,
    residual,
    norm_weight,
    router,
    normed_out,
    new_residual,
    logits,
    ids_out,
    weights_out,
    counters,
    width,
    num_experts,
    x_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLICE: tl.constexpr,
    WRITTEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    part, token = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    expert = part * SLICE + tl.arange(0, SLICE)
    # Weights do not depend on the kernel before.
    rows = tl.load(
        router + expert[:, None] * width + column[None, :],
        mask=(expert[:, None] < num_experts) & inside[None, :],
        other=0.0,
    )
    gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    chain(PDL)

    total = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    total = total.to(tl.float32)
    if ADD:
        place = residual + token * residual_stride + column
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    normed = (total * scale * gain).to(tl.bfloat16)
    products = rows.to(tl.float32) * normed.to(tl.float32)[None, :]
    logit = tl.sum(products, axis=1).to(tl.bfloat16)
    tl.store(logits + token * num_experts + expert, logit, mask=expert < num_experts)
    # One thread arrives for all: their logits must be there before.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + token, 1, sem="acq_rel", scope="gpu")

    # Each program writes its share of the columns; nobody here reads them.
    own = inside & (column >= part * WRITTEN) & (column < (part + 1) * WRITTEN)
    place = token * width + column
    tl.store(normed_out + place, normed, mask=own)
    tl.store(new_residual + place, total.to(tl.bfloat16), mask=own)

    if arrived == tl.num_programs(0) - 1:
        tl.store(counters + token, 0)
        every = tl.arange(0, EXPERTS)[None, :]
        # L1 may be older than what other programs wrote.
        found = tl.load(
            logits + token * num_experts + every,
            mask=every < num_experts,
            other=0.0,
            cache_modifier=".cg",
        )
        ids, weights = _choose(found, num_experts, TOP_K, SLOTS, EXPERTS)
        slot = tl.arange(0, SLOTS)[None, :]
        tl.store(ids_out + token * TOP_K + slot, ids, mask=slot < TOP_K)
        tl.store(weights_out + token * TOP_K + slot, weights, mask=slot < TOP_K)


def make_route_counter(device: torch.device | str) -> torch.Tensor:
    """Make the counters of ``route``, int32 zeros, which it leaves zero.

    Launches that may run at the same time need counters of their own. Those of one
    stream, or of one graph, run one after the other: an engine needs one set.
    """
    return torch.zeros(MAX_ROUTE_TOKENS, dtype=torch.int32, device=device)


def route(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    router_weight: torch.Tensor,
    top_k: int,
    counter: torch.Tensor,
    pdl: bool = True,
    logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add, norm and choose the experts of a few tokens, in one launch.

    Args:
        x: BF16 [M, H], unit inner stride, at most ``MAX_ROUTE_TOKENS`` rows: the
            attention's output.
        residual: BF16 [M, H], unit inner stride; None for zeros.
        norm_weight: BF16 [H], contiguous.
        eps: added to the mean of squares.
        router_weight: BF16 [E, H], contiguous.
        top_k: experts of a token.
        counter: see ``make_route_counter``.
        pdl: load weights while the previous kernel drains, and let the next one start.
        logits: where to write the rounded logits, BF16 [M, E], contiguous; allocated
            by default.

    Returns:
        The norm of x + residual, BF16 [M, H]; x + residual, BF16 [M, H]; expert ids,
        int32 [M, top_k], best first; their weights, FP32 [M, top_k], rounded to BF16.

    Raises:
        ValueError: too many tokens, or an argument has the wrong type, shape or layout.

    """
    _check_route(x, residual, norm_weight, router_weight, counter, logits)
    m, width = x.shape
    experts = router_weight.shape[0]
    _check_top_k(top_k, experts)
    normed, new_residual = x.new_empty(m, width), x.new_empty(m, width)
    ids, weights = _empty_choice(x, top_k)
    if m == 0:
        return normed, new_residual, ids, weights
    if logits is None:
        logits = x.new_empty(m, experts)
    add, early = residual is not None, can_chain(x, pdl)
    _route_constants(width, experts, top_k, add, early).launch(
        _route_kernel,
        (-(-experts // _SLICE), m),
        (
            x,
            residual,
            norm_weight,
            router_weight,
            normed,
            new_residual,
            logits,
            ids,
            weights,
            counter,
        ),
        (
            width,
            experts,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
        ),
    )
    return normed, new_residual, ids, weights


@functools.cache
def _route_constants(
    width: int, experts: int, top_k: int, add: bool, early: bool
) -> Constants:
    parts = triton.cdiv(experts, _SLICE)
    block = triton.next_power_of_2(width)
    return Constants(
        ADD=add,
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        EXPERTS=triton.next_power_of_2(experts),
        SLICE=_SLICE,
        # Whole 16-byte stores.
        WRITTEN=8 * triton.cdiv(width, 8 * parts),
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
        **chained(early),
    )


def topk_sigmoid(
    logits: torch.Tensor, top_k: int, pdl: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of any number of tokens from rounded logits.

    Args:
        logits: BF16 [M, E], unit inner stride.
        top_k: experts of a token.
        pdl: let the next kernel start while this one drains.

    Returns:
        Expert ids, int32 [M, top_k], best first, and their weights, FP32 [M, top_k],
        rounded to BF16.

    Raises:
        ValueError: an argument has the wrong type, shape or layout.

    """
    if logits.dtype != torch.bfloat16 or logits.dim() != 2:
        raise ValueError(
            f"logits must be BF16 [M, E], got {logits.dtype} {tuple(logits.shape)}"
        )
    m, experts = logits.shape
    _check_top_k(top_k, experts)
    ids, weights = _empty_choice(logits, top_k)
    if m == 0:
        return ids, weights
    if logits.stride(1) != 1 and experts > 1:
        raise ValueError("logits must have unit inner stride")
    tokens = 1 if m <= MAX_ROUTE_TOKENS else _TOKENS_OF_MANY
    _topk_constants(experts, top_k, tokens, can_chain(logits, pdl)).launch(
        _topk_kernel,
        (-(-m // tokens),),
        (logits, ids, weights),
        (m, experts, logits.stride(0)),
    )
    return ids, weights


@functools.cache
def _topk_constants(experts: int, top_k: int, tokens: int, early: bool) -> Constants:
    return Constants(
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        TOKENS=tokens,
        EXPERTS=triton.next_power_of_2(experts),
        num_warps=tokens,
        **chained(early),
    )


def _empty_choice(x: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = x.shape[0]
    ids = x.new_empty(tokens, top_k, dtype=torch.int32)
    return ids, x.new_empty(tokens, top_k, dtype=torch.float32)


def _check_top_k(top_k: int, experts: int) -> None:
    # A choice has 16 bits for an expert's index.
    if not 0 < top_k <= experts < 1 << 16:
        raise ValueError(f"cannot choose {top_k} of {experts} experts")


def _check_route(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    router_weight: torch.Tensor,
    counter: torch.Tensor,
    logits: torch.Tensor | None,
) -> None:
    if x.dim() != 2 or router_weight.dim() != 2:
        raise ValueError(
            "x must be [M, H] and router_weight [E, H], got "
            f"{tuple(x.shape)} and {tuple(router_weight.shape)}"
        )
    m, width = x.shape
    experts = router_weight.shape[0]
    if m > MAX_ROUTE_TOKENS:
        raise ValueError(f"at most {MAX_ROUTE_TOKENS} tokens fit, got {m}")
    for name, rows, shape in (
        ("x", x, (m, width)),
        ("residual", residual, (m, width)),
        ("norm_weight", norm_weight, (width,)),
        ("router_weight", router_weight, (experts, width)),
        ("logits", logits, (m, experts)),
    ):
        if rows is None:
            continue
        if rows.dtype != torch.bfloat16 or rows.shape != shape:
            got = f"{rows.dtype} {tuple(rows.shape)}"
            raise ValueError(f"{name} must be BF16 {list(shape)}, got {got}")
        if rows.stride(-1) != 1 and rows.numel():
            raise ValueError(f"{name} must have unit inner stride")
    for name, whole in (("router_weight", router_weight), ("logits", logits)):
        if whole is not None and not whole.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if counter.dtype != torch.int32 or counter.shape != (MAX_ROUTE_TOKENS,):
        raise ValueError(f"counter must be int32 [{MAX_ROUTE_TOKENS}]")
