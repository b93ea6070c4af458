# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""x in shared memory, in the order in which a warp's products need it.

A staged token is one CTA's slice of K as 16-byte chunks of 8 BF16. Within a step the
chunks are transposed so that lanes c = 0..3 read 64 contiguous bytes; tokens lie an odd
multiple of 64 bytes apart, so the eight lanes of a phase hit 32 different banks. A
decode form that pairs codes i and i + 4 finds x paired alike. Tokens past M and k past
K are zero.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32

from . import primitives as p
from .config import GemvConfig, GemvSpec
from .decode import FORMS

_CHUNK_K = 8
# Loads of x that a thread has in flight.
_BATCH = 8


class StagedActivations:
    """How x is staged and read back as B fragments."""

    def __init__(self, spec: GemvSpec, config: GemvConfig):
        self.spec = spec
        self.config = config
        self.half_pairs = not spec.is_bf16 and FORMS[spec.form].half_pairs
        self.chunks = config.cta_k(spec) // _CHUNK_K
        self.words = config.x_stride(spec) // 4
        self.lane_words = spec.lane_k // _CHUNK_K
        self.exact_k = config.cta_k(spec) * config.k_ctas == spec.k

    def layout(self) -> cute.Layout:
        """(token, 32-bit word of its slice)."""
        return cute.make_layout(
            (self.config.tokens, self.words), stride=(self.words, 1)
        )

    def slot(self, chunk):
        """Where chunk ``chunk`` of the slice is kept: (c, word) to (word, c)."""
        per_step = 4 * self.lane_words
        step, c = chunk // per_step, (chunk // self.lane_words) % 4
        return step * per_step + (chunk % self.lane_words) * 4 + c

    @cute.jit
    def stage(self, m_x: cute.Tensor, s_x: cute.Tensor, rank: Int32, thread: Int32):
        """Copies x[:, slice] of this CTA, permuted; all threads take part."""
        threads = self.config.threads
        total = self.config.tokens * self.chunks
        copies = -(-total // threads)
        for batch in cutlass.range_constexpr(-(-copies // _BATCH)):
            count = min(_BATCH, copies - batch * _BATCH)
            held = []
            for j in cutlass.range_constexpr(count):
                index = thread + (batch * _BATCH + j) * threads
                held.append(self._load_chunk(m_x, rank, index))
            for j in cutlass.range_constexpr(count):
                index = thread + (batch * _BATCH + j) * threads
                if total % threads == 0 or index < total:
                    self._store_chunk(s_x, held[j], index)

    @cute.jit
    def _load_chunk(self, m_x: cute.Tensor, rank: Int32, index: Int32):
        token, chunk = index // self.chunks, index % self.chunks
        column = rank * self.chunks + chunk
        values = cute.make_rmem_tensor((_CHUNK_K,), BFloat16)
        values.fill(0)
        valid = token < cute.size(m_x, mode=[0])
        if cutlass.const_expr(not self.exact_k):
            valid = valid & (column < self.spec.k // _CHUNK_K)
        if valid:
            source = cute.local_tile(m_x[token, None], (_CHUNK_K,), (column,))
            cute.autovec_copy(source, values)
        return cute.recast_tensor(values, Uint32)

    @cute.jit
    def _store_chunk(self, s_x: cute.Tensor, words: cute.Tensor, index: Int32):
        token, chunk = index // self.chunks, index % self.chunks
        paired = cute.make_rmem_tensor((4,), Uint32)
        if cutlass.const_expr(self.half_pairs):
            for j in cutlass.range_constexpr(2):
                low, high = words[j], words[j + 2]
                paired[2 * j] = p.prmt(low, high, Uint32(0x5410))
                paired[2 * j + 1] = p.prmt(low, high, Uint32(0x7632))
        else:
            for j in cutlass.range_constexpr(4):
                paired[j] = words[j]
        target = cute.local_tile(s_x[token, None], (4,), (self.slot(chunk),))
        cute.autovec_copy(paired, target)

    def read(self, s_x: cute.Tensor, lane: Int32, step, word: int):
        """B fragments of word ``word`` of a step: ``[token tile]`` four registers.

        The first two belong to product 2 * word, the others to 2 * word + 1.
        """
        slot = step * 4 * self.lane_words + 4 * word + lane % 4
        out = []
        for t in range(self.config.nt):
            registers = cute.make_rmem_tensor((4,), Uint32)
            source = cute.local_tile(s_x[8 * t + lane // 4, None], (4,), (slot,))
            cute.autovec_copy(source, registers)
            out.append(registers)
        return out
