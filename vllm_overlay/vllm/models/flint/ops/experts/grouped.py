# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NVFP4 experts for many tokens: two grouped GEMMs and a weighted sum.

Pairs of a token and an expert are grouped by expert, so that each weight is read and
decoded once for up to ``block_t`` of them. With few tokens an expert's pairs are few,
and the launches here (grouping, permutation, two GEMMs, sum) are what costs: then
``moe_gemv`` is the faster form. Each pair has a column of the MMA of its own, and its
sum one order, so two runs give the same bits.
"""

import functools

import torch

from vllm.triton_utils import triton

from ..gemv_weight import COLUMNS
from ..triton_launch import Constants
from .align import Groups, group_pairs
from .chain import can_chain, chained
from .grouped_config import GemmConfig, GroupedConfig, pick_config, picked_configs
from .grouped_kernel import combine_pairs, grouped_gemm, permute_rows
from .weights import FlintMoEWeights

# Widths are multiples of what shares one word of block scales, rows of their swizzle.
_WIDTHS = 64
_ROWS = 128
_COMBINE_BLOCK = 1024


def grouped_fits(weights: FlintMoEWeights) -> bool:
    """Whether ``grouped_experts`` serves these experts."""
    return (
        not weights.is_bf16
        and weights.hidden % _ROWS == 0
        and weights.intermediate % _WIDTHS == 0
    )


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    tw: torch.Tensor,
    weights: FlintMoEWeights,
    shared_out: torch.Tensor | None,
    config: GroupedConfig | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Add up each token's experts, weighted, and its shared expert's output.

    Args:
        x: BF16 [M, H], unit inner stride; rows may be strided.
        ids: int32 [M, top_k], contiguous: experts on this rank.
        tw: FP32 [M, top_k], contiguous: their weights.
        weights: NVFP4 experts that ``grouped_fits``.
        shared_out: BF16 [M, H], unit inner stride; None without a shared expert.
        config: tiles; by default those for this many rows an expert.
        pdl: launch each kernel while the one before it drains, where a GPU can.

    Returns:
        BF16 [M, H]: bf16(bf16(sum of tw * y) + shared_out).

    Raises:
        ValueError: an argument has the wrong type, shape or layout.

    """
    _check(x, ids, tw, weights, shared_out)
    tokens, top_k = ids.shape
    out = x.new_empty(tokens, weights.hidden)
    if tokens == 0:
        return out
    pairs = tokens * top_k
    if config is None:
        config = pick_config(pairs, weights.num_experts)
    groups = group_pairs(ids, config.block_t, weights.num_experts, pdl)
    permuted = permute(x, pdl)
    act = x.new_empty(pairs, weights.intermediate)
    operands = weights.w1, weights.w1_scale, weights.alpha1
    launch_gemm(permuted, operands, act, groups, top_k, config.gate_up, pdl)
    y = x.new_empty(pairs, weights.hidden)
    operands = weights.w2, weights.w2_scale, weights.alpha2
    launch_gemm(act, operands, y, groups, 1, config.down, pdl)
    shared = shared_out is not None
    _combine_constants(top_k, shared, can_chain(x, pdl)).launch(
        combine_pairs,
        (tokens, -(-weights.hidden // _COMBINE_BLOCK)),
        (y, tw, shared_out, out),
        (weights.hidden, 0 if shared_out is None else shared_out.stride(0)),
    )
    return out


@functools.cache
def _combine_constants(top_k: int, shared: bool, early: bool) -> Constants:
    return Constants(
        TOP_K=top_k,
        SHARED=shared,
        BLOCK=_COMBINE_BLOCK,
        num_warps=4,
        **chained(early),
    )


def warmup_grouped(weights: FlintMoEWeights, top_k: int, shared: bool) -> None:
    """Compile all that ``grouped_experts`` may launch for such a layer.

    Args:
        weights: experts of a layer, which must not be traced or captured now.
        top_k: experts of a token.
        shared: whether layers have a shared expert.

    """
    x = torch.zeros((1, weights.hidden), dtype=torch.bfloat16, device=weights.w1.device)
    ids = torch.zeros((1, top_k), dtype=torch.int32, device=x.device)
    for config in picked_configs():
        grouped_experts(x, ids, ids.float(), weights, x if shared else None, config)


def permute(x: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """Copy BF16 rows, unit inner stride, into the order that ``launch_gemm`` reads."""
    rows, k = x.shape
    out = x.new_empty(rows, k)
    _permute_constants(k, can_chain(x, pdl)).launch(
        permute_rows, (rows,), (x, out), (x.stride(0),)
    )
    return out


@functools.cache
def _permute_constants(k: int, early: bool) -> Constants:
    block = triton.next_power_of_2(k)
    return Constants(K=k, BLOCK=block, num_warps=4, **chained(early))


def launch_gemm(
    x: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
    groups: Groups,
    share: int,
    config: GemmConfig,
    pdl: bool = False,
) -> None:
    """Multiply grouped rows with their experts.

    Args:
        x: BF16 [pairs / share, K], contiguous and permuted.
        operands: uint8 [E, N, K / 2] or int32 [E, N, K / 8] (``pack_codes``), its block
            scales and global scales.
        out: BF16 [pairs, N]; or [pairs, N / 2], which takes silu(gate) * up, permuted.
        groups: the pairs by expert.
        share: pairs that read one row of ``x``.
        config: the other tile sizes.
        pdl: start while the kernel before drains.

    """
    weight, weight_scale, alpha = operands
    ordered = weight.dtype == torch.int32
    rows, k = weight.shape[1], weight.shape[2] * COLUMNS[weight.dtype]
    tiles = groups.tile_experts.shape[0]
    pairs, width = out.shape
    tile = groups.block_t, config
    constants = _gemm_constants(
        rows, width, k, share, ordered, *tile, x.is_cuda, can_chain(x, pdl)
    )
    constants.launch(
        grouped_gemm,
        (tiles * (rows // config.block_n),),
        (
            x,
            weight.view(torch.int64),
            weight_scale,
            alpha,
            out,
            groups.pairs,
            groups.tile_experts,
        ),
        (pairs,),
    )


@functools.cache
def _gemm_constants(
    rows: int,
    width: int,
    k: int,
    share: int,
    ordered: bool,
    block_t: int,
    config: GemmConfig,
    on_gpu: bool,
    early: bool,
) -> Constants:
    block_k = config.block_k
    while k % block_k:
        block_k //= 2
    return Constants(
        N=width,
        K=k,
        SHARE=share,
        GATED=width < rows,
        ORDERED=ordered,
        PACKED=on_gpu,
        BLOCK_N=config.block_n,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        num_warps=config.warps,
        num_stages=config.stages,
        **chained(early),
    )


def _check(
    x: torch.Tensor,
    ids: torch.Tensor,
    tw: torch.Tensor,
    weights: FlintMoEWeights,
    shared_out: torch.Tensor | None,
) -> None:
    if not grouped_fits(weights):
        raise ValueError(
            f"needs NVFP4 experts with H a multiple of {_ROWS} and I of {_WIDTHS}, "
            f"got {weights.w1.dtype}, {weights.hidden} and {weights.intermediate}"
        )
    if ids.dim() != 2 or ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError("ids must be contiguous int32 [M, top_k]")
    if tw.shape != ids.shape or tw.dtype != torch.float32 or not tw.is_contiguous():
        raise ValueError(f"tw must be contiguous FP32 {list(ids.shape)}")
    wanted = (ids.shape[0], weights.hidden)
    for name, rows in (("x", x), ("shared_out", shared_out)):
        if rows is None:
            continue
        if rows.dtype != torch.bfloat16 or rows.shape != wanted:
            raise ValueError(f"{name} must be BF16 {list(wanted)}")
        if rows.stride(1) != 1 and rows.numel():
            raise ValueError(f"{name} must have unit inner stride")
