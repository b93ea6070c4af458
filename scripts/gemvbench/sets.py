# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which variants tests, sweeps and comparisons need."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from vllm.models.flint.ops.gemv.config import (
    MMA_TOKENS,
    SCALE_ROWS,
    GemvConfig,
    GemvSpec,
    Layout,
)
from vllm.models.flint.ops.gemv.tables import (
    Shape,
    candidates,
    default_config,
    estimated_cost,
    load_table,
    token_tiles,
)
from vllm.models.flint.ops.qkv_fused import MAX_M

from gemvbench.shapes import HIDDEN, Layer, layers_of

# A GEMV, or a dequantization: row width and decode form.
Variant: TypeAlias = tuple[GemvSpec, GemvConfig] | tuple[int, str]

# The H200's. Another count of SMs only changes which schedules look worth trying.
SMS = 132
# RMSNorm's, in Flint's config.
EPS = 1e-6
# Small and odd shapes: (N, K, silu_mul).
TEST_SHAPES = [
    (128, 64, False),
    (48, 96, False),
    (130, 160, False),
    (257, 1056, False),
    (256, 512, True),
    (512, 2048, True),
    (640, 2048, False),
    (1000, 4096, False),
    (384, 6144, False),
    (256, 1024, False),
    (256, 32, False),
    (96, 128, False),
    (4096, 2048, True),
]
# The same for fragments: whole blocks, and no SiLU over part of a 128-row block.
FRAGMENT_SHAPES = [
    (128, 64, False),
    (256, 128, False),
    (384, 192, False),
    (256, 512, True),
    (640, 2048, False),
]


def spec_of(
    layer: Layer, form: str, pdl: bool = True, layout: Layout = "row_major"
) -> GemvSpec:
    """What the overlay compiles for a layer."""
    shape = layer.shape(form, layout)
    width = shape.n // 2 if shape.silu_mul else shape.n
    full = width % SCALE_ROWS == 0
    return GemvSpec(shape.k, form, layer.silu_mul, layer.fp32_out, full, pdl, layout)


def chosen(
    layer: Layer,
    form: str,
    table: str,
    pdl: bool = True,
    layout: Layout = "row_major",
) -> list[Variant]:
    """What the overlay picks for a layer: by a tuned table, else by its rule."""
    spec = spec_of(layer, form, pdl, layout)
    shape = layer.shape(form, layout)
    entry = load_table(table).get(shape)
    found: list[Variant] = [
        (spec, _schedule(spec, shape, table, nt)) for nt in token_tiles(spec, entry)
    ]
    if shape.dequantized:
        found.append((layer.k, form))
    return found


def _schedule(spec: GemvSpec, shape: Shape, table: str, nt: int) -> GemvConfig:
    entry = load_table(table).get(shape)
    config = None if entry is None else entry.schedules.get(nt)
    if config is None or config.why_not(spec) is not None:
        return default_config(spec, shape.n, nt, SMS)
    return config


def normed(layer: Layer, form: str, table: str, pdl: bool = True) -> list[Variant]:
    """What the fused QKV picks for a layer, in each layout that it may have."""
    found: list[Variant] = []
    for f, layout in _kinds(form):
        spec = replace(spec_of(layer, f, pdl, layout), norm_eps=EPS)
        shape = layer.shape(f, layout)
        found += [
            (spec, _schedule(spec, shape, table, nt))
            for nt in token_tiles(spec, None)
            if MMA_TOKENS * nt <= MAX_M
        ]
    return found


def _kinds(form: str) -> list[tuple[str, Layout]]:
    """Decode forms with the layouts that the overlay may read."""
    kinds: list[tuple[str, Layout]] = [(form, "row_major"), ("bf16", "row_major")]
    return [*kinds, (form, "fragments")] if form == "mul" else kinds


def served(table: str, form: str) -> list[Variant]:
    """Every variant that Flint may launch at TP 1 and 2."""
    layers = layers_of(1) + layers_of(2)
    found = [
        chosen(layer, f, table, layout=layout)
        for layer in layers
        for f, layout in _kinds(form)
    ]
    found += [normed(Layer(5120 // tp, HIDDEN), form, table) for tp in (1, 2)]
    return list(dict.fromkeys(itertools.chain(*found)))


def tested(table: str, form: str) -> list[Variant]:
    """What tests/gpu launches besides."""
    found: list[Variant] = []
    for f, layout in _kinds(form):
        fragments = layout == "fragments"
        for n, k, silu in FRAGMENT_SHAPES if fragments else TEST_SHAPES:
            found += chosen(Layer(n, k, silu), f, table, layout=layout)
        odd = (256, 128, False) if fragments else (512, 2048, True)
        for n, k, silu in ((640, 2048, False), odd):
            layer, head = Layer(n, k, silu), Layer(n, k, silu, fp32_out=True)
            found += chosen(layer, f, table, pdl=False, layout=layout)
            found += chosen(head, f, table, layout=layout)
    found += normed(Layer(5120, HIDDEN), form, table, pdl=False)
    found += normed(Layer(5120, 256), form, table)
    # Every code times every scale.
    found += chosen(Layer(256, 32, fp32_out=True), form, table)
    return list(dict.fromkeys(found))


def _unlike(known: Iterable[GemvConfig]) -> Iterator[GemvConfig]:
    """Schedules like the known ones, with other splits of K and steps in flight."""
    for config in known:
        yield config
    for config in known:
        for k_ctas in (config.k_ctas * 2, config.k_ctas // 2):
            if k_ctas in (1, 2, 4, 8):
                yield replace(config, k_ctas=k_ctas)
        yield replace(config, early=0)
        yield replace(config, depth=config.depth + 1)
        yield replace(config, depth=config.depth + 2)


def sweep(
    layer: Layer,
    form: str,
    nt: int,
    limit: int,
    known: Sequence[GemvConfig],
    layout: Layout = "row_major",
) -> Iterator[Variant]:
    """At most `limit` schedules for a layer: known good ones first, then likely ones.

    Args:
        layer: The layer.
        form: Decode form, or bf16.
        nt: Tiles of 8 tokens.
        limit: How many to give.
        known: Schedules that were fast before, at any `nt`; those of the nearest `nt`
            come first.
        layout: Of the weight.
    """
    spec = spec_of(layer, form, layout=layout)
    n = layer.shape(form, layout).n
    likely = sorted(
        candidates(spec, n, nt, SMS),
        key=lambda config: estimated_cost(config, spec, n, SMS),
    )
    near = sorted(known, key=lambda config: abs(math.log2(config.nt / nt)))
    options = [replace(config, nt=nt) for config in near]
    options = [*options[:2], default_config(spec, n, nt, SMS), *_unlike(options)]
    usable = (c for c in dict.fromkeys([*options, *likely]) if c.why_not(spec) is None)
    for config in itertools.islice(usable, limit):
        yield spec, config
