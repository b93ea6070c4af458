# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The compiled variants of this process, and what compiling them took."""

import functools
import importlib.metadata
import time
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar, cast

from vllm.logger import init_logger

from .config import GemvConfig, GemvSpec
from .disk_cache import on_disk

logger = init_logger(__name__)

# The release whose compiler these kernels were written for and measured with.
CUTE_DSL_RELEASE = "4.8"

# What the compiler of a kernel is called with: of each kernel other types.
Key = tuple[Hashable, ...]
P = ParamSpec("P")
T = TypeVar("T")
_compiled: dict[Key, Callable[..., Any]] = {}
_seconds: dict[Key, float] = {}
_from_disk: set[Key] = set()
_forget: list[Callable[[], None]] = []


@functools.cache
def missing_compiler() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return f"nvidia-cutlass-dsl {CUTE_DSL_RELEASE} is not installed"
    if version.split(".")[:2] != CUTE_DSL_RELEASE.split("."):
        return f"nvidia-cutlass-dsl {CUTE_DSL_RELEASE} is needed, found {version}"
    try:
        import cutlass.cute  # noqa: F401
    except Exception as error:
        # A broken install raises anything while it loads its libraries.
        return f"nvidia-cutlass-dsl cannot be imported: {error}"
    return None


def variant(
    key: Key, load_compiler: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """The compiled kernel of ``key``: what ``load_compiler()(*key)`` gives, once."""
    if key not in _compiled:
        _compiled[key] = on_disk(_timed(load_compiler()))(*key)
        if key not in _seconds:
            _from_disk.add(key)
    return _compiled[key]


@functools.cache
def _timed(compiler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiler)
    def compile_and_time(*key: Hashable) -> Any:
        start = time.perf_counter()
        compiled = compiler(*key)
        _seconds[key] = time.perf_counter() - start
        return compiled

    return compile_and_time


def gemv_variant(spec: GemvSpec, config: GemvConfig) -> Callable[..., Any]:
    """The compiled GEMV; see ``compile.compile_gemv``."""

    def compiler() -> Callable[..., Any]:
        from .compile import compile_gemv

        return compile_gemv

    return variant((spec, config), compiler)


def dequantize_variant(k: int, form: str) -> Callable[..., Any]:
    """The compiled dequantization; see ``compile.compile_dequantize``."""

    def compiler() -> Callable[..., Any]:
        from .compile import compile_dequantize

        return compile_dequantize

    return variant((k, form), compiler)


def add_prebuilt(key: Key, function: Callable[..., Any]) -> None:
    """Takes a variant that was compiled ahead of time."""
    _compiled[key] = function
    forget_kept()


def keep_variants(function: Callable[P, T]) -> Callable[P, T]:
    """``functools.cache`` for what holds variants, which ``add_prebuilt`` replaces."""
    kept = functools.cache(function)
    _forget.append(kept.cache_clear)
    return cast(Callable[P, T], kept)


def forget_kept() -> None:
    """Empties every cache of ``keep_variants``."""
    for forget in _forget:
        forget()


# Putting it together costs as much as a look-up of a kernel.
@functools.cache
def report_compilation() -> None:
    """Says once, at the first launch, what start-up compiled."""
    logger.info_once(
        "Flint compiled %d kernel variants in %.1f s and took %d from disk",
        len(_seconds),
        sum(_seconds.values()),
        len(_from_disk),
    )
