# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Decode attention on a GPU, through its public interface, against the contract."""

import dataclasses

import pytest
import torch
from vllm.models.flint.ops.decode_attention import (
    DecodeWorkspace,
    flint_decode_attention,
)
from vllm.models.flint.ops.device import current_gpu

from support.attention import Problem

DEVICE = "cuda"
WINDOW = 513
LENGTHS = [0, 1, 512, 513, 514, 16383, 16384, 100000, 262144]


def call(problem: Problem, out: torch.Tensor, **options) -> None:
    flint_decode_attention(
        problem.q,
        problem.kv_cache,
        problem.block_tables,
        problem.seq_lens,
        problem.sinks,
        problem.window,
        problem.scale,
        out,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        **options,
    )


def attend(problem: Problem, **options) -> torch.Tensor:
    out = torch.full_like(problem.q, float("nan"))
    call(problem, out, **options)
    return out


def check(problem: Problem, **options) -> None:
    """Runs twice: the same bits, and right ones."""
    out = attend(problem, **options)
    assert torch.equal(out, attend(problem, **options))
    problem.bounds().check(out)


def random(lengths: list[int], **options) -> Problem:
    return Problem.random(lengths, device=DEVICE, **options)


def ragged(batch: int) -> list[int]:
    """Lengths of 0 to 1500, mixed, and a long one."""
    lengths = [(i * 977 + 13) % 1500 for i in range(batch)]
    lengths[batch // 2] = 9000
    return lengths


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND", "LAYERS"])
def test_ragged_lengths(layout: str, fp8: bool, window: int | None) -> None:
    check(random(LENGTHS, layout=layout, fp8=fp8, window=window, blocks=17000))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_request(length: int, fp8: bool, window: int | None) -> None:
    check(random([length], fp8=fp8, window=window))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    "batch", [1, 2, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 255, 256]
)
def test_batches(batch: int, window: int | None) -> None:
    for kv_heads in (4, 2):
        check(random(ragged(batch), kv_heads=kv_heads, window=window, page=64))


@pytest.mark.parametrize("page", [16, 32, 48, 256, 1040])
def test_pages(page: int) -> None:
    check(random([0, 1, 3000, 777], page=page))


@pytest.mark.parametrize("sink", [-1e4, -80.0, 80.0, 1e4])
def test_sinks(sink: float) -> None:
    check(random([0, 1, 700, 5000], sink=sink))


def test_ways_to_launch() -> None:
    problem = random([3, 0, 2000, 600])
    check(problem, pdl=False)
    check(problem, early_reads=True)
    gpu = torch.device(DEVICE, torch.cuda.current_device())
    workspace = DecodeWorkspace(4, 4, current_gpu().sms, gpu)
    check(problem, workspace=workspace)
    assert not workspace.counters.any()


def test_strided_rows() -> None:
    """q as a slice of what the QKV projection gives."""
    problem = random([100, 700])
    wide = torch.randn(2, 5120, device=DEVICE).bfloat16()
    q = wide[:, :4096].view(2, 32, 128)
    check(dataclasses.replace(problem, q=q))


def test_no_requests() -> None:
    problem = random([5])
    none = dataclasses.replace(
        problem,
        q=problem.q[:0],
        seq_lens=problem.seq_lens[:0],
        block_tables=problem.block_tables[:0],
    )
    assert attend(none).numel() == 0


@pytest.mark.parametrize("early_reads", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("batch", [1, 6, 40])
def test_graph_replay(batch: int, window: int | None, early_reads: bool) -> None:
    """A chain of launches, replayed with other lengths and block tables."""
    problem = random([4000] * batch, window=window)
    gpu = torch.device(DEVICE, torch.cuda.current_device())
    options = {
        "workspace": DecodeWorkspace(batch, 4, current_gpu().sms, gpu),
        "early_reads": early_reads,
    }
    outs = [torch.empty_like(problem.q) for _ in range(4)]
    attend(problem, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            call(problem, out, **options)
    generator = torch.Generator(DEVICE).manual_seed(batch)
    for most in (4000, 600, 1, 2000):
        lengths = torch.randint(
            0, most + 1, (batch,), device=DEVICE, generator=generator
        )
        problem.seq_lens.copy_(lengths)
        order = torch.randperm(250, device=DEVICE, generator=generator)
        problem.block_tables.copy_(problem.block_tables[:, order])
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        expected = attend(problem, **options)
        torch.cuda.synchronize()
        for out in outs:
            assert torch.equal(out, expected)
        problem.bounds().check(expected)


def test_streams_at_once() -> None:
    """Each stream has a workspace of its own."""
    problem = random([60000, 100])
    expected = attend(problem)
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = [torch.empty_like(problem.q) for _ in range(30)]
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        with torch.cuda.stream(streams[i % 3]):
            call(problem, out)
    torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, expected)


def test_capture_without_a_workspace_is_refused() -> None:
    problem = random([5])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with (
        pytest.raises(RuntimeError, match="no decode workspace"),
        torch.cuda.graph(graph, stream=stream),
    ):
        call(problem, torch.empty_like(problem.q))
