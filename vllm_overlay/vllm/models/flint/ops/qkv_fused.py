# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first half of an attention block for a few tokens, in two launches.

The first launch adds x to the residual stream, norms the sum and multiplies it by the
QKV weight: the GEMV of ``gemv/kernel.py`` with the prologue of ``gemv/normed.py``, in
the schedule that was tuned for the plain one. The second, ``qk_norm_rope``, norms and
rotates q and k and writes k and v to the paged cache; it starts while the first drains.

Numerics: q, k and v are rounded to BF16 between the two, once, as the output of any
linear layer is (the contract rounds a product after its global scale, and norms what
was rounded). So the answer does not depend on whether a token came through here or,
in a larger batch, through separate operators, but for the order of FP32 sums.

Bytes: the weight once (N * K * 9 / 16 for NVFP4), and little else. Floor: these over
the memory bandwidth plus two launches. It pays while a CTA's slice of x is small: past
8 tokens, norming it once in a launch of its own is cheaper.
"""

import torch

from .gemv.tables import Shape
from .gemv_weight import GemvWeight
from .nvfp4_gemv import max_tokens, normed_gemv, warmup_normed
from .qk_norm_rope import qk_norm_rope_cache

# Two tiles of 8 tokens.
MAX_M = 16
# Up to how many tokens these launches are picked. On an H200, 8 take 6.6 us and 16 take
# 11.4; the three of norm, GEMV and ``qk_norm_rope`` take 7.6 and 8.7.
_PICKED_MAX_M = 8


def flint_qkv_fused(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    qk_eps: float,
    cos_sin_cache: torch.Tensor | None,
    positions: torch.Tensor,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    launch_dependents: bool = False,
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, norm, project, norm and rotate q and k, and write the cache.

    Args:
        x: BF16 [M, K], unit inner stride: the last block's output. M <= ``MAX_M``.
        residual: BF16 [M, K], the residual stream before it; None for zeros.
        norm_weight: BF16 [K].
        eps: of the first norm.
        weight: q, k and v rows: NVFP4 (uint8 [N, K/2], ModelOpt layout), or BF16
            [N, K].
        weight_scale: 128x4-swizzled E4M3 bytes; None for a BF16 weight.
        global_scale: one FP32 value on the device; None for a BF16 weight.
        q_norm_weight: [head_dim].
        k_norm_weight: [head_dim].
        qk_eps: of the q and k norms.
        cos_sin_cache: FP32 [positions, head_dim]; None on layers without RoPE.
        positions: [M].
        k_cache: see ``qk_norm_rope_cache``.
        v_cache: see ``qk_norm_rope_cache``.
        slot_mapping: see ``qk_norm_rope_cache``.
        num_q_heads: query heads.
        num_kv_heads: key heads.
        k_scale: see ``qk_norm_rope_cache``.
        v_scale: see ``qk_norm_rope_cache``.
        launch_dependents: see ``qk_norm_rope_cache``.
        pdl: start loading weights while the previous kernel drains.

    Returns:
        q, BF16 [M, num_q_heads, head_dim], and x + residual, BF16 [M, K].

    Raises:
        ValueError: too many tokens, or an argument has the wrong type or shape.

    """
    if weight_scale is None or global_scale is None:
        loaded = GemvWeight.bf16(weight)
    else:
        loaded = GemvWeight.row_major(weight, weight_scale, global_scale)
    return qkv_of_layer(
        x,
        residual,
        norm_weight,
        eps,
        loaded,
        q_norm_weight,
        k_norm_weight,
        qk_eps,
        cos_sin_cache,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        num_q_heads,
        num_kv_heads,
        k_scale,
        v_scale,
        launch_dependents,
        pdl,
    )


def qkv_of_layer(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: GemvWeight,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    qk_eps: float,
    cos_sin_cache: torch.Tensor | None,
    positions: torch.Tensor,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    launch_dependents: bool = False,
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flint_qkv_fused`` on a weight as a layer holds it, of any layout."""
    m, k = x.shape
    if m > MAX_M:
        raise ValueError(f"at most {MAX_M} tokens fit, got {m}")
    head_dim, n = q_norm_weight.shape[0], weight.shape.n
    q = x.new_empty((m, num_q_heads, head_dim))
    # What passes between the launches shares the new residual's allocation.
    parts = x.new_empty(m * (k + n)).split((m * k, m * n))
    new_residual, qkv = parts[0].view(m, k), parts[1].view(m, n)
    if m == 0:
        return q, new_residual
    if residual is None:
        residual = x.new_zeros(1, k).expand(m, k)
    normed_gemv(
        x,
        residual,
        norm_weight,
        eps,
        weight,
        qkv,
        new_residual,
        pdl,
    )
    qk_norm_rope_cache(
        qkv,
        positions,
        q_norm_weight,
        k_norm_weight,
        qk_eps,
        cos_sin_cache,
        k_cache,
        v_cache,
        slot_mapping,
        num_q_heads,
        num_kv_heads,
        head_dim,
        launch_dependents,
        k_scale,
        v_scale,
        wait=pdl,
        out=q,
    )
    return q, new_residual


def warmup_qkv(shape: Shape, eps: float, pdl: bool = True) -> int:
    """Compiles every GEMV that a QKV weight may need.

    Returns:
        Up to how many tokens the fused QKV is the fastest choice; 0 where no schedule
        fits the shape, or something else is faster.

    """
    most = max_tokens(shape.n, shape.k, bf16=shape.bf16, layout=shape.layout)
    return warmup_normed(shape, eps, min(_PICKED_MAX_M, most), pdl)
