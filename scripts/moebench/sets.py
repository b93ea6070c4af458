# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which variants of the two kernels for few tokens are served, and which are tried."""

import itertools
from collections.abc import Iterator
from typing import TypeAlias

from vllm.models.flint.ops.experts.spec import (
    DOWN_CASES,
    TOKEN_CASES,
    DownConfig,
    DownSpec,
    GateUpConfig,
    GateUpSpec,
    down_config,
    gate_up_config,
)
from vllm.models.flint.ops.gemv.config import GemvSpec, Layout

from moebench.weights import Sizes

Variant: TypeAlias = tuple[GateUpSpec, GateUpConfig] | tuple[DownSpec, DownConfig]


def dense_form(form: str) -> str:
    """How the shared expert is decoded, beside experts with a decode form."""
    return "mul" if form == "packed" else form


def gate_up_specs(sizes: Sizes, form: str, layout: Layout) -> list[GateUpSpec]:
    """The first kernel, for every count of tokens.

    Args:
        sizes: Of the block.
        form: Decode form of the experts, or bf16.
        layout: Of the shared expert's weight.
    """
    routed = GemvSpec(sizes.hidden, form, True)
    shared = GemvSpec(sizes.hidden, dense_form(form), True, layout=layout)
    parts = sizes.top_k, sizes.width, routed, shared, sizes.shared
    return [GateUpSpec(*parts, tokens) for tokens in TOKEN_CASES]


def down_spec(sizes: Sizes, form: str, layout: Layout) -> DownSpec:
    """The second kernel; arguments are those of `gate_up_specs`."""
    routed = GemvSpec(sizes.width, form)
    shared = GemvSpec(sizes.shared, dense_form(form), layout=layout)
    return DownSpec(sizes.top_k, sizes.hidden, routed, shared)


def served(form: str, layout: Layout, tps: tuple[int, ...] = (1, 2)) -> list[Variant]:
    """What the overlay picks on one of so many ranks."""
    found: list[Variant] = []
    for tp in tps:
        sizes = Sizes.of(tp=tp)
        firsts = gate_up_specs(sizes, form, layout)
        found += [(spec, gate_up_config(spec)) for spec in firsts]
        second = down_spec(sizes, form, layout)
        seconds = dict.fromkeys(down_config(second, case) for case in DOWN_CASES)
        found += [(second, config) for config in seconds]
    return found


def gate_up_sweep(spec: GateUpSpec) -> Iterator[GateUpConfig]:
    """Schedules of the first kernel to try."""
    steps = spec.routed.k // spec.routed.step_k
    for shape in itertools.product((1, 2, 4), (4, 8, 16), (1, 2)):
        config = GateUpConfig(*shape)
        fits = config.depth * config.k_warps <= steps
        if fits and config.why_not(spec) is None:
            yield config


def down_sweep(spec: DownSpec) -> Iterator[DownConfig]:
    """Schedules of the second kernel to try."""
    steps = spec.routed.k // spec.routed.step_k
    for shape in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4), (1, 2)):
        config = DownConfig(*shape)
        fits = config.depth * config.expert_warps <= steps
        if fits and config.why_not(spec) is None:
            yield config


def swept(form: str, layout: Layout) -> list[Variant]:
    """All that `tune` tries, at TP 1."""
    sizes = Sizes.of()
    second = down_spec(sizes, form, layout)
    found: list[Variant] = [(second, config) for config in down_sweep(second)]
    for first in gate_up_specs(sizes, form, layout):
        found += [(first, config) for config in gate_up_sweep(first)]
    return found
