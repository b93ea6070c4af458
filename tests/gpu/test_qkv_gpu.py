# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Norms, q/k norm with RoPE and cache write, and the fused QKV on a GPU."""

import pytest
import torch
from vllm.models.flint.ops import norm, qkv_fused
from vllm.models.flint.ops.gemv_weight import GemvWeight
from vllm.models.flint.ops.nvfp4_gemv import normed_gemv
from vllm.models.flint.ops.qk_norm_rope import qk_norm_rope_cache

from contract import ops
from contract.numerics import Numerics
from contract.ops import rope_table
from support.gemv import Bounds, QuantizedLinear, normed_output_bounds, silu_mul_bounds
from support.norm_rope import PagedCache, norm_bounds, qk_bounds

DEVICE = "cuda"
EPS = 1e-6
HIDDEN, HEADS, DIM = 2048, (32, 4), 128
PAGES, PAGE = 40, 16
KINDS = ["nvfp4", "bf16", "fragments"]
# quack's order is for SM90; elsewhere codes become BF16 in another way.
SM90 = torch.cuda.get_device_capability() == (9, 0)
each_kind = pytest.mark.parametrize("kind", KINDS if SM90 else KINDS[:2])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=seeded(seed)).bfloat16()


@pytest.fixture(autouse=True)
def poisoned_allocator() -> None:
    sizes = (4096, 65536, 1 << 21, 1 << 24)
    blocks = [torch.full((n,), float("nan"), device=DEVICE) for n in sizes]
    del blocks


class Tokens:
    """T tokens in a paged cache of one layout; every third is not cached."""

    def __init__(self, tokens: int, layout: str = "NHD", fp8: bool = False):
        pages = max(PAGES, -(-tokens // PAGE) + 1)
        dtype = torch.uint8 if fp8 else torch.bfloat16
        args = (layout, pages, PAGE, HEADS[1], DIM)
        self.cache = PagedCache.poisoned(*args, dtype=dtype, device=DEVICE)
        generator = seeded(tokens)
        self.positions = torch.randint(
            0, 600, (tokens,), device=DEVICE, generator=generator
        )
        places = torch.randperm(pages * PAGE, device=DEVICE, generator=generator)
        self.slots = places[:tokens].clone()
        self.slots[2::3] = -1
        self.table = rope_table(600, DIM, 1e4).to(DEVICE)
        self.q_weight, self.k_weight = draw(DIM, seed=1), draw(DIM, seed=2)

    def rows(self, rope: bool) -> torch.Tensor | None:
        return self.table[self.positions] if rope else None

    def write(self, qkv: torch.Tensor, rope: bool = True, **more) -> torch.Tensor:
        return qk_norm_rope_cache(
            qkv,
            self.positions,
            self.q_weight,
            self.k_weight,
            EPS,
            self.table if rope else None,
            *self.cache.views(),
            self.slots,
            *HEADS,
            DIM,
            **more,
        )


def split(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = (HEADS[0], HEADS[1], HEADS[1])
    q, k, v = qkv.unflatten(-1, (-1, DIM)).split(parts, 1)
    return q, k, v


@pytest.mark.parametrize("rows", [1, 7, 256, 5000])
def test_row_kernels(rows: int) -> None:
    x, residual = draw(rows, HIDDEN + 8)[:, :HIDDEN], draw(rows, HIDDEN, seed=1) * 50
    weight = draw(HIDDEN, seed=2)
    norm_bounds(x, weight, EPS).check(norm.rms_norm(x, weight, EPS))
    bounds = norm_bounds(x, weight, EPS, residual)
    total = (x.double() + residual.double()).float().bfloat16()
    for out, new in (
        norm.add_rms_norm(x, residual, weight, EPS),
        norm.fused_add_rms_norm(x.clone(), residual.clone(), weight, EPS),
    ):
        bounds.check(out)
        assert torch.equal(new, total)
    exact = x.double()
    found = silu_mul_bounds(Bounds(exact, exact)).rounded()
    found.check(norm.silu_and_mul(x))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rope", [True, False])
def test_qk_norm_rope_cache(rope: bool, layout: str) -> None:
    for tokens in (1, 2, 16, 64, 65, 1000):
        batch = Tokens(tokens, layout)
        qkv = draw(tokens, 5120 + 8, seed=tokens)[:, :5120]
        out = batch.write(qkv, rope)
        q, k, v = split(qkv)
        qk_bounds(q, batch.q_weight, EPS, batch.rows(rope)).check(out)
        bounds = qk_bounds(k, batch.k_weight, EPS, batch.rows(rope))
        batch.cache.check(batch.slots, bounds, v)
        again = Tokens(tokens, layout)
        assert torch.equal(again.write(qkv, rope), out)


def test_fp8_cache_is_what_vllm_writes() -> None:
    """Bit for bit what vLLM's operator makes of the same rounded keys and values."""
    from vllm import _custom_ops as vllm_ops

    tokens = 200
    qkv = draw(tokens, 5120, seed=3) * 30
    scales = torch.tensor([0.37], device=DEVICE), torch.tensor([1.7], device=DEVICE)
    ours, plain, theirs = (Tokens(tokens, fp8=fp8) for fp8 in (True, False, True))
    ours.write(qkv, k_scale=scales[0], v_scale=scales[1])
    plain.write(qkv)
    kept = plain.slots >= 0
    k, v = (c.flatten(0, 1)[plain.slots.clamp(min=0)] for c in plain.cache.views())
    vllm_ops.reshape_and_cache_flash(
        k[kept], v[kept], *theirs.cache.views(), plain.slots[kept], "fp8", *scales
    )
    assert torch.equal(ours.cache.raw, theirs.cache.raw)


class Fused:
    """A QKV projection and what comes before it.

    Attributes:
        weight: as a layer holds it.
    """

    def __init__(self, kind: str, hidden: int = HIDDEN):
        n = (HEADS[0] + 2 * HEADS[1]) * DIM
        self.norm_weight = draw(hidden, seed=4)
        if kind == "bf16":
            dense = draw(n, hidden, seed=5) * 0.02
            self.values, self.scale = dense.double(), 1.0
            self.operands = (dense, None, None)
            self.weight = GemvWeight.bf16(dense)
            return
        w = QuantizedLinear.random(n, hidden, seeded(6))
        self.values, self.scale = w.values, w.global_scale.item()
        self.operands = (w.codes, w.scales, w.global_scale)
        if kind == "fragments":
            self.weight = GemvWeight.fragments(*w.fragments(), w.global_scale)
        else:
            self.weight = GemvWeight.row_major(*self.operands)

    def run(self, x, residual, batch: Tokens, rope: bool, **more):
        return qkv_fused.qkv_of_layer(
            x,
            residual,
            self.norm_weight,
            EPS,
            self.weight,
            batch.q_weight,
            batch.k_weight,
            EPS,
            batch.table if rope else None,
            batch.positions,
            *batch.cache.views(),
            batch.slots,
            *HEADS,
            **more,
        )

    def qkv(self, x, residual) -> Bounds:
        normed = norm_bounds(x, self.norm_weight, EPS, residual)
        return normed_output_bounds(normed, self.values, self.scale)


def check_fused(fused: Fused, m: int, rope: bool, layout: str, pdl=True) -> None:
    """Checks both launches: the first one's output comes from a run of its own."""
    hidden = fused.norm_weight.shape[0]
    x, residual = draw(m, hidden, seed=m), draw(m, hidden, seed=m + 1) * 20
    batch = Tokens(m, layout)
    q, total = fused.run(x, residual, batch, rope, pdl=pdl)
    _, exact = ops.rms_norm(
        x.double(), fused.norm_weight, EPS, Numerics.CONTRACT, residual.double()
    )
    assert torch.equal(total.double(), exact)
    qkv = x.new_empty(m, fused.values.shape[0])
    normed_gemv(
        x,
        residual,
        fused.norm_weight,
        EPS,
        fused.weight,
        qkv,
        torch.empty_like(x),
        pdl,
    )
    fused.qkv(x, residual).check(qkv)
    parts, rows = split(qkv), batch.rows(rope)
    qk_bounds(parts[0], batch.q_weight, EPS, rows).check(q)
    bounds = qk_bounds(parts[1], batch.k_weight, EPS, rows)
    batch.cache.check(batch.slots, bounds, parts[2])


@each_kind
def test_fused_matches_contract(kind: str) -> None:
    fused = Fused(kind)
    for m in (1, 2, 3, 7, 8, 9, 15, 16):
        check_fused(fused, m, rope=m % 2 == 1, layout=("NHD", "HND")[m % 2])
    check_fused(fused, 5, rope=True, layout="NHD", pdl=False)


@each_kind
def test_fused_on_another_width(kind: str) -> None:
    check_fused(Fused(kind, hidden=256), 3, rope=True, layout="NHD")


@pytest.mark.parametrize("kind", KINDS[:2])
def test_public_entry_reads_modelopt_and_bf16(kind: str) -> None:
    """The same bits as from the weight of a layer."""
    fused, m = Fused(kind), 3
    x, residual = draw(m, HIDDEN), draw(m, HIDDEN, seed=1)
    batch = Tokens(m)
    expected = fused.run(x, residual, batch, True)
    found = qkv_fused.flint_qkv_fused(
        x,
        residual,
        fused.norm_weight,
        EPS,
        *fused.operands,
        batch.q_weight,
        batch.k_weight,
        EPS,
        batch.table,
        batch.positions,
        *Tokens(m).cache.views(),
        batch.slots,
        *HEADS,
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@each_kind
def test_fused_twice_and_without_residual(kind: str) -> None:
    """Two runs give the same bits; no residual is a residual of zeros."""
    fused = Fused(kind)
    for m in (1, 8, 16):
        x, residual = draw(m, HIDDEN, seed=m), draw(m, HIDDEN, seed=m + 1)
        runs = []
        for _ in range(2):
            batch = Tokens(m)
            runs.append((*fused.run(x, residual, batch, True), batch.cache.raw))
        for first, second in zip(*runs, strict=True):
            assert torch.equal(first.view(torch.int16), second.view(torch.int16))
        zeros = fused.run(x, torch.zeros_like(x), Tokens(m), True)
        nothing = fused.run(x, None, Tokens(m), True)
        assert all(torch.equal(a, b) for a, b in zip(zeros, nothing, strict=True))
        assert torch.equal(nothing[1], x)


def test_fused_in_a_graph() -> None:
    """Changed inputs, positions and slots at every replay, against an eager run."""
    fused, m = Fused("nvfp4"), 4
    batch, x, residual = Tokens(m), draw(m, HIDDEN), draw(m, HIDDEN, seed=1)
    fused.run(x, residual, batch, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, total = fused.run(x, residual, batch, True)
        for _ in range(3):
            q, total = fused.run(total, residual, batch, True)
    for seed in range(4):
        x.copy_(draw(m, HIDDEN, seed=seed))
        fresh = Tokens(m + seed)
        batch.positions.copy_(fresh.positions[:m])
        batch.slots.copy_(fresh.slots[:m])
        batch.cache.raw.fill_(float("nan"))
        graph.replay()
        got = q.clone(), total.clone(), batch.cache.raw.clone()
        batch.cache.raw.fill_(float("nan"))
        expected = fused.run(x, residual, batch, True)
        for _ in range(3):
            expected = fused.run(expected[1], residual, batch, True)
            torch.cuda.synchronize()
        for a, b in zip(got, (*expected, batch.cache.raw), strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_fused_bad_arguments() -> None:
    fused = Fused("nvfp4")
    with pytest.raises(ValueError, match="at most 16 tokens"):
        fused.run(draw(17, HIDDEN), draw(17, HIDDEN), Tokens(17), True)
    with pytest.raises(ValueError, match="residual must be"):
        fused.run(draw(2, HIDDEN), draw(2, HIDDEN).float(), Tokens(2), True)
    q, total = fused.run(draw(0, HIDDEN), draw(0, HIDDEN), Tokens(0), True)
    assert (q.shape, total.shape) == ((0, 32, 128), (0, HIDDEN))
