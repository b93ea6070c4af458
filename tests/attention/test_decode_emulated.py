# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The decode attention's own PTX, in the emulator, against the contract."""

import functools

import pytest
import torch
from vllm.models.flint.ops.attention.config import DecodeConfig, DecodeSpec

from ptx.attention import DecodeRun, decode_kernel
from support.attention import Problem

SPEC = DecodeSpec()
EARLY = DecodeSpec(early_reads=True)
ONE = DecodeConfig(warps=2, cluster=1, tiles=1)
FOUR = DecodeConfig(warps=2, cluster=4, tiles=2)
EIGHT = DecodeConfig(warps=1, cluster=8, tiles=1)

kernel = functools.cache(decode_kernel)


def check(
    spec: DecodeSpec, config: DecodeConfig, problem: Problem, *targets: int
) -> None:
    """Runs with each split target, twice with the last: right, and the same bits."""
    run = DecodeRun(kernel(spec, config), config, problem)
    bounds = problem.bounds()
    for target in targets:
        out = run.launch(target)
        bounds.check(out)
        assert not run.counters.any()
    assert torch.equal(run.launch(targets[-1]), out)


@pytest.mark.parametrize("config", [ONE, FOUR], ids=["one", "four"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "LAYERS"])
def test_ragged_lengths(config: DecodeConfig, layout: str) -> None:
    lengths = [0, 1, 15, 16, 17, 130]
    check(SPEC, config, Problem.random(lengths, 1, 16, layout=layout), 1, 5)


@pytest.mark.parametrize("window", [1, 17, 513])
def test_window(window: int) -> None:
    lengths = [512, 513, 514, 0, 530]
    problem = Problem.random(lengths, 1, 48, window, layout="HND")
    check(SPEC, EIGHT, problem, 1, 7)


@pytest.mark.parametrize("sink", [-1e4, -80.0, 80.0, 1e4])
def test_sinks(sink: float) -> None:
    check(SPEC, FOUR, Problem.random([0, 3, 200], 2, 32, sink=sink), 3)


def test_fp8() -> None:
    for layout in ("NHD", "HND"):
        problem = Problem.random([0, 1, 33, 150], 2, layout=layout, fp8=True)
        check(DecodeSpec(fp8=True), FOUR, problem, 1, 4)


def test_early_reads() -> None:
    for lengths in ([1], [16, 17], [300, 0, 48]):
        check(EARLY, ONE, Problem.random(lengths, 1, 16), 2)
    check(EARLY, EIGHT, Problem.random([40, 0, 200], 1, 16, window=65), 2)


def test_more_requests_than_lanes() -> None:
    lengths = [i % 5 * 9 for i in range(70)]
    lengths[50] = 600
    check(SPEC, ONE, Problem.random(lengths, 1, 16), 8)


def test_places_are_found_again() -> None:
    """A warp looks its pages up for 32 tiles at once."""
    one_warp = DecodeConfig(warps=1, cluster=1, tiles=2)
    check(SPEC, one_warp, Problem.random([1100], 1, 16), 1)


@pytest.mark.parametrize(
    ("lengths", "target", "splits"),
    [
        # Four requests of 7 rounds: three chunks each would be more than 10.
        ([200] * 4, 10, 8),
        # 20 chunks of 2 rounds are as fast as 33 of at most 2.
        ([1280], 33, 20),
        # A long request's part, beside short ones that are not cut.
        ([1280, 5, 30, 0], 9, 8),
    ],
)
def test_no_more_chunks_than_fit(lengths: list[int], target: int, splits: int) -> None:
    problem = Problem.random(lengths, 1, 16)
    run = DecodeRun(kernel(SPEC, ONE), ONE, problem)
    problem.bounds().check(run.launch(target))
    assert run.splits == splits
