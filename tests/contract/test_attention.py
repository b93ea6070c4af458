# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Attention of the contract, judged by plain loops and by PyTorch's own."""

import math

import pytest
import torch

from contract.attention import attention, decode_attention, gather_pages
from contract.numerics import Numerics, round_bf16

CONTRACT, EXACT = Numerics.CONTRACT, Numerics.EXACT


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return round_bf16(torch.randn(*shape, generator=generator, dtype=torch.float64))


def by_loops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention straight from its definition, one query and head at a time."""
    out = torch.zeros_like(q)
    offset = len(k) - len(q)
    group = q.shape[1] // k.shape[1]
    for t in range(len(q)):
        last = offset + t
        first = 0 if window is None else max(0, last - window + 1)
        for h in range(q.shape[1]):
            terms = [
                math.exp(scale * float(q[t, h] @ k[s, h // group]))
                for s in range(first, last + 1)
            ]
            total = sum(terms) + math.exp(float(sinks[h]))
            for s, term in zip(range(first, last + 1), terms, strict=True):
                out[t, h] += term / total * v[s, h // group]
    return out


@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_attention(tokens: int, window: int | None) -> None:
    q, k, v = draw(tokens, 6, 8), draw(9, 2, 8, seed=1), draw(9, 2, 8, seed=2)
    sinks = draw(6, seed=3) * 3
    expected = by_loops(q, k, v, sinks, 0.7, window)
    out = attention(q, k, v, sinks, 0.7, EXACT, window)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-14)


def test_without_sinks_it_is_the_usual_attention() -> None:
    q, k, v = draw(12, 4, 16), draw(12, 4, 16, seed=1), draw(12, 4, 16, seed=2)
    sinks = torch.full((4,), -math.inf)
    out = attention(q, k, v, sinks, 0.25, EXACT)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        is_causal=True,
        scale=0.25,
    )
    assert torch.allclose(out, expected.transpose(0, 1), rtol=1e-12)


def test_large_scores_and_sinks_stay_finite() -> None:
    q, k, v = draw(2, 2, 4) * 1e4, draw(5, 1, 4, seed=1), draw(5, 1, 4, seed=2)
    out = attention(q, k, v, torch.tensor([-3e4, 3e4]), 1.0, EXACT)
    assert out.isfinite().all()


def test_probabilities_are_rounded_but_not_their_sum() -> None:
    # Two equal keys and a sink that is 1/2 of their weight: p = 1, sum = 2.5.
    q, k = torch.zeros(1, 1, 2).double(), torch.zeros(2, 1, 2).double()
    v = torch.tensor([[[1.0, 3.0]], [[2.0, 4.0]]]).double()
    sinks = torch.tensor([math.log(0.5)], dtype=torch.float64)
    out = attention(q, k, v, sinks, 1.0, CONTRACT)
    assert out.flatten().tolist() == [1.203125, 2.796875]  # of 1.2 and 2.8

    q, k, v = draw(1, 1, 64), draw(200, 1, 64, seed=1), draw(200, 1, 64, seed=2)
    scores = q[0, 0] @ k[:, 0].T
    p = torch.exp(scores - scores.max())
    total = p.sum() + torch.exp(-scores.max())
    out = attention(q, k, v, torch.zeros(1), 1.0, CONTRACT).flatten()
    assert torch.equal(out, round_bf16(round_bf16(p) @ v[:, 0] / total))
    assert not torch.equal(out, round_bf16(p @ v[:, 0] / total))


@pytest.mark.parametrize("window", [None, 5])
def test_paged_keys_give_the_same(window: int | None) -> None:
    block_size, lengths = 4, [7, 0, 1, 8, 12]
    blocks = torch.randperm(30, generator=torch.Generator().manual_seed(4))
    tables = blocks[: 5 * 4].reshape(5, 4).int()
    k_cache, v_cache = draw(30, block_size, 2, 8, seed=5), draw(30, block_size, 2, 8)
    q, sinks = draw(5, 4, 8, seed=6), draw(4, seed=7)
    out = decode_attention(
        q, k_cache, v_cache, tables, torch.tensor(lengths), sinks, 0.3, EXACT, window
    )
    for i, length in enumerate(lengths):
        if length == 0:
            assert not out[i].any()
            continue
        k, v = (
            torch.stack(
                [
                    cache[tables[i, s // block_size], s % block_size]
                    for s in range(length)
                ]
            )
            for cache in (k_cache, v_cache)
        )
        expected = by_loops(q[i : i + 1], k, v, sinks, 0.3, window)
        assert torch.allclose(out[i], expected[0], rtol=1e-12, atol=1e-14)


def test_gathering_stops_at_the_length() -> None:
    cache = torch.arange(24.0).reshape(3, 4, 1, 2)
    rows = gather_pages(cache, torch.tensor([2, 0, 1]), 6)
    assert rows[:, 0, 0].tolist() == [16, 18, 20, 22, 0, 2]
