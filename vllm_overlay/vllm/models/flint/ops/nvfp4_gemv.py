# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Linear layers for a few tokens: NVFP4 or BF16 weights, BF16 activations.

``gemv/kernel.py`` says what is computed, how exactly and how fast. This module checks
arguments, picks a schedule and launches. Nothing is allocated but the output, and all
of it may be captured in a CUDA graph once compiled (``warmup``).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .device import current_gpu
from .gemv.config import MMA_TOKENS, SCALE_ROWS, GemvConfig, GemvSpec, Layout
from .gemv.tables import (
    DEFAULT_MAX_TOKENS,
    GemmTiles,
    Shape,
    TunedShape,
    default_config,
    family,
    load_table,
    token_tiles,
)
from .gemv.variants import dequantize_variant, gemv_variant, keep_variants
from .gemv_weight import GemvWeight, check_row_major


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
    loaded = GemvWeight.row_major(weight, weight_scale, global_scale)
    return gemv_of_layer(x, loaded, silu_mul, pdl, out_dtype)


def fragment_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    silu_mul: bool = False,
    pdl: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``nvfp4_gemv`` on the bytes of quack's GEMM; see ``fragments.to_fragments``.

    Args:
        x: as in ``nvfp4_gemv``.
        weight: uint8 [N / 64, K / 64, 128, 16]; N is a multiple of 128.
        weight_scale: uint8 [N / 64, K / 64, 32, 4, 2], E4M3 without signs.
        global_scale: as in ``nvfp4_gemv``, and so are the other arguments, the result
            and the errors.
        silu_mul: as in ``nvfp4_gemv``.
        pdl: as in ``nvfp4_gemv``.
        out_dtype: as in ``nvfp4_gemv``.

    """
    loaded = GemvWeight.fragments(weight, weight_scale, global_scale)
    return gemv_of_layer(x, loaded, silu_mul, pdl, out_dtype)


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
    return gemv_of_layer(x, GemvWeight.bf16(weight), silu_mul, pdl, out_dtype)


def normed_gemv(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: GemvWeight,
    out: torch.Tensor,
    new_residual: torch.Tensor,
    pdl: bool = True,
) -> None:
    """The GEMV of the RMSNorm of ``x + residual``, in one launch.

    Args:
        x: BF16 [M, K], unit inner stride, at most as many rows as one launch takes.
        residual: like ``x``; rows may be one row repeated.
        norm_weight: BF16 [K].
        eps: added to the mean of squares.
        weight: of any layout.
        out: where to write the product, BF16 [M, N], contiguous.
        new_residual: where to write x + residual, BF16 [M, K], contiguous, in memory
            of its own.
        pdl: see ``nvfp4_gemv``.

    Raises:
        ValueError: an argument has the wrong type, shape or layout.

    """
    shape = weight.shape
    _check_x(x, shape.k)
    _check_x(residual, shape.k, "residual")
    if norm_weight.dtype != torch.bfloat16 or norm_weight.shape != (shape.k,):
        raise ValueError(f"the norm's weight must be BF16 [{shape.k}]")
    launches = _launches(
        shape.n, shape.k, False, shape.bf16, shape.layout, pdl, torch.bfloat16, eps
    )
    m = x.shape[0]
    if max(m, 1) > launches.most:
        raise ValueError(f"one launch takes at most {launches.most} tokens, got {m}")
    launches.variant(m)(
        with_aligned_rows(x),
        *weight.operands,
        out,
        with_aligned_rows(residual),
        norm_weight,
        new_residual,
    )


def dequantize_rows(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Exact BF16 [N, K] of an NVFP4 weight, without the global scale.

    Arguments and errors are those of ``nvfp4_gemv``; K is a multiple of 16.
    """
    n, k = weight.shape[0], 2 * weight.shape[1]
    check_row_major(weight, weight_scale, 16)
    out = torch.empty((n, k), dtype=torch.bfloat16, device=weight.device)
    if n:
        dequantize_variant(k, decode_form())(
            weight.view(torch.int32),
            weight_scale.view(-1).view(torch.uint8),
            out.view(torch.int32),
        )
    return out


def tuned(
    n: int,
    k: int,
    silu_mul: bool = False,
    bf16: bool = False,
    layout: Layout = "row_major",
) -> bool:
    """Whether the GEMV is the fastest choice at some M for this shape, on this GPU."""
    entry = _measured(Shape(n, k, silu_mul, bf16, layout))
    return entry is not None and entry.pick(1) is not None


def pick_nt(
    n: int,
    k: int,
    m: int,
    silu_mul: bool = False,
    bf16: bool = False,
    layout: Layout = "row_major",
) -> int | None:
    """Smallest tuned count of 8-token tiles that covers ``m`` tokens.

    None where something else is faster, and past what one launch takes.
    """
    entry = _measured(Shape(n, k, silu_mul, bf16, layout))
    return None if entry is None else entry.pick(m)


def max_tokens(
    n: int,
    k: int,
    silu_mul: bool = False,
    bf16: bool = False,
    layout: Layout = "row_major",
) -> int:
    """Up to how many tokens the GEMV, in several launches, is the fastest choice.

    Untuned shapes get a bound for NVFP4, and 0 for BF16.
    """
    entry = _measured(Shape(n, k, silu_mul, bf16, layout))
    if entry is not None:
        return entry.max_tokens
    return 0 if bf16 else DEFAULT_MAX_TOKENS[layout]


def gemm_tiles(shape: Shape) -> dict[int, GemmTiles]:
    """The partner's measured tiles; see ``TunedShape``."""
    entry = _measured(shape)
    return {} if entry is None else entry.gemm_tiles


def warmup(
    n: int, k: int, silu_mul: bool = False, pdl: bool = True, bf16: bool = False
) -> None:
    """Compiles every variant with BF16 output that this shape may pick."""
    warmup_for(Shape(n, k, silu_mul, bf16), pdl, torch.bfloat16)


def warmup_for(shape: Shape, pdl: bool, out_dtype: torch.dtype) -> None:
    """``warmup`` for a layout and an output type; nothing is launched."""
    spec = _spec(shape, pdl, out_dtype)
    for nt in token_tiles(spec, _measured(shape)):
        gemv_variant(spec, _config(spec, shape, nt))
    if shape.dequantized:
        dequantize_variant(shape.k, spec.form)


def warmup_normed(shape: Shape, eps: float, most: int, pdl: bool = True) -> int:
    """Compiles what ``normed_gemv`` may launch for up to ``most`` tokens.

    Returns:
        Up to how many of these tokens it serves; 0 where no schedule fits the shape.

    """
    spec = _spec(shape, pdl, torch.bfloat16, eps)
    served = 0
    for nt in token_tiles(spec, None):
        if served < most:
            gemv_variant(spec, _config(spec, shape, nt))
            served = min(most, MMA_TOKENS * nt)
    return served


def _check_x(x: torch.Tensor, k: int, name: str = "x") -> None:
    size = x.shape
    if x.dtype != torch.bfloat16 or len(size) != 2 or size[1] != k:
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"{name} must be BF16 [M, {k}], got {got}")
    if x.stride(1) != 1 and x.numel():
        raise ValueError(f"{name} must have unit inner stride")


def _spec(
    shape: Shape, pdl: bool, out_dtype: torch.dtype, norm_eps: float | None = None
) -> GemvSpec:
    width = shape.n // 2 if shape.silu_mul else shape.n
    return GemvSpec(
        k=shape.k,
        form="bf16" if shape.bf16 else decode_form(),
        silu_mul=shape.silu_mul,
        fp32_out=out_dtype == torch.float32,
        full_blocks=width % SCALE_ROWS == 0,
        pdl=pdl,
        layout=shape.layout,
        norm_eps=norm_eps,
    )


class _Launches:
    """The variants of one function of weights of one shape, by count of tokens.

    Attributes:
        most: how many tokens one launch takes.

    """

    def __init__(self, shape: Shape, spec: GemvSpec) -> None:
        self._shape, self._spec = shape, spec
        # Tuned tables are of plain GEMVs.
        entry = _measured(shape) if spec.norm_eps is None else None
        self._tiles = token_tiles(spec, entry)
        self.most = MMA_TOKENS * max(self._tiles, default=0)
        # By tiles of 8 tokens.
        self._variants: dict[int, Callable[..., Any]] = {}

    def variant(self, m: int) -> Callable[..., Any]:
        """The variant for at most ``most`` tokens, compiled when first asked for."""
        tiles = -(-m // MMA_TOKENS)
        found = self._variants.get(tiles)
        if found is None:
            nt = next(nt for nt in self._tiles if tiles <= nt)
            config = _config(self._spec, self._shape, nt)
            found = self._variants[tiles] = gemv_variant(self._spec, config)
        return found


# Each call of a linear layer asks; to hash a spec and a schedule costs microseconds.
@keep_variants
def _launches(
    n: int,
    k: int,
    silu_mul: bool,
    bf16: bool,
    layout: Layout,
    pdl: bool,
    out_dtype: torch.dtype,
    norm_eps: float | None = None,
) -> _Launches:
    shape = Shape(n, k, silu_mul, bf16, layout)
    return _Launches(shape, _spec(shape, pdl, out_dtype, norm_eps))


def gemv_of_layer(
    x: torch.Tensor,
    weight: GemvWeight,
    silu_mul: bool,
    pdl: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``nvfp4_gemv`` on a weight as a layer holds it, of any layout."""
    shape = weight.shape
    _check_x(x, shape.k)
    if silu_mul and shape.n % 2:
        raise ValueError(f"silu_mul needs an even number of weight rows, got {shape.n}")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype must be BF16 or FP32, got {out_dtype}")
    width = shape.n // 2 if silu_mul else shape.n
    if silu_mul and width % SCALE_ROWS:
        # Gate and up rows of one CTA must lie alike in their blocks.
        both = gemv_of_layer(x, weight, False, pdl, torch.bfloat16)
        gate, up = both.float().chunk(2, dim=1)
        return (gate * torch.sigmoid(gate) * up).to(out_dtype)
    m = x.shape[0]
    out = x.new_empty((m, width), dtype=out_dtype)
    if m == 0 or width == 0:
        return out
    x = with_aligned_rows(x)
    launches = _launches(
        shape.n, shape.k, silu_mul, shape.bf16, shape.layout, pdl, out_dtype
    )
    most = launches.most
    if m <= most:
        launches.variant(m)(x, *weight.operands, out)
        return out
    for part, result in zip(x.split(most), out.split(most), strict=True):
        launches.variant(part.shape[0])(part, *weight.operands, result)
    return out


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x where its rows allow 16-byte loads, else a copy."""
    if x.data_ptr() % 16 or (x.shape[0] > 1 and x.stride(0) % 8):
        return x.clone(memory_format=torch.contiguous_format)
    if x.stride(0) % 8:
        # The stride of a single row means nothing.
        return x.as_strided(x.shape, (x.shape[1], 1))
    return x


@functools.cache
def decode_form() -> str:
    """The one place that chooses how codes become BF16."""
    if current_gpu().capability < (10, 0):
        return "mul"
    from cutlass import CUDA_VERSION

    # The assembler of CUDA 12 does not know SM100's conversion.
    return "cvt" if CUDA_VERSION.major >= 13 else "mul"


def _measured(shape: Shape) -> TunedShape | None:
    return load_table(family(current_gpu().capability)).get(shape)


@functools.cache
def _config(spec: GemvSpec, shape: Shape, nt: int) -> GemvConfig:
    entry = _measured(shape)
    config = None if entry is None else entry.schedules.get(nt)
    if config is not None and config.why_not(spec) is None:
        return config
    return default_config(spec, shape.n, nt, current_gpu().sms)
