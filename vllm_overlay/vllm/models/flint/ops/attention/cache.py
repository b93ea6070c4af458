# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The paged cache: from pages to mma fragments, in registers.

vLLM's cache is [blocks, KV heads, page, K | V] with any strides but the last: token- or
head-major, layers apart or together. A key's K and V are 128 channels each, so one
16-byte load a lane reads whole sectors in every layout.

Nothing goes through shared memory. Scores sum over channels in any order, as long as q
is permuted alike: lane (g, t) = (lane // 4, lane % 4) loads 16 bytes of keys g and
g + 8, and those are its own part of B fragments. For the product with P, the channels
are rows of the output, in any order too: a lane loads the same 16 bytes of keys 2t,
2t + 1, 2t + 8 and 2t + 9 and pairs neighbouring keys with byte permutes.

E4M3 becomes BF16 exactly: exponent and mantissa at bits 10..4 are the value times
2^-120, and a BF16 multiplication by 2^120 keeps subnormals.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..gemv import primitives as p
from .config import HEAD_DIM, TILE_KEYS, DecodeConfig, DecodeSpec

# 2^120 in both halves.
_E4M3_SCALE = (120 + 127) << 7 | (120 + 127) << 23


def e4m3_pairs(word):
    """Four E4M3 bytes to BF16 pairs (0, 2) and (1, 3)."""
    even = ((word & Uint32(0x007F007F)) << 4) | ((word & Uint32(0x00800080)) << 8)
    odd = ((word >> 4) & Uint32(0x07F007F0)) | (word & Uint32(0x80008000))
    scale = Uint32(_E4M3_SCALE)
    return p.mul_bf16x2(even, scale), p.mul_bf16x2(odd, scale)


class PagedCache:
    """Loads of one warp: ``tiles`` tiles of 16 keys in flight."""

    def __init__(self, spec: DecodeSpec, config: DecodeConfig):
        self.spec = spec
        self.config = config
        # 16-byte loads of a lane for one key: of K by four lanes, of V by eight.
        self.k_loads = HEAD_DIM // (4 * spec.lane_dims)
        self.v_loads = HEAD_DIM // (8 * spec.lane_dims)
        # 32-bit words of K, and as many of V, that a lane holds for one tile.
        self.tile_words = 8 * self.k_loads

    def registers(self) -> cute.Tensor:
        """Room for K or for V, [tile, word]."""
        return cute.make_rmem_tensor(
            cute.make_layout(
                (self.config.tiles, self.tile_words), stride=(self.tile_words, 1)
            ),
            Uint32,
        )

    @cute.jit
    def locate(
        self,
        m_tables: cute.Tensor,
        request: Int32,
        page_keys: Int32,
        first: Int32,
        last: Int32,
        lane: Int32,
    ):
        """Where a warp's next 32 tiles lie: lane i has the i-th one's.

        Args:
            m_tables: block tables.
            request: whose.
            page_keys: keys in a page.
            first: the warp's first tile of these.
            last: last tile that exists; later ones are read as it.
            lane: this lane.

        Returns:
            Block, and first row in it.

        """
        tiles = const_expr(self.config.tiles)
        step = lane // tiles * self.config.round_tiles + lane % tiles
        key = cutlass.min(first + step, last) * TILE_KEYS
        page = key // page_keys
        return m_tables[request, page], key - page * page_keys

    def _row(self, m_kv, block, head, row, side, chunk):
        """16 bytes of a key as four words."""
        content = m_kv[block, head, row, None]
        chunks = HEAD_DIM // self.spec.lane_dims
        source = cute.local_tile(
            content, (self.spec.lane_dims,), (side * chunks + chunk,)
        )
        return p.load_streaming(cute.recast_tensor(source, Uint32), 4)

    @cute.jit
    def load_k(self, k, m_kv, place, slot, head, last_rows, lane):
        """Issue the loads of a step's K.

        Args:
            k: ``registers()`` to fill.
            m_kv: the cache.
            place: what ``locate`` gave.
            slot: lane that has the step's first tile.
            head: KV head.
            last_rows: for each tile its last row that holds a key.
            lane: this lane.

        """
        g, t = lane // 4, lane % 4
        for i in cutlass.range_constexpr(self.config.tiles):
            block = cute.arch.shuffle_sync(place[0], slot + i)
            first = cute.arch.shuffle_sync(place[1], slot + i)
            for half in cutlass.range_constexpr(2):
                row = first + cutlass.min(g + 8 * half, last_rows[i])
                for j in cutlass.range_constexpr(self.k_loads):
                    words = self._row(m_kv, block, head, row, 0, 4 * j + t)
                    for w in cutlass.range_constexpr(4):
                        k[i, (half * self.k_loads + j) * 4 + w] = words[w]

    @cute.jit
    def load_v(self, v, m_kv, place, slot, head, last_rows, lane):
        """Issue the loads of a step's V; arguments as for ``load_k``."""
        g, t = lane // 4, lane % 4
        for i in cutlass.range_constexpr(self.config.tiles):
            block = cute.arch.shuffle_sync(place[0], slot + i)
            first = cute.arch.shuffle_sync(place[1], slot + i)
            for key in cutlass.range_constexpr(4):
                offset = 2 * t + key % 2 + 8 * (key // 2)
                row = first + cutlass.min(offset, last_rows[i])
                for j in cutlass.range_constexpr(self.v_loads):
                    words = self._row(m_kv, block, head, row, 1, 8 * j + g)
                    for w in cutlass.range_constexpr(4):
                        v[i, (key * self.v_loads + j) * 4 + w] = words[w]

    def q_fragments(self, m_q, request, first_head, lane):
        """A fragments of q, rows 0..7 only: for each product its two registers."""
        g, t = lane // 4, lane % 4
        q = m_q[request, first_head + g, None]
        words = []
        for j in range(self.k_loads):
            chunk = (4 * j + t) * (self.spec.lane_dims // 8)
            for half in range(self.spec.lane_dims // 8):
                source = cute.local_tile(q, (8,), (chunk + half,))
                loaded = p.load_streaming(cute.recast_tensor(source, Uint32), 4)
                words += [loaded[w] for w in range(4)]
        if self.spec.fp8:
            pairs = []
            for low, high in zip(words[::2], words[1::2], strict=True):
                pairs.append(p.prmt(low, high, Uint32(0x5410)))
                pairs.append(p.prmt(low, high, Uint32(0x7632)))
            words = pairs
        return list(zip(words[::2], words[1::2], strict=True))

    def k_fragments(self, k, tile: int, half: int):
        """B fragments of keys 8 * half..: for each product its two registers."""
        words = [k[tile, half * self.k_loads * 4 + w] for w in range(4 * self.k_loads)]
        if self.spec.fp8:
            return [e4m3_pairs(word) for word in words]
        return list(zip(words[::2], words[1::2], strict=True))

    def v_fragments(self, v, tile: int):
        """A fragments of V transposed: for each product its four registers.

        Product i gives channels ``channel(i, lane)`` (rows g), and those of the other
        half (rows g + 8).
        """
        size = 4 * self.v_loads
        keys = [[v[tile, key * size + w] for w in range(size)] for key in range(4)]
        low = self._key_pairs(keys[0], keys[1])
        high = self._key_pairs(keys[2], keys[3])
        return [(low[i], low[i + 8], high[i], high[i + 8]) for i in range(8)]

    def _key_pairs(self, even, odd):
        """BF16 pairs (even key, odd key) of this lane's 16 channels."""
        pairs: list[Any] = []
        for a, b in zip(even, odd, strict=True):
            for select in (0x5410, 0x7632):
                pair = p.prmt(a, b, Uint32(select))
                pairs += e4m3_pairs(pair) if self.spec.fp8 else [pair]
        return pairs

    def channels(self, lane, half: int):
        """First of the eight neighbouring channels that a lane gets for one half."""
        if self.spec.fp8:
            return lane // 4 * 16 + half * 8
        return half * 64 + lane // 4 * 8
