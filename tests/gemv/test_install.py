# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which of a model's dense layers take Flint's kernels, and what the log says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static
from vllm.models.flint.ops import compile_key, linear

N, K = 5120, 2048


class Dense(nn.Module):
    """A linear layer, unquantized or with ModelOpt's NVFP4 weights."""

    def __init__(self, quantized: bool, n: int = N) -> None:
        super().__init__()
        self.output_size_per_partition, self.input_size_per_partition = n, K
        self.weight = nn.Parameter(torch.empty(n, K, device="meta"))
        method: Any = linear.UnquantizedLinearMethod()
        if quantized:
            method = Modelopt()
            method.spec = SimpleNamespace(weight=kNvfp4Static, activation=None)
            method.kernel = object()
        self.quant_method = method


class Modelopt:
    spec: Any
    kernel: Any


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged on a GPU on which only N x K is tuned."""
    lines: list[str] = []
    monkeypatch.setattr(
        linear.logger, "info_once", lambda text, *args: lines.append(text % args)
    )
    monkeypatch.setattr(linear, "LinearBase", Dense)
    monkeypatch.setattr(linear, "ModelOptLinearMethod", Modelopt)
    monkeypatch.setattr(linear, "_get_linear_backend", lambda quantization: "auto")
    monkeypatch.setattr(linear, "tuned", lambda n, k, **_: n == N)
    supported = classmethod(lambda cls: (True, None))
    monkeypatch.setattr(linear.FlintNvFp4LinearKernel, "is_supported", supported)
    monkeypatch.setattr(linear.FlintNvFp4LinearKernel, "__init__", lambda *_: None)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield lines
    torch.set_default_dtype(default)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_tuned_layer_takes_them(said: list[str], quantized: bool) -> None:
    model = nn.Sequential(Dense(quantized))
    assert linear.install_flint_dense_kernels(model) == 1
    method = model[0].quant_method
    if quantized:
        assert isinstance(method.kernel, linear.FlintNvFp4LinearKernel)
        # As if the user had asked for it.
        assert linear.install_flint_dense_kernels(model) == 1
    else:
        assert isinstance(method, linear.FlintBf16LinearMethod)
    assert said == []


@pytest.mark.parametrize("quantized", [False, True])
def test_an_untuned_shape_is_said(said: list[str], quantized: bool) -> None:
    model = nn.Sequential(Dense(quantized, n=96))
    assert linear.install_flint_dense_kernels(model) == 0
    assert "of 96 x 2048 to vLLM's" in said[0]
    assert "no layer can have them" in said[1]


@pytest.mark.parametrize("quantized", [False, True])
def test_another_backend_is_said(
    said: list[str], quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_get_linear_backend", lambda quantization: "marlin")
    linear.install_flint_dense_kernels(nn.Sequential(Dense(quantized)))
    assert "to --linear-backend marlin" in said[0]


def test_another_dtype_is_said(said: list[str]) -> None:
    torch.set_default_dtype(torch.float16)
    assert linear.install_flint_dense_kernels(nn.Sequential(Dense(True))) == 0
    assert said == [
        "Flint's dense kernels are not used: they require bfloat16, and the model's "
        "dtype is torch.float16"
    ]


def test_compiled_graphs_are_of_these_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's key changes with what the kernels need, and with nothing else of it."""

    def key(compiler: str | None, quack: str | None) -> str:
        monkeypatch.setattr(compile_key, "missing_compiler", lambda: compiler)
        monkeypatch.setattr(compile_key, "missing_quack", lambda: quack)
        config = VllmConfig(additional_config={"flint_kernels": True})
        compile_key.tell_compile_cache(config)
        assert config.additional_config["flint_kernels"] is True
        return config.compute_hash()

    keys = {key(None, None), key("absent", None), key(None, "absent")}
    assert len(keys) == 3
    assert key(None, None) in keys
