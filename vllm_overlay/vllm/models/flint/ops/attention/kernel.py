# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Split-KV decode attention: GQA 8, head size 128, sinks, any window, paged cache.

Numerics: FP32 scores and online softmax; P rounded to BF16 for its product with V, its
sum not rounded; partial results merged in FP32 (``merge``); the sink of a head joins
the sum once, at the end; one rounding to BF16. E4M3 keys and values become BF16
exactly, and their scales multiply FP32 scores and the FP32 output. Two runs give the
same bits.

Bytes: each key's K and V once for each KV head, 512 bytes in BF16, over the memory
bandwidth. Short contexts are latency instead: lengths, block table, cache, merge and
store, one after the other. So a warp loads straight to registers, all of a step at once
and the next one's as soon as registers are free; the maximum of a step needs two
shuffles; and a cluster merges in shared memory.

Shape: a CTA's warps take interleaved steps of ``tiles`` tiles of 16 keys, a cluster a
chunk (``plan``). A tile never crosses a page, since pages hold a multiple of 16 keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .cache import PagedCache
from .config import GROUP, TILE_KEYS, DecodeConfig, DecodeSpec, grid_clusters
from .merge import Destination, Merge
from .plan import Share, WorkPlan
from .softmax import WarpSoftmax, WarpState


class DecodeKernel:
    """One variant of the kernel.

    Raises:
        ValueError: ``config`` cannot run.

    """

    def __init__(self, spec: DecodeSpec, config: DecodeConfig):
        reason = config.why_not()
        if reason is not None:
            raise ValueError(f"{config} cannot run: {reason}")
        self.spec = spec
        self.config = config
        self.plan = WorkPlan(config)
        self.cache = PagedCache(spec, config)
        self.softmax = WarpSoftmax(self.cache)
        self.merge = Merge(config)
        # Steps whose places one ``locate`` finds.
        self.located = 32 // config.tiles

    @cute.jit
    def __call__(
        self,
        m_q: cute.Tensor,
        m_kv: cute.Tensor,
        m_tables: cute.Tensor,
        m_lens: cute.Tensor,
        m_sinks: cute.Tensor,
        m_out: cute.Tensor,
        m_records: cute.Tensor,
        m_counters: cute.Tensor,
        m_k_scale: cute.Tensor | None,
        m_v_scale: cute.Tensor | None,
        window: Int32,
        target: Int32,
        scale: Float32,
        stream,
    ):
        """Launch the kernel.

        Args:
            m_q: BF16 [B, H, 128].
            m_kv: BF16 or E4M3 bytes, [blocks, KV heads, page, 256].
            m_tables: int32 [B, pages of a request].
            m_lens: int32 [B].
            m_sinks: FP32 [H].
            m_out: BF16 [B, H, 128].
            m_records: FP32 [clusters, KV heads, 8, RECORD].
            m_counters: int32, all 0.
            m_k_scale: FP32 [1], None for BF16.
            m_v_scale: likewise.
            window: keys a query sees, its own included.
            target: clusters that a KV head should get.
            scale: of the scores.
            stream: CUDA stream.

        """
        config = self.config
        kv_heads = cute.size(m_kv, mode=[1])
        clusters = grid_clusters(cute.size(m_lens), target) * kv_heads
        self.kernel(
            m_q,
            m_kv,
            m_tables,
            m_lens,
            m_sinks,
            m_out,
            m_records,
            m_counters,
            m_k_scale,
            m_v_scale,
            window,
            target,
            scale,
        ).launch(
            grid=[clusters * config.cluster, 1, 1],
            block=[config.threads, 1, 1],
            cluster=[config.cluster, 1, 1] if config.cluster > 1 else None,
            stream=stream,
            use_pdl=self.spec.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        m_q: cute.Tensor,
        m_kv: cute.Tensor,
        m_tables: cute.Tensor,
        m_lens: cute.Tensor,
        m_sinks: cute.Tensor,
        m_out: cute.Tensor,
        m_records: cute.Tensor,
        m_counters: cute.Tensor,
        m_k_scale: cute.Tensor | None,
        m_v_scale: cute.Tensor | None,
        window: Int32,
        target: Int32,
        scale: Float32,
    ):
        spec, config = self.spec, self.config
        if const_expr(spec.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = Int32(cute.arch.make_warp_uniform(cute.arch.warp_idx()))
        kv_heads = cute.size(m_kv, mode=[1])
        rank, number = cta % config.cluster, cta // config.cluster
        # Those with nothing to do come last.
        kv_head, cluster = number % kv_heads, number // kv_heads

        smem = cutlass.memory.SmemAllocator()
        s_warps = smem.allocate_tensor(Float32, self.merge.warps_layout(), 16)
        s_last = smem.allocate_tensor(Int32, cute.make_layout((1,)), 4)
        s_ranks = barrier = None
        if const_expr(config.cluster > 1):
            s_ranks = smem.allocate_tensor(Float32, self.merge.exchange_layout(), 16)
            barrier = smem.allocate_array(Int64, 1)
            self.merge.open_exchange(barrier, thread)

        if const_expr(spec.pdl and not spec.early_reads):
            cute.arch.griddepcontrol_wait()
        share = self.plan.share_of(m_lens, cluster, window, target, lane)
        if share.request >= 0:
            v_scale = Float32(1.0)
            if const_expr(spec.fp8):
                scale = scale * m_k_scale[0]  # type: ignore[index]
                v_scale = m_v_scale[0]  # type: ignore[index]
            state = WarpState.empty()
            self.attend(
                state,
                m_q,
                m_kv,
                m_tables,
                share,
                kv_head,
                rank * config.warps + warp,
                scale,
                lane,
            )
            self.softmax.store(state, s_warps[warp, None, None], lane)
            if const_expr(config.cluster > 1):
                cute.arch.cluster_wait()
                self.merge.expect(barrier, thread)
            cute.arch.sync_threads()
            to = Destination(
                m_out,
                m_sinks,
                m_records,
                m_counters,
                v_scale,
                kv_heads,
                kv_head,
                cluster,
            )
            self.merge.finish(
                s_warps, s_ranks, barrier, s_last, share, to, rank, thread
            )

    @cute.jit
    def attend(
        self,
        state,
        m_q: cute.Tensor,
        m_kv: cute.Tensor,
        m_tables: cute.Tensor,
        share: Share,
        kv_head: Int32,
        worker: Int32,
        scale: Float32,
        lane: Int32,
    ):
        """Run one warp's steps; ``worker`` is its number in the cluster."""
        config = self.config
        first = share.first_tile + worker * config.tiles
        last = share.end_tile - 1
        size = config.round_tiles
        steps = cutlass.max((share.end_tile - first + size - 1) // size, Int32(0))
        page_keys = cute.size(m_kv, mode=[2])
        k, v = self.cache.registers(), self.cache.registers()
        place = (Int32(0), Int32(0))
        if steps > 0:
            place = self.cache.locate(
                m_tables, share.request, page_keys, first, last, lane
            )
        early = Int32(0)
        if const_expr(self.spec.pdl and self.spec.early_reads):
            # The last key is the previous kernel's.
            if (steps > 0) & ((first + config.tiles) * TILE_KEYS < share.length):
                early = Int32(1)
                rows = self._last_rows(first, share)
                self.cache.load_k(k, m_kv, place, Int32(0), kv_head, rows, lane)
                self.cache.load_v(v, m_kv, place, Int32(0), kv_head, rows, lane)
            cute.arch.griddepcontrol_wait()
        if (steps > 0) & (early == 0):
            rows = self._last_rows(first, share)
            self.cache.load_k(k, m_kv, place, Int32(0), kv_head, rows, lane)
            self.cache.load_v(v, m_kv, place, Int32(0), kv_head, rows, lane)
        q = self.cache.q_fragments(m_q, share.request, kv_head * GROUP, lane)

        for step in cutlass.range(steps, unroll=1):
            tile = first + step * size
            follow = step + 1
            next_tile = tile + size
            scores = self.softmax.scores(q, k)
            slot = follow % self.located * config.tiles
            if (slot == 0) & (follow < steps):
                place = self.cache.locate(
                    m_tables, share.request, page_keys, next_tile, last, lane
                )
            rows = self._last_rows(next_tile, share)
            if follow < steps:
                self.cache.load_k(k, m_kv, place, slot, kv_head, rows, lane)
            tiles = [tile + i for i in range(config.tiles)]
            weights = self.softmax.probabilities(
                state,
                scores,
                scale,
                tiles,
                share.start,
                cutlass.min(share.length, share.end_tile * TILE_KEYS),
                lane,
            )
            self.softmax.add_values(state, weights, v)
            if follow < steps:
                self.cache.load_v(v, m_kv, place, slot, kv_head, rows, lane)

    def _last_rows(self, tile, share: Share):
        """The last row of each tile of a step that holds a key.

        Rows past the request's end may hold anything, and 0 times that might be NaN.
        Tiles past the chunk's end are read as its last one.
        """
        last = share.end_tile - 1
        return [
            share.length - 1 - cutlass.min(tile + i, last) * TILE_KEYS
            for i in range(self.config.tiles)
        ]
