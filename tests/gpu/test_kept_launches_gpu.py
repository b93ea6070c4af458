# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Launches past Triton's and quack's Python, against theirs, on a GPU."""

import functools
from collections.abc import Callable

import pytest
import torch
from vllm.models.flint.ops import fragments, moe, norm, triton_launch
from vllm.models.flint.ops.experts.grouped import grouped_experts
from vllm.models.flint.ops.gemv.tables import GemmTiles
from vllm.models.flint.ops.qk_norm_rope import qk_norm_rope_cache

from support.gemv import QuantizedLinear, output_bounds
from support.grouped import Experts

DEVICE = "cuda"
EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 6, 2048, 512
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128

Tensors = list[torch.Tensor]


# Kept, because no random numbers can be drawn while a graph is captured.
@functools.cache
def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, generator=generator).bfloat16()


def norms(m: int) -> Tensors:
    x, residual = draw(m, HIDDEN), draw(m, HIDDEN, seed=1)
    gate_up = draw(m, 2 * WIDTH, seed=2)
    gain = torch.ones(HIDDEN, device=DEVICE).bfloat16()
    return [
        norm.rms_norm(x, gain, 1e-6),
        *norm.add_rms_norm(x, residual, gain, 1e-6),
        norm.silu_and_mul(gate_up),
    ]


def heads(m: int) -> Tensors:
    qkv = draw(m, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    gain = torch.ones(HEAD_DIM, device=DEVICE).bfloat16()
    cache = torch.zeros(m, 16, KV_HEADS, 2 * HEAD_DIM, device=DEVICE).bfloat16()
    positions = torch.arange(m, device=DEVICE)
    sizes = HEADS, KV_HEADS, HEAD_DIM
    halves = cache.chunk(2, dim=-1)
    more = gain, gain, 1e-6, None, *halves, 16 * positions
    return [qk_norm_rope_cache(qkv, positions, *more, *sizes), cache]


def choices(m: int) -> Tensors:
    router, gain = draw(EXPERTS, HIDDEN, seed=3), torch.ones(HIDDEN, device=DEVICE)
    x, residual = draw(m, HIDDEN), draw(m, HIDDEN, seed=1)
    found = [*moe.topk_sigmoid(draw(m, EXPERTS, seed=4), TOP_K)]
    if m <= 16:
        counter = moe.make_route_counter(torch.device(DEVICE))
        more = gain.bfloat16(), 1e-6, router, TOP_K, counter
        found += moe.route(x, residual, *more)
    return found


@functools.cache
def weights_of_experts() -> moe.FlintMoEWeights:
    generator = torch.Generator(DEVICE).manual_seed(5)
    return Experts.random(EXPERTS, HIDDEN, WIDTH, generator).weights


def experts(m: int) -> Tensors:
    weights = weights_of_experts()
    ids, shares = moe.topk_sigmoid(draw(m, EXPERTS, seed=4), TOP_K)
    x, shared = draw(m, HIDDEN), draw(m, HIDDEN, seed=6)
    return [grouped_experts(x, ids, shares, weights, shared)]


def linears(m: int) -> Tensors:
    if fragments.missing_quack() is not None:
        pytest.skip("quack's GEMM does not run here")
    generator = torch.Generator(DEVICE).manual_seed(7)
    found = []
    for n, k in ((1024, HIDDEN), (HIDDEN, 1024)):
        w = QuantizedLinear.random(n, k, generator, 0.001)
        own = [part.contiguous() for part in w.fragments()]
        for fp32 in (False, True):
            tail = False, fp32, True, 0
            found.append(
                fragments.fragment_linear(draw(m, k), *own, w.global_scale, *tail)
            )
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has Triton and quack launch everything themselves."""
    monkeypatch.setattr(triton_launch, "_hooked", lambda knobs: True)
    if fragments.missing_quack() is None:
        from vllm.models.flint.ops import quack_gemm

        def gemm(x, weight, scale, alpha, dtype, pdl, tiles):
            out = x.new_empty(x.shape[0], 64 * weight.shape[0], dtype=dtype)
            quack_gemm._compile(x, weight, scale, out, alpha, pdl, tiles, launch=True)
            return out

        monkeypatch.setattr(quack_gemm, "gemm", gemm)


@pytest.mark.parametrize("run", [norms, heads, choices, experts, linears])
@pytest.mark.parametrize("m", [1, 16, 100, 1000])
def test_the_same_bits(run: Callable[[int], Tensors], m: int) -> None:
    """The first launch of a kind is Triton's own, the second is kept."""
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        expected = run(m)
    for _ in range(3):
        for one, other in zip(run(m), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("run", [norms, experts])
def test_in_a_graph(run: Callable[[int], Tensors]) -> None:
    """Memory of the graph's own, on another stream than the first launches."""
    expected = run(40)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(40)
    graph.replay()
    for one, other in zip(captured, expected, strict=True):
        assert torch.equal(one, other)


def test_split_k_keeps_its_flags() -> None:
    """Replays and launches outside of a graph take turns on a weight's flags."""
    if fragments.missing_quack() is not None:
        pytest.skip("quack's GEMM does not run here")
    from vllm.models.flint.ops import quack_gemm

    tiles = GemmTiles(64, 32, 4)
    n, k, m = 1024, HIDDEN, 100
    w = QuantizedLinear.random(n, k, torch.Generator(DEVICE).manual_seed(8), 0.001)
    own = *(part.contiguous() for part in w.fragments()), w.global_scale
    x = draw(m, k)

    def run() -> torch.Tensor:
        return quack_gemm.gemm(x, *own, torch.bfloat16, True, tiles)

    quack_gemm.gemm(x, *own, torch.bfloat16, True, tiles, launch=False)
    key = own[0].data_ptr(), n
    quack_gemm._flags.pop(key, None)
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        from_first = run()
    assert key not in quack_gemm._flags, "flags of a graph's own memory were kept"
    expected = run()
    flags = quack_gemm._flags[key]
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second):
        from_second = run()
    for _ in range(3):
        first.replay()
        second.replay()
        assert torch.equal(run(), expected)
        assert torch.equal(from_first, expected)
        assert torch.equal(from_second, expected)
    assert not flags.any()
    output_bounds(x, w.values, 0.001).check(expected)
