# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Times quack's GEMM, the partner on weights in fragment order, at its tiles."""

import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from tqdm import tqdm
from vllm.models.flint.ops.fragments import to_fragments
from vllm.models.flint.ops.gemv.config import FRAGMENT_BLOCK
from vllm.models.flint.ops.gemv.tables import GemmTiles
from vllm.models.flint.ops.norm import silu_and_mul

from gemvbench.sets import SMS
from gemvbench.shapes import Layer
from gemvbench.timing import graph_us
from gemvbench.tune import Results
from gemvbench.weights import Weight, copies_of, weight_bytes

TOKENS = [8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]
# Logits are for the tokens of one step, not for a prompt.
_HEAD_TOKENS = 512
# How many tiles are timed for a count of tokens, besides quack's own choice.
_TIMED = 4


def _cost(tiles: GemmTiles, n: int, k: int, m: int) -> float:
    """Rough cycles, to rank tiles only: products or decoding, and fixed parts."""
    ctas = -(-n // tiles.tile_m) * -(-m // tiles.tile_n) * tiles.split_k
    # Two CTAs of an SM share its matrix units, but hide each other's latency.
    resident = 1 if tiles.tile_n > 64 else 2
    width = max(4 * tiles.tile_n * resident, 350) * tiles.tile_m / 128
    steps = k / FRAGMENT_BLOCK / tiles.split_k
    waves = -(-ctas // (SMS * resident))
    return 1500 + waves * (steps * width + 800) + 3000 * (tiles.split_k - 1)


def _likely(layer: Layer, m: int) -> list[GemmTiles]:
    shape = layer.shape("mul", "fragments")
    sizes = (64, 128), (16, 32, 64, 128, 192, 256), (1, 2, 4)
    options = [
        tiles
        for tiles in itertools.starmap(GemmTiles, itertools.product(*sizes))
        if (tiles.tile_n < 2 * m or tiles.tile_n == 16)
        and (tiles.split_k == 1 or tiles.tile_n <= 128)
        and shape.k // FRAGMENT_BLOCK // tiles.split_k >= 8
    ]
    return sorted(options, key=lambda t: _cost(t, shape.n, shape.k, m))[:_TIMED]


def timed_tiles(layer: Layer) -> Iterator[tuple[int, GemmTiles]]:
    """Counts of tokens and the tiles to time for them."""
    for m in TOKENS:
        if layer.fp32_out and m > _HEAD_TOKENS:
            continue
        for tiles in dict.fromkeys([*_likely(layer, m), _own_tiles(layer, m)]):
            yield m, tiles


def _own_tiles(layer: Layer, m: int) -> GemmTiles:
    """What quack takes."""
    from vllm.models.flint.ops.quack_gemm import quack_tiles

    shape = layer.shape("mul", "fragments")
    return quack_tiles(shape.n, shape.k, m)


def _compile(job: tuple[Layer, GemmTiles]) -> None:
    """Puts one GEMM in quack's cache on disk."""
    from vllm.models.flint.ops import quack_gemm

    layer, tiles = job
    shape = layer.shape("mul", "fragments")
    groups, blocks = shape.n // FRAGMENT_BLOCK, shape.k // FRAGMENT_BLOCK
    like = functools.partial(torch.empty, dtype=torch.uint8, device="cuda")
    dtype = torch.float32 if layer.fp32_out else torch.bfloat16
    x = torch.empty(1, shape.k, dtype=torch.bfloat16, device="cuda")
    quack_gemm.gemm(
        x,
        like(groups, blocks, 128, 16),
        like(groups, blocks, 32, 4, 2),
        torch.ones(1, device="cuda"),
        dtype,
        True,
        tiles,
        launch=False,
    )


def compile_tiles(layers: list[Layer], jobs: int) -> None:
    """Compiles everything that `time_tiles` will launch, in several processes."""
    wanted = {
        (Layer(layer.n, layer.k, fp32_out=layer.fp32_out), tiles)
        for layer in layers
        for _, tiles in timed_tiles(layer)
    }
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(wanted))) as pool:
        work = pool.imap_unordered(_compile, wanted)
        list(tqdm(work, total=len(wanted), desc="compile quack's GEMM"))


def time_tiles(results: Results, layers: list[Layer]) -> None:
    """Adds rows for quack's GEMM, with SiLU and product where the layer has them."""
    for layer in tqdm(layers, desc="partner"):
        if results.out_of_time(f"quack's GEMM on {layer.name}"):
            continue
        shape = layer.shape("mul", "fragments")
        size = weight_bytes(layer.n, layer.k, False)
        weights = []
        for _ in range(copies_of(size)):
            weight = Weight.random(layer.n, layer.k)
            weights.append(to_fragments(weight.codes, weight.scales))
        for m, tiles in timed_tiles(layer):
            x = torch.randn(m, shape.k, device="cuda").bfloat16()
            calls: list[Callable[[], object]] = [
                functools.partial(_linear, layer, x, codes, scales, tiles)
                for codes, scales in weights
            ]
            results.add(
                size,
                graph_us(calls),
                n=shape.n,
                k=shape.k,
                silu_mul=shape.silu_mul,
                form="mul",
                layout="fragments",
                m=m,
                tiles=asdict(tiles),
                partners_own=tiles == _own_tiles(layer, m),
            )
        results.save()


def _linear(
    layer: Layer,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    tiles: GemmTiles,
) -> torch.Tensor:
    from vllm.models.flint.ops.quack_gemm import gemm

    dtype = torch.float32 if layer.fp32_out else torch.bfloat16
    out = gemm(x, weight, scales, 0.01, dtype, True, tiles)
    return silu_and_mul(out) if layer.silu_mul else out
