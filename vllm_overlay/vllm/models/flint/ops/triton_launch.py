# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches of Triton kernels that cost the host little.

``kernel[grid](...)`` binds and specializes its arguments anew at each launch, and asks
the driver about each pointer. A layer has ten launches, and a GPU may be done with it
sooner than Python. Here what Triton once compiled for such arguments is launched by
itself, in the way that torch.compile launches its kernels.

Triton specializes for a tensor's type and whether it is 16-byte aligned, for a number's
type, size, and whether it is 1 or a multiple of 16, and for constants and options. What
is kept is found by all of these. Triton itself launches what is not aligned or not on a
GPU, as in its interpreter, what torch.compile traces, and everything while a profiler
hooks its launches.
"""

from typing import Any, NamedTuple

import torch

# So many kernels are kept for one set of constants: numbers may follow the tokens.
_MOST_KEPT = 1024


class _Kept(NamedTuple):
    """What Triton compiled, and what launching it takes besides its arguments."""

    kernel: Any
    knobs: Any
    stream_of: Any
    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Constants:
    """Constants and options of a kernel's launches, to be made once for all of them."""

    def __init__(self, **named: Any) -> None:
        self._named = named
        self._kept: dict[tuple, _Kept] = {}

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: tuple[torch.Tensor | None, ...],
        numbers: tuple[int | float, ...],
    ) -> None:
        """Launch a kernel as ``kernel[grid](*tensors, *numbers, **constants)`` does.

        Args:
            kernel: takes tensors first, then numbers, then constants.
            grid: one to three counts of programs.
            tensors: the kernel's.
            numbers: the kernel's, none of them a boolean.

        """
        if torch.compiler.is_dynamo_compiling():
            kernel[grid](*tensors, *numbers, **self._named)
            return
        places: list[int | None] = []
        kinds: list[Any] = []
        bits = 0
        for tensor in tensors:
            if tensor is None:
                places.append(None)
                kinds.append(None)
                continue
            place = tensor.data_ptr()
            bits |= place
            places.append(place)
            kinds += tensor.dtype, tensor.is_cuda
        if bits % 16 or False in kinds:
            kernel[grid](*tensors, *numbers, **self._named)
            return
        device = torch.accelerator.current_device_index()
        key = (device, *numbers, *map(type, numbers), *kinds)
        kept = self._kept.get(key)
        if kept is None or kept.kernel is not kernel or _hooked(kept.knobs):
            compiled = kernel[grid](*tensors, *numbers, **self._named)
            self._keep(key, kernel, compiled, len(tensors) + len(numbers))
            return
        _, _, stream_of, run, function, metadata, constants = kept
        # No hooks, and so nothing to tell them.
        rest = stream_of(device), function, metadata, None, None, None
        run(*(*grid, 1, 1)[:3], *rest, *places, *numbers, *constants)

    def _keep(self, key: tuple, kernel: Any, compiled: Any, arguments: int) -> None:
        from triton import knobs
        from triton.runtime import driver

        # The interpreter gives nothing.
        if compiled is None:
            return
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[key] = _Kept(
            kernel,
            knobs.runtime,
            driver.active.get_current_stream,
            compiled.run,
            compiled.function,
            compiled.packed_metadata,
            tuple(self._named[name] for name in kernel.arg_names[arguments:]),
        )


def _hooked(knobs: Any) -> bool:
    """Whether something wants to know of launches."""
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
