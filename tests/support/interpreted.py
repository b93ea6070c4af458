# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Triton kernels of the overlay in Triton's interpreter, on CPU tensors.

The interpreter of Triton 3.7 cuts FP32 off where a GPU rounds it to BF16, and loses the
carry where it rounds to FP8; here both round to nearest even, as PyTorch does. Its dot
product takes the bits of BF16 operands for integers; here they are widened first.
"""

import importlib.util
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch


def load_interpreted(monkeypatch: pytest.MonkeyPatch, name: str) -> types.ModuleType:
    """Imports a second copy of a module whose Triton kernels run in the interpreter.

    A CPU build of vLLM imports no Triton, and a kernel is bound to the compiler or the
    interpreter when it is defined.

    Args:
        monkeypatch: Undoes what the copy needs, once the test is over.
        name: Full name of the module, which must register no operators.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton
    import triton.language as tl
    import vllm.triton_utils
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    # Triton's own helpers, such as sum, were bound when it was imported.
    for namespace in (tl, tl.standard):
        for helper, function in list(vars(namespace).items()):
            if isinstance(function, JITFunction):
                copy = interpreter.InterpretedFunction(function.fn)
                monkeypatch.setattr(namespace, helper, copy)
    rounding = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    convert = _rounding(interpreter._convert_float, tl.float32, rounding)
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    builder = interpreter.InterpreterBuilder
    dot = _widening(builder.create_dot, tl.bfloat16, tl.float32)
    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(vllm.triton_utils, "triton", triton)
    monkeypatch.setattr(vllm.triton_utils, "tl", tl)
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _widening(original: Callable[..., Any], narrow: Any, wide: Any) -> Callable:
    """A dot product that takes operands of type `narrow` as `wide`."""

    def dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            builder.cast_impl(x, wide) if x.dtype.scalar == narrow else x
            for x in (a, b)
        )
        return original(builder, a, b, *rest)

    return dot


def _rounding(
    original: Callable[..., np.ndarray], wide: Any, narrow: dict[Any, torch.dtype]
) -> Callable[..., np.ndarray]:
    """A conversion that rounds from `wide` to each of `narrow`, else is `original`."""

    def convert(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if source != wide or target not in narrow:
            return original(data, source, target, mode)
        values = torch.from_numpy(np.array(data, np.float32)).to(narrow[target])
        bits = torch.int16 if values.element_size() == 2 else torch.uint8
        return values.view(bits).numpy().view(f"u{values.element_size()}")

    return convert
