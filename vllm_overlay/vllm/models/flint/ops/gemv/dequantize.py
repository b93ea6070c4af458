# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Exact dequantization of NVFP4 rows to BF16, without the global scale.

Numerics: e2m1 * e4m3 always fits BF16, so nothing is rounded. Bytes: 9/16 read and 2
written for each weight; floor: these over the memory bandwidth. One thread takes one
16-wide block: 8 code bytes, 1 scale byte, 32 bytes written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from . import primitives as p
from .config import SCALE_ROWS
from .decode import FORMS

_THREADS = 256


class DequantizeKernel:
    """Dequantizes a weight whose rows are ``k`` wide with decode form ``form``."""

    def __init__(self, k: int, form: str):
        self.k = k
        self.form = FORMS[form]

    @cute.jit
    def __call__(self, m_w: cute.Tensor, m_sf: cute.Tensor, m_out: cute.Tensor, stream):
        """Launches the kernel.

        Args:
            m_w: codes as 32-bit words, [N, K / 8].
            m_sf: 128x4-swizzled e4m3 bytes.
            m_out: BF16 pairs as 32-bit words, [N, K / 2].
            stream: CUDA stream.

        """
        blocks = cute.size(m_w, mode=[0]) * (self.k // 16)
        self.kernel(m_w, m_sf, m_out).launch(
            grid=[cute.ceil_div(blocks, _THREADS), 1, 1],
            block=[_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, m_w: cute.Tensor, m_sf: cute.Tensor, m_out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        index = cta * _THREADS + thread
        width = self.k // 16
        row, block = index // width, index % width
        if row < cute.size(m_w, mode=[0]):
            codes = cute.make_rmem_tensor((2,), Int32)
            cute.autovec_copy(cute.local_tile(m_w[row, None], (2,), (block,)), codes)
            place = (row // 128, block // 4, row % 32, row % 128 // 32, block % 4)
            scale = Uint32(self._scales(m_sf)[place])
            pair = self.form.scales(scale * Uint32(0x01010101), 0)
            out = cute.make_rmem_tensor((8,), Int32)
            for word in cutlass.range_constexpr(2):
                values = self._ordered(self.form.codes(Uint32(codes[word])))
                for i in cutlass.range_constexpr(4):
                    exact = p.mul_bf16x2(values[i], pair)
                    if const_expr(self.form.output_scale != 1.0):
                        # 2^7 as BF16.
                        exact = p.mul_bf16x2(exact, Uint32(0x43004300))
                    out[4 * word + i] = Int32(exact)
            cute.autovec_copy(out, cute.local_tile(m_out[row, None], (8,), (block,)))

    def _scales(self, m_sf: cute.Tensor) -> cute.Tensor:
        """(row block, 4-wide k block, row of 32, group of 32 rows, k) bytes."""
        blocks_k = -(-self.k // 64)
        blocks_n = cute.size(m_sf) // (SCALE_ROWS * 4 * blocks_k)
        layout = cute.make_layout(
            (blocks_n, blocks_k, 32, 4, 4), stride=(512 * blocks_k, 512, 16, 4, 1)
        )
        return cute.make_tensor(m_sf.iterator, layout)

    def _ordered(self, pairs):
        """Pairs of neighbouring codes, in order."""
        if not self.form.half_pairs:
            return pairs
        a, b, c, d = pairs
        low, high = Uint32(0x5410), Uint32(0x7632)
        return (
            p.prmt(a, b, low),
            p.prmt(c, d, low),
            p.prmt(a, b, high),
            p.prmt(c, d, high),
        )
