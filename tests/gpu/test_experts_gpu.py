# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The experts of a few tokens on a GPU, through their interface, by the contract."""

import functools
from dataclasses import dataclass

import pytest
import torch
from vllm.models.flint.ops.gemv.packing import pack_codes
from vllm.models.flint.ops.moe_gemv import down_combine, gate_up
from vllm.models.flint.ops.nvfp4_gemv import decode_form

from support.experts import (
    Experts,
    SharedKind,
    SharedLinear,
    down_bounds,
    gate_up_bounds,
    random_routes,
)
from support.gemv import output_bounds

DEVICE = "cuda"
TOP_K = 6
COUNT = 256
HIDDEN = 2048
# Widths of a routed and of the shared expert, for one GPU and for two.
WHOLE, HALF = (512, 1024), (256, 512)
TOKENS = [1, 2, 3, 7, 8, 16, 33, 64]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


@dataclass(frozen=True)
class Layer:
    """A sparse block's weights: [gate | up] and down, routed and shared."""

    first: Experts
    second: Experts
    shared_first: SharedLinear | None
    shared_second: SharedLinear | None


@functools.lru_cache(maxsize=2)
def routed(width: int, bf16: bool) -> tuple[Experts, Experts]:
    generator = seeded(width)
    return (
        Experts.random(COUNT, 2 * width, HIDDEN, generator, bf16),
        Experts.random(COUNT, HIDDEN, width, generator, bf16),
    )


def layer_of(
    kind: SharedKind | None,
    widths: tuple[int, int] = WHOLE,
    bf16: bool = False,
) -> Layer:
    generator = seeded(widths[1])
    shared: list[SharedLinear | None] = [None, None]
    if kind is not None:
        for i, (n, k) in enumerate(((2 * widths[1], HIDDEN), (HIDDEN, widths[1]))):
            shared[i] = SharedLinear.random(kind, n, k, generator)
    return Layer(*routed(widths[0], bf16), *shared)


class Step:
    """A step's inputs and poisoned outputs; `launch` may be repeated."""

    packed = False

    def __init__(self, layer: Layer, ids: torch.Tensor, tw: torch.Tensor, pad: int = 0):
        self.layer, self.ids, self.tw = layer, ids, tw
        self.m = len(ids)
        rows = torch.randn(
            self.m, HIDDEN + pad, device=DEVICE, generator=seeded(self.m + pad)
        )
        self.x = rows.bfloat16()[:, :HIDDEN]
        width = layer.second.weight.shape[-1]
        if layer.second.alpha is not None:
            width *= 2
        self.act = self._output(ids.numel(), width)
        self.out = self._output(self.m, HIDDEN)
        self.shared_act = None
        if layer.shared_second is not None:
            self.shared_act = self._output(self.m, layer.shared_second.values.shape[1])

    @classmethod
    def random(cls, layer: Layer, m: int, pad: int = 0) -> "Step":
        return cls(layer, *random_routes(m, COUNT, TOP_K, seeded(m)), pad)

    @staticmethod
    def _output(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)

    def poison(self) -> None:
        for tensor in (self.act, self.out, self.shared_act):
            if tensor is not None:
                tensor.fill_(float("nan"))

    def launch(self, pdl: bool = True) -> None:
        layer = self.layer
        none = (None, None, None)
        first = none if layer.shared_first is None else layer.shared_first.operands
        second = none if layer.shared_second is None else layer.shared_second.operands
        pack = pack_codes if self.packed else torch.Tensor.contiguous
        experts = (pack(layer.first.weight), layer.first.scales, layer.first.alpha)
        gate_up(self.x, self.ids, *experts, self.act, *first, self.shared_act, pdl)
        experts = (pack(layer.second.weight), layer.second.scales, layer.second.alpha)
        down_combine(
            self.act,
            self.ids,
            self.tw,
            *experts,
            self.shared_act,
            *second,
            self.out,
            pdl,
        )

    def check(self) -> None:
        """Asserts that what was launched is right."""
        layer = self.layer
        gate_up_bounds(self.x, self.ids, layer.first).check(self.act)
        shared = None
        if layer.shared_first is not None:
            own = layer.shared_first
            bounds = output_bounds(self.x, own.values, own.scale, silu_mul=True)
            bounds.check(self.shared_act)
            shared = self.shared_act, layer.shared_second
        found = down_bounds(self.act, self.ids, self.tw, layer.second, shared)
        found.check(self.out)

    def run(self, pdl: bool = True) -> None:
        """Launches twice: the same bits, and right ones."""
        self.poison()
        self.launch(pdl)
        first = self.act.clone(), self.out.clone()
        self.poison()
        self.launch(pdl)
        assert torch.equal(first[0], self.act)
        assert torch.equal(first[1], self.out)
        self.check()


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("m", TOKENS)
def test_token_counts(m: int, pdl: bool) -> None:
    Step.random(layer_of("fragments"), m, pad=8 * (m % 3)).run(pdl)


@pytest.mark.skipif(decode_form() != "mul", reason="packed codes are for integers")
@pytest.mark.parametrize("m", TOKENS)
def test_packed_codes(m: int) -> None:
    step = Step.random(layer_of("fragments"), m)
    step.packed = True
    step.run()


@pytest.mark.parametrize("kind", ["row_major", "bf16", None])
@pytest.mark.parametrize("m", [1, 8, 33])
def test_forms_of_the_shared_expert(kind: SharedKind | None, m: int) -> None:
    Step.random(layer_of(kind), m).run()


@pytest.mark.parametrize("kind", ["row_major", "fragments"])
@pytest.mark.parametrize("m", [1, 7, 16])
def test_half_of_every_expert(kind: SharedKind, m: int) -> None:
    Step.random(layer_of(kind, HALF), m).run()


@pytest.mark.parametrize("m", [1, 3, 8, 64])
def test_bf16_experts(m: int) -> None:
    Step.random(layer_of("bf16", bf16=True), m).run()


def test_bf16_experts_with_other_shared_ones() -> None:
    for kind in ("fragments", None):
        Step.random(layer_of(kind, bf16=True), 2).run()


def weights_of(ids: torch.Tensor) -> torch.Tensor:
    return random_routes(len(ids), COUNT, TOP_K, seeded(len(ids)))[1]


@pytest.mark.parametrize("m", [7, 8, 9, 64])
def test_all_tokens_with_the_same_experts(m: int) -> None:
    ids = torch.tensor([[9, 255, 0, 31, 128, 77]], device=DEVICE, dtype=torch.int32)
    ids = ids.repeat(m, 1)
    Step(layer_of("fragments"), ids, weights_of(ids)).run()


def test_every_pair_is_one_experts() -> None:
    ids = torch.full((64, TOP_K), 255, device=DEVICE, dtype=torch.int32)
    Step(layer_of("fragments"), ids, weights_of(ids)).run()


def test_every_pair_has_an_expert_of_its_own() -> None:
    order = torch.randperm(COUNT, device=DEVICE, generator=seeded(0))
    ids = order[: 42 * TOP_K].view(42, TOP_K).int()
    Step(layer_of("fragments"), ids, weights_of(ids)).run()


def test_few_experts_for_many_tokens() -> None:
    """Groups of all sizes, and an expert that a token has twice."""
    ids = torch.randint(0, 5, (29, TOP_K), device=DEVICE, generator=seeded(1)).int()
    Step(layer_of("fragments"), ids, weights_of(ids)).run()


@pytest.mark.parametrize("m", [1, 8, 40])
def test_graph_replay(m: int) -> None:
    """Three blocks in a row, replayed with other inputs, ids and weights."""
    steps = [Step.random(layer_of("fragments"), m) for _ in range(3)]
    for before, after in zip(steps, steps[1:], strict=False):
        after.x = before.out
    steps[0].launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step.launch()
    for seed in range(3):
        generator = seeded(100 + seed)
        steps[0].x.normal_(generator=generator)
        for step in steps:
            ids, tw = random_routes(m, COUNT, TOP_K, generator)
            step.ids.copy_(ids)
            step.tw.copy_(tw)
            step.poison()
        graph.replay()
        replayed = [step.out.clone() for step in steps]
        for step, out in zip(steps, replayed, strict=True):
            step.check()
            step.poison()
            step.launch()
            torch.cuda.synchronize()
            assert torch.equal(step.out, out)


def test_no_tokens() -> None:
    ids = torch.empty((0, TOP_K), device=DEVICE, dtype=torch.int32)
    Step(layer_of("fragments"), ids, ids.float()).launch()
    torch.cuda.synchronize()
