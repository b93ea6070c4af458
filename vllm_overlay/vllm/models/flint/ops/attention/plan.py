# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which keys a cluster takes, from the lengths on the device.

The host knows neither the lengths nor their sum: a captured graph is replayed with
others. It launches as many clusters as any lengths can need, and each finds its
request. Every warp computes the same plan from all lengths; those are a few cached
loads for each 32 requests.

All requests are cut into chunks of about equal size, so that a batch of one spreads
over the GPU and a batch of many short ones is not cut at all. Chunks are rather too
large than too many: one cluster more than the GPU holds would cost the time of two.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .config import TILE_KEYS, DecodeConfig


class Share(NamedTuple):
    """What a cluster does.

    Attributes:
        request: which request, -1 where there is nothing to do.
        split: which chunk of it.
        splits: how many chunks it has.
        length: its keys.
        start: its first key in the window.
        first_tile: first tile of the chunk.
        end_tile: one past the chunk's last tile.

    """

    request: Int32
    split: Int32
    splits: Int32
    length: Int32
    start: Int32
    first_tile: Int32
    end_tile: Int32


class WorkPlan:
    """How lengths become shares."""

    def __init__(self, config: DecodeConfig):
        self.config = config

    def _tiles(self, length, window):
        """First tile in the window, and how many there are."""
        start = cutlass.max(length - window, Int32(0))
        first = start // TILE_KEYS
        return first, (length + TILE_KEYS - 1) // TILE_KEYS - first

    def _rounds(self, tiles):
        size = self.config.round_tiles
        return (tiles + size - 1) // size

    @cute.jit
    def _chunks(self, rounds: Int32, target: Int32, total: Int32):
        """A request's share of ``target``, in no more chunks than help."""
        # A request of length 0 still writes its zeros.
        count = cutlass.max(cutlass.min(rounds * target // total, rounds), Int32(1))
        if (count > 1) & (count < rounds):
            chunk = (rounds + count - 1) // count
            count = (rounds + chunk - 1) // chunk
        return count

    @cute.jit
    def _length(self, m_lens: cute.Tensor, request: Int32):
        length = Int32(0)
        if request < cute.size(m_lens):
            length = m_lens[request]
        return length

    @cute.jit
    def share_of(
        self,
        m_lens: cute.Tensor,
        cluster: Int32,
        window: Int32,
        target: Int32,
        lane: Int32,
    ):
        """Find the share of a cluster, counted over all requests; a warp does it."""
        batch = cute.size(m_lens)
        total = Int32(0)
        for base in cutlass.range(0, batch, 32, unroll=1):
            _, tiles = self._tiles(self._length(m_lens, base + lane), window)
            total += self._rounds(tiles)
        total = cutlass.max(cute.arch.warp_redux_sync(total, "add"), Int32(1))

        request, split, splits = Int32(-1), Int32(0), Int32(1)
        before = Int32(0)
        for base in cutlass.range(0, batch, 32, unroll=1):
            index = base + lane
            _, tiles = self._tiles(self._length(m_lens, index), window)
            count = self._chunks(self._rounds(tiles), target, total)
            if index >= batch:
                count = Int32(0)
            upto = count
            for power in cutlass.range_constexpr(5):
                below = cute.arch.shuffle_sync_up(upto, offset=1 << power)
                if lane >= 1 << power:
                    upto += below
            place = cluster - before - (upto - count)
            mine = (place >= 0) & (place < count)
            found = Int32(-1)
            found_split = found_splits = Int32(0)
            if mine:
                found, found_split, found_splits = index, place, count
            found = cute.arch.warp_redux_sync(found, "max")
            if found >= 0:
                request = found
                split = cute.arch.warp_redux_sync(found_split, "max")
                splits = cute.arch.warp_redux_sync(found_splits, "max")
            before += cute.arch.shuffle_sync(upto, 31)

        length = self._length(m_lens, cutlass.max(request, Int32(0)))
        first, tiles = self._tiles(length, window)
        size = const_expr(self.config.round_tiles)
        rounds = self._rounds(tiles)
        begin = split * rounds // splits * size
        end = cutlass.min((split + 1) * rounds // splits * size, tiles)
        start = cutlass.max(length - window, Int32(0))
        return Share(request, split, splits, length, start, first + begin, first + end)
