# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""SiLU and product for [gate | up] that a GEMM wrote.

Numerics: gate and up are BF16 (or FP32) as given; silu(gate) * up is FP32 and rounded
once, where vLLM's own kernel rounds silu(gate) first. Bytes: three times the output.
Floor: these over the memory bandwidth.
"""

import torch

from vllm.triton_utils import tl, triton

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map [M, 2 * I], unit inner stride, to BF16 [M, I]: silu(gate) * up."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, width), dtype=torch.bfloat16)
    if out.numel():
        grid = (tokens, triton.cdiv(width, _BLOCK))
        _silu_and_mul_kernel[grid](gate_up, out, width, gate_up.stride(0), BLOCK=_BLOCK)
    return out
