# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recursive's Flint: a 39.8B-parameter MoE decoder with attention sinks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import FlintForCausalLM

__all__ = ["FlintForCausalLM"]


def __getattr__(name: str):
    # The config and the GGUF loader are imported by every vLLM process; only
    # a process that serves Flint pays for its model code.
    if name in __all__:
        from . import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
