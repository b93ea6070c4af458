# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""q/k norm, RoPE and the write to the paged KV cache, for any tokens (Triton).

Numerics: the norm of a head, its weight and the rotation are FP32, with an FP32 cos/sin
table and one rounding. v is copied. An FP8 cache takes the rounded k and v over their
per-tensor scales, saturated, exactly as vLLM's own ``reshape_and_cache`` writes them.

Bytes: qkv once, q once, k and v once. Floor: these over the memory bandwidth; for a
few tokens the launch and one chain of dependent loads, about 2 us. Few tokens take one
warp a head, so that loads of all heads overlap; many take several heads a program.
"""

import functools

import torch

from vllm.triton_utils import tl, triton

from .triton_launch import Constants

# Up to how many tokens each head has a program of its own.
_FEW_TOKENS = 64
_HEADS_OF_MANY = 8
_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _to_cache(x, scale, cache, FP8: tl.constexpr):
    """What the cache holds for FP32 values that BF16 holds too."""
    x = x.to(tl.bfloat16)
    if FP8:
        x = tl.math.div_rn(x.to(tl.float32), tl.load(scale))
        x = tl.clamp(x, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.dtype.element_ty)


@triton.jit
def _qk_norm_rope_kernel(
    qkv,
    positions,
    q_weight,
    k_weight,
    cos_sin,
    q_out,
    k_cache,
    v_cache,
    slots,
    k_scale,
    v_scale,
    num_q,
    num_kv,
    half,
    eps,
    page_size,
    qkv_stride,
    cos_sin_stride,
    q_stride,
    k_page,
    k_slot,
    k_head,
    v_page,
    v_slot,
    v_head,
    ROPE: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT: tl.constexpr,
    LAUNCH_DEPENDENTS: tl.constexpr,
):
    if LAUNCH_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = channel < half
    is_q, is_k = head < num_q, (head >= num_q) & (head < num_q + num_kv)
    is_v = (head >= num_q + num_kv) & (head < num_q + 2 * num_kv)
    normed = (is_q | is_k) & inside
    # Weights do not depend on the kernel before.
    gain = tl.where(is_q, q_weight + channel, k_weight + channel)
    gain_1 = tl.load(gain, mask=normed, other=0.0).to(tl.float32)
    gain_2 = tl.load(gain + half, mask=normed, other=0.0).to(tl.float32)
    if WAIT:
        tl.extra.cuda.gdc_wait()

    source = qkv + token * qkv_stride + head * (2 * half) + channel
    loaded = (is_q | is_k | is_v) & inside
    x_1 = tl.load(source, mask=loaded, other=0.0).to(tl.float32)
    x_2 = tl.load(source + half, mask=loaded, other=0.0).to(tl.float32)
    slot = tl.load(slots + token).to(tl.int64)
    squares = tl.sum(x_1 * x_1 + x_2 * x_2, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / (2 * half) + eps)
    y_1, y_2 = x_1 * scale * gain_1, x_2 * scale * gain_2
    if ROPE:
        row = cos_sin + tl.load(positions + token) * cos_sin_stride + channel
        cos = tl.load(row, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(row + half, mask=inside, other=0.0).to(tl.float32)
        y_1, y_2 = y_1 * cos - y_2 * sin, y_2 * cos + y_1 * sin

    place = q_out + token * q_stride + head * (2 * half) + channel
    tl.store(place, y_1.to(q_out.dtype.element_ty), mask=is_q & inside)
    tl.store(place + half, y_2.to(q_out.dtype.element_ty), mask=is_q & inside)
    page, offset = slot // page_size, slot % page_size
    written = inside & (slot >= 0)
    place = k_cache + page * k_page + offset * k_slot
    place += (head - num_q) * k_head + channel
    to_k = is_k & written
    tl.store(place, _to_cache(y_1, k_scale, k_cache, FP8), mask=to_k)
    tl.store(place + half, _to_cache(y_2, k_scale, k_cache, FP8), mask=to_k)
    place = v_cache + page * v_page + offset * v_slot
    place += (head - num_q - num_kv) * v_head + channel
    to_v = is_v & written
    tl.store(place, _to_cache(x_1, v_scale, v_cache, FP8), mask=to_v)
    tl.store(place + half, _to_cache(x_2, v_scale, v_cache, FP8), mask=to_v)


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    launch_dependents: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    wait: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k of each token, and put k and v in the cache.

    Args:
        qkv: BF16 [T, (num_q_heads + 2 * num_kv_heads) * head_dim], unit inner stride:
            the rounded output of the QKV projection.
        positions: int32 or int64 [T].
        q_weight: [head_dim], contiguous.
        k_weight: [head_dim], contiguous.
        eps: added to the mean of squares.
        cos_sin_cache: FP32 [positions, head_dim], cosines then sines; None on layers
            without RoPE.
        k_cache: view [pages, page size, num_kv_heads, head_dim] of any strides but a
            unit inner one: BF16, or FP8 E4M3 (also as uint8). None where nothing is
            cached, as in a profiling run.
        v_cache: like ``k_cache``.
        slot_mapping: int32 or int64, at least [T]: page * page size + offset, or
            negative for a token that is not cached. None with no cache.
        num_q_heads: query heads in ``qkv``.
        num_kv_heads: key heads in ``qkv``, and value heads.
        head_dim: channels of a head, even.
        launch_dependents: let the next kernel start, if it waits for this one by
            itself (programmatic dependent launch).
        k_scale: FP32, one value on the device: k over it goes to an FP8 cache.
        v_scale: likewise for v.
        wait: start while the previous kernel drains, and wait for it. That kernel
            must allow it.
        out: where to write q, contiguous; allocated by default.

    Returns:
        q, BF16 [T, num_q_heads, head_dim].

    Raises:
        ValueError: an argument has the wrong type, shape or layout.

    """
    tokens = qkv.shape[0]
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width or (tokens and qkv.stride(1) != 1):
        raise ValueError(f"qkv must be [T, {width}] with unit inner stride")
    if out is None:
        out = qkv.new_empty(tokens, num_q_heads, head_dim)
    if tokens == 0:
        return out
    fp8 = False
    if k_cache is None or v_cache is None or slot_mapping is None:
        # Nothing is stored: a slot of -1 for all, and any memory for the rest.
        k_cache = v_cache = qkv.as_strided((1, 1, num_kv_heads, head_dim), (0, 0, 0, 1))
        slot_mapping = torch.full_like(positions, -1)
    else:
        k_cache, v_cache = _typed(k_cache), _typed(v_cache)
        _check_cache(k_cache, v_cache, num_kv_heads, head_dim)
        fp8 = k_cache.dtype == torch.float8_e4m3fn
        if fp8 and (k_scale is None or v_scale is None):
            raise ValueError("an FP8 cache needs k_scale and v_scale")
        if slot_mapping.shape[0] < tokens:
            raise ValueError(f"slot_mapping must have {tokens} entries")
    if cos_sin_cache is not None and (
        cos_sin_cache.dtype != torch.float32 or cos_sin_cache.shape[1] != head_dim
    ):
        raise ValueError(f"cos_sin_cache must be FP32 [positions, {head_dim}]")
    heads = 1 if tokens <= _FEW_TOKENS else _HEADS_OF_MANY
    rope = cos_sin_cache is not None
    _constants(rope, fp8, heads, head_dim, wait, launch_dependents).launch(
        _qk_norm_rope_kernel,
        (tokens, -(-(num_q_heads + 2 * num_kv_heads) // heads)),
        (
            qkv,
            positions,
            q_weight,
            k_weight,
            cos_sin_cache,
            out,
            k_cache,
            v_cache,
            slot_mapping,
            k_scale,
            v_scale,
        ),
        (
            num_q_heads,
            num_kv_heads,
            head_dim // 2,
            eps,
            k_cache.shape[1],
            qkv.stride(0),
            0 if cos_sin_cache is None else cos_sin_cache.stride(0),
            out.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
        ),
    )
    return out


@functools.cache
def _constants(
    rope: bool, fp8: bool, heads: int, head_dim: int, wait: bool, dependents: bool
) -> Constants:
    return Constants(
        ROPE=rope,
        FP8=fp8,
        HEADS=heads,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        WAIT=wait,
        LAUNCH_DEPENDENTS=dependents,
        num_warps=1 if heads == 1 else 4,
        **({"launch_pdl": True} if wait else {}),
    )


def _typed(cache: torch.Tensor) -> torch.Tensor:
    """Give an FP8 cache, which vLLM keeps as bytes, its type."""
    return cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache


def _check_cache(
    k_cache: torch.Tensor, v_cache: torch.Tensor, num_kv_heads: int, head_dim: int
) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(f"{name} must be BF16 or FP8 E4M3, got {cache.dtype}")
        if cache.dim() != 4 or cache.shape[2:] != (num_kv_heads, head_dim):
            raise ValueError(
                f"{name} must be [pages, page size, {num_kv_heads}, {head_dim}], "
                f"got {tuple(cache.shape)}"
            )
        if cache.stride(3) != 1 and head_dim > 1:
            raise ValueError(f"{name} must have unit inner stride")
    if k_cache.dtype != v_cache.dtype or k_cache.shape[1] != v_cache.shape[1]:
        raise ValueError("k_cache and v_cache must be alike")
