# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The expert kernels' own PTX, in the emulator, against the contract."""

import pytest
import torch
from vllm.models.flint.ops.experts.spec import (
    DOWN_CASES,
    TOKEN_CASES,
    DownConfig,
    DownSpec,
    GateUpConfig,
    GateUpSpec,
    down_config,
    gate_up_config,
)
from vllm.models.flint.ops.gemv.config import GemvSpec

from ptx.experts import run_down, run_gate_up
from support.experts import (
    Experts,
    SharedKind,
    SharedLinear,
    down_bounds,
    gate_up_bounds,
    random_routes,
)
from support.gemv import output_bounds

TOP_K = 3
COUNT = 8


def part(k: int, kind: SharedKind | None, silu_mul: bool = False) -> GemvSpec | None:
    """A variant of the GEMV for a shared expert of one kind."""
    if kind is None:
        return None
    form = "bf16" if kind == "bf16" else "mul"
    layout = "fragments" if kind == "fragments" else "row_major"
    return GemvSpec(k, form, silu_mul, layout=layout)


def check_gate_up(
    hidden: int,
    width: int,
    ids: torch.Tensor,
    kind: SharedKind | None,
    bf16: bool = False,
    pad: int = 0,
    config: GateUpConfig | None = None,
    form: str = "mul",
) -> None:
    """Runs one variant on x whose rows lie `pad` elements apart."""
    m, top_k = ids.shape
    generator = torch.Generator().manual_seed(hidden + m)
    experts = Experts.random(COUNT, 2 * width, hidden, generator, bf16)
    x = torch.randn(m, hidden + pad, generator=generator).bfloat16()
    shared = None
    if kind is not None:
        shared = SharedLinear.random(kind, 512, hidden, generator)
    routed = GemvSpec(hidden, "bf16" if bf16 else form, True)
    case = next(tokens for tokens in TOKEN_CASES if m <= tokens)
    own = part(hidden, kind, True)
    spec = GateUpSpec(top_k, width, routed, own, 256 if own else 0, case)
    config = config or gate_up_config(spec)
    act, shared_act = run_gate_up(spec, config, x, ids, experts, shared)
    gate_up_bounds(x[:, :hidden], ids, experts).check(act)
    if shared is not None:
        bounds = output_bounds(x[:, :hidden], shared.values, shared.scale, True)
        bounds.check(shared_act)


def routes(m: int) -> torch.Tensor:
    return random_routes(m, COUNT, TOP_K, torch.Generator().manual_seed(m))[0]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("m", "kind"),
    [(1, None), (1, "fragments"), (2, "row_major"), (11, "bf16"), (9, "fragments")],
)
def test_gate_up(m: int, kind: SharedKind | None, bf16: bool) -> None:
    check_gate_up(256, 128, routes(m), kind, bf16, pad=8 * (m % 3))


@pytest.mark.parametrize(
    "config", [GateUpConfig(2, 1, 1), GateUpConfig(1, 4, 1), GateUpConfig(1, 2, 8)]
)
def test_gate_up_schedules(config: GateUpConfig) -> None:
    check_gate_up(384, 256, routes(5), "fragments", config=config)


def test_gate_up_of_one_expert() -> None:
    """More pairs than a group has; every pair is the same expert's."""
    check_gate_up(128, 128, torch.full((11, 2), 5, dtype=torch.int32), None)


def test_gate_up_of_distinct_and_of_repeated_experts() -> None:
    distinct = torch.arange(8, dtype=torch.int32).view(4, 2)
    check_gate_up(128, 128, distinct, "row_major")
    repeated = torch.tensor([[1, 1, 7], [7, 1, 0]], dtype=torch.int32)
    check_gate_up(128, 128, repeated, None)


def test_gate_up_at_model_width() -> None:
    check_gate_up(2048, 128, routes(1), "fragments")


def check_down(
    width: int,
    hidden: int,
    shared_width: int,
    m: int,
    kind: SharedKind | None,
    bf16: bool = False,
    config: DownConfig | None = None,
    form: str = "mul",
) -> None:
    generator = torch.Generator().manual_seed(hidden + m)
    experts = Experts.random(COUNT, hidden, width, generator, bf16)
    ids, tw = random_routes(m, COUNT, TOP_K, generator)
    act = torch.randn(m * TOP_K, width, generator=generator).bfloat16()
    shared = None
    if kind is not None:
        linear = SharedLinear.random(kind, hidden, shared_width, generator)
        own = torch.randn(m, shared_width, generator=generator).bfloat16()
        shared = own, linear
    routed = GemvSpec(width, "bf16" if bf16 else form)
    spec = DownSpec(TOP_K, hidden, routed, part(shared_width, kind))
    case = next(tokens for tokens in DOWN_CASES if m <= tokens)
    config = config or down_config(spec, case)
    out = run_down(spec, config, act, ids, tw, experts, shared)
    down_bounds(act, ids, tw, experts, shared).check(out)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("m", "kind"),
    [(1, None), (1, "fragments"), (2, "row_major"), (3, "bf16"), (9, "fragments")],
)
def test_down(m: int, kind: SharedKind | None, bf16: bool) -> None:
    check_down(128, 256, 256, m, kind, bf16)


@pytest.mark.parametrize(
    "config",
    [
        DownConfig(1, 1, 2, 4, 1),
        DownConfig(1, 2, 1, 3, 2),
        DownConfig(2, 4, 1, 2, 1),
        DownConfig(2, 1, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("kind", ["row_major", "fragments"])
def test_down_schedules(kind: SharedKind, config: DownConfig) -> None:
    """Five tokens: some CTAs have fewer of them than their schedule allows."""
    check_down(256, 128, 384, 5, kind, config=config)


def test_down_at_model_width() -> None:
    check_down(512, 128, 1024, 1, "fragments")


@pytest.mark.parametrize("m", [1, 2, 9])
def test_packed_codes(m: int) -> None:
    """Beside a shared expert in quack's order, as on SM90."""
    check_gate_up(256, 128, routes(m), "fragments", form="packed")
    check_down(128, 256, 256, m, "fragments", form="packed")
