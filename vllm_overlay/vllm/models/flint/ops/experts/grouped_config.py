# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tile sizes of the experts' grouped GEMM, by how many rows an expert gets."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ..device import current_gpu


@dataclass(frozen=True)
class GemmConfig:
    """Tiles and pipeline of one of the two GEMMs.

    Attributes:
        block_n: weight rows of a tile, 64 or 128.
        block_k: columns of a pipeline stage, a power of two from 64 on; halved until
            it divides the width. Below 128 scales are not loaded ahead.
        warps: 4 or 8.
        stages: stages in flight.

    """

    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class GroupedConfig:
    """How ``grouped_experts`` runs.

    Attributes:
        block_t: rows of one expert in a tile, a power of two from 16 on.
        gate_up: the first GEMM.
        down: the second GEMM.

    """

    block_t: int
    gate_up: GemmConfig
    down: GemmConfig


_FEW = GemmConfig(block_n=128, block_k=128, warps=4, stages=5)
_SOME = GemmConfig(block_n=128, block_k=128, warps=8, stages=4)
_MANY = GemmConfig(block_n=128, block_k=128, warps=8, stages=3)
_SMALL_FEW = GemmConfig(block_n=128, block_k=128, warps=4, stages=4)
# Up to how many rows an expert gets, on average, with which tiles: with the shared
# memory (227 KiB) and the MMAs of SM90 and SM100, and anywhere else (99 KiB).
_LADDER = (
    (6.0, GroupedConfig(16, _FEW, _FEW)),
    (20.0, GroupedConfig(32, _FEW, _FEW)),
    (60.0, GroupedConfig(64, _SOME, _SOME)),
    (float("inf"), GroupedConfig(128, _MANY, _MANY)),
)
_SMALL_LADDER = (
    (6.0, GroupedConfig(16, _SMALL_FEW, _SMALL_FEW)),
    (20.0, GroupedConfig(32, _SMALL_FEW, _SMALL_FEW)),
    (float("inf"), GroupedConfig(64, _MANY, _MANY)),
)


def pick_config(
    pairs: int, num_experts: int, capability: tuple[int, int] | None = None
) -> GroupedConfig:
    """Pick the tiles for ``pairs`` rows that are spread over ``num_experts``.

    Args:
        pairs: tokens times experts a token.
        num_experts: experts on this rank.
        capability: of the GPU, by default the current one.

    Returns:
        The tiles of both GEMMs.

    """
    mean = pairs / num_experts
    return next(config for limit, config in _ladder(capability) if mean <= limit)


def picked_configs(
    capability: tuple[int, int] | None = None,
) -> tuple[GroupedConfig, ...]:
    """All that ``pick_config`` may return on such a GPU."""
    return tuple(config for _, config in _ladder(capability))


def _ladder(
    capability: tuple[int, int] | None,
) -> tuple[tuple[float, GroupedConfig], ...]:
    major, _ = capability or current_gpu().capability
    return _LADDER if major in (9, 10) else _SMALL_LADDER


def candidate_configs(block_t: int) -> Iterator[GemmConfig]:
    """Yield what is worth timing for either GEMM at one tile width.

    Each of them fits the registers and the shared memory of an SM90 or SM100.
    """
    words = (64, 128), (128, 256), (4, 8), (3, 4, 5, 6)
    for block_n, block_k, warps, stages in itertools.product(*words):
        accumulators = block_n * block_t // (32 * warps)
        stage = block_k * (2 * block_t + block_n // 2 + block_n // 16)
        fits = accumulators <= 128 and stage * stages <= 220 * 1024
        if fits and (block_n, warps) != (64, 8):
            yield GemmConfig(block_n, block_k, warps, stages)
