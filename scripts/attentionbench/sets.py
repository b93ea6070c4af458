# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which variants tests, sweeps and comparisons need."""

import itertools

from vllm.models.flint.ops.attention.config import (
    DecodeConfig,
    DecodeSpec,
    pick_config,
)

# The H200's.
SMS = 132
SPECS = [
    DecodeSpec(),
    DecodeSpec(fp8=True),
    DecodeSpec(early_reads=True),
    DecodeSpec(fp8=True, early_reads=True),
]


def served(max_batch: int = 256) -> list[tuple[DecodeSpec, DecodeConfig]]:
    """Every variant that Flint may launch at TP 1 and 2."""
    configs = dict.fromkeys(
        pick_config(batch, kv_heads, SMS, windowed)
        for windowed in (False, True)
        for kv_heads in (4, 2)
        for batch in range(1, max_batch + 1)
    )
    return list(itertools.product(SPECS, configs))


def tested() -> list[tuple[DecodeSpec, DecodeConfig]]:
    """What tests/gpu launches besides."""
    spec = DecodeSpec(pdl=False)
    return [(spec, config) for s, config in served() if s == DecodeSpec()]


def sweep() -> list[tuple[DecodeSpec, DecodeConfig]]:
    """Schedules to try."""
    shapes = itertools.product((2, 4, 8), (1, 2, 4, 8), (1, 2))
    return [(DecodeSpec(early_reads=True), DecodeConfig(*shape)) for shape in shapes]
