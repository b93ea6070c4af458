# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which weights the fused QKV reads, for how many tokens, and what is said if none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.models.flint import attention
from vllm.models.flint.ops import linear, nvfp4_gemv, qkv_fused
from vllm.models.flint.ops.device import Gpu
from vllm.models.flint.ops.gemv.tables import Shape
from vllm.models.flint.ops.gemv_weight import GemvWeight, KeptWeight

EPS = 1e-6
N, K = 256, 128
KERNEL = linear.FlintNvFp4LinearKernel


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Spec, schedule and operands of what an H200 would compile, or launch."""
    found: list[tuple[Any, ...]] = []

    def variant(spec, config):
        found.append((spec, config, None))
        return lambda *operands: found.append((spec, config, operands))

    monkeypatch.setattr(nvfp4_gemv, "current_gpu", lambda: Gpu((9, 0), 132))
    monkeypatch.setattr(nvfp4_gemv, "gemv_variant", variant)
    return found


def weights() -> dict[str, GemvWeight]:
    def codes(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    one = torch.ones(1)
    blocks = N // 64, K // 64
    return {
        "row_major": GemvWeight.row_major(codes(N, K // 2), codes(N, K // 16), one),
        "fragments": GemvWeight.fragments(
            codes(*blocks, 128, 16), codes(*blocks, 32, 4, 2), one
        ),
        "bf16": GemvWeight.bf16(torch.zeros(N, K).bfloat16()),
    }


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (Shape(5120, 2048), 8),
        (Shape(2560, 2048), 8),
        (Shape(5120, 2048, layout="fragments"), 8),
        (Shape(5120, 2048, bf16=True), 8),
        (Shape(5121, 2048, bf16=True), 0),
        # Of x a CTA's threads can hold no row this long.
        (Shape(256, 1 << 17), 0),
    ],
)
def test_warmup(launches: list, shape: Shape, tokens: int) -> None:
    assert qkv_fused.warmup_qkv(shape, EPS) == tokens
    assert [config.tokens for _, config, _ in launches] == [8][: tokens // 8]
    for spec, config, _ in launches:
        assert (spec.norm_eps, spec.layout) == (EPS, shape.layout)
        assert config.why_not(spec) is None


@pytest.mark.parametrize("kind", ["row_major", "fragments", "bf16"])
def test_normed_gemv_takes_every_layout(launches: list, kind: str) -> None:
    weight, x = weights()[kind], torch.zeros(9, K).bfloat16()
    gain, out = torch.ones(K).bfloat16(), torch.empty(9, N).bfloat16()
    total = torch.empty_like(x)
    nvfp4_gemv.normed_gemv(x, x, gain, EPS, weight, out, total)
    spec, config, operands = launches[-1]
    assert (spec.layout, spec.is_bf16) == (weight.shape.layout, kind == "bf16")
    assert config.tokens == 16
    expected = (x, *weight.operands, out, x, gain, total)
    assert all(a is b for a, b in zip(operands, expected, strict=True))


def test_too_many_tokens(launches: list) -> None:
    x = torch.zeros(1000, K).bfloat16()
    gain = torch.ones(K).bfloat16()
    with pytest.raises(ValueError, match="one launch takes at most"):
        nvfp4_gemv.normed_gemv(x, x, gain, EPS, weights()["bf16"], x, x)


def layer_of(layout: str, **change: Any) -> SimpleNamespace:
    """What `FlintNvFp4LinearKernel` makes of a layer."""
    groups, blocks = N // 64, K // 64
    fragments = layout == "fragments"
    sizes = [(groups, blocks, 128, 16), (groups, blocks, 32, 4, 2)]
    rows = [(N, K // 2), (N, K // 16)]
    weight, scale = (
        torch.zeros(size, dtype=torch.uint8) for size in (sizes if fragments else rows)
    )
    fields = {
        "quant_method": SimpleNamespace(kernel=object.__new__(KERNEL)),
        "flint_kept_weight": KeptWeight(getattr(GemvWeight, layout)),
        "flint_padding": 0,
        "flint_rows": N,
        "output_size_per_partition": N,
        "weight": weight,
        "weight_scale": scale,
        "weight_global_scale": torch.ones(1),
    }
    return SimpleNamespace(**(fields | change))


@pytest.mark.parametrize("layout", ["row_major", "fragments"])
def test_weight_of_a_layer_is_no_copy(layout: str) -> None:
    layer: Any = layer_of(layout)
    weight = linear.gemv_weight(layer)
    assert isinstance(weight, GemvWeight)
    assert weight.shape == Shape(N, K, layout=layout)
    assert weight.words.data_ptr() == layer.weight.data_ptr()
    assert weight.scales is not None
    assert weight.scales.data_ptr() == layer.weight_scale.data_ptr()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_method": None}, "another linear kernel"),
        ({"flint_padding": 32}, "padded"),
        ({"output_size_per_partition": N - 16}, "padded"),
    ],
)
def test_without_a_weight_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str
) -> None:
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(attention.logger, "info_once", lambda *args: said.append(args))
    fake: Any = SimpleNamespace(
        uses_kernels=True,
        decodes=False,
        attn=SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "X")),
        qkv_proj=layer_of("fragments", **change),
        _qkv_weight=None,
        _max_fused_tokens=0,
    )
    attention.FlintAttention.prepare_kernels(fake, EPS, None)
    assert fake._qkv_weight is None
    ((text, why),) = said
    assert "fused QKV is not used" in text
    assert reason in why
