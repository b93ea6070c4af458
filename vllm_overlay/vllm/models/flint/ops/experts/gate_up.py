# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first half of the experts: ``act = silu(x @ gate.T) * (x @ up.T)``.

One launch has a CTA for every (token, expert) pair and tile of the expert's rows, and
CTAs for the shared expert's rows and tokens. ``grouping`` gives an expert's pairs to
one CTA, eight at a time.

Numerics: as in the GEMV (``gemv/kernel.py``). A routed expert's gate and up stay FP32
until their product is rounded to BF16; the shared expert's are rounded to BF16 first,
as the output of a dense linear layer is. Two runs give the same bits.

Bytes: the weights of the experts that some token chose, once for each 8 of its tokens,
and the shared expert's once (from L2 for more than 8 tokens). Floor: these over the
memory bandwidth. At one token of Flint that is 9.4 MB, less than what is in flight, so
the chain of latencies counts: ids, weights, products, sum over the warps. All loads
of a warp are issued at once, and the shared expert's before the grid-dependency wait.
The search costs every CTA without work the time to read the ids: past about 48 tokens
a grouped GEMM wins.

The next kernel is released after the wait, so that it may read, before its own wait,
what this kernel's predecessor wrote: the ids.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..gemv.config import MMA_TOKENS, GemvSpec
from ..gemv.reduction import Reduction, silu_mul
from .grouping import PairGroups, Pairs
from .slices import Operand, WarpSlice
from .spec import GateUpConfig, GateUpSpec


class Memory(NamedTuple):
    """A CTA's shared memory: x of this warp, partial sums, rows of this warp."""

    words: cute.Pointer
    s_partial: cute.Tensor
    s_rows: cute.Tensor


class RoutedReduction(Reduction):
    """Sums whose gate and up are not rounded; rows of the output are pairs."""

    @cute.jit
    def finish_pairs(
        self,
        s_partial: cute.Tensor,
        scale: Float32,
        m_act: cute.Tensor,
        pairs: Pairs,
        tile: Int32,
        thread: Int32,
    ):
        """``finish`` for some pairs."""
        threads = self.config.threads
        for j in cutlass.range_constexpr(-(-self.units // threads)):
            unit = thread + j * threads
            token = unit // self.quads
            if (unit < self.units) & (token < pairs.count):
                sums = self._sum_warps(s_partial, unit)
                row = pairs.first
                if const_expr(pairs.s_pairs is not None):
                    row = pairs.s_pairs[token]  # type: ignore[index]
                self._store(sums, scale, m_act, row, tile, unit % self.quads)

    def _epilogue(self, values):
        return silu_mul(*values)


class GateUpKernel:
    """One variant of the kernel.

    Raises:
        ValueError: ``config`` cannot compute ``spec``.

    """

    def __init__(self, spec: GateUpSpec, config: GateUpConfig):
        reason = config.why_not(spec)
        if reason is not None:
            raise ValueError(f"{config} cannot compute {spec}: {reason}")
        self.spec = spec
        self.config = config
        self.groups = PairGroups(spec)
        self.routed = self._slice(spec.routed)
        cta = config.cta(spec.routed)
        self.reduction = RoutedReduction(spec.routed, cta, self.routed.weight)
        self.tiles = spec.width // config.rows
        self.warp_words = self.routed.staged_words
        if spec.shared is not None:
            self.shared = self._slice(spec.shared)
            cta = config.cta(spec.shared)
            self.shared_reduction = Reduction(spec.shared, cta, self.shared.weight)
            self.shared_tiles = spec.shared_width // config.rows
            self.warp_words = max(self.warp_words, self.shared.staged_words)

    def _slice(self, part: GemvSpec) -> WarpSlice:
        return WarpSlice(part, self.config.slice(part), self.spec.one_token)

    @cute.jit
    def __call__(
        self,
        m_x: cute.Tensor,
        m_ids: cute.Tensor,
        m_w: cute.Tensor,
        m_sf: cute.Tensor | None,
        m_alpha: cute.Tensor | None,
        m_act: cute.Tensor,
        m_shared_w: cute.Tensor | None,
        m_shared_sf: cute.Tensor | None,
        m_shared_scale: cute.Tensor | None,
        m_shared_act: cute.Tensor | None,
        stream,
    ):
        """Launches the kernel.

        Args:
            m_x: x, BF16 [M, H].
            m_ids: experts, int32 [M * top_k].
            m_w: all experts' weights as 32-bit words, [E, 2 * I, H / 8], or
                [E, 2 * I, H / 2] for BF16.
            m_sf: their swizzled scales as 32-bit words, [E, any]; None for BF16.
            m_alpha: their global scales, FP32 [E]; None for BF16.
            m_act: BF16 [M * top_k, I].
            m_shared_w: the shared expert's weight as a GEMV has it; None, as are the
                following, where there is none.
            m_shared_sf: its scales; None for BF16.
            m_shared_scale: its global scale, FP32 [1]; None for BF16.
            m_shared_act: BF16 [M, Ish].
            stream: CUDA stream.

        """
        ctas = cute.size(m_ids) * self.tiles
        if const_expr(self.spec.shared is not None):
            ctas += self.shared_tiles * self.token_groups(m_x)
        self.kernel(
            m_x,
            m_ids,
            m_w,
            m_sf,
            m_alpha,
            m_act,
            m_shared_w,
            m_shared_sf,
            m_shared_scale,
            m_shared_act,
        ).launch(
            grid=[ctas, 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            use_pdl=self.spec.routed.pdl,
            min_blocks_per_mp=self.config.min_ctas,
        )

    @cute.kernel
    def kernel(
        self,
        m_x: cute.Tensor,
        m_ids: cute.Tensor,
        m_w: cute.Tensor,
        m_sf: cute.Tensor | None,
        m_alpha: cute.Tensor | None,
        m_act: cute.Tensor,
        m_shared_w: cute.Tensor | None,
        m_shared_sf: cute.Tensor | None,
        m_shared_scale: cute.Tensor | None,
        m_shared_act: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = Int32(cute.arch.make_warp_uniform(cute.arch.warp_idx()))
        warps = self.config.k_warps

        smem = cutlass.memory.SmemAllocator()
        words = smem.allocate_array(
            Uint32, warps * self.warp_words, byte_alignment=16
        ) + (warp * self.warp_words)
        s_partial = smem.allocate_tensor(Float32, self.reduction.partial_layout(), 16)
        rows = cute.make_ordered_layout((warps, 2, MMA_TOKENS), order=(2, 1, 0))
        s_rows = smem.allocate_tensor(Int32, rows, 16)[warp, None, None]

        memory = Memory(words, s_partial, s_rows)
        experts = Operand(m_w, m_sf, m_alpha)
        if const_expr(self.spec.shared is None):
            self.routed_part(m_x, m_ids, experts, m_act, memory, cta, thread, warp)
        else:
            # The shared expert's CTAs come first: they have loads to issue early.
            shared = Operand(m_shared_w, m_shared_sf, m_shared_scale)
            groups = self.token_groups(m_x)
            first = self.shared_tiles * groups
            if cta < first:
                tile = cta // groups
                group = cta - tile * groups
                self.shared_part(
                    m_x, shared, m_shared_act, memory, tile, group, thread, warp
                )
            else:
                self.routed_part(
                    m_x, m_ids, experts, m_act, memory, cta - first, thread, warp
                )

    def token_groups(self, m_x: cute.Tensor):
        """How many CTAs share the tokens of the shared expert's rows."""
        if self.spec.one_token:
            return 1
        return cute.ceil_div(cute.size(m_x, mode=[0]), MMA_TOKENS)

    def wait(self):
        """Everything before this kernel is done, and the next one may start."""
        if self.spec.routed.pdl:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def shared_part(
        self,
        m_x: cute.Tensor,
        weight: Operand,
        m_act: cute.Tensor,
        memory: Memory,
        tile: Int32,
        group: Int32,
        thread: Int32,
        warp: Int32,
    ):
        """Rows ``tile`` of the shared expert for the ``group``-th 8 tokens."""
        part = self.shared
        lane = thread % 32
        loaded = part.load_weights(weight, tile, lane, warp)
        scale = part.factor(weight, 0)
        self.wait()
        first = group * MMA_TOKENS
        count = cutlass.min(cute.size(m_x, mode=[0]) - first, MMA_TOKENS)
        s_x = part.staged(memory.words)
        tokens = cute.domain_offset((first, 0), m_x)
        part.store_x(s_x, part.load_x(tokens, None, count, lane, warp), lane)
        acc = part.multiply(loaded, weight, s_x, tile, lane, warp)
        self.shared_reduction.store_partial(acc, memory.s_partial, lane, 0, warp)
        cute.arch.sync_threads()
        width = self.spec.shared_width
        out = cute.make_tensor(
            m_act[first, None].iterator,
            cute.make_layout((count, width), stride=(width, 1)),
        )
        self.shared_reduction.finish(
            memory.s_partial, None, None, scale, out, tile, Int32(0), thread
        )

    @cute.jit
    def routed_part(
        self,
        m_x: cute.Tensor,
        m_ids: cute.Tensor,
        experts: Operand,
        m_act: cute.Tensor,
        memory: Memory,
        index: Int32,
        thread: Int32,
        warp: Int32,
    ):
        """The ``index``-th pair and tile of rows, if this CTA leads its pairs."""
        self.wait()
        pair, tile = index // self.tiles, index % self.tiles
        if const_expr(self.spec.one_token):
            pairs = Pairs(m_ids[pair], pair, Int32(1), None, None)
            self.expert_part(m_x, experts, m_act, memory, pairs, tile, thread, warp)
        else:
            s_rows = memory.s_rows
            expert, before, count = self.groups.find(m_ids, pair, s_rows, thread % 32)
            pairs = Pairs(expert, pair, count, s_rows[0, None], s_rows[1, None])
            if before % MMA_TOKENS == 0:
                self.expert_part(m_x, experts, m_act, memory, pairs, tile, thread, warp)

    @cute.jit
    def expert_part(
        self,
        m_x: cute.Tensor,
        experts: Operand,
        m_act: cute.Tensor,
        memory: Memory,
        pairs: Pairs,
        tile: Int32,
        thread: Int32,
        warp: Int32,
    ):
        """Rows ``tile`` of an expert for some of its pairs."""
        part = self.routed
        lane = thread % 32
        weight = experts.expert(pairs.expert)
        scale = part.factor(weight, pairs.expert)
        x = None
        if const_expr(self.spec.one_token):
            # While the expert is on its way.
            x = part.load_x(m_x, None, pairs.count, lane, warp)
        loaded = part.load_weights(weight, tile, lane, warp)
        if const_expr(not self.spec.one_token):
            # Keeps all loads of weights before those of x.
            cute.arch.sync_warp()
            x = part.load_x(m_x, pairs.s_tokens, pairs.count, lane, warp)
        s_x = part.staged(memory.words)
        part.store_x(s_x, x, lane)
        acc = part.multiply(loaded, weight, s_x, tile, lane, warp)
        self.reduction.store_partial(acc, memory.s_partial, lane, 0, warp)
        cute.arch.sync_threads()
        self.reduction.finish_pairs(memory.s_partial, scale, m_act, pairs, tile, thread)
