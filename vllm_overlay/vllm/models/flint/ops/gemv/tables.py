# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which schedule to use: tuned tables (data) and a rule for untuned shapes."""

import functools
import itertools
import json
import pathlib
from dataclasses import dataclass, replace

from .config import MMA_TOKENS, GemvConfig, GemvSpec, Layout

_TUNED = pathlib.Path(__file__).parent / "tuned"
# Token tiles that variants are built for; M past the last takes several launches.
TOKEN_TILES = (1, 2, 4, 8)
# How many tokens the GEMV takes where nothing was measured: two launches of 64 tokens
# read less than one dequantization writes; quack's GEMM may win past one launch.
DEFAULT_MAX_TOKENS: dict[Layout, int] = {"row_major": 128, "fragments": 64}


@dataclass(frozen=True)
class Shape:
    """A weight of N rows and K columns, how it lies, and what is done with it."""

    n: int
    k: int
    silu_mul: bool = False
    bf16: bool = False
    layout: Layout = "row_major"

    @property
    def dequantized(self) -> bool:
        """Whether the GEMV's partner is dequantization and cuBLAS."""
        return not self.bf16 and self.layout == "row_major"


@dataclass(frozen=True)
class GemmTiles:
    """Tiles of the partner GEMM: weight rows, tokens, and parts along K."""

    tile_m: int
    tile_n: int
    split_k: int


@dataclass(frozen=True)
class TunedShape:
    """What was measured for one shape.

    Attributes:
        schedules: the fastest schedule of each count of 8-token tiles.
        max_tokens: up to how many tokens the GEMV beats what else reads these bytes.
        gemm_tiles: the partner's fastest tiles, by up to how many tokens; the last ones
            serve all larger counts. Empty where the partner has no choice.

    """

    schedules: dict[int, GemvConfig]
    max_tokens: int
    gemm_tiles: dict[int, GemmTiles]

    def pick(self, m: int) -> int | None:
        """Smallest tuned count of tiles that covers ``m`` tokens, if it is fastest."""
        if not 0 < m <= self.max_tokens:
            return None
        return min((nt for nt in self.schedules if MMA_TOKENS * nt >= m), default=None)


def family(capability: tuple[int, int]) -> str:
    """Name of a GPU family's table: sm90, sm100 (B200, B300), sm120."""
    return f"sm{capability[0]}0"


@functools.cache
def load_table(name: str) -> dict[Shape, TunedShape]:
    """Tuned shapes of a GPU family; empty without a table."""
    path = _TUNED / f"{name}.json"
    if not path.exists():
        return {}
    table = {}
    for row in json.loads(path.read_text())["shapes"]:
        shape = Shape(row["n"], row["k"], row["silu_mul"], row["bf16"], row["layout"])
        configs = [GemvConfig(**entry["config"]) for entry in row["schedules"]]
        tiles = {e["m"]: GemmTiles(**e["tiles"]) for e in row["gemm_tiles"]}
        schedules = {config.nt: config for config in configs}
        table[shape] = TunedShape(schedules, row["max_tokens"], tiles)
    return table


def candidates(spec: GemvSpec, n: int, nt: int, sms: int) -> list[GemvConfig]:
    """Schedules worth trying: enough CTAs, not too many steps a warp."""
    found = []
    for row_warps, row_tiles, k_warps, k_ctas in itertools.product(
        (1, 2, 4), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8)
    ):
        shape = GemvConfig(nt, row_warps, row_tiles, k_warps, k_ctas, depth=1)
        if shape.why_not(spec) is not None or not 64 <= shape.threads <= 512:
            continue
        steps = shape.steps(spec)
        ctas = shape.grid_rows(n, spec) * k_ctas
        if steps > 16 or ctas < sms // 2 or (ctas > 12 * sms and steps < 4):
            continue
        for depth in sorted({min(steps, d) for d in (2, 4, 8)}):
            if depth * row_tiles > 8:
                continue
            for early in sorted({0, min(1, depth), min(2, depth)}):
                config = replace(shape, depth=depth, early=early)
                if config.why_not(spec) is None:
                    found.append(config)
    return found


def estimated_cost(config: GemvConfig, spec: GemvSpec, n: int, sms: int) -> float:
    """Rough microseconds, to rank untuned schedules only."""
    ctas = config.grid_rows(n, spec) * config.k_ctas
    waves = -(-ctas // (sms * max(1, 512 // config.threads)))
    steps = config.steps(spec)
    latency = 0.4 * waves + 0.15 * steps * config.row_tiles
    latency += 0.25 * (config.k_ctas.bit_length() - 1) + 0.05 * (steps - config.depth)
    x_bytes = ctas * config.tokens * config.cta_k(spec) * 2
    weight_bytes = n * spec.k * (2 if spec.is_bf16 else 9 / 16)
    underfill = max(0.0, 1.5 * sms - ctas) / sms
    return latency + x_bytes / 4e6 + weight_bytes / 4e6 + underfill


@functools.cache
def default_config(spec: GemvSpec, n: int, nt: int, sms: int) -> GemvConfig:
    """A schedule for a shape that no table covers; exists for all ``token_tiles``.

    Early decoding is left out: it pays only where measured.
    """
    options = [c for c in candidates(spec, n, nt, sms) if c.early == 0]
    if options:
        return min(options, key=lambda c: estimated_cost(c, spec, n, sms))
    small = _small_configs(spec, nt)[0]
    return replace(small, depth=min(4, small.steps(spec)))


def _small_configs(spec: GemvSpec, nt: int) -> list[GemvConfig]:
    """A short K has no step for every warp; a long one needs a cluster to hold x."""
    return [
        config
        for k_ctas in (1, 2, 4, 8)
        for rows, k_warps in ((2, 4), (2, 2), (2, 1), (4, 4))
        if (config := GemvConfig(nt, rows, 1, k_warps, k_ctas, 1)).why_not(spec) is None
    ]


def token_tiles(spec: GemvSpec, entry: TunedShape | None) -> tuple[int, ...]:
    """Counts of 8-token tiles of a launch: measured ones, else those whose x fits."""
    if entry is not None:
        return tuple(sorted(entry.schedules))
    return tuple(nt for nt in TOKEN_TILES if _small_configs(spec, nt))
