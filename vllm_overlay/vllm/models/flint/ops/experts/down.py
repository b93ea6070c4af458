# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The second half of the experts: down projections, weighted sum, shared expert.

A CTA has 16 rows of one token's output. Its warps are the token's experts and the
shared expert, each with a slice of K; so the sum over the experts needs no other CTA.

Numerics: products accumulate in FP32; an expert's output is its FP32 sum times the
global scale, rounded to BF16; these are weighted and added in FP32, in the order of the
ids, and rounded; the shared expert's output, rounded alike, is added, and the sum
rounded. Two runs give the same bits.

Bytes: each chosen expert's weight and the shared one's; experts that several tokens
chose come from L2, as the CTAs of the same rows are neighbours. Floor: these over the
memory bandwidth; at one token of Flint that is 4.7 MB, all of it in flight at once.

The kernel before this one must be ``gate_up`` or leave ids and weights of the tokens
alone: they, and with them everything but the activations, are read before the
grid-dependency wait. Many tokens of one expert are each multiplied alone, so past about
64 tokens a grouped GEMM wins.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr

from ..gemv.config import MMA_ROWS
from .slices import Operand, WarpSlice
from .spec import DownConfig, DownSpec


class Memory(NamedTuple):
    """Shared memory: x of this warp; of each warp, sums, and its expert's factors."""

    words: cute.Pointer
    s_partial: cute.Tensor
    s_factors: cute.Tensor


class DownKernel:
    """One variant of the kernel.

    Raises:
        ValueError: ``config`` cannot compute ``spec``.

    """

    def __init__(self, spec: DownSpec, config: DownConfig):
        reason = config.why_not(spec)
        if reason is not None:
            raise ValueError(f"{config} cannot compute {spec}: {reason}")
        self.spec = spec
        self.config = config
        self.warps = config.warps(spec)
        self.routed_warps = config.routed_warps(spec)
        self.routed = WarpSlice(
            spec.routed,
            config.slice(spec.routed, config.expert_warps),
            True,
            spec.contiguous,
        )
        self.warp_words = self.routed.staged_words
        if spec.shared is not None:
            schedule = config.slice(spec.shared, config.shared_warps)
            self.shared = WarpSlice(spec.shared, schedule, True)
            self.warp_words = max(self.warp_words, self.shared.staged_words)

    @cute.jit
    def __call__(
        self,
        m_act: cute.Tensor,
        m_ids: cute.Tensor,
        m_tw: cute.Tensor,
        m_w: cute.Tensor,
        m_sf: cute.Tensor | None,
        m_alpha: cute.Tensor | None,
        m_shared_act: cute.Tensor | None,
        m_shared_w: cute.Tensor | None,
        m_shared_sf: cute.Tensor | None,
        m_shared_scale: cute.Tensor | None,
        m_out: cute.Tensor,
        stream,
    ):
        """Launches the kernel.

        Args:
            m_act: BF16 [M * top_k, I].
            m_ids: experts, int32 [M * top_k].
            m_tw: their weights, FP32 [M * top_k].
            m_w: all experts' weights as 32-bit words, [E, H, I / 8], or [E, H, I / 2]
                for BF16.
            m_sf: their swizzled scales as 32-bit words, [E, any]; None for BF16.
            m_alpha: their global scales, FP32 [E]; None for BF16.
            m_shared_act: BF16 [M, Ish]; None, as are the following, where there is no
                shared expert.
            m_shared_w: the shared expert's weight as a GEMV has it.
            m_shared_sf: its scales; None for BF16.
            m_shared_scale: its global scale, FP32 [1]; None for BF16.
            m_out: BF16 [M, H].
            stream: CUDA stream.

        """
        tiles = self.spec.width // MMA_ROWS
        self.kernel(
            m_act,
            m_ids,
            m_tw,
            m_w,
            m_sf,
            m_alpha,
            m_shared_act,
            m_shared_w,
            m_shared_sf,
            m_shared_scale,
            m_out,
        ).launch(
            # Tokens are nearest in time: they share experts.
            grid=[cute.size(m_out, mode=[0]), tiles, 1],
            block=[32 * self.warps, 1, 1],
            stream=stream,
            use_pdl=self.spec.routed.pdl,
            min_blocks_per_mp=self.config.min_ctas,
        )

    @cute.kernel
    def kernel(
        self,
        m_act: cute.Tensor,
        m_ids: cute.Tensor,
        m_tw: cute.Tensor,
        m_w: cute.Tensor,
        m_sf: cute.Tensor | None,
        m_alpha: cute.Tensor | None,
        m_shared_act: cute.Tensor | None,
        m_shared_w: cute.Tensor | None,
        m_shared_sf: cute.Tensor | None,
        m_shared_scale: cute.Tensor | None,
        m_out: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        token, tile, _ = cute.arch.block_idx()
        warp = Int32(cute.arch.make_warp_uniform(cute.arch.warp_idx()))

        smem = cutlass.memory.SmemAllocator()
        words = smem.allocate_array(
            Uint32, self.warps * self.warp_words, byte_alignment=16
        ) + (warp * self.warp_words)
        layout = cute.make_ordered_layout((self.warps, MMA_ROWS), order=(1, 0))
        s_partial = smem.allocate_tensor(Float32, layout, 16)
        # Of each warp's expert: global scale, weight of the token.
        layout = cute.make_ordered_layout((self.warps, 2), order=(1, 0))
        s_factors = smem.allocate_tensor(Float32, layout, 16)

        memory = Memory(words, s_partial, s_factors)
        experts = Operand(m_w, m_sf, m_alpha)
        if const_expr(self.spec.shared is None):
            self.routed_warp(
                m_act, m_ids, m_tw, experts, memory, tile, token, thread, warp
            )
        else:
            shared = Operand(m_shared_w, m_shared_sf, m_shared_scale)
            if warp < self.routed_warps:
                self.routed_warp(
                    m_act, m_ids, m_tw, experts, memory, tile, token, thread, warp
                )
            else:
                self.shared_warp(
                    m_shared_act, shared, memory, tile, token, thread, warp
                )
        cute.arch.sync_threads()
        if thread < MMA_ROWS:
            self.finish(s_partial, s_factors, m_out, tile, token, thread)

    @cute.jit
    def routed_warp(
        self,
        m_act: cute.Tensor,
        m_ids: cute.Tensor,
        m_tw: cute.Tensor,
        experts: Operand,
        memory: Memory,
        tile: Int32,
        token: Int32,
        thread: Int32,
        warp: Int32,
    ):
        """One slice of one of the token's experts."""
        pair = token * self.spec.top_k + warp // self.config.expert_warps
        expert, weight = m_ids[pair], m_tw[pair]
        factor = self.routed.factor(experts, expert)
        rank = warp % self.config.expert_warps
        self.multiply(
            self.routed,
            experts.expert(expert),
            m_act,
            pair,
            memory,
            tile,
            thread % 32,
            warp,
            rank,
        )
        if thread % 32 == 0:
            memory.s_factors[warp, 0] = factor
            memory.s_factors[warp, 1] = weight

    @cute.jit
    def shared_warp(
        self,
        m_act: cute.Tensor,
        shared: Operand,
        memory: Memory,
        tile: Int32,
        token: Int32,
        thread: Int32,
        warp: Int32,
    ):
        """One slice of the shared expert."""
        factor = self.shared.factor(shared, 0)
        rank = warp - self.routed_warps
        self.multiply(
            self.shared, shared, m_act, token, memory, tile, thread % 32, warp, rank
        )
        if thread % 32 == 0:
            memory.s_factors[warp, 0] = factor

    @cute.jit
    def multiply(
        self,
        part: WarpSlice,
        weight: Operand,
        m_x: cute.Tensor,
        row: Int32,
        memory: Memory,
        tile: Int32,
        lane: Int32,
        warp: Int32,
        rank: Int32,
    ):
        """Writes a warp's sums for row ``row`` of ``m_x``."""
        loaded = part.load_weights(weight, tile, lane, rank)
        if const_expr(self.spec.routed.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        x = cute.domain_offset((row, 0), m_x)
        s_x = part.staged(memory.words)
        part.store_x(s_x, part.load_x(x, None, Int32(1), lane, rank), lane)
        acc = part.multiply(loaded, weight, s_x, tile, lane, rank)
        # All columns are the one token's.
        if lane % 4 == 0:
            memory.s_partial[warp, lane // 4] = acc[0][0][0]
            memory.s_partial[warp, lane // 4 + 8] = acc[0][0][2]

    @cute.jit
    def finish(
        self,
        s_partial: cute.Tensor,
        s_factors: cute.Tensor,
        m_out: cute.Tensor,
        tile: Int32,
        token: Int32,
        row: Int32,
    ):
        """Adds up one row of the CTA and writes it."""
        spec, config = self.spec, self.config
        total = Float32(0.0)
        for j in cutlass.range_constexpr(spec.top_k):
            first = j * config.expert_warps
            y = self._output(s_partial, s_factors, first, config.expert_warps, row)
            total += s_factors[first, 1] * y.to(Float32)
        out = total.to(BFloat16)
        if const_expr(spec.shared is not None):
            y = self._output(
                s_partial, s_factors, self.routed_warps, config.shared_warps, row
            )
            out = (out.to(Float32) + y.to(Float32)).to(BFloat16)
        column = self.routed.weight.quad_row(tile, row // 4) + row % 4
        m_out[token, column] = out

    @staticmethod
    def _output(s_partial, s_factors, first: int, warps: int, row):
        """One expert's output, BF16."""
        total = s_partial[first, row]
        for warp in range(first + 1, first + warps):
            total = total + s_partial[warp, row]
        return (total * s_factors[first, 0]).to(BFloat16)
