# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""torch.compile sees one operator where a linear layer is called, without a GPU."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.kernels.linear.nvfp4 import flint_gemv
from vllm.models.flint.ops import linear, nvfp4_gemv
from vllm.models.flint.ops.device import Gpu
from vllm.models.flint.ops.gemv.config import GemvConfig
from vllm.models.flint.ops.gemv.tables import Shape, TunedShape

N, K = 256, 128


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 on which these shapes are tuned; nothing is compiled or launched."""
    entry = TunedShape({1: GemvConfig(1, 4, 1, 1, 1, 1)}, 8, {})
    shapes = [Shape(N, K, silu, bf16=True) for silu in (False, True)]
    for layout in ("row_major", "fragments"):
        shapes += [Shape(N, K, silu, layout=layout) for silu in (False, True)]
    table = dict.fromkeys(shapes, entry)
    monkeypatch.setattr(nvfp4_gemv, "current_gpu", lambda: Gpu((9, 0), 132))
    monkeypatch.setattr(nvfp4_gemv, "load_table", lambda name: table)
    monkeypatch.setattr(nvfp4_gemv, "gemv_variant", lambda spec, config: None)
    monkeypatch.setattr(nvfp4_gemv, "dequantize_variant", lambda k, form: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    nvfp4_gemv._config.cache_clear()


def to_fragments(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for what needs quack: the shapes only."""
    blocks = N // 64, K // 64
    return tuple(
        torch.zeros(*blocks, *tail, dtype=torch.uint8)
        for tail in ((128, 16), (32, 4, 2))
    )


def layer_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A layer as it is after loading, with its method."""
    layer: Any = nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = N, K
    if kind == "bf16":
        method: Any = linear.FlintBf16LinearMethod()
        layer.weight = nn.Parameter(torch.zeros(N, K).bfloat16(), requires_grad=False)
        # Some CPUs' kernels would pack the weight, which a GPU's never do.
        layer._cpu_skip_gemm_dispatch = True
        method.process_weights_after_loading(layer)
    else:
        monkeypatch.setattr(flint_gemv, "_layout", lambda: kind)
        monkeypatch.setattr(flint_gemv, "_capability", lambda: 90)
        monkeypatch.setattr(flint_gemv, "swizzle_blockscale", lambda scale: scale)
        monkeypatch.setattr(flint_gemv.fragments, "to_fragments", to_fragments)
        monkeypatch.setattr(flint_gemv.fragments, "compile_partner", lambda *_: None)
        for name, value in (
            ("weight", torch.zeros(N, K // 2, dtype=torch.uint8)),
            ("weight_scale", torch.zeros(N, K // 16, dtype=torch.float8_e4m3fn)),
            ("weight_global_scale", torch.ones(())),
        ):
            setattr(layer, name, nn.Parameter(value, requires_grad=False))
        kernel = object.__new__(linear.FlintNvFp4LinearKernel)
        kernel.process_weights_after_loading(layer)
        method = SimpleNamespace(kernel=kernel, apply=kernel.apply_weights)
    layer.quant_method = method
    return layer


def traced(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[Any]:
    """Each operator's name, and its output's shape and type, in the one graph."""
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if "vllm" in str(node.target):
                out = node.meta["example_value"]
                found.append((str(node.target), tuple(out.shape), out.dtype))
        # The operators' kernels need a GPU.
        width = graph.graph.output_node().args[0][0].meta["example_value"].shape[-1]
        return lambda *_: (x.new_zeros(*x.shape[:-1], width),)

    torch._dynamo.mark_dynamic(x, 0)
    out = torch.compile(call, fullgraph=True, backend=backend)(x)
    return [*found, tuple(out.shape)]


@pytest.mark.parametrize("leading", [(3,), (2, 3)])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("bf16", "vllm.flint_bf16_linear"),
        ("row_major", "vllm.flint_nvfp4_linear"),
        ("fragments", "vllm.flint_fragment_linear"),
    ],
)
def test_a_layer_is_one_operator(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    operator: str,
    silu: bool,
    leading: tuple[int, ...],
) -> None:
    layer = layer_of(kind, monkeypatch)

    def call(x: torch.Tensor) -> torch.Tensor | None:
        if silu:
            return linear.gate_up_silu_mul(layer, x)
        return layer.quant_method.apply(layer, x)

    name, shape = traced(call, torch.zeros(*leading, K).bfloat16())
    width = N // 2 if silu else N
    assert name[0].startswith(operator)
    assert name[1:] == ((torch.Size(leading).numel(), width), torch.bfloat16)
    assert shape == (*leading, width)


@pytest.mark.parametrize("kind", ["bf16", "row_major", "fragments"])
def test_a_layer_holds_what_every_torch_can_trace(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Torch 2.11 refuses a list where a bool picks from it; later ones trace that."""
    held = vars(layer_of(kind, monkeypatch))
    own = {name: value for name, value in held.items() if name.startswith("flint_")}
    # Read only where nothing is traced.
    assert own.pop("flint_kept_weight")
    for name, value in own.items():
        assert isinstance(value, int | float | str | None), name


@pytest.mark.parametrize("kind", ["bf16", "row_major", "fragments"])
def test_gate_up_that_is_not_tuned_is_left_to_the_caller(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(nvfp4_gemv, "load_table", lambda name: {})
    layer = layer_of(kind, monkeypatch)
    x = torch.zeros(3, K).bfloat16()

    def call(x: torch.Tensor) -> torch.Tensor:
        fused = linear.gate_up_silu_mul(layer, x)
        return x if fused is None else fused

    assert traced(lambda x: call(x) + 1, x) == [(3, K)]
