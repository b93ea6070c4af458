# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The second half of the experts: down projections, weighted sum, shared expert.

A CTA has some rows of the output of a few tokens. Its warps are each token's experts,
and the shared expert, each with a slice of K; so the sum over the experts needs no
other CTA. The shared expert's warps multiply all tokens of the CTA at once.

Numerics: products accumulate in FP32; an expert's output is its FP32 sum times the
global scale, rounded to BF16; these are weighted and added in FP32, in the order of the
ids, and rounded; the shared expert's output, rounded alike, is added, and the sum
rounded. Two runs give the same bits.

Bytes: each chosen expert's weight and the shared one's; experts that several tokens
chose come from L2, as the CTAs of the same rows are neighbours. Floor: these over the
memory bandwidth; at one token of Flint that is 4.7 MB, all of it in flight at once.
More tokens are bound by instructions: decoding the weights, the shared expert's as
often as a CTA has tokens less.

The kernel before this one must be ``gate_up`` or leave ids and weights of the tokens
alone: they, and with them everything but the activations, are read before the
grid-dependency wait. Many tokens of one expert are each multiplied alone, so past about
48 tokens a grouped GEMM wins.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr

from ..gemv.config import MMA_ROWS
from .slices import Operand, WarpSlice
from .spec import DownConfig, DownSpec


class Memory(NamedTuple):
    """Shared memory.

    Attributes:
        routed: x of the experts' warps.
        shared: x of the shared expert's warps.
        s_partial: sums of each expert's warp, then of each token of each of the shared
            expert's, by row.
        s_factors: of each warp, its expert's global scale and weight.

    """

    routed: cute.Pointer
    shared: cute.Pointer
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
        self.token_warps = self.routed_warps // config.tokens
        self.routed_words = self.routed_warps * self.routed.staged_words
        self.sums, self.shared_words = self.routed_warps, 0
        if spec.shared is not None:
            schedule = config.slice(spec.shared, config.shared_warps)
            self.shared = WarpSlice(spec.shared, schedule, config.tokens == 1)
            self.shared_words = config.shared_warps * self.shared.staged_words
            self.sums += config.shared_warps * config.tokens

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
        tiles = self.spec.width // self.config.rows
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
            grid=[
                cute.ceil_div(cute.size(m_out, mode=[0]), self.config.tokens),
                tiles,
                1,
            ],
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
        group, tile, _ = cute.arch.block_idx()
        warp = Int32(cute.arch.make_warp_uniform(cute.arch.warp_idx()))
        first = group * self.config.tokens
        count = cutlass.min(cute.size(m_out, mode=[0]) - first, self.config.tokens)

        smem = cutlass.memory.SmemAllocator()
        words = smem.allocate_array(
            Uint32, self.routed_words + self.shared_words, byte_alignment=16
        )
        layout = cute.make_ordered_layout((self.sums, self.config.rows), order=(1, 0))
        s_partial = smem.allocate_tensor(Float32, layout, 16)
        layout = cute.make_ordered_layout((self.warps, 2), order=(1, 0))
        s_factors = smem.allocate_tensor(Float32, layout, 16)

        memory = Memory(words, words + self.routed_words, s_partial, s_factors)
        experts = Operand(m_w, m_sf, m_alpha)
        if warp < count * self.token_warps:
            self.routed_warp(
                m_act, m_ids, m_tw, experts, memory, tile, first, thread % 32, warp
            )
        if const_expr(self.spec.shared is not None):
            shared = Operand(m_shared_w, m_shared_sf, m_shared_scale)
            if warp >= self.routed_warps:
                x = cute.domain_offset((first, 0), m_shared_act)
                self.shared_warp(x, count, shared, memory, tile, thread % 32, warp)
        cute.arch.sync_threads()
        if thread < count * self.config.rows:
            self.finish(memory, m_out, tile, first, thread)

    @cute.jit
    def routed_warp(
        self,
        m_act: cute.Tensor,
        m_ids: cute.Tensor,
        m_tw: cute.Tensor,
        experts: Operand,
        memory: Memory,
        tile: Int32,
        first: Int32,
        lane: Int32,
        warp: Int32,
    ):
        """One slice of one of a token's experts."""
        config = self.config
        # Pairs lie token by token, and so do warps.
        pair = first * self.spec.top_k + warp // config.expert_warps
        expert, weight = m_ids[pair], m_tw[pair]
        factor = self.routed.factor(experts, expert)
        acc = self._multiply(
            self.routed,
            experts.expert(expert),
            cute.domain_offset((pair, 0), m_act),
            Int32(1),
            memory.routed + warp * self.routed.staged_words,
            tile,
            lane,
            warp % config.expert_warps,
        )
        # All columns are the one token's.
        if lane % 4 == 0:
            for t, (sums,) in enumerate(acc):
                row = MMA_ROWS * t + lane // 4
                memory.s_partial[warp, row] = sums[0]
                memory.s_partial[warp, row + 8] = sums[2]
        if lane == 0:
            memory.s_factors[warp, 0] = factor
            memory.s_factors[warp, 1] = weight

    @cute.jit
    def shared_warp(
        self,
        x: cute.Tensor,
        count: Int32,
        shared: Operand,
        memory: Memory,
        tile: Int32,
        lane: Int32,
        warp: Int32,
    ):
        """One slice of the shared expert, for the first ``count`` rows of ``x``."""
        tokens = self.config.tokens
        factor = self.shared.factor(shared, 0)
        rank = warp - self.routed_warps
        words = memory.shared + rank * self.shared.staged_words
        acc = self._multiply(self.shared, shared, x, count, words, tile, lane, rank)
        for t, (sums,) in enumerate(acc):
            row = MMA_ROWS * t + lane // 4
            for column in cutlass.range_constexpr(min(2, tokens)):
                token = 2 * (lane % 4) + column
                if token < tokens:
                    at = self.routed_warps + rank * tokens + token
                    memory.s_partial[at, row] = sums[column]
                    memory.s_partial[at, row + 8] = sums[2 + column]
        if lane == 0:
            memory.s_factors[warp, 0] = factor

    def _multiply(
        self, part: WarpSlice, weight: Operand, x, count, words, tile, lane, rank
    ):
        """A warp's sums for the first ``count`` rows of ``x``."""
        loaded = part.load_weights(weight, tile, lane, rank)
        if self.spec.routed.pdl:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        s_x = part.staged(words)
        part.store_x(s_x, part.load_x(x, None, count, lane, rank), lane)
        return part.multiply(loaded, weight, s_x, tile, lane, rank)

    @cute.jit
    def finish(
        self,
        memory: Memory,
        m_out: cute.Tensor,
        tile: Int32,
        first: Int32,
        thread: Int32,
    ):
        """Adds up one row of a token and writes it."""
        spec, config = self.spec, self.config
        index, row = thread // config.rows, thread % config.rows
        total = Float32(0.0)
        for j in cutlass.range_constexpr(spec.top_k):
            warp = index * self.token_warps + j * config.expert_warps
            y = self._output(memory, warp, warp, config.expert_warps, 1, row)
            total += memory.s_factors[warp, 1] * y.to(Float32)
        out = total.to(BFloat16)
        if const_expr(spec.shared is not None):
            warp, warps = self.routed_warps, config.shared_warps
            y = self._output(memory, warp, warp + index, warps, config.tokens, row)
            out = (out.to(Float32) + y.to(Float32)).to(BFloat16)
        column = self.routed.weight.quad_row(tile, row // 4) + row % 4
        m_out[first + index, column] = out

    @staticmethod
    def _output(memory: Memory, warp, at, warps: int, stride: int, row):
        """One expert's output, BF16: the sums of its warps, ``stride`` apart."""
        total = memory.s_partial[at, row]
        for i in range(1, warps):
            total = total + memory.s_partial[at + i * stride, row]
        return (total * memory.s_factors[warp, 0]).to(BFloat16)
