# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which pairs of token and expert a CTA takes: up to 8 of one expert.

No launch sorts the pairs. A CTA is one of an expert's pair, reads the ids of all pairs,
and counts the earlier ones with its expert. Every eighth leads: it takes its pair and
the next seven of the expert; the other CTAs have nothing to do. So an expert's weights
are read once for 8 tokens. Each warp does this for itself, without a barrier.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ..gemv.config import MMA_TOKENS
from .spec import GateUpSpec


class Pairs(NamedTuple):
    """Pairs of one expert.

    Attributes:
        expert: theirs.
        first: the first of them.
        count: how many, at most 8.
        s_tokens: the tokens of all; None where ``first`` is the only one.
        s_pairs: all of them; None where ``first`` is the only one.

    """

    expert: Int32
    first: Int32
    count: Int32
    s_tokens: cute.Tensor | None
    s_pairs: cute.Tensor | None


class PairGroups:
    """The search of ``spec``'s kernel."""

    def __init__(self, spec: GateUpSpec):
        self.spec = spec

    @cute.jit
    def find(
        self, m_ids: cute.Tensor, pair: Int32, s_rows: cute.Tensor, lane: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """Finds the pairs that the CTA of ``pair`` takes, if it leads.

        Args:
            m_ids: int32 [pairs], the expert of each.
            pair: one of them.
            s_rows: where to write, int32 [2, 8] of this warp: the tokens and the pairs.
            lane: of the warp.

        Returns:
            The expert, how many of its pairs come before ``pair`` (a leader's is a
            multiple of 8), and how many there are from ``pair`` on, at most 8.

        """
        expert = m_ids[pair]
        pairs = cute.size(m_ids)
        same = []
        for word in cutlass.range_constexpr(self.spec.id_words):
            index = 32 * word + lane
            other = Int32(-1)
            if index < pairs:
                other = m_ids[index]
            same.append(other == expert)
        before, total, ranks = Int32(0), Int32(0), []
        below = (Uint32(1) << Uint32(lane)) - Uint32(1)
        for word in cutlass.range_constexpr(self.spec.id_words):
            mask = Uint32(cute.arch.vote_ballot_sync(same[word]))
            earlier = cute.arch.vote_ballot_sync(same[word] & (32 * word + lane < pair))
            ranks.append(total + Int32(cute.arch.popc(mask & below)))
            before += Int32(cute.arch.popc(Uint32(earlier)))
            total += Int32(cute.arch.popc(mask))
        for word in cutlass.range_constexpr(self.spec.id_words):
            slot = ranks[word] - before
            if same[word] & (slot >= 0) & (slot < MMA_TOKENS):
                index = 32 * word + lane
                s_rows[0, slot] = index // self.spec.top_k
                s_rows[1, slot] = index
        cute.arch.sync_warp()
        return expert, before, cutlass.min(total - before, MMA_TOKENS)
