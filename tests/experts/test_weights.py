# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Preparing the weights of a sparse layer: one copy, checked once."""

from dataclasses import replace

import pytest
import torch
from vllm.models.flint.ops.experts.weights import (
    FlintMoEWeights,
    LLMoEWeights,
)
from vllm.models.flint.ops.gemv.packing import pack_codes
from vllm.models.flint.ops.gemv_weight import GemvWeight

from contract.nvfp4 import swizzle_scales
from support.experts import layer_operands
from support.gemv import QuantizedLinear

EXPERTS, HIDDEN, WIDTH, SHARED = 3, 192, 144, 128


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def modelopt(hidden: int = HIDDEN, width: int = WIDTH) -> dict[str, torch.Tensor]:
    return {
        "w1": draw(EXPERTS, 2 * width, hidden // 2),
        "w1_scale": draw(EXPERTS, 2 * width, hidden // 16, seed=1),
        "alpha1": torch.arange(EXPERTS).float(),
        "w2": draw(EXPERTS, hidden, width // 2, seed=2),
        "w2_scale": draw(EXPERTS, hidden, width // 16, seed=3),
        "alpha2": torch.arange(EXPERTS).float() + 1,
    }


def bf16(experts: int = EXPERTS) -> FlintMoEWeights:
    return FlintMoEWeights(
        torch.zeros(experts, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16),
        None,
        None,
        torch.zeros(experts, HIDDEN, WIDTH, dtype=torch.bfloat16),
        None,
        None,
    )


@pytest.mark.parametrize(
    ("hidden", "width"), [(HIDDEN, WIDTH), (256, 128), (16, 16), (2048, 512)]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_from_modelopt(hidden: int, width: int, dtype: torch.dtype) -> None:
    """Codes stay where they are; each expert's scales are swizzled, and padded."""
    given = modelopt(hidden, width)
    for name in ("w1_scale", "w2_scale"):
        given[name] = given[name].view(dtype)
    weights = FlintMoEWeights.from_modelopt(**given)
    for name in ("w1", "alpha1", "w2", "alpha2"):
        assert getattr(weights, name).data_ptr() == given[name].data_ptr()
    for name in ("w1_scale", "w2_scale"):
        swizzled = getattr(weights, name)
        for expert in range(EXPERTS):
            expected = swizzle_scales(given[name][expert].view(torch.uint8))
            assert torch.equal(swizzled[expert], expected)
    assert not weights.is_bf16
    assert weights.num_experts == EXPERTS
    assert (weights.hidden, weights.intermediate) == (hidden, width)


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_packed_in_place(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("vllm.models.flint.ops.experts.weights._PACKED_BYTES", at_once)
    given = modelopt()
    expected = [pack_codes(given[name]) for name in ("w1", "w2")]
    weights = FlintMoEWeights.from_modelopt(**given)
    packed = weights.packed()
    assert packed.is_packed and not weights.is_packed
    for name, words in zip(("w1", "w2"), expected, strict=True):
        found = getattr(packed, name)
        assert torch.equal(found, words)
        assert found.data_ptr() == given[name].data_ptr()
    assert (packed.hidden, packed.intermediate) == (HIDDEN, WIDTH)


def test_bf16_experts() -> None:
    weights = bf16()
    assert weights.is_bf16
    sizes = (weights.num_experts, weights.hidden, weights.intermediate)
    assert sizes == (EXPERTS, HIDDEN, WIDTH)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("w1", torch.zeros(EXPERTS, 288, 96), "w1 must be uint8"),
        ("w1", draw(288, 96), "w1 must be uint8"),
        ("w2", draw(EXPERTS, HIDDEN, 64), "w2_scale must be"),
        ("w1_scale", draw(EXPERTS, 288, 13), "w1_scale must be"),
        ("w1_scale", torch.zeros(EXPERTS, 288, 12), "w1_scale must be"),
        ("w2_scale", draw(2, HIDDEN, 9), "w2_scale must be"),
        ("alpha1", torch.zeros(EXPERTS - 1), "alpha of w1"),
        ("alpha2", torch.zeros(EXPERTS, dtype=torch.float64), "alpha of w2"),
    ],
)
def test_wrong_tensors(name: str, wrong: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlintMoEWeights.from_modelopt(**{**modelopt(), name: wrong})


def test_wrong_parts() -> None:
    weights = FlintMoEWeights.from_modelopt(**modelopt())
    with pytest.raises(ValueError, match="both be uint8"):
        replace(weights, w2=bf16().w2)
    with pytest.raises(ValueError, match="takes no scales"):
        replace(bf16(), alpha1=weights.alpha1)
    with pytest.raises(ValueError, match="w2 must be"):
        replace(bf16(), w2=bf16().w2[:, :-1].contiguous())
    with pytest.raises(ValueError, match="must be contiguous"):
        replace(bf16(), w1=bf16().w1.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="w1_scale must be"):
        replace(weights, w1_scale=weights.w1_scale[:, :-1])
    with pytest.raises(ValueError, match="w1_scale must be"):
        replace(weights, w1_scale=None)


def shared_layers(kind: str) -> list[tuple[GemvWeight, tuple]]:
    """Gate and up, and down, each with the operands that it was made of."""
    layers = []
    for seed, (n, k) in enumerate(((2 * SHARED, HIDDEN), (HIDDEN, SHARED))):
        if kind == "bf16":
            dense = torch.randn(n, k).bfloat16()
            layers.append((GemvWeight.bf16(dense), (dense, None, None)))
            continue
        # Fragments come in multiples of 128 rows.
        n = -(-n // 128) * 128
        w = QuantizedLinear.random(n, k, torch.Generator().manual_seed(seed))
        if kind == "fragments":
            operands = (*w.fragments(), w.global_scale)
            layers.append((GemvWeight.fragments(*operands), operands))
        else:
            operands = (w.codes, w.scales, w.global_scale)
            layers.append((GemvWeight.row_major(*operands), operands))
    return layers


@pytest.mark.parametrize("kind", ["bf16", "row_major", "fragments"])
def test_layer_operands(kind: str) -> None:
    """Views of the layer's own tensors, in the shapes that it has."""
    for weight, operands in shared_layers(kind):
        for found, given in zip(layer_operands(weight), operands, strict=True):
            if given is None:
                assert found is None
                continue
            assert found.data_ptr() == given.data_ptr()
            assert torch.equal(found, given)


def test_low_latency_weights() -> None:
    (up, up_operands), (down, _) = shared_layers("bf16")
    router = torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    weights = LLMoEWeights(router, bf16(), up, down)
    held, _, _ = layer_operands(weights.shared_gate_up)
    assert held.data_ptr() == up_operands[0].data_ptr()
    assert weights.shared_down is down
    with pytest.raises(ValueError, match="router must be BF16"):
        replace(weights, router=router.float())
    with pytest.raises(ValueError, match="router must be BF16"):
        replace(weights, experts=bf16(4))
    with pytest.raises(ValueError, match="router must be contiguous"):
        replace(weights, router=router.t().contiguous().t())
    with pytest.raises(ValueError, match="gate and up rows do not fit"):
        replace(weights, shared_gate_up=down)
    with pytest.raises(ValueError, match="down rows do not fit"):
        wide = GemvWeight.bf16(torch.zeros(HIDDEN + 8, SHARED, dtype=torch.bfloat16))
        replace(weights, shared_down=wide)
