# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The blocks of the contract, judged by values worked out by hand."""

import math

import pytest
import torch

from contract import ops
from contract.numerics import Numerics, round_bf16
from contract.nvfp4 import Nvfp4Weight, pack_codes

CONTRACT, EXACT = Numerics.CONTRACT, Numerics.EXACT


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rms_norm() -> None:
    x, weight = f64(3, 4), f64(1, 2)
    normed, total = ops.rms_norm(x, weight, 0.5, EXACT)
    root = math.sqrt(13)  # of (9 + 16) / 2 + 0.5
    assert torch.allclose(normed, f64(3 / root, 8 / root), rtol=1e-15)
    assert torch.equal(total, x)


def test_rms_norm_is_of_the_unrounded_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (
        round_bf16(torch.randn(64, 32, generator=generator, dtype=torch.float64))
        for _ in range(2)
    )
    normed, total = ops.rms_norm(x, torch.ones(32), 1e-6, CONTRACT, residual)
    unrounded, _ = ops.rms_norm(x + residual, torch.ones(32), 1e-6, EXACT)
    assert torch.equal(total, round_bf16(x + residual))
    assert torch.equal(normed, round_bf16(unrounded))
    of_rounded, _ = ops.rms_norm(total, torch.ones(32), 1e-6, CONTRACT)
    assert not torch.equal(normed, of_rounded)


def test_rms_norm_weight_is_applied_before_the_only_rounding() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    weight = torch.rand(32, generator=generator, dtype=torch.float64) + 0.5
    normed, _ = ops.rms_norm(x, weight, 1e-6, CONTRACT)
    plain, _ = ops.rms_norm(x, torch.ones(32), 1e-6, EXACT)
    assert torch.equal(normed, round_bf16(plain * weight))
    assert not torch.equal(normed, round_bf16(round_bf16(plain) * weight))


def test_rope_table() -> None:
    table = ops.rope_table(8, 4, 100.0)
    assert table.dtype == torch.float32
    for position in range(8):
        angles = (position, position / 10)
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert torch.allclose(table[position].double(), f64(*expected), atol=1e-6)


def test_rotate_pairs_channels_half_a_head_apart() -> None:
    x = f64(1, 2, 3, 4).reshape(1, 1, 4)
    quarter_turn_of_first_pair = f64(0, 1, 1, 0).reshape(1, 4)
    out = ops.rotate(x, quarter_turn_of_first_pair)
    assert torch.equal(out.flatten(), f64(-3, 2, 1, 4))


def test_qk_norm_rope_rounds_once() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 3, 8, generator=generator, dtype=torch.float64)
    weight = torch.rand(8, generator=generator, dtype=torch.float64) + 0.5
    table = ops.rope_table(50, 8, 10000.0)
    normed, _ = ops.rms_norm(x, weight, 1e-6, EXACT)
    out = ops.qk_norm_rope(x, weight, 1e-6, CONTRACT, table)
    assert torch.equal(out, round_bf16(ops.rotate(normed, table)))
    assert not torch.equal(out, round_bf16(ops.rotate(round_bf16(normed), table)))
    plain = ops.qk_norm_rope(x, weight, 1e-6, CONTRACT)
    assert torch.equal(plain, round_bf16(normed))
    assert torch.equal(out[0], plain[0])  # position 0 does not turn


def test_global_scale_multiplies_the_sum() -> None:
    codes = torch.tensor([[1, 2, 10, 7] * 4, [0, 8, 15, 9] * 4], dtype=torch.uint8)
    scales = torch.tensor([[0x40], [0x01]], dtype=torch.uint8)  # 2 and 2^-9
    weight = Nvfp4Weight(pack_codes(codes), scales, 0.3)
    x = torch.arange(16, dtype=torch.float64).reshape(1, 16)
    first = sum(v * 2 * i for i, v in zip(range(16), [0.5, 1, -1, 6] * 4, strict=True))
    second = sum(
        v * 2**-9 * i for i, v in zip(range(16), [0, 0, -6, -0.5] * 4, strict=True)
    )
    out = ops.accumulate(x, weight)
    assert torch.allclose(out, f64(first * 0.3, second * 0.3), rtol=1e-15)
    assert torch.equal(ops.linear(x, weight, CONTRACT), round_bf16(out))
    assert torch.equal(ops.head(x, weight), out)


def test_router_breaks_ties_toward_the_lower_index() -> None:
    weights, ids = ops.select_experts(f64(0, 2, 1, 2, 1, 1).reshape(1, 6), 3, EXACT)
    assert ids.tolist() == [[1, 3, 2]]
    score = [1 / (1 + math.exp(-v)) for v in (2, 2, 1)]
    expected = f64(*(s / sum(score) for s in score)).reshape(1, 3)
    assert torch.allclose(weights, expected, rtol=1e-15)


def test_router_logits_are_rounded_before_they_compete() -> None:
    weight = f64(1.0, 1 + 2**-10, 0.5).reshape(3, 1)
    x = f64(1).reshape(1, 1)
    weights, ids = ops.route(x, weight, 1, CONTRACT)
    assert ids.tolist() == [[0]]
    assert ops.route(x, weight, 1, EXACT)[1].tolist() == [[1]]
    assert weights.tolist() == [[1.0]]


def test_router_weights_are_rounded() -> None:
    logits = f64(1, 0).reshape(1, 2)
    exact, _ = ops.select_experts(logits, 2, EXACT)
    contract, _ = ops.select_experts(logits, 2, CONTRACT)
    assert torch.equal(contract, round_bf16(exact))
    assert exact.sum() == pytest.approx(1, rel=1e-15)


def test_router_scores_may_stay_as_they_are() -> None:
    logits = f64(1, 0, 3).reshape(1, 3)
    weights, _ = ops.select_experts(logits, 2, EXACT, renormalize=False)
    expected = f64(1 / (1 + math.exp(-3)), 1 / (1 + math.exp(-1)))
    assert torch.allclose(weights[0], expected, rtol=1e-15)


def test_routed_and_dense_experts_round_in_different_places() -> None:
    generator = torch.Generator().manual_seed(3)
    x, gate, up, down = (
        round_bf16(torch.randn(*shape, generator=generator, dtype=torch.float64))
        for shape in ((40, 16), (24, 16), (24, 16), (16, 24))
    )
    g, u = x @ gate.T, x @ up.T
    act = round_bf16(g / (1 + torch.exp(-g)) * u)
    routed = ops.routed_expert(x, gate, up, down, CONTRACT)
    assert torch.equal(routed, round_bf16(act @ down.T))
    g, u = round_bf16(g), round_bf16(u)
    act = round_bf16(g / (1 + torch.exp(-g)) * u)
    dense = ops.dense_mlp(x, gate, up, down, CONTRACT)
    assert torch.equal(dense, round_bf16(act @ down.T))
    assert not torch.equal(routed, dense)
    same = ops.routed_expert(x, gate, up, down, EXACT)
    assert torch.equal(same, ops.dense_mlp(x, gate, up, down, EXACT))


def test_combine_rounds_the_routed_sum_first() -> None:
    weights = f64(0.5, 0.25).reshape(1, 2)
    routed = f64(2, 2**-6).reshape(1, 2, 1)
    shared = f64(2**-8).reshape(1, 1)
    # 1 + 2^-8 is a tie that rounds to 1; adding 2^-8 gives the tie again.
    assert ops.combine(weights, routed, shared, CONTRACT).item() == 1.0
    assert ops.combine(weights, routed, shared, EXACT).item() == 1 + 2**-7
