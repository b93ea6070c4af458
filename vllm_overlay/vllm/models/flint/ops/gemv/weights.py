# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weight loads: row-major weights to mma fragments, without moving a byte.

mma.sync m16n8k16 sums over k in any order, so K is permuted freely as long as x is
permuted alike. Lane (g, c) = (lane // 4, lane % 4) loads 16 bytes of row g and of row
g + 8 at chunk 4 * step + c, and those codes are its own part of ``step_k / 16``
products. Four lanes read 64 contiguous bytes of a row.

Rows are permuted too. The 16 rows of a tile are 4 neighbours from each of the four
32-row groups of a 128-row scale block: row g is ``128 * block + i + 64 * (g // 4)``
with ``i = i0 + g % 4``, row g + 8 is 32 further. In the 128x4 swizzle the scales of
these two rows for 64 k are 8 contiguous bytes, and a tile's are 64.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from . import primitives as p
from .config import MMA_ROWS, SCALE_ROWS, GemvConfig, GemvSpec
from .decode import FORMS


class RowMajorWeight:
    """ModelOpt's NVFP4 layout with 128x4-swizzled scales, or row-major BF16."""

    # How far fragment row g + 8 lies behind row g.
    half_rows = 32

    def __init__(self, spec: GemvSpec, config: GemvConfig):
        self.spec = spec
        self.config = config
        self.form = None if spec.is_bf16 else FORMS[spec.form]
        self.output_scale = 1.0 if self.form is None else self.form.output_scale
        self.row_chunks = spec.k // spec.lane_k
        slots = config.k_warps * config.k_ctas * config.steps(spec)
        self.exact_k = slots * spec.step_k == spec.k

    def tile_rows(self, tile: Int32, index, g: Int32):
        """128-row block of fragment row ``g`` of a 16-row tile, and its i of 0..31."""
        rows = self.config.rows // self.spec.parts
        per_block = SCALE_ROWS // rows
        i = (tile % per_block) * (rows // 4) + 4 * index + g % 4
        return tile // per_block, i

    def load_step(self, m_w, m_sf, tile, row_warp, lane, step):
        """Issues the loads of one step of a warp.

        Returns:
            For each 16-row tile (words of row g, words of row g + 8, scale words).

        """
        spec, config = self.spec, self.config
        n = cute.size(m_w, mode=[0])
        part_rows = n // spec.parts
        chunk = step * 4 + lane % 4
        if not self.exact_k:
            # Past K any valid address will do: x is zero there.
            chunk = cutlass.min(chunk, Int32(self.row_chunks - 1))
        w = cute.make_tensor(
            cute.recast_ptr(m_w.iterator, dtype=Uint32),
            cute.make_layout(
                (n, self.row_chunks, 4), stride=(self.row_chunks * 4, 4, 1)
            ),
        )
        loaded = []
        for t in range(config.row_tiles):
            index = row_warp * config.row_tiles + t
            part = 0
            if spec.parts == 2:
                part = index // (config.row_blocks // 2)
                index = index % (config.row_blocks // 2)
            block, i, row = self.place(tile, index, lane)
            row = part * part_rows + row
            pair = [
                p.load_streaming(
                    w[self._in_bounds(row + self.half_rows * h, n), chunk, None], 4
                )
                for h in range(2)
            ]
            scales = None
            if not spec.is_bf16:
                block = block + part * (part_rows // SCALE_ROWS)
                scales = self._load_scales(m_sf, block, i, lane, step)
            loaded.append((*pair, scales))
        return loaded

    def place(self, tile: Int32, index, lane: Int32):
        """A lane's fragment row g in a 16-row tile: 128-row block, i, and row."""
        block, i = self.tile_rows(tile, index, lane // 4)
        return block, i, block * SCALE_ROWS + i + 64 * (lane // 16)

    def quad_row(self, tile, quad):
        """First of the four output rows of a CTA's ``quad``."""
        rows = self.config.rows // self.spec.parts
        per_block = SCALE_ROWS // rows
        # Quads 0..3 of a 16-row tile are groups 0, 2, 1, 3 of the scale block.
        group = (quad % 2) * 2 + (quad // 2) % 2
        return (
            (tile // per_block) * SCALE_ROWS
            + (tile % per_block) * (rows // 4)
            + (quad // 4) * 4
            + group * 32
        )

    def _in_bounds(self, row, n):
        """Rows past N are computed from row N - 1 and never stored."""
        return row if self.spec.full_blocks else cutlass.min(row, n - 1)

    def _load_scales(self, m_sf, block, i, lane, step):
        """Eight e4m3 bytes: four 16-wide blocks of row g, then of row g + 8."""
        sf, block_k = self._scale_words(m_sf, lane, step)
        return p.load_streaming(sf[block, block_k, i, lane // 16, None], 2)

    def _scale_words(self, m_sf, lane, step):
        """(128-row block, 64 of k, row of 32, pair of groups, group); a lane's k."""
        blocks_k = -(-self.spec.k // 64)
        block_k = step * 2 + (lane % 4) // 2
        if not self.exact_k:
            block_k = cutlass.min(block_k, Int32(blocks_k - 1))
        blocks_n = cute.size(m_sf) // (SCALE_ROWS * blocks_k)
        sf = cute.make_tensor(
            cute.recast_ptr(m_sf.iterator, dtype=Uint32),
            cute.make_layout(
                (blocks_n, blocks_k, 32, 2, 2),
                stride=(blocks_k * SCALE_ROWS, SCALE_ROWS, 4, 2, 1),
            ),
        )
        return sf, block_k

    def decode_step(self, loaded, lane):
        """Fragments of one step: ``[tile][product]`` is the four A registers.

        Products 2w and 2w + 1 need the x of word w (NVFP4); BF16 has two products.
        """
        return [
            self._bf16_fragments(top, bottom)
            if scales is None
            else self._nvfp4_fragments(top, bottom, scales, lane)
            for top, bottom, scales in loaded
        ]

    @staticmethod
    def _bf16_fragments(top, bottom):
        return [
            (top[2 * j], bottom[2 * j], top[2 * j + 1], bottom[2 * j + 1])
            for j in range(2)
        ]

    def _nvfp4_fragments(self, top, bottom, scales, lane):
        assert self.form is not None
        # This lane's two of the four blocks, for both rows.
        odd = lane % 2
        select = Uint32(0x5410) + Uint32(odd) * Uint32(0x2222)
        both = p.prmt(scales[0], scales[1], select)
        fragments = []
        for word in range(4):
            if word % 2 == 0:
                pair = self.form.scales(both, word // 2)
            t = self.form.codes(top[word])
            b = self.form.codes(bottom[word])
            for j in range(2):
                fragments.append(
                    (
                        p.mul_bf16x2_by_half(t[2 * j], pair, False),
                        p.mul_bf16x2_by_half(b[2 * j], pair, True),
                        p.mul_bf16x2_by_half(t[2 * j + 1], pair, False),
                        p.mul_bf16x2_by_half(b[2 * j + 1], pair, True),
                    )
                )
        return fragments


class ContiguousRowsWeight(RowMajorWeight):
    """The same bytes in tiles of 16 neighbouring rows, as fragments have them.

    The scales of a lane's two rows are then no neighbours: two loads of four bytes.
    """

    half_rows = 8

    def place(self, tile: Int32, index, lane: Int32):
        rows = self.config.rows // self.spec.parts
        row = tile * rows + MMA_ROWS * index + lane // 4
        return row // SCALE_ROWS, row % SCALE_ROWS, row

    def quad_row(self, tile, quad):
        return tile * (self.config.rows // self.spec.parts) + 4 * quad

    def _load_scales(self, m_sf, block, i, lane, step):
        sf, block_k = self._scale_words(m_sf, lane, step)
        group = i // 32
        words = cute.make_rmem_tensor((2,), Uint32)
        for h in range(2):
            place = (block, block_k, i % 32 + self.half_rows * h, group // 2, None)
            words[h] = p.load_streaming(
                cute.local_tile(sf[place], (1,), (group % 2,)), 1
            )[0]
        return words
