# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""RMSNorm, with and without a residual, and SiLU with product, for any rows (Triton).

Numerics: RMSNorm is FP32 throughout, the weight multiplied in FP32, with one rounding.
With a residual the norm is taken of the unrounded FP32 sum; the residual becomes that
sum, rounded. vLLM's own kernels round before the weight, or before the norm.
silu(gate) * up is FP32 and rounded once, where vLLM's kernel rounds silu(gate) first.

Bytes: each input and each output once. Floor: these over the memory bandwidth.
"""

import functools

import torch

from vllm.model_executor.layers import layernorm
from vllm.triton_utils import tl, triton

from .triton_launch import Constants

_BLOCK = 1024
_SILU_AND_MUL = Constants(BLOCK=_BLOCK)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    new_residual,
    width,
    x_stride,
    residual_stride,
    out_stride,
    new_residual_stride,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    total = total.to(tl.float32)
    if ADD:
        place = residual + row * residual_stride + column
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        place = new_residual + row * new_residual_stride + column
        tl.store(place, total.to(new_residual.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = total * scale * gain
    place = out + row * out_stride + column
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_mul_kernel(gate_up, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis.

    Args:
        x: BF16, FP16 or FP32 [..., K], unit inner stride; rows may be strided.
        weight: [K], contiguous.
        eps: added to the mean of squares.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: an argument has the wrong shape or layout.

    """
    rows = x.reshape(-1, x.shape[-1])
    _check(rows, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(rows, None, weight, eps, out.view(rows.shape), None)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fused_add_rms_norm`` into new memory: the norm, and the new residual."""
    _check_with_residual(x, residual, weight)
    whole = torch.contiguous_format
    out = torch.empty_like(x, memory_format=whole)
    new_residual = torch.empty_like(x, memory_format=whole)
    _launch_rms_norm(x, residual, weight, eps, out, new_residual)
    return out, new_residual


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: ``residual`` becomes ``x + residual``, ``x`` that sum's ``rms_norm``.

    Args:
        x: BF16, FP16 or FP32 [M, K], unit inner stride; rows may be strided.
        residual: like ``x``, in memory of its own.
        weight: [K], contiguous.
        eps: added to the mean of squares.

    Returns:
        ``x`` and ``residual``.

    Raises:
        ValueError: an argument has the wrong shape or layout.

    """
    _check_with_residual(x, residual, weight)
    _launch_rms_norm(x, residual, weight, eps, x, residual)
    return x, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map [M, 2 * I], unit inner stride, to BF16 [M, I]: silu(gate) * up."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width, dtype=torch.bfloat16)
    if out.numel():
        _SILU_AND_MUL.launch(
            _silu_and_mul_kernel,
            (tokens, -(-width // _BLOCK)),
            (gate_up, out),
            (width, gate_up.stride(0)),
        )
    return out


class RMSNorm(layernorm.RMSNorm):
    """vLLM's RMSNorm with Flint's rounding: once, and never before the norm."""

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Norm in plain PyTorch, which torch.compile fuses."""
        total = x.float() if residual is None else x.float() + residual.float()
        scale = torch.rsqrt(
            total.square().mean(-1, keepdim=True) + self.variance_epsilon
        )
        normed = (total * scale * self.weight.float()).to(x.dtype)
        return normed if residual is None else (normed, total.to(x.dtype))

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Norm on the Triton kernels; with a residual, in place."""
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        return fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 2 or (x.stride(1) != 1 and x.numel()):
        raise ValueError("x must have rows with unit inner stride")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [{x.shape[1]}]")


def _check_with_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> None:
    _check(x, weight)
    if residual.shape != x.shape or (residual.stride(1) != 1 and residual.numel()):
        raise ValueError(f"residual must be {tuple(x.shape)} with unit inner stride")


def _launch_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    new_residual: torch.Tensor | None,
) -> None:
    if x.numel() == 0:
        return
    rows, width = x.shape
    _rms_norm_constants(width, residual is not None).launch(
        _rms_norm_kernel,
        (rows,),
        (x, residual, weight, out, new_residual),
        (
            width,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            0 if new_residual is None else new_residual.stride(0),
            eps,
        ),
    )


@functools.cache
def _rms_norm_constants(width: int, add: bool) -> Constants:
    block = triton.next_power_of_2(width)
    return Constants(ADD=add, BLOCK=block, num_warps=min(8, max(1, block // 512)))
