# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The small-M GEMV: ``out[M, N] = (x[M, K] @ weight[N, K]^T) * scale``.

Numerics: an NVFP4 weight becomes BF16 exactly (see ``decode``); products accumulate in
FP32 on the matrix units; partial sums are added in a fixed order; the global scale
multiplies the FP32 sum once, before the only rounding. With ``silu_mul`` gate and up
are rounded to BF16 first, then silu(gate) * up is computed in FP32 and rounded once.
Two runs give the same bits.

Bytes: each weight byte is read once (N * K * 9 / 16 for NVFP4, N * K * 2 for BF16);
each CTA reads its slice of x once, from L2. Floor: these bytes over the memory
bandwidth. At M <= 16 the matrix units idle; what competes with the loads is decoding,
about 20 instructions for 8 weights, and the serial tail of x load, products, reduction
and store. So every load of a warp is issued before the grid-dependency wait, and the
first ``early`` steps are decoded before it. Past about 32 tokens a GEMM that decodes a
weight once for all tokens of a large tile wins.

Shape: mma.sync m16n8k16 with 16 weight rows as A and 8 tokens as B; ``weights``,
``activations`` and ``reduction`` say how each operand is laid out.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from .activations import FragmentActivations, StagedActivations
from .config import SCALE_ROWS, GemvConfig, GemvSpec
from .fragments import FragmentWeight
from .normed import NormPrologue
from .reduction import Reduction
from .weights import RowMajorWeight


class GemvKernel:
    """One variant of the kernel.

    Raises:
        ValueError: ``config`` cannot compute ``spec``.

    """

    def __init__(self, spec: GemvSpec, config: GemvConfig):
        reason = config.why_not(spec)
        if reason is not None:
            raise ValueError(f"{config} cannot compute {spec}: {reason}")
        self.spec = spec
        self.config = config
        self.steps = config.steps(spec)
        self.weight: FragmentWeight | RowMajorWeight
        self.activations: StagedActivations
        if spec.layout == "fragments":
            self.weight = FragmentWeight(spec, config)
            self.activations = FragmentActivations(spec, config)
        else:
            self.weight = RowMajorWeight(spec, config)
            self.activations = StagedActivations(spec, config)
        self.norm = NormPrologue(spec, config, self.activations)
        self.reduction = Reduction(spec, config, self.weight)

    @cute.jit
    def __call__(
        self,
        m_x: cute.Tensor,
        m_w: cute.Tensor,
        m_sf: cute.Tensor | None,
        m_scale: cute.Tensor | None,
        m_out: cute.Tensor,
        stream,
    ):
        """Launches the kernel.

        Args:
            m_x: x, BF16 [M, K].
            m_w: the weight as 32-bit words: [N, K / 8], [N, K / 2] for BF16, or
                [N / 64, K * 8] for fragments.
            m_sf: the scales as 32-bit words in the weight's layout, None for BF16.
            m_scale: global scale, FP32 [1], None for BF16.
            m_out: BF16 or FP32 [M, N], or [M, N / 2] with ``silu_mul``.
            stream: CUDA stream.

        """
        self.launch(m_x, m_w, m_sf, m_scale, m_out, None, None, None, stream)

    @cute.jit
    def launch(
        self,
        m_x: cute.Tensor,
        m_w: cute.Tensor,
        m_sf: cute.Tensor | None,
        m_scale: cute.Tensor | None,
        m_out: cute.Tensor,
        m_residual: cute.Tensor | None,
        m_norm: cute.Tensor | None,
        m_total: cute.Tensor | None,
        stream,
    ):
        """Launches with or without the norm; see ``NormedGemvKernel.__call__``."""
        config = self.config
        blocks = cute.ceil_div(cute.size(m_out, mode=[1]), SCALE_ROWS)
        tiles = blocks * (SCALE_ROWS * self.spec.parts // config.rows)
        self.kernel(m_x, m_w, m_sf, m_scale, m_out, m_residual, m_norm, m_total).launch(
            grid=[tiles * config.k_ctas, 1, 1],
            block=[config.threads, 1, 1],
            cluster=[config.k_ctas, 1, 1] if config.k_ctas > 1 else None,
            stream=stream,
            use_pdl=self.spec.pdl,
            min_blocks_per_mp=config.min_ctas,
        )

    @cute.kernel
    def kernel(
        self,
        m_x: cute.Tensor,
        m_w: cute.Tensor,
        m_sf: cute.Tensor | None,
        m_scale: cute.Tensor | None,
        m_out: cute.Tensor,
        m_residual: cute.Tensor | None,
        m_norm: cute.Tensor | None,
        m_total: cute.Tensor | None,
    ):
        spec, config = self.spec, self.config
        if const_expr(spec.pdl):
            cute.arch.griddepcontrol_launch_dependents()

        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = Uint32(cute.arch.make_warp_uniform(cute.arch.warp_idx()))
        rank, tile = cta % config.k_ctas, cta // config.k_ctas
        row_warp = Int32(warp % config.row_warps)
        k_warp = Int32(warp // config.row_warps)

        smem = cutlass.memory.SmemAllocator()
        staged = smem.allocate_array(
            Uint32, config.staged_bytes(spec) // 4, byte_alignment=16
        )
        s_x = cute.make_tensor(staged, self.activations.layout())
        partial_layout = self.reduction.partial_layout()
        if const_expr(config.partial_over_x):
            over_x = cute.recast_ptr(staged, dtype=Float32)
            s_partial = cute.make_tensor(over_x, partial_layout)
        else:
            s_partial = smem.allocate_tensor(Float32, partial_layout, 16)
        s_squares = squares_barrier = norm_weight = None
        if const_expr(spec.norm_eps is not None):
            s_squares = smem.allocate_tensor(Float32, self.norm.squares_layout(), 16)
            if const_expr(config.k_ctas > 1):
                squares_barrier = smem.allocate_array(Int64, 1)
                self.norm.open_squares(squares_barrier, thread)
        s_exchange = barrier = None
        if const_expr(config.k_ctas > 1):
            s_exchange = smem.allocate_tensor(
                Float32, self.reduction.exchange_layout(), 16
            )
            barrier = smem.allocate_array(Int64, 1)
            self.reduction.open_exchange(barrier, thread)

        # Weights do not depend on the previous kernel: all of this overlaps with it.
        first = (rank * config.k_warps + k_warp) * self.steps
        loaded, fragments = {}, {}
        for s in cutlass.range_constexpr(config.depth):
            loaded[s] = self.weight.load_step(
                m_w, m_sf, tile, row_warp, lane, first + s
            )
        if const_expr(spec.norm_eps is not None):
            norm_weight = self.norm.load_weight(m_norm, rank, thread)
        scale = Float32(1.0)
        if const_expr(m_scale is not None):
            scale = m_scale[0] * self.weight.output_scale  # type: ignore[index]
        for s in cutlass.range_constexpr(config.early):
            fragments[s] = self.weight.decode_step(loaded.pop(s), lane)
            if const_expr(s + config.depth < self.steps):
                loaded[s + config.depth] = self.weight.load_step(
                    m_w, m_sf, tile, row_warp, lane, first + s + config.depth
                )

        if const_expr(config.k_ctas > 1):
            cute.arch.cluster_wait()
            tokens = cute.size(m_out, mode=[0])
            self.reduction.expect(barrier, tokens, thread)
            if const_expr(spec.norm_eps is not None):
                self.norm.expect_squares(squares_barrier, tokens, thread)
        if const_expr(spec.pdl):
            cute.arch.griddepcontrol_wait()

        if const_expr(spec.norm_eps is None):
            self.activations.stage(m_x, s_x, rank, thread)
        else:
            self.norm.stage(
                m_x,
                m_residual,
                m_total,
                norm_weight,
                s_x,
                s_squares,
                squares_barrier,
                rank,
                tile,
                thread,
            )
        cute.arch.sync_threads()

        acc = [
            [[Float32(0.0)] * 4 for _ in range(config.nt)]
            for _ in range(config.row_tiles)
        ]
        for s in cutlass.range_constexpr(self.steps):
            if const_expr(s >= config.early):
                fragments[s] = self.weight.decode_step(loaded.pop(s), lane)
                if const_expr(s + config.depth < self.steps):
                    loaded[s + config.depth] = self.weight.load_step(
                        m_w, m_sf, tile, row_warp, lane, first + s + config.depth
                    )
            self.activations.multiply(
                acc, fragments.pop(s), s_x, lane, k_warp * self.steps + s
            )

        if const_expr(config.partial_over_x):
            cute.arch.sync_threads()
        self.reduction.store_partial(acc, s_partial, lane, row_warp, k_warp)
        cute.arch.sync_threads()
        self.reduction.finish(
            s_partial, s_exchange, barrier, scale, m_out, tile, rank, thread
        )


class NormedGemvKernel(GemvKernel):
    """The kernel of norm(x + residual); see ``normed``."""

    @cute.jit
    def __call__(
        self,
        m_x: cute.Tensor,
        m_w: cute.Tensor,
        m_sf: cute.Tensor | None,
        m_scale: cute.Tensor | None,
        m_out: cute.Tensor,
        m_residual: cute.Tensor,
        m_norm: cute.Tensor,
        m_total: cute.Tensor,
        stream,
    ):
        """Launches the kernel; all but these arguments as in ``GemvKernel``.

        Args:
            m_x: x, BF16 [M, K].
            m_w: see ``GemvKernel``.
            m_sf: see ``GemvKernel``.
            m_scale: see ``GemvKernel``.
            m_out: see ``GemvKernel``.
            m_residual: BF16 [M, K].
            m_norm: weight of the norm, BF16 [K].
            m_total: x + residual, BF16 [M, K], in memory of its own.
            stream: CUDA stream.

        """
        self.launch(m_x, m_w, m_sf, m_scale, m_out, m_residual, m_norm, m_total, stream)
