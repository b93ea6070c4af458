# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Kept launches against Triton's own choice of what it compiles, without a GPU."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from vllm.models.flint.ops.triton_launch import Constants

WORDS = 2**31


@dataclass(frozen=True)
class Pointer:
    """Stands in for a tensor."""

    place: int
    dtype: torch.dtype = torch.bfloat16
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.place


class Compiled:
    """A compiled kernel, which says what Triton compiled and what was launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, key: str, launched: list) -> None:
        self.key, self.launched = key, launched

    def launch_metadata(self, grid: Any, stream: int, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        grid, rest, values = args[:3], args[3:6], args[9:]
        assert rest == (7, self.function, self.packed_metadata)
        places = [v.data_ptr() if isinstance(v, Pointer) else v for v in values]
        self.launched.append((self.key, grid, places))


class Driver:
    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(device: int) -> int:
        return 7

    @staticmethod
    def get_current_target() -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def source(x, y, rows, eps, N: tl.constexpr, ADD: tl.constexpr):
    pass


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list:
    seen: list = []
    monkeypatch.setattr(driver, "_active", Driver)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)

    def compiled(self: Any, key: str, *args: Any) -> Compiled:
        return self.device_caches[0][0].setdefault(key, Compiled(key, seen))

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    return seen


@pytest.fixture
def kernel(launched: list) -> JITFunction:
    return JITFunction(source)


def picks(monkeypatch: pytest.MonkeyPatch, kernel: JITFunction) -> list:
    """What is launched by Triton's own choice from now on."""
    chosen: list = []
    run = kernel.run

    def count(*args: Any, **named: Any) -> Any:
        chosen.append(args)
        return run(*args, **named)

    monkeypatch.setattr(kernel, "run", count)
    return chosen


def test_what_is_kept_is_what_triton_would_pick(kernel, launched) -> None:
    pointers = [Pointer(64), Pointer(72), Pointer(96, torch.float32)]
    pairs = itertools.product(pointers, [*pointers, None])
    numbers = itertools.product((0, 1, 2, 16, 48, WORDS - 1, WORDS), (1, 1.0, 0.5))
    cases = list(itertools.product(pairs, numbers))
    constants = Constants(ADD=True, N=4, num_warps=8)
    for _ in range(2):
        for tensors, values in cases:
            constants.launch(kernel, (5,), tensors, values)
            kernel[(5,)](*tensors, *values, N=4, ADD=True, num_warps=8)
            assert launched[-1] == launched[-2]


def test_the_second_launch_is_not_triton_s(kernel, launched, monkeypatch) -> None:
    chosen = picks(monkeypatch, kernel)
    constants = Constants(ADD=False, N=4)
    for place in (64, 96, 128):
        constants.launch(kernel, (2, 3), (Pointer(place), None), (16, 0.5))
    assert len(chosen) == 1
    assert launched[-1][1:] == ((2, 3, 1), [128, None, 16, 0.5, 4, False])


@pytest.mark.parametrize(
    "other",
    [Pointer(72), Pointer(64, is_cuda=False), Pointer(64, torch.float16)],
    ids=["unaligned", "not on the GPU", "another type"],
)
def test_triton_picks_for_another_tensor(kernel, monkeypatch, other, launched) -> None:
    chosen = picks(monkeypatch, kernel)
    constants = Constants(ADD=False, N=4)
    for second in (Pointer(64), other):
        constants.launch(kernel, (1,), (Pointer(64), second), (16, 0.5))
    assert len(chosen) == 2


def test_profilers_see_every_launch(kernel, monkeypatch, launched) -> None:
    chosen = picks(monkeypatch, kernel)
    constants = Constants(ADD=False, N=4)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", print)
    for _ in range(3):
        constants.launch(kernel, (1,), (Pointer(64), None), (16, 0.5))
    assert len(chosen) == 3


def test_not_everything_is_kept(kernel, launched) -> None:
    constants = Constants(ADD=False, N=4)
    for rows in range(5000):
        constants.launch(kernel, (1,), (Pointer(64), None), (rows, 0.5))
    assert 0 < len(constants._kept) < 2000
