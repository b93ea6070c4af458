# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Linear layers for a few tokens: NVFP4 or BF16 weights, BF16 activations.

``gemv/kernel.py`` says what is computed, how exactly and how fast. This module checks
arguments, picks a schedule and launches. Nothing is allocated but the output, and all
of it may be captured in a CUDA graph once compiled (``warmup``).
"""

import functools
from typing import TypeAlias

import torch

from vllm.platforms import current_platform

from .gemv.config import MMA_TOKENS, SCALE_ROWS, GemvConfig, GemvSpec
from .gemv.tables import (
    DEFAULT_MAX_TOKENS,
    TOKEN_TILES,
    Shape,
    TunedShape,
    default_config,
    family,
    load_table,
)
from .gemv.variants import dequantize_variant, gemv_variant

MAX_TOKENS_PER_LAUNCH = MMA_TOKENS * TOKEN_TILES[-1]

_Operands: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def nvfp4_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    silu_mul: bool = False,
    pdl: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``(x @ dequantized(weight).T) * global_scale``.

    Args:
        x: BF16 [M, K], unit inner stride; rows may be strided.
        weight: uint8 [N, K/2], ModelOpt layout: two consecutive codes a byte, low
            nibble first. K is a multiple of 32.
        weight_scale: E4M3 bytes of [N, K/16] in the 128x4 swizzle, padded to
            multiples of 128 and 4.
        global_scale: one FP32 value on the device.
        silu_mul: rows are [gate | up]; the output is silu(gate) * up, where gate and
            up are rounded to BF16 first.
        pdl: start loading weights while the previous kernel drains.
        out_dtype: torch.bfloat16, or torch.float32 for logits.

    Returns:
        [M, N], or [M, N/2] with ``silu_mul``.

    Raises:
        ValueError: an argument has the wrong type, shape or layout.

    """
    n, k = weight.shape[0], 2 * weight.shape[1]
    _check_weight(weight, weight_scale, n, k, 32)
    _check_x(x, n, k, silu_mul)
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1:
        raise ValueError("global_scale must be one FP32 value")
    operands = (
        weight.view(torch.int32),
        weight_scale.view(-1).view(torch.int32),
        global_scale.view(1),
    )
    return _run(x, operands, n, silu_mul, pdl, out_dtype, bf16=False)


def bf16_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    silu_mul: bool = False,
    pdl: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``x @ weight.T`` with a row-major BF16 [N, K] weight, K a multiple of 8.

    Other arguments, result and errors are those of ``nvfp4_gemv``.
    """
    n, k = weight.shape
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        raise ValueError("weight must be contiguous BF16 [N, K]")
    if k == 0 or k % 8:
        raise ValueError(f"K must be a positive multiple of 8, got {k}")
    _check_x(x, n, k, silu_mul)
    operands = (weight.view(torch.int32), None, None)
    return _run(x, operands, n, silu_mul, pdl, out_dtype, bf16=True)


def dequantize_rows(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Exact BF16 [N, K] of an NVFP4 weight, without the global scale.

    Arguments and errors are those of ``nvfp4_gemv``; K is a multiple of 16.
    """
    n, k = weight.shape[0], 2 * weight.shape[1]
    _check_weight(weight, weight_scale, n, k, 16)
    out = torch.empty((n, k), dtype=torch.bfloat16, device=weight.device)
    if n:
        dequantize_variant(k, _decode_form())(
            weight.view(torch.int32),
            weight_scale.view(-1).view(torch.uint8),
            out.view(torch.int32),
        )
    return out


def tuned(n: int, k: int, silu_mul: bool = False, bf16: bool = False) -> bool:
    """Whether the GEMV is the fastest choice at some M for this shape, on this GPU."""
    entry = _measured(Shape(n, k, silu_mul, bf16))
    return entry is not None and entry.pick(1) is not None


def pick_nt(
    n: int, k: int, m: int, silu_mul: bool = False, bf16: bool = False
) -> int | None:
    """Smallest tuned count of 8-token tiles that covers ``m`` tokens.

    None where something else is faster, and past what one launch takes.
    """
    entry = _measured(Shape(n, k, silu_mul, bf16))
    return None if entry is None else entry.pick(m)


def max_tokens(n: int, k: int, silu_mul: bool = False, bf16: bool = False) -> int:
    """Up to how many tokens the GEMV, in several launches, is the fastest choice.

    Untuned shapes get a bound for NVFP4, where the alternative on the same bytes is
    far slower, and 0 for BF16.
    """
    entry = _measured(Shape(n, k, silu_mul, bf16))
    if entry is not None:
        return entry.max_tokens
    return 0 if bf16 else DEFAULT_MAX_TOKENS


def warmup(
    n: int, k: int, silu_mul: bool = False, pdl: bool = True, bf16: bool = False
) -> None:
    """Compiles every variant with BF16 output that this shape may pick."""
    warmup_for(n, k, silu_mul, pdl, bf16, torch.bfloat16)


def warmup_for(
    n: int, k: int, silu_mul: bool, pdl: bool, bf16: bool, out_dtype: torch.dtype
) -> None:
    """``warmup`` for an output type; nothing is launched."""
    spec = _spec(n, k, silu_mul, pdl, bf16, out_dtype)
    for nt in TOKEN_TILES:
        gemv_variant(spec, _config(spec, n, nt))
    if not bf16:
        dequantize_variant(k, spec.form)


def _check_weight(
    weight: torch.Tensor, weight_scale: torch.Tensor, n: int, k: int, k_multiple: int
) -> None:
    if weight.dtype != torch.uint8 or not weight.is_contiguous():
        raise ValueError("weight must be contiguous uint8 [N, K/2]")
    if k == 0 or k % k_multiple:
        raise ValueError(f"K must be a positive multiple of {k_multiple}, got {k}")
    scale_bytes = weight_scale.numel() * weight_scale.element_size()
    padded = -(-n // SCALE_ROWS) * SCALE_ROWS * -(-k // 64) * 4
    if scale_bytes != padded or not weight_scale.is_contiguous():
        raise ValueError(
            f"weight_scale must be the {padded} swizzled E4M3 bytes of a {n} x {k} "
            f"weight, got {scale_bytes} bytes"
        )


def _check_x(x: torch.Tensor, n: int, k: int, silu_mul: bool) -> None:
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x must be BF16 [M, {k}], got {x.dtype} {tuple(x.shape)}")
    if x.stride(1) != 1 and x.numel():
        raise ValueError("x must have unit inner stride")
    if silu_mul and n % 2:
        raise ValueError(f"silu_mul needs an even number of weight rows, got {n}")


def _spec(
    n: int, k: int, silu_mul: bool, pdl: bool, bf16: bool, out_dtype: torch.dtype
) -> GemvSpec:
    width = n // 2 if silu_mul else n
    return GemvSpec(
        k=k,
        form="bf16" if bf16 else _decode_form(),
        silu_mul=silu_mul,
        fp32_out=out_dtype == torch.float32,
        full_blocks=width % SCALE_ROWS == 0,
        pdl=pdl,
    )


def _run(
    x: torch.Tensor,
    operands: _Operands,
    n: int,
    silu_mul: bool,
    pdl: bool,
    out_dtype: torch.dtype,
    bf16: bool,
) -> torch.Tensor:
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype must be BF16 or FP32, got {out_dtype}")
    m, k = x.shape
    if silu_mul and n // 2 % SCALE_ROWS:
        # Gate and up rows of one CTA must lie alike in their scale blocks.
        both = _run(x, operands, n, False, pdl, torch.bfloat16, bf16).float()
        gate, up = both.chunk(2, dim=1)
        return (gate * torch.sigmoid(gate) * up).to(out_dtype)
    out = x.new_empty((m, n // 2 if silu_mul else n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    x = _with_aligned_rows(x)
    spec = _spec(n, k, silu_mul, pdl, bf16, out_dtype)
    for start in range(0, m, MAX_TOKENS_PER_LAUNCH):
        rows = slice(start, start + MAX_TOKENS_PER_LAUNCH)
        part, result = (x, out) if m <= MAX_TOKENS_PER_LAUNCH else (x[rows], out[rows])
        nt = next(t for t in TOKEN_TILES if part.shape[0] <= MMA_TOKENS * t)
        gemv_variant(spec, _config(spec, n, nt))(part, *operands, result)
    return out


def _with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x where its rows allow 16-byte loads, else a copy."""
    if x.data_ptr() % 16 or (x.shape[0] > 1 and x.stride(0) % 8):
        return x.clone(memory_format=torch.contiguous_format)
    if x.stride(0) % 8:
        # The stride of a single row means nothing.
        return x.as_strided(x.shape, (x.shape[1], 1))
    return x


@functools.cache
def _device() -> tuple[tuple[int, int], int]:
    """Compute capability and SM count of the current GPU."""
    capability = current_platform.get_device_capability()
    if capability is None:
        raise RuntimeError("Flint's GEMV needs a CUDA GPU, and there is none")
    return (capability.major, capability.minor), current_platform.num_compute_units()


@functools.cache
def _decode_form() -> str:
    """The one place that chooses how codes become BF16."""
    if _device()[0] < (10, 0):
        return "mul"
    from cutlass import CUDA_VERSION

    # The assembler of CUDA 12 does not know SM100's conversion.
    return "cvt" if CUDA_VERSION.major >= 13 else "mul"


def _measured(shape: Shape) -> TunedShape | None:
    return load_table(family(_device()[0])).get(shape)


@functools.cache
def _config(spec: GemvSpec, n: int, nt: int) -> GemvConfig:
    entry = _measured(Shape(n, spec.k, spec.silu_mul, spec.is_bf16))
    config = None if entry is None else entry.schedules.get(nt)
    if config is not None and config.why_not(spec) is None:
        return config
    return default_config(spec, n, nt, _device()[1])
