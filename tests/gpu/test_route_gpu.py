# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Choosing experts on a GPU: routing launches, and top-k alone."""

import pytest
import torch
from vllm.models.flint.ops.experts.route import (
    MAX_ROUTE_TOKENS,
    make_route_counter,
    route,
    topk_sigmoid,
)
from vllm.models.flint.ops.nvfp4_gemv import bf16_gemv

from support.routing import KINDS, check_choice, check_route, draw_logits

DEVICE = "cuda"
EPS = 1e-6
HIDDEN, EXPERTS, TOP_K = 2048, 256, 6
NAN = float("nan")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=seeded(seed)).bfloat16()


def same(first, second) -> bool:
    """Whether two results are the same bits."""
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@pytest.fixture(autouse=True)
def poisoned_allocator() -> None:
    sizes = (256, 4096, 65536, 1 << 21, 1 << 24)
    blocks = [torch.full((n,), NAN, device=DEVICE) for n in sizes for _ in range(8)]
    del blocks


class Layer:
    """A router behind a norm; `scale` sets how far logits lie apart."""

    def __init__(
        self,
        hidden: int = HIDDEN,
        experts: int = EXPERTS,
        top_k: int = TOP_K,
        scale: float = 0.02,
    ):
        self.norm_weight = draw(hidden, seed=1)
        self.router = draw(experts, hidden, seed=2) * scale
        self.top_k = top_k
        self.counter = make_route_counter(DEVICE)

    def run(self, x: torch.Tensor, residual: torch.Tensor | None, **more):
        args = (self.norm_weight, EPS, self.router, self.top_k)
        return route(x, residual, *args, self.counter, **more)

    def check(self, x: torch.Tensor, residual: torch.Tensor | None, **more):
        """Checks a launch; returns its logits."""
        shape = (x.shape[0], self.router.shape[0])
        logits = torch.full(shape, NAN, device=DEVICE, dtype=torch.bfloat16)
        found = self.run(x, residual, logits=logits, **more)
        args = (self.norm_weight, EPS, self.router, self.top_k)
        check_route(x, residual, *args, logits, found)
        assert not self.counter.any()
        assert same(found, self.run(x, residual, **more))
        assert same(found[2:], topk_sigmoid(logits, self.top_k))
        return logits


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("tokens", range(1, MAX_ROUTE_TOKENS + 1))
def test_route(tokens: int, pdl: bool) -> None:
    layer = Layer()
    x = draw(tokens, HIDDEN + 8, seed=tokens)[:, :HIDDEN]
    layer.check(x, draw(tokens, HIDDEN, seed=tokens + 1) * 20, pdl=pdl)
    layer.check(x, None, pdl=pdl)


@pytest.mark.parametrize(
    ("hidden", "experts", "top_k"), [(256, 16, 2), (96, 10, 3), (2048, 33, 8)]
)
def test_other_sizes(hidden: int, experts: int, top_k: int) -> None:
    layer = Layer(hidden, experts, top_k)
    for tokens in (1, 4, 5, 16):
        layer.check(draw(tokens, hidden), draw(tokens, hidden, seed=1))


@pytest.mark.parametrize("kind", ["equal rows", "zeros", "negative", "large"])
def test_hard_logits(kind: str) -> None:
    layer, x = Layer(), draw(8, HIDDEN, seed=3)
    if kind == "equal rows":
        layer.router = layer.router[:4].repeat(EXPERTS // 4, 1)
    elif kind == "zeros":
        layer.router.zero_()
    elif kind == "negative":
        x, layer.norm_weight = x.abs(), layer.norm_weight.abs()
        layer.router = -layer.router.abs()
    else:
        layer.router *= 1000
    logits = layer.check(x, None).float()
    if kind in ("equal rows", "zeros"):
        assert all(len(row.unique()) <= 4 for row in logits)
    elif kind == "negative":
        assert (logits < -10).all()
    else:
        assert logits.abs().max() > 1000


def test_rows_that_are_no_numbers() -> None:
    """A row of padding chooses experts that exist, and changes no other row."""
    layer, x = Layer(), draw(4, HIDDEN)
    good = layer.run(x, None)
    x[1], x[2, 5] = NAN, float("inf")
    found = layer.run(x, None)
    ids = found[2]
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    assert all(len(row.unique()) == TOP_K for row in ids)
    assert same([y[::3] for y in found], [y[::3] for y in good])


def test_many_launches() -> None:
    """Thousands without a pause: every one ends with the same answer and zeros."""
    for tokens in (1, 8, 16):
        layer, x = Layer(), draw(tokens, HIDDEN, seed=4)
        first = layer.run(x, x)
        wrong = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for _ in range(1000):
            found = [layer.run(x, x) for _ in range(3)][-1]
            for a, b in zip(found, first, strict=True):
                wrong |= (a != b).any()
        assert not wrong
        assert not layer.counter.any()


def test_behind_a_kernel_that_lets_it_start() -> None:
    """A GEMV makes x, and starts the routing before it has."""
    layer, weight = Layer(), draw(HIDDEN, HIDDEN, seed=5) * 0.05
    for tokens in (1, 8):
        for seed in range(20):
            source = draw(tokens, HIDDEN, seed=seed)
            found = layer.run(bf16_gemv(source, weight), source)
            torch.cuda.synchronize()
            x = bf16_gemv(source, weight, pdl=False)
            torch.cuda.synchronize()
            assert same(found, layer.run(x, source, pdl=False))


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_route_in_a_graph(tokens: int) -> None:
    """A chain of launches on one set of counters, with new inputs at every replay."""
    layer = Layer()
    x, residual = draw(tokens, HIDDEN), draw(tokens, HIDDEN, seed=1)

    def chain():
        outputs = []
        normed, total = x, residual
        for _ in range(5):
            normed, total, *choice = layer.run(normed, total)
            outputs += [normed, total, *choice]
        return outputs

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for seed in range(5):
        x.copy_(draw(tokens, HIDDEN, seed=seed + 10))
        residual.copy_(draw(tokens, HIDDEN, seed=seed + 20))
        for output in captured:
            output.fill_(-1)
        graph.replay()
        found = [output.clone() for output in captured]
        assert same(found, chain())
        assert not layer.counter.any()


def test_two_engines_at_a_time() -> None:
    """Two graphs on two streams, with counters of their own."""
    layers, xs = [Layer(), Layer()], [draw(8, HIDDEN, seed=s) for s in (6, 7)]
    expected = [layer.run(x, x) for layer, x in zip(layers, xs)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    graphs, captured = [], []
    for layer, x in zip(layers, xs):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append([layer.run(x, x) for _ in range(50)])
        graphs.append(graph)
    for _ in range(20):
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for found, right in zip(captured, expected):
        assert all(same(one, right) for one in found)


@pytest.mark.parametrize("kind", KINDS)
def test_topk(kind: str) -> None:
    for tokens in (1, 2, 3, 16, 17, 64, 1000, 16384):
        logits = draw_logits(kind, seeded(tokens), tokens, EXPERTS)
        found = topk_sigmoid(logits, TOP_K)
        check_choice(logits, TOP_K, *found)
        assert same(found, topk_sigmoid(logits, TOP_K, pdl=False))


def test_topk_of_other_sizes() -> None:
    for experts, top_k in ((16, 6), (10, 3), (512, 8), (1, 1)):
        logits = draw_logits("ties", seeded(experts), 50, experts + 8)[:, :experts]
        check_choice(logits, top_k, *topk_sigmoid(logits, top_k))
    assert [tuple(y.shape) for y in topk_sigmoid(draw(0, 16), 6)] == [(0, 6)] * 2


@pytest.mark.parametrize("value", [NAN, -NAN])
def test_topk_of_what_is_no_number(value: float) -> None:
    logits = draw(100, EXPERTS)
    logits[::3] = value
    logits[1::3, ::2] = value
    found = topk_sigmoid(logits, TOP_K)
    assert ((found[0] >= 0) & (found[0] < EXPERTS)).all()
    assert all(len(row.unique()) == TOP_K for row in found[0])
    check_choice(logits[2::3], TOP_K, *(y[2::3] for y in found))


def test_topk_in_a_graph() -> None:
    logits = draw(300, EXPERTS)
    topk_sigmoid(logits, TOP_K)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = topk_sigmoid(logits, TOP_K)
    for seed in range(3):
        logits.copy_(draw_logits("ties", seeded(seed), 300, EXPERTS))
        graph.replay()
        check_choice(logits, TOP_K, *captured)
