# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""PTX instructions that CuTe DSL does not expose as pure register operations.

Helpers on 32-bit registers (``Uint32``) have no side effect: the compiler may reorder,
hoist or merge them.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm_u32(code: str, operands, loc, ip) -> Uint32:
    values = [Uint32(x).ir_value(loc=loc, ip=ip) for x in operands]
    out = llvm.inline_asm(
        T.i32(),
        values,
        code,
        "=r" + ",r" * len(values),
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return Uint32(out)


@dsl_user_op
def prmt(low, high, selector, *, loc=None, ip=None) -> Uint32:
    """Four bytes of ``high:low`` picked by the four nibbles of ``selector``."""
    return _asm_u32("prmt.b32 $0, $1, $2, $3;", (low, high, selector), loc, ip)


@dsl_user_op
def rotate_right(x, bits: int, *, loc=None, ip=None) -> Uint32:
    """``x`` with its low ``bits`` moved to the top."""
    return _asm_u32(f"shf.r.wrap.b32 $0, $1, $1, {bits};", (x,), loc, ip)


@dsl_user_op
def imul(x, factor: int, *, loc=None, ip=None) -> Uint32:
    """Low half of ``x * factor``, kept on the FMA pipe (IMAD).

    Written as a multiplication so that shifts leave the integer pipe, which is
    what bounds 4-bit decoding.
    """
    return _asm_u32(f"mul.lo.u32 $0, $1, {factor};", (x,), loc, ip)


@dsl_user_op
def mul_bf16x2(a, b, *, loc=None, ip=None) -> Uint32:
    """BF16 pair product, round to nearest; subnormals are kept."""
    return _asm_u32("mul.rn.bf16x2 $0, $1, $2;", (a, b), loc, ip)


@dsl_user_op
def mul_bf16x2_by_half(a, pair, high: bool, *, loc=None, ip=None) -> Uint32:
    """BF16 pair ``a`` times one half of ``pair`` (a free HMUL2 operand swizzle)."""
    half = "h" if high else "l"
    code = (
        "{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, $2; "
        f"mov.b32 s, {{{half}, {half}}}; mul.rn.bf16x2 $0, $1, s;}}"
    )
    return _asm_u32(code, (a, pair), loc, ip)


@dsl_user_op
def cvt_e2m1x8_to_bf16x8(x, *, loc=None, ip=None) -> tuple[Uint32, ...]:
    """Eight e2m1 codes to four BF16 pairs in hardware (SM100 and later)."""
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    code = (
        "{.reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, $4; "
        + " ".join(f"cvt.rn.bf16x2.e2m1x2 ${i}, b{i};" for i in range(4))
        + "}"
    )
    out = llvm.inline_asm(
        struct,
        [Uint32(x).ir_value(loc=loc, ip=ip)],
        code,
        "=r,=r,=r,=r,r",
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Uint32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(4)
    )


@dsl_user_op
def cvt_e4m3x2_to_bf16x2(x, *, loc=None, ip=None) -> Uint32:
    """The two low e4m3 bytes of ``x`` to a BF16 pair in hardware (SM100)."""
    code = "{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.bf16x2.e4m3x2 $0, l;}"
    return _asm_u32(code, (x,), loc, ip)


def load_streaming(source: cute.Tensor, words: int) -> cute.Tensor:
    """A read-only load of ``words`` neighbouring 32-bit words, not kept in L1."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        Uint32,
        num_bits_per_copy=32 * words,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )
    registers = cute.make_rmem_tensor((words,), Uint32)
    cute.copy(atom, source, registers)
    return registers


@dsl_user_op
def cvt_e4m3x2_to_f16x2(x, high: bool, *, loc=None, ip=None) -> Uint32:
    """Two e4m3 bytes of ``x``, its low or high half, to an FP16 pair (from SM89)."""
    half = "{_, s}" if high else "{s, _}"
    code = f"{{.reg .b16 s; mov.b32 {half}, $1; cvt.rn.f16x2.e4m3x2 $0, s;}}"
    return _asm_u32(code, (x,), loc, ip)


@dsl_user_op
def push_f32(pointer, value, barrier, rank, *, loc=None, ip=None) -> None:
    """``push_f32x4`` for one value."""
    word = Int32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip)))
    cute.arch.store_async_dsmem(pointer, word, barrier, rank, loc=loc, ip=ip)


@dsl_user_op
def push_f32x4(pointer, values, barrier, rank, *, loc=None, ip=None) -> None:
    """Stores four FP32 values in another CTA's shared memory, asynchronously.

    The store counts 16 bytes on that CTA's ``barrier``, so no fence is needed.
    """
    words = tuple(
        Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip)))
        for x in values
    )
    cute.arch.store_async_dsmem(pointer, words, barrier, rank, loc=loc, ip=ip)


@dsl_user_op
def mma_m16n8k16(a, b, c, *, loc=None, ip=None) -> list[Float32]:
    """``c + a @ b`` for one warp: BF16 operands, FP32 accumulation.

    ``a`` is four registers: (row g, row g + 8) for the first k pair, then for the
    second, with g = lane // 4. ``b`` is two: the first and second k pair of column g.
    ``c`` is four FP32 values: (row g; columns 2t, 2t + 1), then row g + 8, with
    t = lane % 4.
    """
    operands = [Uint32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    out = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        operands,
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return [
        Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(4)
    ]
