# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Flint's expert kernels fit its sizes, and are right against float64."""

from typing import TypeAlias

import pytest
import torch

from vllm.models.flint.ops import moe, moe_gemv
from vllm.models.flint.ops.experts import spec
from vllm.models.flint.ops.gemv.config import GemvSpec, Layout
from vllm.models.flint.ops.gemv.variants import missing_compiler
from vllm.models.flint.ops.gemv_weight import GemvWeight
from vllm.platforms import current_platform

EXPERTS, TOP_K, HIDDEN, WIDTH, SHARED = 32, 6, 2048, 512, 1024
EPS = 1e-6
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)

# Codes, E4M3 scales and global scales of [E, N, K]; or BF16 weights alone.
Stack: TypeAlias = tuple[torch.Tensor, ...]

needs_gpu = pytest.mark.skipif(
    not current_platform.is_cuda()
    or not current_platform.has_device_capability(90)
    or missing_compiler() is not None,
    reason="needs SM90 or later, and nvidia-cutlass-dsl",
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_stack(count: int, n: int, k: int, bf16: bool, seed: int) -> Stack:
    """Weights that keep values near one."""
    generator = seeded(seed)
    if bf16:
        return ((torch.randn(count, n, k, generator=generator) * 0.03).bfloat16(),)
    codes = torch.randint(
        0, 256, (count, n, k // 2), generator=generator, dtype=torch.uint8
    )
    scales = torch.rand(count, n, k // 16, generator=generator) / 2 + 0.5
    alpha = (1 + torch.arange(count) / count) / (2 * k**0.5)
    return codes, scales.to(torch.float8_e4m3fn), alpha


def values(stack: Stack, index: int) -> torch.Tensor:
    """Matrix of one expert, exact."""
    if len(stack) == 1:
        return stack[0][index].double()
    codes, scales, alpha = (part[index] for part in stack)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    found = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0).double()
    return found * scales.double().repeat_interleave(16, dim=-1) * alpha.double()


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Flat 128x4 order of [N, K / 16] scales, which fill whole tiles."""
    n, k = scales.shape
    row, column = torch.arange(n)[:, None], torch.arange(k)
    place = (row // 128 * (k // 4) + column // 4) * 512
    place = place + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    out = torch.empty(n * k, dtype=torch.uint8)
    out[place.flatten()] = scales.view(torch.uint8).flatten()
    return out


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def mlp(projected: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    gate, up = projected.chunk(2, dim=-1)
    act = rounded(torch.nn.functional.silu(gate) * up)
    return rounded(act @ second.T)


class SparseLayer:
    """Random weights of a sparse layer, and its answers in float64."""

    def __init__(self, bf16: bool):
        self.first = random_stack(EXPERTS, 2 * WIDTH, HIDDEN, bf16, seed=1)
        self.second = random_stack(EXPERTS, HIDDEN, WIDTH, bf16, seed=2)
        self.shared_first = random_stack(1, 2 * SHARED, HIDDEN, bf16, seed=3)
        self.shared_second = random_stack(1, HIDDEN, SHARED, bf16, seed=4)
        (self.router,) = (part[0] for part in random_stack(1, EXPERTS, HIDDEN, True, 5))

    def weights(self, device: str) -> moe.LLMoEWeights:
        first, second = (
            [part.to(device) for part in stack] for stack in (self.first, self.second)
        )
        if len(first) == 1:
            nothing = (None, None)
            experts = moe.FlintMoEWeights(*first, *nothing, *second, *nothing)
        else:
            experts = moe.FlintMoEWeights.from_modelopt(*first, *second)
        shared = []
        for stack in (self.shared_first, self.shared_second):
            if len(stack) == 1:
                shared.append(GemvWeight.bf16(stack[0][0].to(device)))
                continue
            codes, scales, alpha = stack
            parts = codes[0].to(device), swizzled(scales[0]).to(device)
            shared.append(GemvWeight.row_major(*parts, alpha.to(device)))
        return moe.LLMoEWeights(self.router.to(device), experts, *shared)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        # Its gate and up are those of a dense layer, which rounds them.
        projected = rounded(x.double() @ values(self.shared_first, 0).T)
        return mlp(projected, values(self.shared_second, 0))

    def answer(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of the experts, and the shared one; rounded as they are."""
        total = torch.zeros(x.shape, dtype=torch.float64)
        for expert in ids.unique().tolist():
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            projected = x[tokens].double() @ values(self.first, expert).T
            found = mlp(projected, values(self.second, expert))
            total.index_add_(0, tokens, found * weights[tokens, slots, None].double())
        return rounded(rounded(total) + self.shared(x))


@pytest.fixture(scope="module", params=[False, True], ids=["nvfp4", "bf16"])
def layer(request: pytest.FixtureRequest) -> SparseLayer:
    return SparseLayer(request.param)


@pytest.fixture(scope="module")
def nvfp4() -> SparseLayer:
    return SparseLayer(bf16=False)


def random_tokens(m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and the experts and weights of each."""
    generator = seeded(m)
    x = torch.randn(m, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(m, EXPERTS, generator=generator).topk(TOP_K).indices.int()
    weights = torch.rand(m, TOP_K, generator=generator)
    weights = weights / weights.sum(1, keepdim=True)
    return x, ids, weights.bfloat16().float()


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    # An FP32 sum next to a tie may round the other way, before the last sum too.
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2**-7, atol=2**-6)


def specs(
    hidden: int, width: int, shared: int, layout: Layout, tokens: int
) -> tuple[spec.GateUpSpec, spec.DownSpec]:
    first = GemvSpec(hidden, "mul", silu_mul=True)
    second = GemvSpec(width, "mul")
    shared_first = GemvSpec(hidden, "mul", silu_mul=True, layout=layout)
    shared_second = GemvSpec(shared, "mul", layout=layout)
    return (
        spec.GateUpSpec(TOP_K, width, first, shared_first, shared, tokens),
        spec.DownSpec(TOP_K, hidden, second, shared_second),
    )


@pytest.mark.parametrize(("width", "shared"), [(512, 1024), (256, 512)])
@pytest.mark.parametrize("layout", ["row_major", "fragments"])
@pytest.mark.parametrize("tokens", spec.TOKEN_CASES)
def test_flints_sizes_have_schedules(
    width: int, shared: int, layout: Layout, tokens: int
):
    first, second = specs(HIDDEN, width, shared, layout, tokens)
    assert spec.gate_up_config(first).why_not(first) is None
    assert spec.down_config(second, tokens == 1).why_not(second) is None


def test_other_sizes_are_refused():
    first, second = specs(2048, 192, 512, "row_major", 1)
    assert "192 rows" in (spec.gate_up_config(first).why_not(first) or "")
    assert "an input of 192" in (spec.down_config(second, True).why_not(second) or "")


def test_block_scales_alone_get_another_order(nvfp4: SparseLayer):
    found = nvfp4.weights("cpu").experts
    for (codes, scales, alpha), weight, scale, factor in (
        (nvfp4.first, found.w1, found.w1_scale, found.alpha1),
        (nvfp4.second, found.w2, found.w2_scale, found.alpha2),
    ):
        assert weight.data_ptr() == codes.data_ptr()
        assert factor is not None and factor.data_ptr() == alpha.data_ptr()
        assert scale is not None and scale.shape == (EXPERTS, scales[0].numel())
        for expert in (0, 1, EXPERTS - 1):
            assert torch.equal(scale[expert], swizzled(scales[expert]))


def test_wrong_arguments_are_refused(nvfp4: SparseLayer):
    w = nvfp4.weights("cpu")
    x, ids, weights = random_tokens(2)
    with pytest.raises(ValueError, match="ids must be int32"):
        moe.flint_moe(x, (ids.long(), weights), w.experts)
    with pytest.raises(ValueError, match="added twice"):
        moe.flint_moe(x, (ids, weights), w.experts, fused=w, shared_out=x)
    with pytest.raises(ValueError, match="these are NVFP4"):
        moe.flint_moe_bf16_decode(x, (ids, weights), w.experts)
    act = torch.empty(2 * TOP_K, WIDTH, dtype=torch.bfloat16)
    operands = w.experts.w1, w.experts.w1_scale, w.experts.alpha1
    nothing = (None,) * 4
    with pytest.raises(ValueError, match="act must be BF16"):
        moe_gemv.gate_up(x, ids, *operands, act[:-1], *nothing)
    with pytest.raises(ValueError, match="x must have unit inner stride"):
        moe_gemv.gate_up(x.T.contiguous().T, ids, *operands, act, *nothing)


@needs_gpu
@pytest.mark.parametrize("m", [1, 8, 32])
def test_few_tokens_against_float64(layer: SparseLayer, m: int):
    w = layer.weights("cuda")
    x, *choice = random_tokens(m)
    run = moe.flint_moe_bf16_decode if w.experts.is_bf16 else moe.flint_moe
    ids, weights = (part.cuda() for part in choice)
    out = run(x.cuda(), (ids, weights), w.experts, fused=w)
    check(out, layer.answer(x, *choice))


@needs_gpu
@pytest.mark.parametrize("m", [33, 400])
def test_many_tokens_against_float64(nvfp4: SparseLayer, m: int):
    w = nvfp4.weights("cuda")
    x, *choice = random_tokens(m)
    ids, weights = (part.cuda() for part in choice)
    shared = nvfp4.shared(x).bfloat16().cuda()
    out = moe.flint_moe(x.cuda(), (ids, weights), w.experts, shared_out=shared)
    check(out, nvfp4.answer(x, *choice))


@needs_gpu
@pytest.mark.parametrize("m", [1, 5, moe.LL_MOE_MAX_TOKENS])
def test_a_layer_in_three_launches(layer: SparseLayer, m: int):
    w = layer.weights("cuda")
    generator = seeded(m)
    x, residual = (
        torch.randn(m, HIDDEN, generator=generator).bfloat16() for _ in range(2)
    )
    norm = (torch.rand(HIDDEN, generator=generator) + 0.5).bfloat16()
    inputs = (x.cuda(), residual.cuda(), norm.cuda(), EPS)
    counter = moe.make_route_counter("cuda")
    normed, _, *choice = moe.route(*inputs, w.router, TOP_K, counter)
    out, total = moe.flint_moe_ll(*inputs, w, TOP_K, counter)
    assert counter.count_nonzero() == 0

    exact = x.double() + residual.double()
    assert torch.equal(total.cpu(), exact.bfloat16())
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS)
    normed, ids, weights = (part.cpu() for part in (normed, *choice))
    torch.testing.assert_close(
        normed.double(), exact * scale * norm.double(), rtol=2**-8, atol=0
    )
    logits = normed.double() @ layer.router.double().T
    chosen, best = logits.gather(1, ids.long()), logits.topk(TOP_K).values
    # Logits that differ by less than their rounding may change places.
    torch.testing.assert_close(chosen, best, rtol=2**-7, atol=0)
    shares = chosen.sigmoid() / chosen.sigmoid().sum(1, keepdim=True)
    torch.testing.assert_close(weights.double(), shares, rtol=2**-6, atol=0)
    check(out, layer.answer(normed, ids, weights))
