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

    def __init__(self, spec: GemvSpec, config: GemvConfig, one_token: bool = False):
        """Prepares for up to ``config.tokens`` tokens.

        Args:
            spec: of the product.
            config: its schedule.
            one_token: whether there is one token only: it is staged once, and is every
                column of B.

        """
        self.spec = spec
        self.config = config
        self.tokens = 1 if one_token else config.tokens
        self.unit_k = spec.unit_k
        self.half_pairs = not spec.is_bf16 and FORMS[spec.form].half_pairs
        self.chunks = config.cta_k(spec) // _CHUNK_K
        self.words = config.x_stride(spec) // 4
        self.lane_words = spec.lane_k // _CHUNK_K
        self.exact_k = config.cta_k(spec) * config.k_ctas == spec.k

    def layout(self) -> cute.Layout:
        """(token, 32-bit word of its slice)."""
        stride = 0 if self.tokens == 1 else self.words
        return cute.make_layout((self.config.tokens, self.words), stride=(stride, 1))

    def slot(self, chunk):
        """Where chunk ``chunk`` of the slice is kept: (c, word) to (word, c)."""
        per_step = 4 * self.lane_words
        step, c = chunk // per_step, (chunk // self.lane_words) % 4
        return step * per_step + (chunk % self.lane_words) * 4 + c

    @cute.jit
    def stage(self, m_x: cute.Tensor, s_x: cute.Tensor, rank: Int32, thread: Int32):
        """Copies x[:, slice] of this CTA, permuted; all threads take part."""
        count = cute.size(m_x, mode=[0])
        in_flight = _BATCH * _CHUNK_K // self.unit_k
        for batch in cutlass.range_constexpr(-(-self.copies // in_flight)):
            first = batch * in_flight
            units = range(first, min(first + in_flight, self.copies))
            held = self.load(m_x, None, count, rank, thread, units)
            self.store(s_x, held, thread, units)

    @property
    def units(self) -> int:
        """Units of a token's slice."""
        return self.chunks * _CHUNK_K // self.unit_k

    @property
    def copies(self) -> int:
        """Units that each thread stages."""
        return -(-self.tokens * self.units // self.config.threads)

    def load(self, m_x, rows, count, rank, thread, units):
        """Issues loads of x[:, slice], to be stored by the same thread.

        Args:
            m_x: BF16 [any, K].
            rows: which rows of it the tokens are; None where the first ones.
            count: how many tokens there are; the others are zeros.
            rank: which slice.
            thread: index of the ``config.threads`` threads that take part.
            units: which of ``copies``.

        """
        threads = self.config.threads
        return [
            self._load_unit(m_x, rows, count, rank, thread + j * threads) for j in units
        ]

    @cute.jit
    def store(self, s_x: cute.Tensor, held, thread: Int32, units):
        """Stores what ``load`` returned in its permuted places."""
        threads = self.config.threads
        total = self.tokens * self.units
        for j, words in enumerate(held):
            index = thread + units[j] * threads
            if total % threads == 0 or index < total:
                self.store_unit(s_x, words, index)

    @cute.jit
    def _load_unit(
        self,
        m_x: cute.Tensor,
        rows: cute.Tensor | None,
        count: Int32,
        rank: Int32,
        index: Int32,
    ):
        token, unit = index // self.units, index % self.units
        column = rank * self.units + unit
        values = cute.make_rmem_tensor((self.unit_k,), BFloat16)
        values.fill(0)
        valid = token < count
        if cutlass.const_expr(not self.exact_k):
            valid = valid & (column < self.spec.k // self.unit_k)
        if valid:
            row = token
            if cutlass.const_expr(rows is not None):
                row = rows[token]  # type: ignore[index]
            source = cute.local_tile(m_x[row, None], (self.unit_k,), (column,))
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

    def multiply(self, acc, fragments, s_x, lane, step):
        """Adds one step's products to ``acc[row tile][token tile]``."""
        for word in range(len(fragments[0]) // 2):
            x = self.read(s_x, lane, step, word)
            for j in range(2):
                for t, tile in enumerate(fragments):
                    for m, b in enumerate(x):
                        acc[t][m] = p.mma_m16n8k16(
                            tile[2 * word + j], (b[2 * j], b[2 * j + 1]), acc[t][m]
                        )


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
