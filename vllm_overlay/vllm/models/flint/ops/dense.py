# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Dense linears for any number of tokens: the GEMV, or its partner on the same bytes.

The partner of an NVFP4 weight in ModelOpt's layout is FlashInfer's W4A16 GEMM where its
layout is the one that the GEMV reads (SM100), else exact dequantization into a
temporary BF16 weight and cuBLAS, which gives its FP32 sums: the global scale multiplies
them before the only rounding. It stays on the device, where a reload changes it.
``fragments`` has the layout and the partner that SM90 takes where quack is installed.

The temporary comes from the caching allocator at every call, which is right on any
stream (vLLM may run shared experts beside the routed ones) and is seen when vLLM
measures peak memory; a buffer shared by all layers would be neither.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from vllm.utils.torch_utils import direct_register_custom_op

from .gemv.config import SCALE_ROWS
from .gemv.variants import report_compilation
from .norm import silu_and_mul
from .nvfp4_gemv import bf16_gemv, dequantize_rows, nvfp4_gemv

# How much of a weight is dequantized at a time: all of it, but for a head.
_TEMPORARY_BYTES = 64 << 20
# How many sums of such a part are kept at a time.
_SUM_BYTES = 64 << 20


def nvfp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    silu_mul: bool,
    fp32_out: bool,
    pdl: bool,
    max_gemv_tokens: int,
    partner_scale: torch.Tensor | None,
) -> torch.Tensor:
    """``x @ dequantized(weight).T * global_scale``, optionally with SiLU and product.

    Args:
        x: BF16 [M, K], unit inner stride.
        weight: uint8 [N, K/2], ModelOpt layout.
        weight_scale: E4M3 bytes in the 128x4 swizzle.
        global_scale: one FP32 value on the device.
        silu_mul: rows are [gate | up]; see ``nvfp4_gemv``.
        fp32_out: FP32 output, for logits.
        pdl: let the GEMV load weights while the previous kernel drains.
        max_gemv_tokens: the GEMV serves up to so many tokens.
        partner_scale: the scales as FlashInfer's GEMM wants to see them, or None
            where that GEMM cannot run.

    Returns:
        [M, N], or [M, N/2] with ``silu_mul``.

    """
    report_compilation()
    if x.shape[0] <= max_gemv_tokens:
        dtype = torch.float32 if fp32_out else torch.bfloat16
        return nvfp4_gemv(
            x, weight, weight_scale, global_scale, silu_mul, pdl, out_dtype=dtype
        )
    if partner_scale is None or fp32_out:
        out = _dequantized_gemm(x, weight, weight_scale, global_scale, fp32_out)
    else:
        out = torch.ops.vllm.flashinfer_mm_bf16_fp4(
            x.contiguous(), weight, partner_scale, global_scale
        )
    return silu_and_mul(out) if silu_mul else out


def bf16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    silu_mul: bool,
    pdl: bool,
    max_gemv_tokens: int,
) -> torch.Tensor:
    """``x @ weight.T`` with a BF16 weight; see ``nvfp4_linear``."""
    report_compilation()
    if x.shape[0] <= max_gemv_tokens:
        return bf16_gemv(x, weight, silu_mul, pdl)
    out = F.linear(x, weight)
    return silu_and_mul(out) if silu_mul else out


def _dequantized_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    fp32_out: bool,
) -> torch.Tensor:
    n, k = weight.shape[0], 2 * weight.shape[1]
    m = x.shape[0]
    out = x.new_empty((m, n), dtype=torch.float32 if fp32_out else x.dtype)
    step = max(1, _TEMPORARY_BYTES // (2 * k * SCALE_ROWS)) * SCALE_ROWS
    tokens = max(1, _SUM_BYTES // (4 * min(step, n)))
    blocks = weight_scale.view(-1).view(torch.uint8).view(-(-n // SCALE_ROWS), -1)
    with fp32_split_k():
        for start in range(0, n, step):
            rows = slice(start, start + step)
            scales = blocks[start // SCALE_ROWS : -(-(start + step) // SCALE_ROWS)]
            dense = dequantize_rows(weight[rows], scales.reshape(-1)).t()
            parts = zip(x.split(tokens), out[:, rows].split(tokens), strict=True)
            for part, result in parts:
                sums = torch.mm(part, dense, out_dtype=torch.float32)
                torch.mul(sums, global_scale, out=result)
    return out


@contextmanager
def fp32_split_k() -> Iterator[None]:
    """Keep cuBLAS from adding the parts of a split K in BF16."""
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = allowed


def _nvfp4_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    silu_mul: bool,
    fp32_out: bool,
    pdl: bool,
    max_gemv_tokens: int,
    partner_scale: torch.Tensor | None,
) -> torch.Tensor:
    width = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    dtype = torch.float32 if fp32_out else torch.bfloat16
    return x.new_empty((x.shape[0], width), dtype=dtype)


def _bf16_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    silu_mul: bool,
    pdl: bool,
    max_gemv_tokens: int,
) -> torch.Tensor:
    width = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    return x.new_empty((x.shape[0], width))


# Opaque to torch.compile: what they do depends on how many tokens there are.
direct_register_custom_op(
    "flint_nvfp4_linear", nvfp4_linear, fake_impl=_nvfp4_linear_fake
)
direct_register_custom_op("flint_bf16_linear", bf16_linear, fake_impl=_bf16_linear_fake)
