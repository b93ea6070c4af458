# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What a linear layer keeps between calls, and when it is looked up anew."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.kernels.linear.nvfp4 import flint_gemv
from vllm.models.flint.ops import linear, nvfp4_gemv
from vllm.models.flint.ops.device import Gpu
from vllm.models.flint.ops.gemv import variants
from vllm.models.flint.ops.gemv.config import GemvConfig
from vllm.models.flint.ops.gemv.tables import Shape, TunedShape
from vllm.models.flint.ops.gemv_weight import GemvWeight, KeptWeight

N, K = 256, 128
# Tokens of the largest tuned launch.
MOST = 16
TILES = {nt: GemvConfig(nt, 4, 1, 1, 1, 1) for nt in (1, 2)}


class Launches(list):
    """Operands of every launch, and what was looked up for it."""

    def __init__(self) -> None:
        self.looked_up: list[int] = []

    def variant(self, spec: Any, config: GemvConfig) -> Any:
        self.looked_up.append(config.nt)
        return lambda *operands: self.append((config.nt, *operands))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches()
    table = {Shape(N, K, bf16=True): TunedShape(TILES, 64, {})}
    monkeypatch.setattr(nvfp4_gemv, "current_gpu", lambda: Gpu((9, 0), 132))
    monkeypatch.setattr(nvfp4_gemv, "load_table", lambda name: table)
    monkeypatch.setattr(nvfp4_gemv, "gemv_variant", found.variant)
    nvfp4_gemv._config.cache_clear()
    yield found
    nvfp4_gemv._config.cache_clear()


def weight(n: int = N) -> torch.Tensor:
    return torch.zeros(n, K).bfloat16()


def x_of(m: int, pad: int = 0) -> torch.Tensor:
    return torch.arange(m * (K + pad)).view(m, K + pad).bfloat16()[:, :K]


@pytest.mark.parametrize(
    ("m", "parts"),
    [
        (0, []),
        (1, [1]),
        (8, [8]),
        (9, [9]),
        (16, [16]),
        (17, [16, 1]),
        (40, [16, 16, 8]),
    ],
)
def test_each_part_takes_the_smallest_launch(
    launches: Launches, m: int, parts: list[int]
) -> None:
    x, w = x_of(m, pad=8), weight()
    for _ in range(2):
        launches.clear()
        out = nvfp4_gemv.bf16_gemv(x, w)
        assert out.shape == (m, N)
        taken = [launch[1].shape[0] for launch in launches]
        assert taken == parts
        assert [nt for nt, *_ in launches] == [1 if t <= 8 else 2 for t in taken]
        for start, (_, part, words, scales, scale, result) in enumerate(launches):
            rows = slice(MOST * start, MOST * (start + 1))
            assert torch.equal(part, x[rows])
            assert part.data_ptr() == x[rows].data_ptr()
            assert result.data_ptr() == out[rows].data_ptr()
            assert words.data_ptr() == w.data_ptr()
            assert scales is None and scale is None
    # Each count of tiles once, whatever is called how often.
    assert launches.looked_up == list(dict.fromkeys(-(-p // 8) for p in parts))


def test_rows_that_are_not_aligned_are_copied(launches: Launches) -> None:
    x = x_of(3, pad=1)
    nvfp4_gemv.bf16_gemv(x, weight())
    (_, part, *_), *_ = launches
    assert part.stride(0) == K and torch.equal(part, x)


def test_functions_of_one_shape_do_not_mix(launches: Launches) -> None:
    x, w = x_of(1), weight()
    for arguments in ((False, True), (True, True), (False, False), (False, True)):
        for dtype in (torch.bfloat16, torch.float32):
            out = nvfp4_gemv.bf16_gemv(x, w, *arguments, dtype)
            assert out.dtype == dtype
            assert out.shape[1] == (N // 2 if arguments[0] else N)
    # Three pairs of silu_mul and pdl in two types.
    assert len(launches.looked_up) == 6


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (x_of(1).float(), "x must be BF16"),
        (x_of(1)[:, :64], "x must be BF16"),
        (x_of(K).t(), "unit inner stride"),
        (x_of(1)[0], "x must be BF16"),
    ],
)
def test_every_x_is_checked(launches: Launches, x: torch.Tensor, reason: str) -> None:
    nvfp4_gemv.bf16_gemv(x_of(1), weight())
    with pytest.raises(ValueError, match=reason):
        nvfp4_gemv.bf16_gemv(x, weight())
    with pytest.raises(ValueError, match="out_dtype"):
        nvfp4_gemv.bf16_gemv(x_of(1), weight(), out_dtype=torch.float16)
    with pytest.raises(ValueError, match="even number"):
        nvfp4_gemv.bf16_gemv(x_of(1), weight(255), silu_mul=True)


def test_a_variant_that_was_compiled_ahead_takes_over(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "_compiled", {})
    monkeypatch.setattr(nvfp4_gemv, "gemv_variant", variants.gemv_variant)
    spec = nvfp4_gemv._spec(Shape(N, K, bf16=True), True, torch.bfloat16)
    called = []
    for name in ("first", "second"):
        variants.add_prebuilt(
            (spec, TILES[1]), lambda *operands, name=name: called.append(name)
        )
        for _ in range(2):
            nvfp4_gemv.bf16_gemv(x_of(1), weight())
    assert called == ["first"] * 2 + ["second"] * 2


def parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def bf16_layer() -> Any:
    layer: Any = nn.Module()
    layer.weight = parameter(weight())
    # Some CPUs' kernels would pack the weight, which a GPU's never do.
    layer._cpu_skip_gemm_dispatch = True
    layer.quant_method = linear.FlintBf16LinearMethod()
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def test_a_bf16_layer_makes_its_weight_again_where_it_moved(launches: Launches) -> None:
    layer = bf16_layer()

    def words() -> torch.Tensor:
        launches.clear()
        layer.quant_method.apply(layer, x_of(1))
        (_, _, found, *_), *_ = launches
        assert found.data_ptr() == layer.weight.data_ptr()
        return found

    first = words()
    assert words() is first
    layer.weight.data.fill_(1)
    assert words() is first
    layer.weight.data = weight()
    second = words()
    assert second is not first and words() is second
    layer.weight = parameter(weight())
    assert words() is not second
    layer.weight.data = weight().float()
    with pytest.raises(ValueError, match="contiguous BF16"):
        words()


@pytest.mark.parametrize("layout", ["row_major", "fragments"])
def test_an_nvfp4_layer_launches_what_it_holds(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    said: list[None] = []
    monkeypatch.setattr(flint_gemv, "report_compilation", lambda: said.append(None))
    groups = N // 64, K // 64
    sizes: list[tuple[int, ...]] = [(N, K // 2), (N, K // 16)]
    if layout == "fragments":
        sizes = [(*groups, 128, 16), (*groups, 32, 4, 2)]
    layer: Any = nn.Module()
    layer.weight, layer.weight_scale = (
        parameter(torch.zeros(size, dtype=torch.uint8)) for size in sizes
    )
    layer.weight_global_scale = parameter(torch.ones(1))
    layer.output_size_per_partition = layer.flint_rows = N
    layer.flint_padding, layer.flint_fp32_out = 0, True
    layer.flint_layout, layer.flint_max_tokens = layout, 8
    layer.flint_kept_weight = KeptWeight(getattr(GemvWeight, layout))
    kernel = object.__new__(linear.FlintNvFp4LinearKernel)
    tensors = ("weight", "weight_scale", "weight_global_scale")
    for moved in ("", *tensors):
        if moved:
            tensor = getattr(layer, moved)
            tensor.data = tensor.data.clone()
        launches.clear()
        for _ in range(2):
            out = kernel.apply_weights(layer, x_of(3))
            assert out.dtype == torch.float32 and out.shape == (3, N)
        first, second = launches
        assert all(a is b for a, b in zip(first[2:5], second[2:5], strict=True))
        for name, operand in zip(tensors, first[2:5], strict=True):
            assert operand.data_ptr() == getattr(layer, name).data_ptr()
    assert len(said) == 8


def test_a_padded_layer_gives_rows_without_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ranks' logits have to be, when they are gathered."""
    rows = torch.arange(3 * 128.0).view(3, 128)
    monkeypatch.setattr(linear.FlintNvFp4LinearKernel, "_linear", lambda *_, **__: rows)
    kernel = object.__new__(linear.FlintNvFp4LinearKernel)
    layer: Any = SimpleNamespace(output_size_per_partition=100, flint_rows=128)
    out = kernel.apply_weights(layer, x_of(3))
    assert out.is_contiguous()
    assert torch.equal(out, rows[:, :100])
