# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Grouped GEMM of BF16 rows with NVFP4 experts, for many tokens (Triton).

Numerics: a weight becomes BF16 exactly, as e2m1 * e4m3; products are summed in FP32;
the global scale multiplies the sum. Gate and up stay FP32 until their product.

Bytes: 9/16 for each weight of an expert that has tokens, and the rows of x and out.
Floor: these over the memory bandwidth, up to about 30 rows an expert; beyond it the
tensor cores'.

A weight is the MMA's A operand, from registers. One 64-bit word holds the 16 codes
that share a scale, and is all that a thread needs of them: half word h of the word
that thread c of four holds gives the codes i and i + 4 as one register, for the MMA
step i. So step i of 64 columns multiplies the columns 16 * c + 8 * h + 4 * half + i,
and both x and the output of the first GEMM lie in that order (``permute_rows``).

Codes are decoded as ``gemv/decode.py`` describes: magnitude bits at 8..6 and the sign
at 15 of a BF16 are the value times 2^-126; times scale * 2^119 that leaves 2^-7, which
goes into the global scale.
"""

from vllm.triton_utils import tl, triton

from ..gemv.packing import LAST_BITS, LAST_FACTOR, ROTATIONS
from .chain import chain

# In both halves of a word: what a code becomes (0x81C081C0), and where codes lie.
_CODE_BITS = tl.constexpr(-0x7E3F7E40)
_EVEN_CODE = tl.constexpr(0x000F000F)
_ODD_CODE = tl.constexpr(0x00F000F0)
_FIRST_TURN, _SECOND_TURN = (tl.constexpr(turn) for turn in ROTATIONS)
_LAST_BITS, _LAST_FACTOR = tl.constexpr(LAST_BITS), tl.constexpr(LAST_FACTOR)
_SIGN = tl.constexpr(-0x80000000)
_UPPER = tl.constexpr(-0x10000)
_TWO_112 = tl.constexpr(2.0**112)
_TWO_127 = tl.constexpr(2.0**127)


@triton.jit
def _half(pair, HIGH: tl.constexpr):
    """One BF16 of each pair."""
    if HIGH:
        pair = pair >> 16
    return pair.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _as_fp32(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scale_pairs(byte):
    """E4M3 bytes to pairs, both halves scale * 2^119."""
    word = byte.to(tl.int32)
    bits = ((word << 20) & 0x07F00000) | ((word << 24) & _SIGN)
    # Two steps, since 2^239 is no FP32; the first makes subnormals normal.
    wide = _as_fp32(bits) * _TWO_127 * _TWO_112
    pair = wide.to(tl.int32, bitcast=True)
    return pair | ((pair >> 16) & 0xFFFF)


@triton.jit
def _rotate_right(word, BITS: tl.constexpr):
    bits = word.to(tl.uint32, bitcast=True)
    return ((bits >> BITS) | (bits << (32 - BITS))).to(tl.int32, bitcast=True)


@triton.jit
def _code_pairs(word, STEP: tl.constexpr, ORDERED: tl.constexpr):
    """Codes STEP and STEP + 4 of each word as a pair, times 2^-126."""
    if ORDERED:
        if STEP == 3:
            return ((word & _LAST_BITS) * _LAST_FACTOR) & _CODE_BITS
        if STEP > 0:
            word = _rotate_right(word, _FIRST_TURN if STEP == 1 else _SECOND_TURN)
        return word & _CODE_BITS
    if STEP >= 2:
        word = word >> 8
    if STEP % 2 == 0:
        return ((word & _EVEN_CODE) * ((1 << 12) + (1 << 6))) & _CODE_BITS
    return ((word & _ODD_CODE) * ((1 << 8) + (1 << 2))) & _CODE_BITS


@triton.jit
def _multiply_pairs(a, b, PACKED: tl.constexpr):
    """Products of pairs. ``PACKED``: one instruction for both, on SM80 and later."""
    if PACKED:
        # With -0 added, which changes nothing: SM80 has no multiplication of pairs.
        return tl.inline_asm_elementwise(
            "{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z;}",
            "=r,r,r",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    # A BF16 is the upper half of an FP32, and the products are exact.
    low = _as_fp32(a << 16) * _as_fp32(b << 16)
    high = _as_fp32(a & _UPPER) * _as_fp32(b & _UPPER)
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | high


@triton.jit
def _step(
    words,
    scales,
    STEP: tl.constexpr,
    ORDERED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Pairs of one MMA step, from both halves of [R, B] words: [R, B, h]."""
    low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    return tl.join(
        _multiply_pairs(_code_pairs(low, STEP, ORDERED), scales, PACKED),
        _multiply_pairs(_code_pairs(high, STEP, ORDERED), scales, PACKED),
    )


@triton.jit
def _decode(words, scales, ORDERED: tl.constexpr, PACKED: tl.constexpr):
    """[R, B] words and scale pairs to BF16 [R, 16 * B], in the order of the MMA."""
    R: tl.constexpr = words.shape[0]
    B: tl.constexpr = words.shape[1]
    first = _step(words, scales, 0, ORDERED, PACKED)
    third = _step(words, scales, 2, ORDERED, PACKED)
    second = _step(words, scales, 1, ORDERED, PACKED)
    fourth = _step(words, scales, 3, ORDERED, PACKED)
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    halves = tl.join(_half(pairs, 0), _half(pairs, 1))
    # From (B / 4, c, h, i // 2, i % 2, half) to (B / 4, i // 2, i % 2, h, c, half).
    split = halves.reshape(R, B // 4, 4, 2, 2, 2, 2).permute(0, 1, 4, 5, 3, 2, 6)
    return split.reshape(R, 16 * B)


@triton.jit
def _column(place):
    """Which column lies at a place of a permuted row."""
    i, h, c, half = place % 64 // 16, place % 16 // 8, place % 8 // 2, place % 2
    return place // 64 * 64 + 16 * c + 8 * h + 4 * half + i


@triton.jit
def permute_rows(
    x, out, stride, K: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies one row of x into the order in which codes are decoded."""
    chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + column, mask=column < K)
    value = value.reshape(BLOCK // 64, 4, 2, 2, 4).permute(0, 4, 2, 1, 3)
    tl.store(out + row * K + column, value.reshape(BLOCK), mask=column < K)


# Of num_pairs every value would compile anew where it is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_pairs"])
def grouped_gemm(
    x,
    weight,
    weight_scale,
    alpha,
    out,
    pairs,
    tile_experts,
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    GATED: tl.constexpr,
    ORDERED: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of BLOCK_N weight rows and BLOCK_T pairs of one expert.

    Args:
        x: BF16 [num_pairs / SHARE, K], permuted.
        weight: int64 [E, rows, K / 16]: N rows, or 2 * N where ``GATED``.
        weight_scale: uint8 [E, rows * K / 16], 128x4-swizzled.
        alpha: FP32 [E].
        out: BF16 [num_pairs, N]: the products, or silu(gate) * up, permuted.
        pairs: int32, pairs by expert; num_pairs where a tile is padded.
        tile_experts: int32, the expert of each tile of BLOCK_T; -1 for none.
        num_pairs: tokens times experts a token.
        N: width of ``out``, a multiple of BLOCK_N, of half of it where ``GATED``.
        K: width of ``x``, a multiple of BLOCK_K.
        SHARE: how many pairs read one row of ``x``.
        GATED: rows are [gate | up].
        ORDERED: the bits of codes are in the order of ``pack_codes``.
        PACKED: see ``_multiply_pairs``.
        PDL: see ``chain``.
        BLOCK_N: weight rows of a tile, 64 or 128.
        BLOCK_T: pairs of a tile.
        BLOCK_K: columns of a step, at least 64.

    """
    chain(PDL)
    ROWS: tl.constexpr = 2 * N if GATED else N
    tile = tl.program_id(0) // (ROWS // BLOCK_N)
    row_tile = tl.program_id(0) % (ROWS // BLOCK_N)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * BLOCK_T + tl.arange(0, BLOCK_T))
    inside = (pair < num_pairs)[None, :]

    row = tl.arange(0, BLOCK_N)
    if GATED:
        # A thread sums the rows g and g + 8 of 16: they are one gate and its up.
        place = row_tile * (BLOCK_N // 2) + row // 16 * 8 + row % 8
        row = _column(place) + row % 16 // 8 * N
    else:
        row = row_tile * BLOCK_N + row
    block = tl.arange(0, BLOCK_K // 16)
    words = weight + expert * (ROWS * (K // 16))
    words = words + row[:, None] * (K // 16) + block[None, :]
    scale_row = row // 128 * (8 * K) + row % 32 * 16 + row % 128 // 32 * 4
    scales = weight_scale + expert * (ROWS * (K // 16))
    scales = scales + scale_row[:, None] + (block // 4 * 512 + block % 4)[None, :]
    columns = x + (pair // SHARE).to(tl.int64)[None, :] * K
    columns = columns + tl.arange(0, BLOCK_K)[:, None]

    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in range(0, K, BLOCK_K):
        b = tl.load(columns, mask=inside, other=0.0)
        factors = _scale_pairs(tl.load(scales))
        a = _decode(tl.load(words), factors, ORDERED, PACKED)
        acc = tl.dot(a, b, acc)
        words += BLOCK_K // 16
        scales += 8 * BLOCK_K
        columns += BLOCK_K

    value = acc * (tl.load(alpha + expert) * 128.0)
    if GATED:
        split = value.reshape(BLOCK_N // 16, 2, 8, BLOCK_T).permute(0, 2, 3, 1)
        gate, up = split.reshape(BLOCK_N // 2, BLOCK_T, 2).split()
        value = gate / (1.0 + tl.exp(-gate)) * up
        row = row_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    target = out + pair.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(target, value.to(tl.bfloat16), mask=inside)


@triton.jit
def combine_pairs(
    y,
    weights,
    shared,
    out,
    width,
    shared_stride,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one token's weighted outputs in FP32, round, add the shared expert's.

    Args:
        y: BF16 [M * TOP_K, width].
        weights: FP32 [M, TOP_K].
        shared: BF16 [M, width], where ``SHARED``.
        out: BF16 [M, width].
        width: hidden size.
        shared_stride: elements between rows of ``shared``.
        TOP_K: experts of a token.
        SHARED: whether there is a shared expert.
        PDL: see ``chain``.
        BLOCK: columns of a program.

    """
    chain(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        value = tl.load(y + pair * width + column, mask=inside).to(tl.float32)
        total += tl.load(weights + pair) * value
    total = total.to(tl.bfloat16)
    if SHARED:
        more = tl.load(shared + token * shared_stride + column, mask=inside)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(tl.bfloat16)
    tl.store(out + token * width + column, total, mask=inside)
