# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Grouping of pairs (token, expert) by expert, in tiles, in one launch (Triton).

Expert e's tiles start at ``pairs of lower experts // block_t + e``: at most that many
are taken before, whatever the counts are, so that no expert needs another's count of
tiles. Between two experts one tile may stay empty. vLLM's ``moe_align_block_size``
packs tiles densely, which takes two launches, one of them on a single SM.

Bytes: 4 for each pair and expert, from L2. Floor: the launch, and one chain of loads;
from some ten thousand pairs on the chain is longer, and what follows longer still.
"""

import functools
from dataclasses import dataclass

import torch

from vllm.triton_utils import tl, triton

from ..triton_launch import Constants
from .chain import can_chain, chain, chained

_TILES = tl.constexpr(128)


@dataclass(frozen=True)
class Groups:
    """Pairs by expert.

    Attributes:
        pairs: int32 [tiles * block_t]; the number of pairs where a tile is padded, and
            undefined where it is empty.
        tile_experts: int32 [tiles], the expert of each tile; -1 where it is empty.
        block_t: pairs of a tile.

    """

    pairs: torch.Tensor
    tile_experts: torch.Tensor
    block_t: int


@triton.jit(do_not_specialize=["num_pairs", "tiles"])
def _group_kernel(
    ids,
    pairs,
    tile_experts,
    num_pairs,
    tiles,
    PDL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chain(PDL)
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + place
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
        lower += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
    before = tl.sum(lower, axis=0)
    start = before // BLOCK_T + expert
    own_pairs = pairs + start * BLOCK_T
    count = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + place
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
        own = (chosen == expert).to(tl.int32)
        rank = count + tl.cumsum(own, axis=0) - 1
        tl.store(own_pairs + rank, pair, mask=own != 0)
        count += tl.sum(own, axis=0)
    end = start + (count + BLOCK_T - 1) // BLOCK_T
    rank = count + tl.arange(0, BLOCK_T)
    tl.store(own_pairs + rank, num_pairs, mask=rank < (end - start) * BLOCK_T)
    last = (before + count) // BLOCK_T + expert + 1
    if expert == tl.num_programs(0) - 1:
        last = tiles
    for first in range(start, last, _TILES):
        tile = first + tl.arange(0, _TILES)
        tl.store(
            tile_experts + tile, tl.where(tile < end, expert, -1), mask=tile < last
        )


def read_at_once(block_t: int) -> dict[str, int]:
    """Arguments of a launch; few rows an expert come with few pairs to read."""
    block = 64 * block_t
    return {"BLOCK": block, "num_warps": max(4, block // 512)}


def group_pairs(
    ids: torch.Tensor, block_t: int, num_experts: int, pdl: bool = False
) -> Groups:
    """Group pairs by expert, in the order of pairs.

    Args:
        ids: int32 [M, top_k], contiguous: experts from 0 to ``num_experts`` - 1.
        block_t: pairs of a tile, a power of two.
        num_experts: experts on this rank.
        pdl: start while the kernel before drains.

    Returns:
        The groups, in memory that depends on the shape of ``ids`` alone.

    """
    num_pairs = ids.numel()
    tiles = num_pairs // block_t + num_experts
    pairs = ids.new_empty(tiles * block_t)
    tile_experts = ids.new_empty(tiles)
    _constants(block_t, can_chain(ids, pdl)).launch(
        _group_kernel, (num_experts,), (ids, pairs, tile_experts), (num_pairs, tiles)
    )
    return Groups(pairs, tile_experts, block_t)


@functools.cache
def _constants(block_t: int, early: bool) -> Constants:
    return Constants(BLOCK_T=block_t, **read_at_once(block_t), **chained(early))
