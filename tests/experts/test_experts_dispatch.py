# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What the experts' interface refuses, picks and passes on, without a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.models.flint.ops import moe_gemv, nvfp4_gemv
from vllm.models.flint.ops.device import Gpu
from vllm.models.flint.ops.experts.spec import TOKEN_CASES
from vllm.models.flint.ops.gemv.packing import pack_codes
from vllm.models.flint.ops.gemv_weight import GemvWeight

from support.experts import Experts, SharedLinear, random_routes

COUNT, TOP_K, HIDDEN, WIDTH = 4, 2, 256, 128


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """Records (spec, config, arguments) instead of compiling and launching."""
    seen: list[tuple] = []

    def variant(spec, config):
        return lambda *arguments: seen.append((spec, config, arguments))

    monkeypatch.setattr(moe_gemv, "gate_up_variant", variant)
    monkeypatch.setattr(moe_gemv, "down_variant", variant)
    monkeypatch.setattr(nvfp4_gemv, "current_gpu", lambda: Gpu((9, 0), 132))
    nvfp4_gemv.decode_form.cache_clear()
    yield seen
    nvfp4_gemv.decode_form.cache_clear()


def first_arguments(m: int, bf16: bool = False) -> dict:
    generator = torch.Generator().manual_seed(m)
    experts = Experts.random(COUNT, 2 * WIDTH, HIDDEN, generator, bf16)
    shared = SharedLinear.random("fragments", 512, HIDDEN, generator)
    return {
        "x": torch.randn(m, HIDDEN, generator=generator).bfloat16(),
        "ids": random_routes(m, COUNT, TOP_K, generator)[0],
        "w1": experts.weight,
        "w1_sf": experts.scales,
        "alpha": experts.alpha,
        "act": torch.empty(m * TOP_K, WIDTH, dtype=torch.bfloat16),
        **dict(zip(("wsh", "ssh", "gssh"), shared.operands, strict=True)),
        "sact": torch.empty(m, 256, dtype=torch.bfloat16),
    }


def second_arguments(m: int) -> dict:
    generator = torch.Generator().manual_seed(m)
    experts = Experts.random(COUNT, HIDDEN, WIDTH, generator)
    shared = SharedLinear.random("row_major", HIDDEN, 256, generator)
    ids, tw = random_routes(m, COUNT, TOP_K, generator)
    return {
        "act": torch.empty(m * TOP_K, WIDTH, dtype=torch.bfloat16),
        "ids": ids,
        "tw": tw,
        "w2": experts.weight,
        "w2_sf": experts.scales,
        "alpha2": experts.alpha,
        "sact": torch.empty(m, 256, dtype=torch.bfloat16),
        **dict(zip(("wsd", "ssd", "gssd"), shared.operands, strict=True)),
        "out": torch.empty(m, HIDDEN, dtype=torch.bfloat16),
    }


def test_a_checked_weight_is_launched_as_its_operands(launches: list[tuple]) -> None:
    arguments = first_arguments(3)
    moe_gemv.gate_up(**arguments)
    names = "wsh", "ssh", "gssh"
    checked = GemvWeight.fragments(*(arguments[name] for name in names))
    moe_gemv.gate_up(**(arguments | dict.fromkeys(names) | {"wsh": checked}))
    (*variant, given), (*same, found) = launches
    assert variant == same
    for one, other in zip(given, found, strict=True):
        assert one.data_ptr() == other.data_ptr() and one.shape == other.shape


@pytest.mark.parametrize(("m", "case"), [(1, 1), (2, 8), (8, 8), (9, 32), (64, 64)])
def test_variant_by_tokens(launches: list[tuple], m: int, case: int) -> None:
    moe_gemv.gate_up(**first_arguments(m))
    moe_gemv.down_combine(**second_arguments(m), pdl=False)
    (first, *_), (second, *_) = launches
    assert (first.max_tokens, first.width, first.shared_width) == (case, WIDTH, 256)
    assert (first.routed.form, first.shared.layout) == ("mul", "fragments")
    assert first.routed.pdl
    assert (second.width, second.routed.k, second.shared.k) == (HIDDEN, WIDTH, 256)
    assert not second.contiguous
    assert not second.routed.pdl


def test_without_shared_expert_and_scales(launches: list[tuple]) -> None:
    none = dict.fromkeys(("wsh", "ssh", "gssh", "sact"))
    moe_gemv.gate_up(**(first_arguments(3, bf16=True) | none))
    ((spec, _, arguments),) = launches
    assert (spec.routed.form, spec.shared) == ("bf16", None)
    assert arguments[3:5] == (None, None)
    assert arguments[6:] == (None,) * 4


def test_packed_codes(launches: list[tuple]) -> None:
    first = first_arguments(3)
    moe_gemv.gate_up(**first | {"w1": pack_codes(first["w1"])})
    ((spec, _, arguments),) = launches
    assert (spec.routed.form, spec.shared.form) == ("packed", "mul")
    assert torch.equal(arguments[2], pack_codes(first["w1"]))
    with pytest.raises(ValueError, match="x must be BF16"):
        moe_gemv.gate_up(**first | {"w1": first["w1"].int()})


def test_no_tokens_launch_nothing(launches: list[tuple]) -> None:
    moe_gemv.gate_up(**first_arguments(0))
    moe_gemv.down_combine(**second_arguments(0))
    assert launches == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x.float()),
        ("x", lambda x: x[:, 1:]),
        ("ids", lambda ids: ids.long()),
        ("w1", lambda w: w.transpose(1, 2)),
        ("w1_sf", lambda s: s[:, :-1]),
        ("w1_sf", lambda s: None),
        ("alpha", lambda a: a[:-1]),
        ("act", lambda a: a[:, :-1]),
        ("sact", lambda a: None),
        ("gssh", lambda a: a.double()),
    ],
)
def test_bad_arguments(launches: list[tuple], name: str, change) -> None:
    arguments = first_arguments(2)
    with pytest.raises(ValueError, match="must"):
        moe_gemv.gate_up(**(arguments | {name: change(arguments[name])}))
    assert launches == []


def test_too_many_tokens(launches: list[tuple]) -> None:
    with pytest.raises(ValueError, match="at most 64"):
        moe_gemv.gate_up(**first_arguments(65))


@pytest.mark.parametrize("name", ["tw", "out", "w2_sf", "sact"])
def test_bad_arguments_of_the_second(launches: list[tuple], name: str) -> None:
    arguments = second_arguments(2)
    wrong = arguments[name][:-1].contiguous()
    with pytest.raises(ValueError, match="must"):
        moe_gemv.down_combine(**(arguments | {name: wrong}))


def weights(width: int, hidden: int = HIDDEN) -> SimpleNamespace:
    """What a layer's weights look like, on no device."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device="meta")

    return SimpleNamespace(
        w1=empty(COUNT, 2 * width, hidden // 2), w2=empty(COUNT, hidden, width // 2)
    )


def test_why_not(launches: list[tuple]) -> None:
    assert moe_gemv.why_not(weights(WIDTH), None, None, TOP_K) is None
    assert "64" in (moe_gemv.why_not(weights(64), None, None, TOP_K) or "")
    assert "192" in (moe_gemv.why_not(weights(128, 192), None, None, TOP_K) or "")
    assert "warps" in (moe_gemv.why_not(weights(128), None, None, 64) or "")
    generator = torch.Generator().manual_seed(0)
    narrow = SharedLinear.random("row_major", 128, HIDDEN, generator).operands
    odd = GemvWeight.row_major(*narrow)
    assert "64 rows" in (moe_gemv.why_not(weights(128), odd, None, TOP_K) or "")


def test_warm_up_compiles_what_may_be_launched(
    monkeypatch: pytest.MonkeyPatch, launches: list[tuple]
) -> None:
    built = []
    for name in ("gate_up_variant", "down_variant"):
        monkeypatch.setattr(moe_gemv, name, lambda *variant: built.append(variant[0]))
    moe_gemv.warmup_experts(weights(WIDTH), None, None, TOP_K, 9, pdl=False)
    *first, second, again = built
    assert second == again
    assert [spec.max_tokens for spec in first] == list(TOKEN_CASES[:3])
    assert not second.routed.pdl
    assert {spec.routed.pdl for spec in first} == {False}
