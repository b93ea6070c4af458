# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compilation of GEMV variants. It sees no tensor and launches nothing."""

import functools

import cutlass
import cutlass.cute as cute

from .config import FRAGMENT_BLOCK, SCALE_ROWS, GemvConfig, GemvSpec
from .dequantize import DequantizeKernel
from .kernel import GemvKernel, NormedGemvKernel

OPTIONS = "--enable-tvm-ffi --opt-level 3"


def compile_gemv(spec: GemvSpec, config: GemvConfig):
    """Compiles a variant for the current target (``CUTE_DSL_ARCH`` or the GPU).

    Returns:
        A callable (x, weight words, scale words or None, global scale or None, out),
        and for a normed x also (residual, norm weight, new residual).

    """
    fake = functools.partial(cute.runtime.make_fake_compact_tensor, assumed_align=16)
    m = cute.sym_int()
    n = cute.sym_int()
    n_out = cute.sym_int(divisibility=SCALE_ROWS if spec.full_blocks else 1)
    x = fake_rows(m, spec.k)
    words = spec.k // (2 if spec.is_bf16 else 8)
    if spec.layout == "fragments":
        words *= FRAGMENT_BLOCK
    weight = fake(cutlass.Int32, (n, words), stride_order=(1, 0))
    scales = scale = None
    if not spec.is_bf16:
        scales = fake(cutlass.Int32, (cute.sym_int(),))
        scale = cute.runtime.make_fake_compact_tensor(
            cutlass.Float32, (1,), assumed_align=4
        )
    out_type = cutlass.Float32 if spec.fp32_out else cutlass.BFloat16
    out = fake(out_type, (m, n_out), stride_order=(1, 0))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel, norm = GemvKernel, []
    if spec.norm_eps is not None:
        total = fake(cutlass.BFloat16, (m, spec.k), stride_order=(1, 0))
        kernel = NormedGemvKernel
        norm = [fake_rows(m, spec.k), fake(cutlass.BFloat16, (spec.k,)), total]
    return cute.compile(
        kernel(spec, config),
        x,
        weight,
        scales,
        scale,
        out,
        *norm,
        stream,
        options=OPTIONS,
    )


def fake_rows(m, k: int):
    """BF16 [M, K] whose rows may be strided."""
    return cute.runtime.make_fake_tensor(
        cutlass.BFloat16,
        (m, k),
        stride=(cute.sym_int64(divisibility=8), 1),
        assumed_align=16,
    )


def compile_dequantize(k: int, form: str):
    """Compiles exact dequantization for rows of ``k`` weights.

    Returns:
        A callable (weight words, scale bytes, out words).

    """
    fake = functools.partial(cute.runtime.make_fake_compact_tensor, assumed_align=16)
    n = cute.sym_int()
    weight = fake(cutlass.Int32, (n, k // 8), stride_order=(1, 0))
    scales = fake(cutlass.Uint8, (cute.sym_int(),))
    out = fake(cutlass.Int32, (n, k // 2), stride_order=(1, 0))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        DequantizeKernel(k, form), weight, scales, out, stream, options=OPTIONS
    )
