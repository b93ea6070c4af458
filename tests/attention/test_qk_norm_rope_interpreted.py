# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""q/k norm, RoPE and the cache write, in Triton's interpreter, against the contract."""

import pytest
import torch

from contract.ops import rope_table
from support.interpreted import load_interpreted
from support.norm_rope import PagedCache, qk_bounds

EPS = 1e-6
FLINT = (32, 4, 128)
TINY = (4, 2, 32)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch):
    name = "vllm.models.flint.ops.qk_norm_rope"
    return load_interpreted(monkeypatch, name).qk_norm_rope_cache


class Inputs:
    """Random arguments for T tokens; every third token is not cached."""

    def __init__(self, tokens: int, heads: tuple[int, int, int], pad: int = 0):
        self.heads = heads
        num_q, num_kv, dim = heads
        generator = torch.Generator().manual_seed(tokens)
        width = (num_q + 2 * num_kv) * dim
        rows = torch.randn(tokens, width + pad, generator=generator).bfloat16()
        self.qkv = rows[:, :width]
        self.positions = torch.randint(0, 600, (tokens,), generator=generator)
        weights = torch.randn(2, dim, generator=generator).bfloat16()
        self.q_weight, self.k_weight = weights
        self.slots = torch.randperm(6 * 16, generator=generator)[:tokens]
        self.slots[2::3] = -1
        self.table = rope_table(600, dim, 1e4)

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as [T, heads, dim]."""
        num_q, num_kv, dim = self.heads
        q, k, v = self.qkv.unflatten(-1, (-1, dim)).split((num_q, num_kv, num_kv), 1)
        return q, k, v

    def run(self, kernel, cache: PagedCache | None, rope: bool, **more):
        k_cache, v_cache = (None, None) if cache is None else cache.views()
        return kernel(
            self.qkv,
            self.positions,
            self.q_weight,
            self.k_weight,
            EPS,
            self.table if rope else None,
            k_cache,
            v_cache,
            None if cache is None else self.slots,
            *self.heads,
            **more,
        )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "pad"),
    [(1, FLINT, 0), (5, FLINT, 8), (66, TINY, 0), (3, (3, 1, 24), 4)],
)
def test_matches_contract(kernel, tokens, heads, pad, rope, layout) -> None:
    """A program a head, several heads a program, and a head that fills no block."""
    inputs = Inputs(tokens, heads, pad)
    cache = PagedCache.poisoned(layout, 6, 16, *heads[1:])
    out = inputs.run(kernel, cache, rope)
    rows = inputs.table[inputs.positions] if rope else None
    q, k, v = inputs.split()
    qk_bounds(q, inputs.q_weight, EPS, rows).check(out)
    cache.check(inputs.slots, qk_bounds(k, inputs.k_weight, EPS, rows), v)


def test_fp8_cache(kernel) -> None:
    """The nearest E4M3 of the rounded values over their scales, saturated."""
    inputs = Inputs(5, TINY)
    inputs.qkv[0, -1] = 1e4
    raw = PagedCache.poisoned("NHD", 6, 16, *TINY[1:]).raw
    cache = PagedCache(torch.zeros_like(raw, dtype=torch.uint8))
    scales = torch.tensor([0.37]), torch.tensor([1.7])
    inputs.run(kernel, cache, True, k_scale=scales[0], v_scale=scales[1])
    plain = PagedCache.poisoned("NHD", 6, 16, *TINY[1:])
    inputs.run(kernel, plain, True)
    kept = inputs.slots[inputs.slots >= 0]
    for part, reference, scale in zip(
        cache.views(), plain.views(), scales, strict=True
    ):
        stored = part.view(torch.float8_e4m3fn).flatten(0, 1)[kept].double()
        wanted = reference.flatten(0, 1)[kept].float() / scale
        nearest = wanted.clamp(-448, 448).to(torch.float8_e4m3fn).double()
        assert torch.equal(stored, nearest)
    untouched = torch.ones(6 * 16, dtype=torch.bool)
    untouched[kept] = False
    assert (cache.raw.transpose(1, 2).flatten(0, 1)[untouched] == 0).all()


def test_profiling_run_has_no_cache(kernel) -> None:
    inputs = Inputs(3, TINY)
    out = torch.full((3, 4, 32), float("nan")).bfloat16()
    assert inputs.run(kernel, None, True, out=out) is out
    rows = inputs.table[inputs.positions]
    qk_bounds(inputs.split()[0], inputs.q_weight, EPS, rows).check(out)


def test_no_tokens(kernel) -> None:
    cache = PagedCache.poisoned("NHD", 1, 16, *TINY[1:])
    inputs = Inputs(0, TINY)
    assert inputs.run(kernel, cache, True).shape == (0, 4, 32)


def test_bad_arguments(kernel) -> None:
    inputs = Inputs(3, TINY)
    cache = PagedCache.poisoned("NHD", 6, 16, 1, 32)
    with pytest.raises(ValueError, match="k_cache must be"):
        inputs.run(kernel, cache, True)
    cache = PagedCache(torch.zeros(6, 2, 16, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="needs k_scale"):
        inputs.run(kernel, cache, True)
    cache = PagedCache.poisoned("NHD", 6, 16, *TINY[1:])
    inputs.slots = inputs.slots[:2]
    with pytest.raises(ValueError, match="slot_mapping"):
        inputs.run(kernel, cache, True)
    inputs.qkv = inputs.qkv[:, 1:]
    with pytest.raises(ValueError, match="qkv must be"):
        inputs.run(kernel, cache, True)
