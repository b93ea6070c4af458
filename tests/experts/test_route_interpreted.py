# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Choosing experts, in Triton's interpreter, against the contract."""

import pytest
import torch

from support.interpreted import load_interpreted
from support.routing import KINDS, check_choice, check_route, draw_logits

EPS = 1e-6
NAN = float("nan")


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch):
    return load_interpreted(monkeypatch, "vllm.models.flint.ops.experts.route")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed)).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 256, 6), (5, 10, 3), (19, 16, 6), (3, 2, 2)]
)
def test_topk(routing, kind: str, tokens: int, experts: int, top_k: int) -> None:
    logits = draw_logits(kind, seeded(tokens), tokens, experts)
    check_choice(logits, top_k, *routing.topk_sigmoid(logits, top_k, pdl=False))


def test_topk_of_strided_rows_and_of_one_expert(routing) -> None:
    logits = draw(4, 24)
    check_choice(logits[:, :16], 6, *routing.topk_sigmoid(logits[:, :16], 6, pdl=False))
    check_choice(logits[:, :1], 1, *routing.topk_sigmoid(logits[:, :1], 1, pdl=False))


def test_the_checks_see_a_wrong_choice(routing) -> None:
    logits = draw_logits("ties", seeded(0), 8, 256)
    ids, weights = routing.topk_sigmoid(logits, 6, pdl=False)
    higher = logits.flip(1).double().sort(descending=True, stable=True).indices
    with pytest.raises(AssertionError):
        check_choice(logits, 6, (255 - higher[:, :6]).int(), weights)
    with pytest.raises(AssertionError):
        check_choice(logits, 6, ids, (weights * 1.01).bfloat16().float())
    with pytest.raises(AssertionError):
        check_choice(logits, 6, ids, torch.sigmoid(weights).bfloat16().float())


@pytest.mark.parametrize("value", [NAN, -NAN])
def test_logits_that_are_no_numbers(routing, value: float) -> None:
    """Some experts, each once, whatever is chosen."""
    for experts in (10, 256):
        logits = draw(3, experts)
        logits[0] = value
        logits[1, ::2] = value
        ids, _ = routing.topk_sigmoid(logits, 6, pdl=False)
        assert ((ids >= 0) & (ids < experts)).all()
        assert all(len(set(row.tolist())) == 6 for row in ids)
        check_choice(
            logits[2:], 6, *(x[2:] for x in routing.topk_sigmoid(logits, 6, pdl=False))
        )


@pytest.mark.parametrize(
    ("tokens", "width", "experts", "top_k"),
    [(1, 256, 64, 6), (4, 96, 10, 3), (5, 64, 20, 6), (16, 8, 8, 2), (2, 2048, 16, 6)],
)
def test_route(routing, tokens: int, width: int, experts: int, top_k: int) -> None:
    counter = routing.make_route_counter("cpu")
    x, residual = draw(tokens, width + 8)[:, :width], draw(tokens, width, seed=1) * 9
    norm_weight, router = draw(width, seed=2), draw(experts, width, seed=3)
    for old in (residual, None):
        logits = torch.full((tokens, experts), NAN, dtype=torch.bfloat16)
        args = (x, old, norm_weight, EPS, router, top_k)
        found = routing.route(*args, counter, pdl=False, logits=logits)
        check_route(*args, logits, found)
        assert not counter.any()
        again = routing.route(*args, counter, pdl=False)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_route_of_ties_is_that_of_topk(routing) -> None:
    """Whole numbers make equal logits; both ways to choose give the same bits."""
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    router = (draw(32, 64) > 1).bfloat16()
    logits = torch.empty(3, 32, dtype=torch.bfloat16)
    weight, counter = torch.ones(64).bfloat16(), routing.make_route_counter("cpu")
    args = (x, None, weight, EPS, router, 6)
    found = routing.route(*args, counter, pdl=False, logits=logits)
    assert len(logits[0].unique()) < 16
    check_route(*args, logits, found)
    alone = routing.topk_sigmoid(logits, 6, pdl=False)
    assert all(torch.equal(a, b) for a, b in zip(found[2:], alone, strict=True))


def test_norm_of_the_rounded_sum_fails(routing) -> None:
    x, residual = draw(4, 128), draw(4, 128, seed=1) * 100
    weight, router = draw(128, seed=2), draw(16, 128, seed=3)
    logits, counter = draw(4, 16), routing.make_route_counter("cpu")
    total = (x.float() + residual.float()).bfloat16()
    args = (weight, EPS, router, 6)
    found = routing.route(total, None, *args, counter, pdl=False, logits=logits)
    with pytest.raises(AssertionError):
        check_route(x, residual, *args, logits, found)


def test_no_tokens(routing) -> None:
    counter = routing.make_route_counter("cpu")
    found = routing.route(
        draw(0, 64), draw(0, 64), draw(64), EPS, draw(8, 64), 6, counter
    )
    assert [tuple(x.shape) for x in found] == [(0, 64), (0, 64), (0, 6), (0, 6)]
    assert [tuple(x.shape) for x in routing.topk_sigmoid(draw(0, 8), 6)] == [(0, 6)] * 2


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("x", draw(17, 64), "at most 16 tokens"),
        ("x", draw(64), "x must be"),
        ("x", draw(2, 64).float(), "x must be BF16"),
        ("x", draw(64, 2).t(), "x must have unit inner stride"),
        ("residual", draw(2, 32), "residual must be"),
        ("norm_weight", draw(32), "norm_weight must be"),
        ("router_weight", draw(8, 32), "router_weight must be"),
        ("router_weight", draw(8, 72)[:, :64], "router_weight must be contiguous"),
        ("top_k", 9, "cannot choose 9 of 8"),
        ("top_k", 0, "cannot choose 0 of 8"),
        ("counter", torch.zeros(1, dtype=torch.int32), "counter must be"),
        ("logits", draw(2, 7), "logits must be"),
    ],
)
def test_bad_arguments(routing, name: str, wrong, message: str) -> None:
    good = {
        "x": draw(2, 64),
        "residual": draw(2, 64),
        "norm_weight": draw(64),
        "eps": EPS,
        "router_weight": draw(8, 64),
        "top_k": 6,
        "counter": routing.make_route_counter("cpu"),
    }
    with pytest.raises(ValueError, match=message):
        routing.route(**{**good, name: wrong})


def test_bad_logits(routing) -> None:
    with pytest.raises(ValueError, match="logits must be BF16"):
        routing.topk_sigmoid(draw(2, 8).float(), 6)
    with pytest.raises(ValueError, match="unit inner stride"):
        routing.topk_sigmoid(draw(8, 2).t(), 6)
    with pytest.raises(ValueError, match="cannot choose 6 of 5"):
        routing.topk_sigmoid(draw(2, 5), 6)
