# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""x + residual, normed, in shared memory: the prologue that replaces a norm's launch.

Numerics: the norm is taken of the unrounded FP32 sum, multiplied by the weight in FP32
and rounded to BF16 once; the new residual is the sum, rounded. Squares are added in a
fixed order: those of a unit, of a group of neighbouring lanes, then of all groups.

Each CTA norms the slice of K that it stages anyway. A row's square sums come from all
CTAs of a cluster, by st.async and an mbarrier, so no CTA reads more of x than a plain
GEMV does, but for the residual. The CTAs of the first rows write the new residual.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr

from . import primitives as p
from .activations import StagedActivations
from .config import GemvConfig, GemvSpec


class NormPrologue:
    """Stages norm(x + residual) in the order of ``activations``.

    Threads take units of ``unit_k`` neighbouring values, as when x itself is staged.
    """

    def __init__(
        self, spec: GemvSpec, config: GemvConfig, activations: StagedActivations
    ):
        self.spec = spec
        self.config = config
        self.activations = activations
        self.unit_k = spec.unit_k
        self.units = config.cta_k(spec) // self.unit_k
        # Lanes that hold neighbouring units of one token.
        self.lanes = min(32, self.units & -self.units)
        self.groups = self.units // self.lanes
        self.total = config.tokens * self.units
        self.copies = config.staged_units(spec)

    def squares_layout(self) -> cute.Layout:
        """(rank, token, group) square sums."""
        shape = (self.config.k_ctas, self.config.tokens, self.groups)
        return cute.make_ordered_layout(shape, order=(2, 1, 0))

    @cute.jit
    def open_squares(self, barrier: cute.Pointer, thread: Int32):
        """Prepares ``barrier`` for the cluster's square sums.

        ``Reduction.open_exchange`` has the fence; the caller waits for the cluster
        before ``expect_squares``.
        """
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)

    @cute.jit
    def expect_squares(self, barrier: cute.Pointer, tokens: Int32, thread: Int32):
        """Says what will come; as ``Reduction.expect``."""
        if thread == 0:
            sums = cutlass.min(tokens, self.config.tokens) * self.groups
            cute.arch.mbarrier_arrive_and_expect_tx(
                barrier, sums * self.config.k_ctas * 4
            )

    def load_weight(self, m_norm: cute.Tensor, rank: Int32, thread: Int32):
        """Issues this thread's loads of the norm's weight: it depends on no kernel."""
        return [
            self._load_weight_unit(m_norm, rank, thread + j * self.config.threads)
            for j in range(self.copies)
        ]

    @cute.jit
    def stage(
        self,
        m_x: cute.Tensor,
        m_residual: cute.Tensor,
        m_total: cute.Tensor,
        weight,
        s_x: cute.Tensor,
        s_squares: cute.Tensor,
        barrier: cute.Pointer | None,
        rank: Int32,
        tile: Int32,
        thread: Int32,
    ):
        """Norms x[:, slice] + residual[:, slice] of this CTA; all threads take part.

        Args:
            m_x: x, BF16 [M, K].
            m_residual: BF16 [M, K].
            m_total: the new residual, BF16 [M, K].
            weight: what ``load_weight`` returned.
            s_x: as in ``StagedActivations.stage``.
            s_squares: see ``squares_layout``.
            barrier: what ``open_squares`` prepared, None without a cluster.
            rank: this CTA's in the cluster.
            tile: which rows of the weight this CTA has.
            thread: index in the CTA.

        """
        threads = self.config.threads
        tokens = cute.size(m_x, mode=[0])
        sums = []
        for j in cutlass.range_constexpr(self.copies):
            sums.append(self._load_sum(m_x, m_residual, rank, thread + j * threads))
        for j in cutlass.range_constexpr(self.copies):
            index = thread + j * threads
            # A whole warp takes part in the shuffles, or none of it.
            if index // 32 * 32 // self.units < tokens and index < self.total:
                squares = Float32(0.0)
                for i in cutlass.range_constexpr(self.unit_k):
                    squares += sums[j][i] * sums[j][i]
                squares = cute.arch.warp_reduction(
                    squares, operator.add, threads_in_group=self.lanes
                )
                if index // self.units < tokens:
                    self._share(squares, s_squares, barrier, rank, index)
        if const_expr(self.config.k_ctas > 1):
            cute.arch.mbarrier_wait(barrier, 0)
        else:
            cute.arch.sync_threads()
        for j in cutlass.range_constexpr(self.copies):
            index = thread + j * threads
            normed = cute.make_rmem_tensor((self.unit_k,), BFloat16)
            normed.fill(0)
            if index // self.units < tokens and index < self.total:
                scale = self._scale(s_squares, index // self.units)
                for i in cutlass.range_constexpr(self.unit_k):
                    gain = weight[j][i].to(Float32)
                    normed[i] = (sums[j][i] * scale * gain).to(BFloat16)
                if tile == 0:
                    self._store_total(m_total, sums[j], rank, index)
            if index < self.total:
                words = cute.recast_tensor(normed, Uint32)
                self.activations.store_unit(s_x, words, index)

    def _in_row(self, column):
        """Whether a unit lies in K, which the last slice may run past."""
        return column < self.spec.k // self.unit_k

    @cute.jit
    def _load_weight_unit(self, m_norm: cute.Tensor, rank: Int32, index: Int32):
        column = rank * self.units + index % self.units
        values = cute.make_rmem_tensor((self.unit_k,), BFloat16)
        values.fill(0)
        if self._in_row(column):
            source = cute.local_tile(m_norm, (self.unit_k,), (column,))
            cute.autovec_copy(source, values)
        return values

    @cute.jit
    def _load_sum(
        self, m_x: cute.Tensor, m_residual: cute.Tensor, rank: Int32, index: Int32
    ):
        token = index // self.units
        column = rank * self.units + index % self.units
        x = cute.make_rmem_tensor((self.unit_k,), BFloat16)
        old = cute.make_rmem_tensor((self.unit_k,), BFloat16)
        x.fill(0)
        old.fill(0)
        if token < cute.size(m_x, mode=[0]) and self._in_row(column):
            for source, target in ((m_x, x), (m_residual, old)):
                place = cute.local_tile(source[token, None], (self.unit_k,), (column,))
                cute.autovec_copy(place, target)
        total = cute.make_rmem_tensor((self.unit_k,), Float32)
        for i in cutlass.range_constexpr(self.unit_k):
            total[i] = x[i].to(Float32) + old[i].to(Float32)
        return total

    @cute.jit
    def _share(
        self,
        squares: Float32,
        s_squares: cute.Tensor,
        barrier: cute.Pointer | None,
        rank: Int32,
        index: Int32,
    ):
        """Gives one group's sum to every CTA of the cluster, each from its own lane."""
        token, unit = index // self.units, index % self.units
        place = s_squares[rank, token, None].iterator + unit // self.lanes
        if const_expr(self.config.k_ctas == 1):
            if unit % self.lanes == 0:
                place.store(squares)
        else:
            for target in cutlass.range_constexpr(self.config.k_ctas):
                if unit % self.lanes == target % self.lanes:
                    p.push_f32(place, squares, barrier, target)

    def _scale(self, s_squares: cute.Tensor, token: Int32):
        """1 / rms of a token's row."""
        total = Float32(0.0)
        for rank in range(self.config.k_ctas):
            for group in range(self.groups):
                total = total + s_squares[rank, token, group]
        return cute.math.rsqrt(total / self.spec.k + self.spec.norm_eps)

    @cute.jit
    def _store_total(
        self, m_total: cute.Tensor, values: cute.Tensor, rank: Int32, index: Int32
    ):
        column = rank * self.units + index % self.units
        rounded = cute.make_rmem_tensor((self.unit_k,), BFloat16)
        for i in cutlass.range_constexpr(self.unit_k):
            rounded[i] = values[i].to(BFloat16)
        if self._in_row(column):
            row = m_total[index // self.units, None]
            cute.autovec_copy(rounded, cute.local_tile(row, (self.unit_k,), (column,)))
