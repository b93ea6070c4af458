# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which variants tests, sweeps and comparisons need."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from vllm.models.flint.ops.gemv.config import SCALE_ROWS, GemvConfig, GemvSpec
from vllm.models.flint.ops.gemv.tables import (
    TOKEN_TILES,
    Shape,
    candidates,
    default_config,
    estimated_cost,
    load_table,
)

from gemvbench.shapes import Layer, layers_of

# A GEMV, or a dequantization: row width and decode form.
Variant: TypeAlias = tuple[GemvSpec, GemvConfig] | tuple[int, str]

# The H200's. Another count of SMs only changes which schedules look worth trying.
SMS = 132
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


def spec_of(layer: Layer, form: str, pdl: bool = True) -> GemvSpec:
    """What the overlay compiles for a layer."""
    width = layer.n // 2 if layer.silu_mul else layer.n
    return GemvSpec(
        layer.k, form, layer.silu_mul, layer.fp32_out, width % SCALE_ROWS == 0, pdl
    )


def chosen(layer: Layer, form: str, table: str, pdl: bool = True) -> list[Variant]:
    """What the overlay picks for a layer: by a tuned table, else by its rule."""
    spec = spec_of(layer, form, pdl)
    shape = Shape(layer.n, layer.k, layer.silu_mul, spec.is_bf16)
    entry = load_table(table).get(shape)
    found: list[Variant] = []
    for nt in TOKEN_TILES:
        config = None if entry is None else entry.schedules.get(nt)
        if config is None or config.why_not(spec) is not None:
            config = default_config(spec, layer.n, nt, SMS)
        found.append((spec, config))
    if not spec.is_bf16:
        found.append((layer.k, form))
    return found


def served(table: str, form: str) -> list[Variant]:
    """Every variant that Flint may launch at TP 1 and 2."""
    layers = layers_of(1) + layers_of(2)
    found = [chosen(layer, f, table) for layer in layers for f in (form, "bf16")]
    return list(dict.fromkeys(itertools.chain(*found)))


def tested(table: str, form: str) -> list[Variant]:
    """What tests/gpu launches besides."""
    found: list[Variant] = []
    for n, k, silu in TEST_SHAPES:
        for f in (form, "bf16"):
            found += chosen(Layer(n, k, silu), f, table)
    for n, k, silu in ((640, 2048, False), (512, 2048, True), (256, 32, False)):
        for f in (form, "bf16"):
            found += chosen(Layer(n, k, silu), f, table, pdl=False)
            found += chosen(Layer(n, k, silu, fp32_out=True), f, table)
    return list(dict.fromkeys(found))


def sweep(
    layer: Layer, form: str, nt: int, limit: int, known: Iterable[GemvConfig]
) -> Iterator[Variant]:
    """At most `limit` schedules for a layer: known good ones first, then likely ones.

    Args:
        layer: The layer.
        form: Decode form, or bf16.
        nt: Tiles of 8 tokens.
        limit: How many to give.
        known: Schedules that were fast before, at any `nt`.
    """
    spec = spec_of(layer, form)
    likely = sorted(
        candidates(spec, layer.n, nt, SMS),
        key=lambda config: estimated_cost(config, spec, layer.n, SMS),
    )
    options = [replace(config, nt=nt) for config in known]
    options += [default_config(spec, layer.n, nt, SMS), *likely]
    usable = (c for c in dict.fromkeys(options) if c.why_not(spec) is None)
    for config in itertools.islice(usable, limit):
        yield spec, config
