# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compilation of decode-attention variants. It sees no tensor and launches nothing."""

import functools

import cutlass
import cutlass.cute as cute

from .config import GROUP, HEAD_DIM, RECORD, DecodeConfig, DecodeSpec
from .kernel import DecodeKernel

_OPTIONS = "--enable-tvm-ffi --opt-level 3"


def compile_decode(spec: DecodeSpec, config: DecodeConfig):
    """Compile a variant for the current target (``CUTE_DSL_ARCH`` or the GPU).

    Returns:
        A callable (q, kv cache, block tables, lengths, sinks, out, records, counters,
        k scale or None, v scale or None, window, split target, scale).

    """
    compact = functools.partial(cute.runtime.make_fake_compact_tensor, assumed_align=4)
    batch, heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
    rows = [
        cute.runtime.make_fake_tensor(
            cutlass.BFloat16,
            (batch, heads, HEAD_DIM),
            stride=(cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1),
            assumed_align=16,
        )
        for _ in ("q", "out")
    ]
    aligned = functools.partial(cute.sym_int64, divisibility=spec.lane_dims)
    kv = cute.runtime.make_fake_tensor(
        cutlass.Uint8 if spec.fp8 else cutlass.BFloat16,
        (cute.sym_int(), kv_heads, cute.sym_int(), 2 * HEAD_DIM),
        stride=(aligned(), aligned(), aligned(), 1),
        assumed_align=16,
    )
    tables = cute.runtime.make_fake_tensor(
        cutlass.Int32,
        (batch, cute.sym_int()),
        stride=(cute.sym_int64(), 1),
        assumed_align=4,
    )
    records = cute.runtime.make_fake_compact_tensor(
        cutlass.Float32,
        (cute.sym_int(), kv_heads, GROUP, RECORD),
        stride_order=(3, 2, 1, 0),
        assumed_align=16,
    )
    scales = [compact(cutlass.Float32, (1,)) if spec.fp8 else None for _ in ("k", "v")]
    return cute.compile(
        DecodeKernel(spec, config),
        rows[0],
        kv,
        tables,
        compact(cutlass.Int32, (batch,)),
        compact(cutlass.Float32, (heads,)),
        rows[1],
        records,
        compact(cutlass.Int32, (cute.sym_int(),)),
        *scales,
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=_OPTIONS,
    )
