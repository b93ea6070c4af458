# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiled kernels on disk, so that only the first start of an engine compiles.

quack's cache keeps objects and locks them against other processes. Where quack is
absent every start compiles.
"""

import functools
import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.logger import init_logger

from ..device import current_gpu

logger = init_logger(__name__)

_OPS = Path(__file__).resolve().parents[1]


@functools.cache
def on_disk(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compiler``, which first looks for the kernel on disk.

    Args:
        compiler: a function of hashable arguments that can be pickled. Its qualified
            name and they are the key.

    """
    if importlib.util.find_spec("quack") is None:
        return compiler
    try:
        from quack import cache
    except Exception:
        # A broken install raises anything while it loads its libraries.
        return compiler
    if cache.CACHE_DIR is None:
        # quack's default is below /tmp, which containers do not keep.
        cache.CACHE_DIR = os.path.join(envs.VLLM_CACHE_ROOT, "quack_cache")

    # quack adds its own sources and CuTe DSL's release to the key.
    @cache.jit_cache
    @functools.wraps(compiler)
    def compile_for(target: str, sources: str, *key: Any) -> Any:
        return compiler(*key)

    def load_or_compile(*key: Any) -> Any:
        major, minor = current_gpu().capability
        target = os.environ.get("CUTE_DSL_ARCH", f"{major}.{minor}")
        try:
            return compile_for(target, _sources(), *key)
        except OSError as error:
            logger.warning_once("Flint's compiled kernels are not kept: %s", error)
            # quack's own GEMMs, which a layer compiles next, would fail on it, too.
            cache.CACHE_ENABLED = False
            return compiler(*key)

    return load_or_compile


@functools.cache
def _sources() -> str:
    """Digest all that kernels are made from."""
    digest = hashlib.sha256()
    for path in sorted(_OPS.rglob("*.py")):
        digest.update(path.relative_to(_OPS).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()
