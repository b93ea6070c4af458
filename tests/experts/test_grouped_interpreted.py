# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The grouped GEMM of the experts, in Triton's interpreter, against the contract."""

import sys
from dataclasses import replace

import pytest
import torch
from vllm.models.flint.ops import experts as package
from vllm.models.flint.ops.device import Gpu
from vllm.models.flint.ops.experts import grouped_config
from vllm.models.flint.ops.experts.grouped_config import (
    GemmConfig,
    GroupedConfig,
    candidate_configs,
    pick_config,
    picked_configs,
)
from vllm.models.flint.ops.experts.weights import FlintMoEWeights

from contract.nvfp4 import NAN_SCALE_BYTES, dequantize, pack_codes, swizzle_scales
from support.grouped import Experts, check_groups
from support.interpreted import load_interpreted

PACKAGE = package.__name__
SMALL = GroupedConfig(16, GemmConfig(128, 128, 4, 3), GemmConfig(64, 64, 4, 3))


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch):
    for name in ("chain", "align", "grouped_kernel", "grouped"):
        module = load_interpreted(monkeypatch, f"{PACKAGE}.{name}")
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", module)
    monkeypatch.setattr(grouped_config, "current_gpu", lambda: Gpu((9, 0), 132))
    return module


class Tokens:
    """Rows of a wider tensor, and experts chosen at random."""

    def __init__(self, count: int, top_k: int, experts: int, hidden: int):
        generator = torch.Generator().manual_seed(count)
        drawn = torch.randn(2, count, hidden + 8, generator=generator).bfloat16()
        self.x, self.shared = drawn[..., :hidden]
        scores = torch.rand(count, experts, generator=generator)
        self.ids = scores.topk(top_k).indices.int()
        self.tw = torch.rand(count, top_k, generator=generator).bfloat16().float()

    def check(self, experts: Experts, out: torch.Tensor, shared: bool = True) -> None:
        more = self.shared if shared else None
        experts.bounds(self.x, self.ids, self.tw, more).check(out)

    def run(self, grouped, experts: Experts, shared: bool = True, config=SMALL):
        more = self.shared if shared else None
        return grouped.grouped_experts(
            self.x, self.ids, self.tw, experts.weights, more, config
        )


def draw_experts(count: int = 5, hidden: int = 128, width: int = 64) -> Experts:
    return Experts.random(count, hidden, width, torch.Generator().manual_seed(count))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.Tensor.new_empty

    def new_empty(self, *args, **kwargs):
        made = original(self, *args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 0xFF)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.mark.parametrize(("count", "experts"), [(1, 5), (32, 1), (200, 7), (2500, 12)])
def test_grouping(grouped, count: int, experts: int) -> None:
    """Also of more pairs than are read at once, and experts without any."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, experts, (count, 2), generator=generator).int()
    ids[ids == 3] = 2
    check_groups(grouped.group_pairs(ids, 16, experts), ids, experts)


@pytest.mark.parametrize("count", [3, 40])
def test_packed_codes_give_the_same_bits(grouped, count: int) -> None:
    experts = draw_experts()
    tokens = Tokens(count, 3, 5, 128)
    expected = tokens.run(grouped, experts)
    packed = replace(experts, weights=experts.weights.packed())
    assert torch.equal(tokens.run(grouped, packed), expected)


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("shared", [True, False])
def test_against_the_contract(grouped, count: int, shared: bool) -> None:
    experts = draw_experts()
    tokens = Tokens(count, 3, 5, 128)
    tokens.check(experts, tokens.run(grouped, experts, shared), shared)


@pytest.mark.parametrize(
    ("hidden", "width"), [(256, 128), (128, 192)], ids=["two steps", "three halves"]
)
def test_widths(grouped, hidden: int, width: int) -> None:
    experts = draw_experts(3, hidden, width)
    tokens = Tokens(4, 2, 3, hidden)
    tokens.check(experts, tokens.run(grouped, experts))


@pytest.mark.parametrize("config", picked_configs((9, 0)), ids=lambda c: c.block_t)
def test_every_picked_config(grouped, config: GroupedConfig) -> None:
    experts = draw_experts(2, 256, 128)
    tokens = Tokens(9, 2, 2, 256)
    tokens.check(experts, tokens.run(grouped, experts, config=config))


def test_all_tokens_choose_one_expert(grouped) -> None:
    experts = draw_experts()
    tokens = Tokens(35, 1, 5, 128)
    tokens.ids.fill_(3)
    tokens.check(experts, tokens.run(grouped, experts))


def test_no_tokens(grouped) -> None:
    experts = draw_experts()
    assert Tokens(0, 2, 5, 128).run(grouped, experts).shape == (0, 128)


def test_extreme_gates(grouped) -> None:
    """Sums far beyond where exp overflows, of either sign."""
    experts = draw_experts(2)
    experts.first.alpha.fill_(1.0)
    experts.second.alpha.fill_(1e-6)
    tokens = Tokens(3, 2, 2, 128)
    out = tokens.run(grouped, experts)
    assert out.isfinite().all()
    tokens.check(experts, out)


def test_a_wrong_global_scale_fails(grouped) -> None:
    """The bounds see an error of one part in a hundred."""
    experts = draw_experts()
    tokens = Tokens(4, 2, 5, 128)
    out = tokens.run(grouped, experts)
    experts.second.alpha.mul_(1.01)
    with pytest.raises(AssertionError, match="wrong, the first"):
        tokens.check(experts, out)


def test_every_code_and_scale_is_exact(grouped) -> None:
    """One-hot rows read the weights back."""
    scales = torch.arange(512).remainder(256).view(128, 4).to(torch.uint8)
    for byte in NAN_SCALE_BYTES:
        scales[scales == byte] = 0
    codes = pack_codes(torch.arange(16).repeat(128, 4).to(torch.uint8))
    operands = codes[None], swizzle_scales(scales)[None], torch.ones(1)
    x = torch.eye(64).bfloat16()
    permuted = grouped.permute(x)
    groups = grouped.group_pairs(torch.zeros(64, 1, dtype=torch.int32), 16, 1)
    y = torch.empty(64, 128, dtype=torch.bfloat16)
    config = GemmConfig(128, 64, 4, 3)
    grouped.launch_gemm(permuted, operands, y, groups, 1, config)
    assert torch.equal(y.double().T, dequantize(codes, scales))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 3), (12, 0)])
def test_picks_by_rows_an_expert(capability: tuple[int, int]) -> None:
    found = [pick_config(pairs, 256, capability) for pairs in range(1, 10**5, 97)]
    widths = [config.block_t for config in found]
    assert widths == sorted(widths)
    assert set(found) == set(picked_configs(capability))


@pytest.mark.parametrize("block_t", [16, 32, 64, 128, 256])
def test_candidates(block_t: int) -> None:
    found = list(candidate_configs(block_t))
    assert len(found) == len(set(found)) > 1


def test_warms_up_what_it_may_pick(grouped, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def launch(x, operands, out, groups, share, config, pdl) -> None:
        seen.append((groups.block_t, config))

    monkeypatch.setattr(grouped, "launch_gemm", launch)
    grouped.warmup_grouped(draw_experts().weights, 2, shared=True)
    wanted = picked_configs((9, 0))
    assert seen == [(c.block_t, g) for c in wanted for g in (c.gate_up, c.down)]


def test_bad_arguments(grouped) -> None:
    experts = draw_experts()
    tokens = Tokens(2, 2, 5, 128)
    good = (tokens.x, tokens.ids, tokens.tw, experts.weights, None)
    for place, bad, message in (
        (0, tokens.x.float(), "x must be BF16"),
        (0, tokens.x.repeat_interleave(2, 1)[:, ::2], "x must have unit"),
        (1, tokens.ids.long(), "ids must be"),
        (2, tokens.tw.bfloat16(), "tw must be"),
        (4, tokens.x[:1], "shared_out must be BF16"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped.grouped_experts(*good[:place], bad, *good[place + 1 :])
    narrow = draw_experts(2, 128, 32).weights
    wide = torch.zeros(1, 128, 128).bfloat16()
    bf16 = FlintMoEWeights(wide, None, None, wide[..., :64].contiguous(), None, None)
    for weights in (narrow, bf16):
        assert not grouped.grouped_fits(weights)
        with pytest.raises(ValueError, match="needs NVFP4 experts"):
            grouped.grouped_experts(*good[:3], weights, None)
