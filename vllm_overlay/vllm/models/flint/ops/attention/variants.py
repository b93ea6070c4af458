# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The compiled decode-attention variants; ops/gemv keeps them beside its own."""

from collections.abc import Callable
from typing import Any

from ..gemv.variants import variant
from .config import DecodeConfig, DecodeSpec


def decode_variant(spec: DecodeSpec, config: DecodeConfig) -> Callable[..., Any]:
    """The compiled kernel; see ``compile.compile_decode``."""

    def compiler() -> Callable[..., Any]:
        from .compile import compile_decode

        return compile_decode

    return variant((spec, config), compiler)
