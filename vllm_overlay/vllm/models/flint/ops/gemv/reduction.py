# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sums over the warps and CTAs along K, in a fixed order, and the epilogue.

Each warp writes its FP32 sums to shared memory. A thread then owns four neighbouring
output rows of one token: it adds the warps' sums and, with a cluster, pushes the result
to the CTA that owns these rows, which adds the CTAs' in the order of their ranks.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from . import primitives as p
from .config import MMA_ROWS, MMA_TOKENS, GemvConfig, GemvSpec

_QUAD = 4  # rows that one thread finishes


class Reduction:
    """Partial sums, their exchange in the cluster, and the output."""

    def __init__(self, spec: GemvSpec, config: GemvConfig, weight):
        self.spec = spec
        self.config = config
        self.weight = weight
        self.out_rows = config.rows // spec.parts
        self.quads = self.out_rows // _QUAD
        self.units = config.tokens * self.quads

    def partial_layout(self) -> cute.Layout:
        """(warp along K, token, row of the CTA)."""
        stride = self.config.partial_stride
        return cute.make_layout(
            (self.config.k_warps, self.config.tokens, stride),
            stride=(self.config.tokens * stride, stride, 1),
        )

    def exchange_layout(self) -> cute.Layout:
        """(rank, unit that this CTA owns, 4 rows of each part)."""
        width = _QUAD * self.spec.parts
        owned = self.units // self.config.k_ctas
        return cute.make_layout(
            (self.config.k_ctas, owned, width), stride=(owned * width, width, 1)
        )

    @cute.jit
    def open_exchange(self, barrier: cute.Pointer, thread: Int32):
        """Prepares ``barrier`` for what the cluster will push here.

        The caller waits for the cluster before ``expect``: by then all CTAs have run
        this.
        """
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def expect(self, barrier: cute.Pointer, tokens: Int32, thread: Int32):
        """Says what will come, after the cluster has met; bytes may be there already.

        Until this thread arrives, no byte completes the phase.
        """
        if thread == 0:
            rows = cutlass.min(tokens, self.config.tokens) * self.config.rows
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * 4)

    def store_partial(self, acc, s_partial, lane, row_warp, k_warp):
        """Writes one warp's sums; ``acc[tile][token tile]`` are mma accumulators."""
        for t, tile in enumerate(acc):
            row = (row_warp * self.config.row_tiles + t) * MMA_ROWS + lane // 4
            for m, values in enumerate(tile):
                token = m * MMA_TOKENS + 2 * (lane % 4)
                for j in range(4):
                    s_partial[k_warp, token + j % 2, row + 8 * (j // 2)] = values[j]

    @cute.jit
    def finish(
        self,
        s_partial: cute.Tensor,
        s_exchange: cute.Tensor | None,
        barrier: cute.Pointer | None,
        scale: Float32,
        m_out: cute.Tensor,
        tile: Int32,
        rank: Int32,
        thread: Int32,
    ):
        """Everything after the barrier that follows ``store_partial``."""
        config = self.config
        tokens = cute.size(m_out, mode=[0])
        if const_expr(config.k_ctas == 1):
            for j in cutlass.range_constexpr(-(-self.units // config.threads)):
                unit = thread + j * config.threads
                token = unit // self.quads
                if (unit < self.units) & (token < tokens):
                    sums = self._sum_warps(s_partial, unit)
                    self._store(sums, scale, m_out, token, tile, unit % self.quads)
        else:
            for j in cutlass.range_constexpr(-(-self.units // config.threads)):
                unit = thread + j * config.threads
                token = unit // self.quads
                if (unit < self.units) & (token < tokens):
                    sums = self._sum_warps(s_partial, unit)
                    self._push(sums, s_exchange, barrier, rank, unit)
            cute.arch.mbarrier_wait(barrier, 0)
            owned = self.units // config.k_ctas
            for j in cutlass.range_constexpr(-(-owned // config.threads)):
                mine = thread + j * config.threads
                unit = mine * config.k_ctas + rank
                token = unit // self.quads
                if (mine < owned) & (token < tokens):
                    sums = self._sum_ranks(s_exchange, mine)
                    self._store(sums, scale, m_out, token, tile, unit % self.quads)

    def _sum_warps(self, s_partial, unit):
        """FP32 sums of 4 rows of each part over the warps of this CTA."""
        token, quad = unit // self.quads, unit % self.quads
        sums = []
        for part in range(self.spec.parts):
            total = None
            for warp in range(self.config.k_warps):
                index = part * self.quads + quad
                source = cute.local_tile(
                    s_partial[warp, token, None], (_QUAD,), (index,)
                )
                values = cute.make_rmem_tensor((_QUAD,), Float32)
                cute.autovec_copy(source, values)
                row = [values[i] for i in range(_QUAD)]
                total = row if total is None else _add(total, row)
            sums.append(total)
        return sums

    def _push(self, sums, s_exchange, barrier, rank, unit):
        """Stores a unit's sums in its owner's shared memory."""
        owner, slot = unit % self.config.k_ctas, unit // self.config.k_ctas
        for part, values in enumerate(sums):
            place = cute.local_tile(s_exchange[rank, slot, None], (_QUAD,), (part,))
            p.push_f32x4(place.iterator, values, barrier, owner)

    def _sum_ranks(self, s_exchange, slot):
        """FP32 sums over the CTAs of the cluster."""
        sums = []
        for part in range(self.spec.parts):
            total = None
            for source_rank in range(self.config.k_ctas):
                source = cute.local_tile(
                    s_exchange[source_rank, slot, None], (_QUAD,), (part,)
                )
                values = cute.make_rmem_tensor((_QUAD,), Float32)
                cute.autovec_copy(source, values)
                row = [values[i] for i in range(_QUAD)]
                total = row if total is None else _add(total, row)
            sums.append(total)
        return sums

    @cute.jit
    def _store(
        self,
        sums,
        scale: Float32,
        m_out: cute.Tensor,
        token: Int32,
        tile: Int32,
        quad: Int32,
    ):
        """Scales, applies SiLU, rounds, and writes four rows of one token."""
        row = self.weight.quad_row(tile, quad)
        rows = cute.size(m_out, mode=[1])
        values = cute.make_rmem_tensor((_QUAD,), m_out.element_type)
        for i in cutlass.range_constexpr(_QUAD):
            values[i] = self._epilogue([part[i] * scale for part in sums]).to(
                m_out.element_type
            )
        if const_expr(self.spec.full_blocks):
            target = cute.local_tile(m_out[token, None], (_QUAD,), (row // _QUAD,))
            cute.autovec_copy(values, target)
        else:
            for i in cutlass.range_constexpr(_QUAD):
                if row + i < rows:
                    m_out[token, row + i] = values[i]

    def _epilogue(self, values):
        if not self.spec.silu_mul:
            return values[0]
        gate, up = (x.to(BFloat16).to(Float32) for x in values)
        return silu_mul(gate, up)


def silu_mul(gate: Float32, up: Float32) -> Float32:
    """silu(gate) * up in FP32."""
    sigmoid = Float32(1.0) / (Float32(1.0) + cute.math.exp(-gate))
    return gate * sigmoid * up


def _add(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]
