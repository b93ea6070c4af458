# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What decode attention refuses and picks, without a GPU."""

import dataclasses

import pytest
import torch
from vllm.models.flint.ops import decode_attention
from vllm.models.flint.ops.attention.config import (
    DecodeConfig,
    grid_clusters,
    pick_config,
    split_target,
)
from vllm.models.flint.ops.attention.workspace import DecodeWorkspace
from vllm.models.flint.ops.device import Gpu

from support.attention import Problem

SMS = 132


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Records (spec, config, arguments) instead of compiling and launching."""
    seen: list[tuple] = []

    def variant(spec, config):
        return lambda *arguments: seen.append((spec, config, arguments))

    monkeypatch.setattr(decode_attention, "decode_variant", variant)
    monkeypatch.setattr(decode_attention, "current_gpu", lambda: Gpu((9, 0), SMS))
    return seen


def call(problem: Problem, **changes) -> None:
    arguments = {
        "q": problem.q,
        "kv_cache": problem.kv_cache,
        "block_tables": problem.block_tables,
        "seq_lens": problem.seq_lens,
        "sinks": problem.sinks,
        "window": problem.window,
        "scale": problem.scale,
        "out": torch.empty_like(problem.q),
        "k_scale": problem.k_scale,
        "v_scale": problem.v_scale,
        "workspace": DecodeWorkspace(2, 4, SMS, torch.device("cpu")),
    }
    decode_attention.flint_decode_attention(**(arguments | changes))


@pytest.mark.parametrize("layout", ["NHD", "HND", "LAYERS"])
def test_layouts_are_taken_as_they_are(launches: list[tuple], layout: str) -> None:
    problem = Problem.random([5, 40], layout=layout, window=513)
    call(problem)
    ((spec, config, arguments),) = launches
    assert not spec.fp8
    assert config == pick_config(2, 4, SMS, windowed=True)
    assert arguments[1].data_ptr() == problem.kv_cache.data_ptr()
    assert arguments[1].stride() == problem.kv_cache.stride()
    assert arguments[10:] == (513, split_target(config, 4, SMS), problem.scale)


def test_fp8_bytes_and_type(launches: list[tuple]) -> None:
    problem = Problem.random([5, 40], fp8=True)
    call(problem)
    call(problem, kv_cache=problem.kv_cache.view(torch.float8_e4m3fn))
    for spec, _, arguments in launches:
        assert spec.fp8
        assert arguments[1].dtype == torch.uint8
        assert arguments[10] == 2**31 - 1


def test_bad_arguments(launches: list[tuple]) -> None:
    problem = Problem.random([5, 40])
    fp8 = Problem.random([5, 40], fp8=True)
    cache, q = problem.kv_cache, problem.q
    bad = [
        ({"kv_cache": cache[..., :128]}, "kv_cache must be .*256"),
        ({"kv_cache": cache.half()}, "BF16 or E4M3"),
        ({"kv_cache": cache.transpose(2, 3).contiguous().transpose(2, 3)}, "stride"),
        ({"kv_cache": cache[:, :, :8]}, "multiple of 16 keys"),
        ({"q": q[:, :16]}, "q must be BF16"),
        ({"q": q.float()}, "q must be BF16"),
        ({"out": q[:1]}, "out must be BF16"),
        ({"q": torch.zeros(2, 32, 129).bfloat16()[..., 1:]}, "whole 16 bytes"),
        ({"q": torch.zeros(2 * 4096 + 1).bfloat16()[1:].view(2, 32, 128)}, "start at"),
        ({"seq_lens": problem.seq_lens.long()}, "seq_lens must be"),
        ({"block_tables": problem.block_tables[:1]}, "block_tables must be"),
        ({"sinks": problem.sinks.bfloat16()}, "sinks must be FP32"),
        ({"window": 0}, "window must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"kv_cache": fp8.kv_cache}, "k_scale must be one FP32"),
        (
            {"workspace": DecodeWorkspace(1, 4, SMS, torch.device("cpu"))},
            "at most 1 requests",
        ),
        (
            {"workspace": DecodeWorkspace(2, 2, SMS, torch.device("cpu"))},
            "for 2 KV heads",
        ),
    ]
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            call(problem, **changes)
    assert not launches


def test_no_requests_launch_nothing(launches: list[tuple]) -> None:
    problem = Problem.random([5])
    none = dataclasses.replace(
        problem,
        q=problem.q[:0],
        seq_lens=problem.seq_lens[:0],
        block_tables=problem.block_tables[:0],
    )
    call(none)
    assert not launches


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_one_request_gets_the_whole_gpu(kv_heads: int, windowed: bool) -> None:
    config = pick_config(1, kv_heads, SMS, windowed)
    clusters = split_target(config, kv_heads, SMS) * kv_heads
    assert clusters * config.cluster * config.warps >= 7 * SMS
    # A batch of many is not cut: a CTA has a request of its own.
    assert pick_config(256, kv_heads, SMS, windowed).cluster == 1


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_workspace_fits_every_batch(kv_heads: int, windowed: bool) -> None:
    workspace = DecodeWorkspace(256, kv_heads, SMS, torch.device("cpu"))
    for batch in range(1, 257):
        config = pick_config(batch, kv_heads, SMS, windowed)
        clusters = grid_clusters(batch, split_target(config, kv_heads, SMS))
        assert clusters <= workspace.records.shape[0]
        assert batch * kv_heads * config.cluster <= workspace.counters.numel()


def test_schedules_that_cannot_run() -> None:
    assert DecodeConfig().why_not() is None
    assert "cluster of 3" in (DecodeConfig(cluster=3).why_not() or "")
    assert "32 warps" in (DecodeConfig(warps=32).why_not() or "")
    assert "4 tiles" in (DecodeConfig(tiles=4).why_not() or "")
