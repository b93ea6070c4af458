# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weight loads from the layout of quack's NVFP4 GEMM for SM90.

That GEMM's weights are the A operand of WGMMA, kept in fragment order: for each 64 x 64
block, each of 128 threads has 16 bytes. A warp's part of WGMMA's fragment is that of
mma.sync m16n8k16, so a lane's 16 bytes are its A registers of four products, a warp's
512 bytes are contiguous, and one word is one product:

- nibbles 0 and 1 are row g at k = 2c, 2c + 1; nibbles 2 and 3 are row g + 8;
- nibbles 4 to 7 are the same at k + 8, with (g, c) = (lane // 4, lane % 4).

Decoding pairs nibbles i and i + 4, so the k of a register are 2c and 2c + 8, or one
further, and x is staged alike. Scales: for each 16 rows and 64 k the eight bytes of
(row g, row g + 8) for four 16-wide blocks are contiguous.

Scales carry no sign, and codes under a zero scale are zero; what prepares the weight
sees to that.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from . import primitives as p
from .config import FRAGMENT_BLOCK, MMA_ROWS, GemvConfig, GemvSpec
from .decode import FORMS

_TILES = FRAGMENT_BLOCK // MMA_ROWS


class FragmentWeight:
    """An NVFP4 weight as quack's GEMM reads it."""

    def __init__(self, spec: GemvSpec, config: GemvConfig):
        self.spec = spec
        self.config = config
        self.form = FORMS[spec.form]
        self.output_scale = self.form.output_scale
        self.blocks_k = spec.k // FRAGMENT_BLOCK
        self.step_blocks = spec.step_k // FRAGMENT_BLOCK
        slots = config.k_warps * config.k_ctas * config.steps(spec)
        self.exact_k = slots * spec.step_k == spec.k

    def load_step(self, m_w, m_sf, tile, row_warp, lane, step):
        """Issues the loads of one step of a warp.

        Returns:
            For each 16-row tile, for each 64 of k, (code words, scale words).

        """
        spec, config = self.spec, self.config
        groups = cute.size(m_w, mode=[0])
        w = cute.make_tensor(
            cute.recast_ptr(m_w.iterator, dtype=Uint32),
            cute.make_ordered_layout(
                (groups, self.blocks_k, _TILES, 32, 4), order=(4, 3, 2, 1, 0)
            ),
        )
        sf = cute.make_tensor(
            cute.recast_ptr(m_sf.iterator, dtype=Uint32),
            cute.make_ordered_layout(
                (groups, self.blocks_k, _TILES, 8, 2), order=(4, 3, 2, 1, 0)
            ),
        )
        loaded = []
        for t in range(config.row_tiles):
            index = row_warp * config.row_tiles + t
            part = 0
            if spec.parts == 2:
                part = index // (config.row_blocks // 2)
                index = index % (config.row_blocks // 2)
            row_tile = tile * (config.row_blocks // spec.parts) + index
            group = row_tile // _TILES + part * (groups // spec.parts)
            blocks = []
            for j in range(self.step_blocks):
                block = step * self.step_blocks + j
                if not self.exact_k:
                    # Past K any valid address will do: x is zero there.
                    block = cutlass.min(block, Int32(self.blocks_k - 1))
                place = (group, block, row_tile % _TILES)
                codes = p.load_streaming(w[(*place, lane, None)], 4)
                scales = p.load_streaming(sf[(*place, lane // 4, None)], 2)
                blocks.append((codes, scales))
            loaded.append(blocks)
        return loaded

    def decode_step(self, loaded, lane):
        """Fragments of one step: ``[tile][product]`` is the four A registers."""
        return [
            [
                self._fragment(codes[word], scales[word // 2], word % 2 == 1)
                for codes, scales in blocks
                for word in range(4)
            ]
            for blocks in loaded
        ]

    def _fragment(self, word, scales, high):
        pair = self.form.unsigned_scales(scales, high)
        top0, top1, bottom0, bottom1 = self.form.codes(word)
        return (
            p.mul_bf16x2_by_half(top0, pair, False),
            p.mul_bf16x2_by_half(bottom0, pair, True),
            p.mul_bf16x2_by_half(top1, pair, False),
            p.mul_bf16x2_by_half(bottom1, pair, True),
        )

    def quad_row(self, tile, quad):
        """First of the four output rows of a CTA's ``quad``."""
        return tile * (self.config.rows // self.spec.parts) + 4 * quad
