# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Linear layers on a GPU: every path of the dispatch, and the engine with them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from vllm.model_executor.kernels.linear.nvfp4 import flint_gemv
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.models.flint.ops import dense, fragments
from vllm.models.flint.ops.linear import (
    FlintBf16LinearMethod,
    FlintNvFp4LinearKernel,
    gate_up_silu_mul,
)
from vllm.models.flint.ops.nvfp4_gemv import max_tokens, pick_nt, tuned

from support.engine import Pass, run_engine
from support.gemv import QuantizedLinear, output_bounds
from support.logits import assert_bfloat16, prompts_of, references

DEVICE = "cuda"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def random_x(m: int, k: int, pad: int = 0) -> torch.Tensor:
    x = torch.randn(m, k + pad, device=DEVICE, generator=seeded(m)).bfloat16()
    return x[:, :k]


class Layer(nn.Module):
    """A linear layer as vLLM loads it, on the kernel under test."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        scales = torch.randint(
            0x28,
            0x60,
            (n, k // 16),
            dtype=torch.uint8,
            device=DEVICE,
            generator=seeded(n),
        )
        codes = torch.randint(
            0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE, generator=seeded(k)
        )
        self.linear = QuantizedLinear.of(codes, scales, 0.0123)
        self.output_size_per_partition = n
        self.input_size_per_partition = k
        for name, value in (
            ("weight", codes.clone()),
            ("weight_scale", scales.view(torch.float8_e4m3fn)),
            ("weight_global_scale", self.linear.global_scale[0]),
        ):
            setattr(self, name, nn.Parameter(value, requires_grad=False))
        kernel = FlintNvFp4LinearKernel(NvFp4LinearLayerConfig())
        kernel.process_weights_after_loading(self)
        self.quant_method = SimpleNamespace(kernel=kernel)

    def check(self, out: torch.Tensor, x: torch.Tensor, silu: bool = False) -> None:
        w = self.linear
        output_bounds(x, w.values, w.global_scale.item(), silu).check(out)


@pytest.fixture(autouse=True)
def poisoned_allocator() -> None:
    sizes = (65536, 1 << 21, 1 << 24)
    blocks = [torch.full((n,), float("nan"), device=DEVICE) for n in sizes]
    del blocks


def tokens_at_limits(limit: int) -> list[int]:
    return [0, 1, 8, 9, 32, 33, limit, limit + 1, 1000, 4096]


@pytest.fixture(params=["row_major", "fragments"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the layers of a test keep their weights."""
    if request.param == "fragments":
        assert flint_gemv._layout() == "fragments", fragments.missing_quack()
    monkeypatch.setattr(flint_gemv, "_layout", lambda: request.param)
    return request.param


@pytest.mark.parametrize(("n", "k"), [(2048, 1024), (640, 2048), (200, 80)])
def test_dispatch_at_every_limit(layout: str, n: int, k: int) -> None:
    """Tuned and untuned shapes, and one that needs padding in N and K."""
    layer = Layer(n, k)
    kernel = layer.quant_method.kernel
    assert layer.weight.dim() == (4 if layout == "fragments" else 2)
    for m in tokens_at_limits(layer.flint_max_tokens):
        x = random_x(m, k, pad=8)
        out = kernel.apply_weights(layer, x)
        assert out.shape == (m, n)
        assert torch.equal(out, kernel.apply_weights(layer, x))
        layer.check(out, x)


def test_fused_gate_up_at_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flint_gemv, "_layout", lambda: "row_major")
    layer = Layer(2048, 2048)
    assert tuned(2048, 2048, silu_mul=True)
    for m in tokens_at_limits(max_tokens(2048, 2048, silu_mul=True)):
        x = random_x(m, 2048)
        out = gate_up_silu_mul(layer, x)
        assert out is not None
        layer.check(out, x, silu=True)


def test_quack_prepares_what_the_contract_says() -> None:
    layer = Layer(256, 128)
    codes, scales = layer.linear.fragments()
    assert torch.equal(layer.weight, codes)
    assert torch.equal(layer.weight_scale, scales)


@pytest.mark.parametrize("most", [64, 0], ids=["gemv", "quack"])
@pytest.mark.parametrize("silu", [False, True])
def test_fragments_on_both_paths(silu: bool, most: int) -> None:
    """Both read the same bytes; FP32 logits are rounded once, to FP32."""
    w = QuantizedLinear.random(2048, 2048, seeded(7))
    alpha = w.global_scale.item()
    own = w.fragments()
    for m in (0, 1, 9, 33, 64):
        x = random_x(m, 2048, pad=8)
        for fp32 in (False, True) if not silu else (False,):
            args = (x, *own, w.global_scale, silu, fp32, True, most)
            out = fragments.fragment_linear(*args)
            assert out.dtype == (torch.float32 if fp32 else torch.bfloat16)
            assert torch.equal(out, fragments.fragment_linear(*args))
            output_bounds(x, w.values, alpha, silu, fp32).check(out)


def test_head_keeps_fp32_logits(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """A head whose rows are no multiple of 128, on either path."""
    monkeypatch.setattr(flint_gemv, "ParallelLMHead", Layer)
    layer = Layer(600, 2048)
    for m in (0, 1, layer.flint_max_tokens + 1, 300):
        x = random_x(m, 2048)
        out = layer.quant_method.kernel.apply_weights(layer, x)
        assert out.dtype == torch.float32 and out.is_contiguous()
        w = layer.linear
        scale = w.global_scale.item()
        output_bounds(x, w.values, scale, fp32_out=True).check(out)


def test_one_rounding_in_quack() -> None:
    """Exact sums, also where quack splits K: one right answer."""
    n, k = 2048, 4096
    shape = (n, k // 2)
    codes = torch.randint(
        0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=seeded(0)
    )
    one = torch.full((n, k // 16), 0x38, dtype=torch.uint8, device=DEVICE)
    w = QuantizedLinear.of(codes, one, 0.0123)
    for m in (40, 300):
        x = torch.randint(-2, 3, (m, k), device=DEVICE, generator=seeded(m)).bfloat16()
        sums = (x.double() @ w.values.T).float()
        out = fragments.fragment_linear(
            x, *w.fragments(), w.global_scale, False, False, True, 0
        )
        assert torch.equal(out, (sums * w.global_scale).bfloat16())


def test_leading_dimensions_and_bias() -> None:
    layer = Layer(640, 2048)
    kernel = layer.quant_method.kernel
    x = random_x(6, 2048)
    flat = kernel.apply_weights(layer, x)
    assert torch.equal(kernel.apply_weights(layer, x.view(2, 3, -1)).view(6, -1), flat)
    bias = torch.randn(640, device=DEVICE).bfloat16()
    assert torch.equal(kernel.apply_weights(layer, x, bias), flat + bias)


def test_head_gives_fp32_logits_on_both_paths() -> None:
    """More rows than one dequantization takes, so that the parts must join."""
    generator = seeded(0)
    w = QuantizedLinear.random(40960, 2048, generator)
    alpha = w.global_scale.item()
    for m, most in ((4, 8), (4, 0), (70, 0)):
        x = random_x(m, 2048)
        out = dense.nvfp4_linear(
            x, w.codes, w.scales, w.global_scale, False, True, True, most, None
        )
        assert out.dtype == torch.float32
        output_bounds(x, w.values, alpha, fp32_out=True).check(out)


def test_one_rounding_on_the_dequantized_path() -> None:
    """Exact sums: a scale folded into BF16 weights, or two roundings, would show."""
    n, k = 256, 512
    codes = torch.randint(
        0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE, generator=seeded(0)
    )
    one = torch.full((n, k // 16), 0x38, dtype=torch.uint8, device=DEVICE)
    w = QuantizedLinear.of(codes, one, 0.0123)
    shape = (300, k)
    x = torch.randint(-2, 3, shape, device=DEVICE, generator=seeded(1)).bfloat16()
    sums = (x.double() @ w.values.T).float()
    out = dense.nvfp4_linear(
        x, w.codes, w.scales, w.global_scale, False, False, True, 0, None
    )
    assert torch.equal(out, (sums * w.global_scale).bfloat16())


def test_compiled_and_captured(layout: str) -> None:
    layer = Layer(640, 2048)
    kernel = layer.quant_method.kernel
    compiled = torch.compile(
        lambda x: kernel.apply_weights(layer, x) * 2, fullgraph=True, dynamic=True
    )
    for m in (4, 300):
        x = random_x(m, 2048)
        assert torch.equal(compiled(x), kernel.apply_weights(layer, x) * 2)
    x = random_x(300, 2048).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.apply_weights(layer, x)
    x.copy_(random_x(301, 2048)[1:])
    graph.replay()
    assert torch.equal(out, kernel.apply_weights(layer, x))


def test_bfloat16_method() -> None:
    n, k = 640, 2048
    layer = nn.Module()
    value = torch.randn(n, k, device=DEVICE, generator=seeded(n)).bfloat16()
    layer.weight = nn.Parameter(value, requires_grad=False)
    method = FlintBf16LinearMethod()
    method.process_weights_after_loading(layer)
    for most in (0, 64):
        for m in (0, 1, 33, 64, 65):
            x = random_x(m, k)
            out = dense.bf16_linear(x, layer.weight, False, True, most)
            output_bounds(x, value.double()).check(out)
    x = random_x(5, k)
    output_bounds(x, value.double()).check(method.apply(layer, x))


def test_pick_nt_covers_the_tokens() -> None:
    for m in range(1, 33):
        nt = pick_nt(2048, 1024, m)
        assert nt is None or 8 * nt >= m
    assert pick_nt(2048, 1024, 1) == 1
    assert pick_nt(2047, 1024, 1) is None


def test_engine_on_and_off(checkpoint) -> None:
    """The tiny model answers alike, by rounding, on Flint's linears and on stock."""
    refs = references("heads", "nvfp4", "bfloat16")
    exact = references("heads", "nvfp4", "float32")
    config = str(checkpoint("heads", "nvfp4", "safetensors"))
    prompts = prompts_of(refs)
    logprobs = []
    for backend in ("flint", "marlin"):
        (answers,) = run_engine(
            [Pass(prompts)],
            model=str(checkpoint("heads", "nvfp4", "gguf")),
            hf_config_path=config,
            tokenizer=config,
            dtype="bfloat16",
            enforce_eager=True,
            gpu_memory_utilization=0.2,
            linear_backend=backend,
        )
        assert_bfloat16(answers, refs, exact)
        pairs = zip(answers, prompts, strict=True)
        logprobs.append(np.concatenate([a.next_token_logprobs(p) for a, p in pairs]))
    assert np.isfinite(logprobs).all()
    assert not np.array_equal(*logprobs), "both engines ran the same kernels"
