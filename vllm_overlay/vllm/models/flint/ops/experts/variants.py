# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The compiled expert kernels; ops/gemv keeps them beside its own."""

from collections.abc import Callable
from typing import Any

from ..gemv.variants import variant
from .spec import DownConfig, DownSpec, GateUpConfig, GateUpSpec


def gate_up_variant(spec: GateUpSpec, config: GateUpConfig) -> Callable[..., Any]:
    """The compiled kernel; see ``compile.compile_gate_up``."""

    def compiler() -> Callable[..., Any]:
        from .compile import compile_gate_up

        return compile_gate_up

    return variant((spec, config), compiler)


def down_variant(spec: DownSpec, config: DownConfig) -> Callable[..., Any]:
    """The compiled kernel; see ``compile.compile_down``."""

    def compiler() -> Callable[..., Any]:
        from .compile import compile_down

        return compile_down

    return variant((spec, config), compiler)
