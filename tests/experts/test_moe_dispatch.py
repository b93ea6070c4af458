# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which launches serve how many tokens, with launches in plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from vllm.models.flint.ops import moe
from vllm.models.flint.ops.experts import dispatch
from vllm.models.flint.ops.gemv_weight import GemvWeight, KeptWeight
from vllm.models.flint.ops.linear import FlintBf16LinearMethod

from contract import ops
from contract.numerics import Numerics
from support import moe as standins
from support.experts import layer_operands
from support.gemv import QuantizedLinear
from support.interpreted import load_interpreted
from support.norm_rope import norm_bounds

EXPERTS, TOP_K, HIDDEN, WIDTH, SHARED = 8, 3, 128, 64, 128
EPS = 1e-6
FEW = min(moe.DECODE_MAX_TOKENS, moe.BF16_DECODE_MAX_TOKENS)
MANY = moe.DECODE_MAX_TOKENS + 1


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def nvfp4_stack(n: int, k: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Codes and swizzled scales of E matrices, and global scales that differ."""
    generator = torch.Generator().manual_seed(seed)
    all_ = [QuantizedLinear.random(n, k, generator) for _ in range(EXPERTS)]
    codes, scales = (
        torch.stack([getattr(w, name) for w in all_]) for name in ("codes", "scales")
    )
    return codes, scales, torch.linspace(0.01, 0.02, EXPERTS)


@pytest.fixture(params=["nvfp4", "bf16"])
def weights(request) -> moe.LLMoEWeights:
    shapes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    shared_shapes = ((2 * SHARED, HIDDEN), (HIDDEN, SHARED))
    if request.param == "bf16":
        first, second = (draw(EXPERTS, *s, seed=i) * 0.1 for i, s in enumerate(shapes))
        experts = moe.FlintMoEWeights(first, None, None, second, None, None)
        shared = [
            GemvWeight.bf16(draw(*s, seed=i + 2) * 0.1)
            for i, s in enumerate(shared_shapes)
        ]
    else:
        stacks = [nvfp4_stack(*s, seed=i) for i, s in enumerate(shapes)]
        experts = moe.FlintMoEWeights(*stacks[0], *stacks[1])
        shared = []
        for i, s in enumerate(shared_shapes):
            w = QuantizedLinear.random(*s, torch.Generator().manual_seed(i + 2))
            shared.append(GemvWeight.row_major(w.codes, w.scales, w.global_scale))
    return moe.LLMoEWeights(draw(EXPERTS, HIDDEN, seed=9), experts, *shared)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """Launches in plain PyTorch; their names and keywords, as they come."""
    made: list[tuple[str, dict]] = []

    def stand_in(name: str):
        real = getattr(standins, name)

        def call(*args, **kwargs):
            made.append((name, kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(dispatch, name, call)

    for name in ("gate_up", "down_combine", "grouped_experts"):
        stand_in(name)
    return made


def names(calls: list[tuple[str, dict]]) -> list[str]:
    return [name for name, _ in calls]


def choice(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = draw(tokens, EXPERTS, seed=tokens).double()
    weights, ids = ops.select_experts(logits, TOP_K, Numerics.CONTRACT)
    return ids.int(), weights.float()


def shared_expert(w: moe.LLMoEWeights, x: torch.Tensor) -> torch.Tensor:
    gate, up = standins.parts(standins.dense(w.shared_gate_up, None, None))
    down = standins.dense(w.shared_down, None, None)
    return ops.dense_mlp(x.double(), gate, up, down, Numerics.CONTRACT)


def reference(w: moe.LLMoEWeights, x: torch.Tensor, chosen, shared: bool = True):
    """The contract's sparse block, from experts that were chosen."""
    ids, weights = chosen
    e = w.experts
    routed = torch.empty(*ids.shape, HIDDEN, dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for slot, index in enumerate(row):
            gate, up = standins.parts(
                standins.expert((e.w1, e.w1_scale, e.alpha1), index)
            )
            down = standins.expert((e.w2, e.w2_scale, e.alpha2), index)
            routed[token, slot] = ops.routed_expert(
                x[token].double(), gate, up, down, Numerics.CONTRACT
            )
    added = shared_expert(w, x) if shared else torch.zeros_like(x).double()
    return ops.combine(weights.double(), routed, added, Numerics.CONTRACT)


def run(w: moe.LLMoEWeights, x: torch.Tensor, **more) -> torch.Tensor:
    function = moe.flint_moe_bf16_decode if w.experts.is_bf16 else moe.flint_moe
    return function(x, choice(x.shape[0]), w.experts, **more)


@pytest.mark.parametrize("tokens", [1, 5, FEW])
@pytest.mark.parametrize("pdl", [True, False])
def test_decode(weights, calls, tokens: int, pdl: bool) -> None:
    """Two launches, with the shared expert and without."""
    x = draw(tokens, HIDDEN, seed=20)
    out = run(weights, x, fused=weights, pdl=pdl)
    assert torch.equal(out.double(), reference(weights, x, choice(tokens)))
    alone = run(weights, x, pdl=pdl)
    assert torch.equal(alone.double(), reference(weights, x, choice(tokens), False))
    assert calls == [("gate_up", {"pdl": pdl}), ("down_combine", {"pdl": pdl})] * 2


@pytest.mark.parametrize("weights", ["nvfp4"], indirect=True)
@pytest.mark.parametrize("tokens", [3, moe.DECODE_MAX_TOKENS, MANY])
def test_shared_output_of_another_layer(weights, calls, tokens: int) -> None:
    x = draw(tokens, HIDDEN, seed=21)
    shared = shared_expert(weights, x).bfloat16()
    kept = shared.clone()
    out = run(weights, x, shared_out=shared)
    assert torch.equal(out.double(), reference(weights, x, choice(tokens)))
    assert torch.equal(shared, kept)
    few = ["gate_up", "down_combine"]
    assert names(calls) == (["grouped_experts"] if tokens == MANY else few)


def test_no_tokens(weights, calls) -> None:
    x = draw(0, HIDDEN)
    for more in ({}, {"fused": weights}):
        assert run(weights, x, **more).shape == (0, HIDDEN)
    out = moe.flint_moe_ll(
        x, None, draw(HIDDEN), EPS, weights, TOP_K, moe.make_route_counter("cpu")
    )
    assert [tuple(y.shape) for y in out] == [(0, HIDDEN)] * 2
    assert calls == []


@pytest.mark.parametrize("tokens", [1, moe.LL_MOE_MAX_TOKENS])
def test_low_latency(weights, calls, monkeypatch, tokens: int) -> None:
    """What it gives is what its parts give, one after the other."""
    name = "vllm.models.flint.ops.experts.route"
    routing = load_interpreted(monkeypatch, name)
    monkeypatch.setattr(dispatch, "route", routing.route)
    x, residual = draw(tokens, HIDDEN, seed=22), draw(tokens, HIDDEN, seed=23) * 5
    norm_weight, counter = draw(HIDDEN, seed=24), routing.make_route_counter("cpu")
    args = (norm_weight, EPS)
    out, total = moe.flint_moe_ll(
        x, residual, *args, weights, TOP_K, counter, pdl=False
    )
    assert names(calls) == ["gate_up", "down_combine"]
    normed, same, *chosen = routing.route(
        x, residual, *args, weights.router, TOP_K, counter, pdl=False
    )
    norm_bounds(x, norm_weight, EPS, residual).check(normed)
    assert torch.equal(total, same)
    assert torch.equal(out.double(), reference(weights, normed, chosen))


def test_limits(weights, calls) -> None:
    counter = moe.make_route_counter("cpu")
    most = moe.LL_MOE_MAX_TOKENS
    with pytest.raises(ValueError, match=f"at most {most} tokens fit, got {most + 1}"):
        moe.flint_moe_ll(
            draw(most + 1, HIDDEN), None, draw(HIDDEN), EPS, weights, TOP_K, counter
        )
    bf16 = weights.experts.is_bf16
    most = moe.BF16_DECODE_MAX_TOKENS if bf16 else moe.DECODE_MAX_TOKENS
    with pytest.raises(ValueError, match=f"at most {most} tokens fit, got {most + 1}"):
        run(weights, draw(most + 1, HIDDEN), fused=weights)
    assert calls == []


@pytest.mark.parametrize("weights", ["nvfp4"], indirect=True)
@pytest.mark.parametrize(
    ("x", "ids", "tw", "message"),
    [
        (draw(2, 64), None, None, r"x must be BF16 \[M, 128\], got"),
        (draw(2, HIDDEN).float(), None, None, "x must be BF16"),
        (None, torch.zeros(3, 3, dtype=torch.int32), None, "ids must be int32"),
        (None, torch.zeros(2, 3, dtype=torch.int64), None, "ids must be int32"),
        (None, None, torch.zeros(2, 4), "weights must be FP32"),
        (None, None, draw(2, 3), "weights must be FP32"),
    ],
)
def test_bad_arguments(weights, x, ids, tw, message: str) -> None:
    good = draw(2, HIDDEN), *choice(2)
    x, ids, tw = (a if a is not None else b for a, b in zip((x, ids, tw), good))
    with pytest.raises(ValueError, match=message):
        moe.flint_moe(x, (ids, tw), weights.experts)


def test_the_wrong_entry(weights) -> None:
    x, chosen = draw(2, HIDDEN), choice(2)
    wrong = moe.flint_moe if weights.experts.is_bf16 else moe.flint_moe_bf16_decode
    with pytest.raises(ValueError, match="serves"):
        wrong(x, chosen, weights.experts)
    if not weights.experts.is_bf16:
        with pytest.raises(ValueError, match="added twice"):
            moe.flint_moe(x, chosen, weights.experts, weights, shared_out=x)


class Linear(torch.nn.Module):
    """A layer, processed where its method has anything to process."""

    def __init__(self, weight: torch.Tensor, method: object):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = method
        self.flint_kept_weight = KeptWeight(GemvWeight.bf16)


@pytest.mark.parametrize("weights", ["bf16"], indirect=True)
def test_weights_of_layers(weights) -> None:
    gate = Linear(weights.router, None)
    up, down = (
        Linear(layer_operands(part)[0], FlintBf16LinearMethod())
        for part in (weights.shared_gate_up, weights.shared_down)
    )
    found = moe.ll_weights_from_layers(gate, weights.experts, up, down)
    assert isinstance(found, moe.LLMoEWeights)
    assert found.router.data_ptr() == weights.router.data_ptr()
    assert found.experts is weights.experts
    assert found.shared_down.words.data_ptr() == down.weight.data_ptr()
    foreign = Linear(down.weight.data, None)
    reason = moe.ll_weights_from_layers(gate, weights.experts, up, foreign)
    assert reason == "the layer is on another linear kernel"
    with pytest.raises(ValueError, match="do not fit"):
        replace(found, shared_down=found.shared_gate_up)
