# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compilation of the expert kernels. It sees no tensor and launches nothing."""

import functools

import cutlass
import cutlass.cute as cute

from ..gemv.compile import OPTIONS, fake_rows
from ..gemv.config import FRAGMENT_BLOCK, SCALE_ROWS, GemvSpec
from .down import DownKernel
from .gate_up import GateUpKernel
from .spec import DownConfig, DownSpec, GateUpConfig, GateUpSpec

_fake = functools.partial(cute.runtime.make_fake_compact_tensor, assumed_align=16)


def compile_gate_up(spec: GateUpSpec, config: GateUpConfig):
    """Compiles a variant for the current target (``CUTE_DSL_ARCH`` or the GPU).

    Returns:
        A callable with the arguments of ``GateUpKernel.__call__``, but the stream.

    """
    m, pairs = cute.sym_int(), cute.sym_int()
    act = _fake(cutlass.BFloat16, (pairs, spec.width), stride_order=(1, 0))
    shared_act = None
    if spec.shared is not None:
        width = (m, spec.shared_width)
        shared_act = _fake(cutlass.BFloat16, width, stride_order=(1, 0))
    return cute.compile(
        GateUpKernel(spec, config),
        fake_rows(m, spec.routed.k),
        _small(cutlass.Int32, pairs),
        *_experts(spec.routed, spec.width),
        act,
        *_shared(spec.shared, spec.shared_width),
        shared_act,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=OPTIONS,
    )


def compile_down(spec: DownSpec, config: DownConfig):
    """Compiles a variant for the current target (``CUTE_DSL_ARCH`` or the GPU).

    Returns:
        A callable with the arguments of ``DownKernel.__call__``, but the stream.

    """
    m, pairs = cute.sym_int(), cute.sym_int()
    act = _fake(cutlass.BFloat16, (pairs, spec.routed.k), stride_order=(1, 0))
    shared_act = None
    if spec.shared is not None:
        shape = (m, spec.shared.k)
        shared_act = _fake(cutlass.BFloat16, shape, stride_order=(1, 0))
    return cute.compile(
        DownKernel(spec, config),
        act,
        _small(cutlass.Int32, pairs),
        _small(cutlass.Float32, pairs),
        *_experts(spec.routed, spec.width),
        shared_act,
        *_shared(spec.shared, spec.width),
        _fake(cutlass.BFloat16, (m, spec.width), stride_order=(1, 0)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=OPTIONS,
    )


def _small(dtype, size):
    return cute.runtime.make_fake_compact_tensor(dtype, (size,), assumed_align=4)


def _words(spec: GemvSpec) -> int:
    """32-bit words of a weight row."""
    return spec.k // (2 if spec.is_bf16 else 8)


def _scale_words(spec: GemvSpec, rows: int) -> int:
    return -(-rows // SCALE_ROWS) * SCALE_ROWS * -(-spec.k // 64)


def _experts(spec: GemvSpec, width: int):
    """Weights, scales and global scales of all experts."""
    experts, rows = cute.sym_int(), spec.parts * width
    own = (experts, rows, _words(spec))
    weight = _fake(cutlass.Int32, own, stride_order=(2, 1, 0))
    if spec.is_bf16:
        return weight, None, None
    words = (experts, _scale_words(spec, rows))
    scales = _fake(cutlass.Int32, words, stride_order=(1, 0))
    return weight, scales, _small(cutlass.Float32, experts)


def _shared(spec: GemvSpec | None, width: int):
    """The shared expert's weight, scales and global scale."""
    if spec is None:
        return None, None, None
    rows = spec.parts * width
    group = FRAGMENT_BLOCK if spec.layout == "fragments" else 1
    own = (rows // group, group * _words(spec))
    weight = _fake(cutlass.Int32, own, stride_order=(1, 0))
    if spec.is_bf16:
        return weight, None, None
    scales = _fake(cutlass.Int32, (_scale_words(spec, rows),))
    return weight, scales, _small(cutlass.Float32, 1)
