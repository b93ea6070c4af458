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
# Loads of x that a thread has in flight, of 16 bytes.
_BATCH = 8
# A BF16 pair from the low halves of two, or the high ones.
_LOW, _HIGH = 0x5410, 0x7632


class StagedActivations:
    """How x is staged and read back as B fragments."""

    def __init__(self, spec: GemvSpec, config: GemvConfig):
        self.spec = spec
        self.config = config
        self.unit_k = spec.unit_k
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
        total = self.config.tokens * (self.chunks * _CHUNK_K // self.unit_k)
        copies = -(-total // threads)
        in_flight = _BATCH * _CHUNK_K // self.unit_k
        for batch in cutlass.range_constexpr(-(-copies // in_flight)):
            count = min(in_flight, copies - batch * in_flight)
            held = []
            for j in cutlass.range_constexpr(count):
                index = thread + (batch * in_flight + j) * threads
                held.append(self._load_unit(m_x, rank, index))
            for j in cutlass.range_constexpr(count):
                index = thread + (batch * in_flight + j) * threads
                if total % threads == 0 or index < total:
                    self.store_unit(s_x, held[j], index)

    @cute.jit
    def _load_unit(self, m_x: cute.Tensor, rank: Int32, index: Int32):
        units = self.chunks * _CHUNK_K // self.unit_k
        token, unit = index // units, index % units
        column = rank * units + unit
        values = cute.make_rmem_tensor((self.unit_k,), BFloat16)
        values.fill(0)
        valid = token < cute.size(m_x, mode=[0])
        if cutlass.const_expr(not self.exact_k):
            valid = valid & (column < self.spec.k // self.unit_k)
        if valid:
            source = cute.local_tile(m_x[token, None], (self.unit_k,), (column,))
            cute.autovec_copy(source, values)
        return cute.recast_tensor(values, Uint32)

    @cute.jit
    def store_unit(self, s_x: cute.Tensor, words: cute.Tensor, index: Int32):
        """Stores ``unit_k`` values, BF16 pairs in order, in their places."""
        token, chunk = index // self.chunks, index % self.chunks
        paired = cute.make_rmem_tensor((4,), Uint32)
        if cutlass.const_expr(self.half_pairs):
            for j in cutlass.range_constexpr(2):
                low, high = words[j], words[j + 2]
                paired[2 * j] = p.prmt(low, high, Uint32(_LOW))
                paired[2 * j + 1] = p.prmt(low, high, Uint32(_HIGH))
        else:
            for j in cutlass.range_constexpr(4):
                paired[j] = words[j]
        target = cute.local_tile(s_x[token, None], (4,), (self.slot(chunk),))
        cute.autovec_copy(paired, target)

    def lane_slot(self, word: int, lane: Int32):
        """Which of a step's 16-byte slots holds what a lane reads for ``word``."""
        return 4 * word + lane % 4

    def read(self, s_x: cute.Tensor, lane: Int32, step, word: int):
        """B fragments of word ``word`` of a step: ``[token tile]`` four registers.

        The first two belong to product 2 * word, the others to 2 * word + 1.
        """
        slot = step * 4 * self.lane_words + self.lane_slot(word, lane)
        out = []
        for t in range(self.config.nt):
            registers = cute.make_rmem_tensor((4,), Uint32)
            source = cute.local_tile(s_x[8 * t + lane // 4, None], (4,), (slot,))
            cute.autovec_copy(source, registers)
            out.append(registers)
        return out


class FragmentActivations(StagedActivations):
    """The order that fragments of weights need (``fragments``).

    Lane c reads, for two products, x at 2c, 2c + 8, 2c + 1 and 2c + 9 of each 16 k.
    Lanes that store neighbouring words would hit the same banks: the upper two words of
    a step have their slots exchanged.
    """

    def lane_slot(self, word: int, lane: Int32):
        return 4 * word + ((lane % 4) ^ (word // 2))

    @cute.jit
    def store_unit(self, s_x: cute.Tensor, words: cute.Tensor, index: Int32):
        units = self.chunks // 2
        token, unit = index // units, index % units
        word = unit // 2
        for c in cutlass.range_constexpr(4):
            paired = cute.make_rmem_tensor((2,), Uint32)
            paired[0] = p.prmt(words[c], words[c + 4], Uint32(_LOW))
            paired[1] = p.prmt(words[c], words[c + 4], Uint32(_HIGH))
            slot = 4 * word + (c ^ ((word // 2) % 2))
            target = cute.local_tile(s_x[token, None], (2,), (2 * slot + unit % 2,))
            cute.autovec_copy(paired, target)
