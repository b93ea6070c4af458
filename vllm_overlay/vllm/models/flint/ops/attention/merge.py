# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Partial results to one: over warps, CTAs of a cluster, and clusters, in this order.

Every level has the same record for a head: output, maximum, sum; all FP32. Sources are
added in the order of their numbers, whichever comes first, so two runs give the same
bits.

- Warps write records to shared memory.
- A cluster's CTAs each finish some of the heads. Records are pushed to the owner with
  st.async, which counts bytes on its mbarrier.
- Clusters that share a request write records to a workspace and count themselves in.
  The last one adds all of them and sets the counter back to 0 for the next launch.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from ..gemv import primitives as p
from .config import GROUP, HEAD_DIM, MAX_AT, RECORD, SUM_AT, DecodeConfig
from .plan import Share
from .primitives import arrive_at_counter, exp2, load_other_ctas
from .softmax import LOG2_E

_QUADS = HEAD_DIM // 4
# Below every score, yet finite: differences of two are not NaN.
_LOWEST = -3.0e38
# Smaller than any sum that is not zero.
_TINY = 1e-30


class Destination(NamedTuple):
    """Where results of a cluster go.

    Attributes:
        m_out: output, BF16 [B, H, 128].
        m_sinks: FP32 [H].
        m_records: the workspace, FP32 [clusters, KV heads, 8, RECORD].
        m_counters: int32, one for each request, KV head and CTA of a cluster.
        v_scale: multiplies the output.
        kv_heads: how many there are.
        kv_head: this cluster's.
        cluster: this cluster's number among those of its KV head.

    """

    m_out: cute.Tensor
    m_sinks: cute.Tensor
    m_records: cute.Tensor
    m_counters: cute.Tensor
    v_scale: Float32
    kv_heads: Int32
    kv_head: Int32
    cluster: Int32


class Merge:
    """The three levels; threads own (head, four channels)."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.units = GROUP * _QUADS
        self.rank_units = config.rank_heads * _QUADS

    def warps_layout(self) -> cute.Layout:
        """(warp, head, RECORD)."""
        return cute.make_layout(
            (self.config.warps, GROUP, RECORD), stride=(GROUP * RECORD, RECORD, 1)
        )

    def exchange_layout(self) -> cute.Layout:
        """(rank, head that this CTA owns, RECORD)."""
        heads = self.config.rank_heads
        return cute.make_layout(
            (self.config.cluster, heads, RECORD), stride=(heads * RECORD, RECORD, 1)
        )

    @cute.jit
    def open_exchange(self, barrier: cute.Pointer, thread: Int32):
        """Prepare ``barrier``; the caller waits for the cluster before ``expect``."""
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def expect(self, barrier: cute.Pointer, thread: Int32):
        """Say what will come, after the cluster has met; it may be there already."""
        if thread == 0:
            size = 4 * RECORD * GROUP
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    @cute.jit
    def finish(
        self,
        s_warps: cute.Tensor,
        s_ranks: cute.Tensor | None,
        barrier: cute.Pointer | None,
        s_last: cute.Tensor,
        share: Share,
        to: Destination,
        rank: Int32,
        thread: Int32,
    ):
        """Everything after the barrier that follows ``WarpSoftmax.store``."""
        threads = self.config.threads
        sources = s_warps
        if const_expr(self.config.cluster > 1):
            for j in cutlass.range_constexpr(-(-self.units // threads)):
                unit = thread + j * threads
                if self.units % threads == 0 or unit < self.units:
                    self._push(s_warps, s_ranks, barrier, rank, unit)
            cute.arch.mbarrier_wait(barrier, 0)
            sources = s_ranks
        for j in cutlass.range_constexpr(-(-self.rank_units // threads)):
            unit = thread + j * threads
            if self.rank_units % threads == 0 or unit < self.rank_units:
                record = _merge_shared(sources, unit // _QUADS, unit % _QUADS)
                if share.splits == 1:
                    self._write(record, share, to, rank, unit)
                else:
                    self._leave(record, to, rank, unit)
        if share.splits > 1:
            self._finish_splits(s_last, share, to, rank, thread)

    @cute.jit
    def _finish_splits(
        self,
        s_last: cute.Tensor,
        share: Share,
        to: Destination,
        rank: Int32,
        thread: Int32,
    ):
        threads = self.config.threads
        cute.arch.sync_threads()
        if thread == 0:
            group = share.request * to.kv_heads + to.kv_head
            place = to.m_counters.iterator + (group * self.config.cluster + rank)
            before = arrive_at_counter(place)
            s_last[0] = Int32(before == share.splits - 1)
            if before == share.splits - 1:
                to.m_counters[group * self.config.cluster + rank] = Int32(0)
        cute.arch.sync_threads()
        if s_last[0] != 0:
            for j in cutlass.range_constexpr(-(-self.rank_units // threads)):
                unit = thread + j * threads
                if self.rank_units % threads == 0 or unit < self.rank_units:
                    record = self._merge_splits(share, to, rank, unit)
                    self._write(record, share, to, rank, unit)

    @cute.jit
    def _push(self, s_warps, s_ranks, barrier, rank, unit):
        """Merge the warps, and store the result in its owner's shared memory."""
        head, quad = unit // _QUADS, unit % _QUADS
        heads = self.config.rank_heads
        out, peak, total = _merge_shared(s_warps, head, quad)
        target = s_ranks[rank, head % heads, None]
        owner = head // heads
        place = cute.local_tile(target, (4,), (quad,))
        p.push_f32x4(place.iterator, out, barrier, owner)
        if quad == 0:
            place = cute.local_tile(target, (4,), (_QUADS,))
            state = [peak, total, Float32(0.0), Float32(0.0)]
            p.push_f32x4(place.iterator, state, barrier, owner)

    @cute.jit
    def _leave(self, record, to: Destination, rank: Int32, unit: Int32):
        """Write a cluster's part of a record to the workspace."""
        out, peak, total = record
        head, quad = rank * self.config.rank_heads + unit // _QUADS, unit % _QUADS
        target = to.m_records[to.cluster, to.kv_head, head, None]
        values = cute.make_rmem_tensor((4,), Float32)
        for i in cutlass.range_constexpr(4):
            values[i] = out[i]
        cute.autovec_copy(values, cute.local_tile(target, (4,), (quad,)))
        if quad == 0:
            target[MAX_AT] = peak
            target[SUM_AT] = total

    @cute.jit
    def _merge_splits(self, share: Share, to: Destination, rank: Int32, unit: Int32):
        """Add the records of a request's clusters."""
        head, quad = rank * self.config.rank_heads + unit // _QUADS, unit % _QUADS
        first = to.cluster - share.split
        peak, total = Float32(_LOWEST), Float32(0.0)
        out = cute.make_rmem_tensor((4,), Float32)
        out.fill(0.0)
        for i in cutlass.range(share.splits, unroll=4):
            source = to.m_records[first + i, to.kv_head, head, None]
            state = load_other_ctas(cute.local_tile(source, (4,), (_QUADS,)).iterator)
            values = load_other_ctas(cute.local_tile(source, (4,), (quad,)).iterator)
            new_peak = cute.arch.fmax(peak, state[0])
            fade = exp2((peak - new_peak) * LOG2_E)
            factor = exp2((state[0] - new_peak) * LOG2_E)
            total = total * fade + state[1] * factor
            for j in cutlass.range_constexpr(4):
                out[j] = out[j] * fade + values[j] * factor
            peak = new_peak
        return [out[j] for j in range(4)], peak, total

    @cute.jit
    def _write(self, record, share: Share, to: Destination, rank: Int32, unit: Int32):
        """Take in the sink, divide, round, and store."""
        out, peak, total = record
        head = to.kv_head * GROUP + rank * self.config.rank_heads + unit // _QUADS
        sink = to.m_sinks[head]
        new_peak = cute.arch.fmax(cute.arch.fmax(peak, sink), Float32(_LOWEST))
        fade = exp2((peak - new_peak) * LOG2_E)
        total = total * fade + exp2((sink - new_peak) * LOG2_E)
        factor = fade * to.v_scale / cute.arch.fmax(total, Float32(_TINY))
        values = cute.make_rmem_tensor((4,), BFloat16)
        for i in cutlass.range_constexpr(4):
            values[i] = (out[i] * factor).to(BFloat16)
        target = cute.local_tile(
            to.m_out[share.request, head, None], (4,), (unit % _QUADS,)
        )
        cute.autovec_copy(values, target)


def _merge_shared(s_records, head, quad):
    """Add one head's records over the first mode; four channels, maximum, sum."""
    count = cute.size(s_records, mode=[0])
    peaks = [s_records[i, head, MAX_AT] for i in range(count)]
    peak = Float32(_LOWEST)
    for other in peaks:
        peak = cute.arch.fmax(peak, other)
    out, total = [Float32(0.0)] * 4, Float32(0.0)
    for i in range(count):
        factor = exp2((peaks[i] - peak) * LOG2_E)
        total = total + s_records[i, head, SUM_AT] * factor
        values = cute.make_rmem_tensor((4,), Float32)
        cute.autovec_copy(
            cute.local_tile(s_records[i, head, None], (4,), (quad,)), values
        )
        out = [out[j] + values[j] * factor for j in range(4)]
    return out, peak, total
