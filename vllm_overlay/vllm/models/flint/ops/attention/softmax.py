# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What one warp computes: scores, online softmax, and the product with V.

Scores are q K^T, with the 8 query heads as rows 0..7 of an mma's A operand: its result
has head g and keys 2t, 2t + 1 in lane (g, t), just as the B operand of V^T P^T wants P.
Rows 8..15 are zero, which costs eight idle products a tile and saves transposing P.
The output, transposed, has 16 channels as rows and the 8 heads as columns.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..gemv import primitives as p
from .cache import PagedCache
from .config import MAX_AT, SUM_AT, TILE_KEYS
from .primitives import exp2, fma, pack_bf16

LOG2_E = 1.4426950408889634
_PRODUCTS = 8  # mma results of 16 channels


class WarpState(NamedTuple):
    """Running maximum and sum of head g, and the outputs; all in registers."""

    peak: cute.Tensor
    total: cute.Tensor
    out: cute.Tensor

    @classmethod
    def empty(cls) -> "WarpState":
        """Before the first step."""
        peak, total = (cute.make_rmem_tensor((1,), Float32) for _ in range(2))
        out = cute.make_rmem_tensor((4 * _PRODUCTS,), Float32)
        peak.fill(-Float32.inf)
        total.fill(0.0)
        out.fill(0.0)
        return cls(peak, total, out)


class WarpSoftmax:
    """Steps over a warp's tiles."""

    def __init__(self, cache: PagedCache):
        self.cache = cache
        self.tiles = cache.config.tiles

    def scores(self, q, k):
        """Unscaled scores of head g: for each tile keys 2t, 2t + 1, 2t + 8, 2t + 9."""
        found = []
        zero = Uint32(0)
        for tile in range(self.tiles):
            for half in range(2):
                acc = [Float32(0.0)] * 4
                fragments = self.cache.k_fragments(k, tile, half)
                for (a0, a2), b in zip(q, fragments, strict=True):
                    acc = p.mma_m16n8k16((a0, zero, a2, zero), b, acc)
                found += acc[:2]
        return found

    @cute.jit
    def probabilities(self, state, scores, scale, tiles, start, length, lane):
        """Take scores into the running maximum and sum, and rescale the outputs.

        Args:
            state: the warp's ``WarpState``.
            scores: from ``scores``.
            scale: of the scores.
            tiles: the step's tiles.
            start: the first key that counts.
            length: one past the last.
            lane: this lane.

        Returns:
            For each tile the two B registers of P, rounded to BF16.

        """
        t = lane % 4
        peak = state.peak[0]
        masked = []
        for i in cutlass.range_constexpr(4 * self.tiles):
            key = tiles[i // 4] * TILE_KEYS + 2 * t + i % 2 + 8 * (i // 2 % 2)
            seen = (key >= start) & (key < length)
            masked.append(cutlass.select_(seen, scores[i], -Float32.inf))
        best = masked[0]
        for score in masked[1:]:
            best = cute.arch.fmax(best, score)
        best = self._over_lanes(best, cute.arch.fmax)
        new_peak = cute.arch.fmax(peak, best * scale)
        values = [exp2(fma(x, scale, -new_peak) * LOG2_E) for x in masked]
        fade = exp2((peak - new_peak) * LOG2_E)
        total = state.total[0] * fade
        for value in values:
            total += value
        state.peak[0] = new_peak
        state.total[0] = total
        # Columns 2t and 2t + 1 of the outputs; head h's values are in lane 4 h.
        for column in cutlass.range_constexpr(2):
            factor = cute.arch.shuffle_sync(fade, 8 * t + 4 * column)
            for i in cutlass.range_constexpr(2 * _PRODUCTS):
                index = 2 * i + column
                state.out[index] = state.out[index] * factor
        return [
            [
                pack_bf16(values[4 * i + 2 * j], values[4 * i + 2 * j + 1])
                for j in (0, 1)
            ]
            for i in range(self.tiles)
        ]

    def add_values(self, state, weights, v):
        """Add P V of one step."""
        for tile in range(self.tiles):
            for i, a in enumerate(self.cache.v_fragments(v, tile)):
                acc = [state.out[4 * i + j] for j in range(4)]
                acc = p.mma_m16n8k16(a, weights[tile], acc)
                for j in range(4):
                    state.out[4 * i + j] = acc[j]

    @cute.jit
    def store(self, state, s_record: cute.Tensor, lane: Int32):
        """Write the warp's records, [head, RECORD] in shared memory."""
        g, t = lane // 4, lane % 4
        total = self._over_lanes(state.total[0], lambda a, b: a + b)
        if t == 0:
            s_record[g, MAX_AT] = state.peak[0]
            s_record[g, SUM_AT] = total
        for column in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                first = self.cache.channels(lane, half)
                for quad in cutlass.range_constexpr(2):
                    values = cute.make_rmem_tensor((4,), Float32)
                    for i in cutlass.range_constexpr(4):
                        index = 4 * (4 * quad + i) + 2 * half + column
                        values[i] = state.out[index]
                    target = cute.local_tile(
                        s_record[2 * t + column, None], (4,), (first // 4 + quad,)
                    )
                    cute.autovec_copy(values, target)

    @staticmethod
    def _over_lanes(value, function):
        """Reduce over the four lanes that hold one head's keys."""
        for offset in (1, 2):
            other = cute.arch.shuffle_sync_bfly(value, offset=offset)
            value = function(value, other)
        return value
