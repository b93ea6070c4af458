# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The experts' grouped GEMM on a GPU, at the model's shapes, against the contract."""

import functools
from dataclasses import replace

import pytest
import torch
from vllm.models.flint.ops.experts import grouped
from vllm.models.flint.ops.experts.grouped_config import GroupedConfig, picked_configs
from vllm.models.flint.ops.experts.weights import FlintMoEWeights
from vllm.models.flint.ops.gemv.packing import pack_codes as pack_bits

from contract.nvfp4 import NAN_SCALE_BYTES, dequantize, pack_codes, swizzle_scales
from support.grouped import Experts, check_groups

DEVICE = "cuda"
EXPERTS, TOP_K, HIDDEN = 256, 6, 2048
# Whole, and of a rank of two.
WIDTHS = [512, 256]
# How many tokens are checked in float64.
CHECKED = 20
CONFIGS = picked_configs()
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"t{c.block_t}")


@functools.cache
def experts(width: int = 512) -> Experts:
    generator = torch.Generator(DEVICE).manual_seed(width)
    return Experts.random(EXPERTS, HIDDEN, width, generator)


@pytest.fixture(autouse=True)
def poisoned_allocator() -> None:
    sizes = (4096, 65536, 1 << 21, 1 << 25, 1 << 27)
    blocks = [torch.full((n,), float("nan"), device=DEVICE) for n in sizes]
    del blocks


@functools.cache
def packed() -> FlintMoEWeights:
    weights = experts().weights
    return replace(weights, w1=pack_bits(weights.w1), w2=pack_bits(weights.w2))


class Tokens:
    """Rows of a wider tensor, and experts chosen at random."""

    def __init__(self, count: int, seed: int = 0):
        generator = torch.Generator(DEVICE).manual_seed(1000 * seed + count)

        def draw(make, *shape: int) -> torch.Tensor:
            return make(*shape, device=DEVICE, generator=generator)

        drawn = draw(torch.randn, 2, count, HIDDEN + 8).bfloat16()
        self.x, self.shared = drawn[..., :HIDDEN]
        self.choose(draw(torch.rand, count, EXPERTS))
        self.tw = draw(torch.rand, count, TOP_K).bfloat16().float()

    def choose(self, scores: torch.Tensor) -> None:
        self.ids = scores.topk(TOP_K).indices.int().contiguous()

    def run(
        self,
        config: GroupedConfig | None = None,
        width: int = 512,
        shared=True,
        pdl=True,
    ) -> torch.Tensor:
        return grouped.grouped_experts(
            self.x,
            self.ids,
            self.tw,
            experts(width).weights,
            self.shared if shared else None,
            config,
            pdl,
        )

    def check(self, out: torch.Tensor, width: int = 512, shared=True) -> None:
        """All of a few tokens, or a sample of many, the last one always."""
        assert out.isfinite().all()
        count = self.x.shape[0]
        some = torch.randperm(count, device=DEVICE)[: CHECKED - 1]
        some = torch.cat((some, some.new_tensor([count - 1]))).unique()
        more = self.shared[some] if shared else None
        bounds = experts(width).bounds(
            self.x[some], self.ids[some], self.tw[some], more
        )
        bounds.check(out[some])


@each_config
@pytest.mark.parametrize("count", [1, 100, 1365, 16384])
def test_grouping(config: GroupedConfig, count: int) -> None:
    ids = Tokens(count, seed=9).ids
    check_groups(grouped.group_pairs(ids, config.block_t, EXPERTS), ids, EXPERTS)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 17, 64, 65, 256, 1000, 4096, 16384])
def test_against_the_contract(count: int, width: int) -> None:
    tokens = Tokens(count)
    out = tokens.run(width=width)
    tokens.check(out, width)
    assert torch.equal(tokens.run(width=width), out), "two runs differ"


@each_config
@pytest.mark.parametrize("count", [3, 700])
def test_every_config(config: GroupedConfig, count: int) -> None:
    tokens = Tokens(count, seed=1)
    tokens.check(tokens.run(config))


@pytest.mark.parametrize("count", [80, 2000])
def test_without_pdl(count: int) -> None:
    tokens = Tokens(count, seed=8)
    out = tokens.run(pdl=False)
    tokens.check(out)
    assert torch.equal(tokens.run(), out)


def test_without_a_shared_expert() -> None:
    tokens = Tokens(100, seed=3)
    tokens.check(tokens.run(shared=False), shared=False)


@pytest.mark.parametrize("count", [70, 1500])
def test_all_tokens_choose_the_same_experts(count: int) -> None:
    """All but six experts have no rows."""
    tokens = Tokens(count, seed=4)
    scores = torch.zeros(count, EXPERTS, device=DEVICE)
    scores[:, torch.tensor([0, 3, 100, 254, 255, 17])] = 1.0
    tokens.choose(scores)
    tokens.check(tokens.run())


def test_no_tokens() -> None:
    assert Tokens(0).run().shape == (0, HIDDEN)


@pytest.mark.parametrize("count", [64, 1200])
def test_graph_replay_with_other_experts(count: int) -> None:
    tokens = Tokens(count, seed=5)
    tokens.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tokens.run()
    for seed in (6, 7):
        fresh = Tokens(count, seed)
        for name in ("x", "ids", "tw", "shared"):
            getattr(tokens, name).copy_(getattr(fresh, name))
        out.fill_(float("nan"))
        graph.replay()
        fresh.check(out)
        assert torch.equal(out, fresh.run())


@each_config
def test_every_code_and_scale_is_exact(config: GroupedConfig) -> None:
    """One-hot rows read the weights of one expert of three back, bit by bit."""
    n, k, expert = 256, 512, 1
    scales = torch.arange(n * k // 16, device=DEVICE).remainder(256).to(torch.uint8)
    for byte in NAN_SCALE_BYTES:
        scales[scales == byte] = 0
    # Every block of 16 has every code, in an order of its own.
    order = torch.rand(n * k // 16, 16, device=DEVICE).argsort(-1)
    codes, scales = pack_codes(order.view(n, k).to(torch.uint8)), scales.view(n, -1)
    weight = torch.full((3, n, k // 2), 0x77, dtype=torch.uint8, device=DEVICE)
    weight[expert] = codes
    swizzled = torch.full((3, n * k // 16), 0x7E, dtype=torch.uint8, device=DEVICE)
    swizzled[expert] = swizzle_scales(scales)
    x = torch.eye(k, device=DEVICE).bfloat16()
    permuted = grouped.permute(x)
    ids = torch.full((k, 1), expert, dtype=torch.int32, device=DEVICE)
    groups = grouped.group_pairs(ids, config.block_t, 3)
    y = torch.full((k, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    operands = weight, swizzled, torch.tensor([9.0, 1.0, 9.0], device=DEVICE)
    grouped.launch_gemm(permuted, operands, y, groups, 1, config.down)
    wanted = dequantize(codes.cpu(), scales.cpu())
    assert torch.equal(y.double().T.cpu(), wanted)


def test_warm_up() -> None:
    grouped.warmup_grouped(experts().weights, TOP_K, shared=True)
    torch.cuda.synchronize()


@each_config
def test_packed_codes_give_the_same_bits(config: GroupedConfig) -> None:
    tokens = Tokens(100)
    more = tokens.tw, packed(), tokens.shared, config
    out = grouped.grouped_experts(tokens.x, tokens.ids, *more)
    assert torch.equal(out, tokens.run(config))
