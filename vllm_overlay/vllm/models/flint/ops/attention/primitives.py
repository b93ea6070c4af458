# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""PTX that decode attention needs beside the GEMV's (``gemv.primitives``)."""

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def exp2(x, *, loc=None, ip=None) -> Float32:
    """2^x, within 2 ulp; subnormal results are 0."""
    out = llvm.inline_asm(
        T.f32(),
        [Float32(x).ir_value(loc=loc, ip=ip)],
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return Float32(out)


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None) -> Float32:
    """Product and sum, rounded once."""
    out = llvm.inline_asm(
        T.f32(),
        [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)],
        "fma.rn.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return Float32(out)


@dsl_user_op
def pack_bf16(low, high, *, loc=None, ip=None) -> Uint32:
    """Two FP32 values, rounded to nearest, as a BF16 pair."""
    out = llvm.inline_asm(
        T.i32(),
        [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)],
        "cvt.rn.bf16x2.f32 $0, $1, $2;",
        "=r,f,f",
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return Uint32(out)


@dsl_user_op
def load_other_ctas(pointer, *, loc=None, ip=None) -> list[Float32]:
    """Four FP32 values that another CTA has written in this launch.

    ``pointer`` is global and aligned to 16 bytes. A plain load might find an old line
    in L1.
    """
    out = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        [Int64(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)],
        "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [
        Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(4)
    ]


@dsl_user_op
def arrive_at_counter(pointer, *, loc=None, ip=None) -> Int32:
    """Add 1 to a global counter; returns what it was.

    Releases what this thread has seen written, and acquires what those released that
    arrived before.
    """
    out = llvm.inline_asm(
        T.i32(),
        [Int64(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)],
        "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;",
        "=r,l,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return Int32(out)
