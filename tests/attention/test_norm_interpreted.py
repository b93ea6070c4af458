# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The row kernels, in Triton's interpreter, against the contract."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.models.flint.ops.norm import RMSNorm

from contract import ops
from contract.numerics import Numerics
from support.gemv import Bounds, silu_mul_bounds
from support.interpreted import load_interpreted
from support.norm_rope import norm_bounds

EPS = 1e-6


@pytest.fixture
def norm(monkeypatch: pytest.MonkeyPatch):
    return load_interpreted(monkeypatch, "vllm.models.flint.ops.norm")


def draw(rows: int, width: int, pad: int = 0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + rows + width)
    return torch.randn(rows, width + pad, generator=generator).bfloat16()[:, :width]


@pytest.mark.parametrize(
    ("rows", "width", "pad"), [(1, 2048, 0), (3, 96, 8), (5, 128, 3), (2, 1, 0)]
)
def test_rms_norm(norm, rows: int, width: int, pad: int) -> None:
    x, weight = draw(rows, width, pad), draw(1, width, seed=1)[0]
    norm_bounds(x, weight, EPS).check(norm.rms_norm(x, weight, EPS))
    heads = x.reshape(rows, 1, width)
    assert norm.rms_norm(heads, weight, EPS).shape == heads.shape


@pytest.mark.parametrize(("rows", "width", "pad"), [(1, 2048, 0), (4, 96, 8)])
def test_fused_add_rms_norm(norm, rows: int, width: int, pad: int) -> None:
    x, residual = draw(rows, width, pad), draw(rows, width, pad, seed=1) * 100
    weight = draw(1, width, seed=2)[0]
    bounds = norm_bounds(x, weight, EPS, residual)
    _, total = ops.rms_norm(
        x.double(), weight, EPS, Numerics.CONTRACT, residual.double()
    )
    out, new_residual = norm.fused_add_rms_norm(x, residual, weight, EPS)
    assert out is x
    assert new_residual is residual
    bounds.check(x)
    assert torch.equal(residual.double(), total)


def test_norm_of_the_rounded_sum_fails(norm) -> None:
    """What vLLM's own kernel does; the bounds tell it from the contract."""
    x, residual = draw(4, 128), draw(4, 128, seed=1) * 100
    weight = draw(1, 128, seed=2)[0]
    rounded = (x.float() + residual.float()).bfloat16()
    with pytest.raises(AssertionError):
        norm_bounds(x, weight, EPS, residual).check(norm.rms_norm(rounded, weight, EPS))


def test_silu_and_mul(norm) -> None:
    gate_up = draw(3, 2 * 1100, pad=8)
    exact = gate_up.double()
    out = norm.silu_and_mul(gate_up)
    silu_mul_bounds(Bounds(exact, exact)).rounded().check(out)


def test_no_rows(norm) -> None:
    x, weight = draw(0, 64), draw(1, 64)[0]
    assert norm.rms_norm(x, weight, EPS).shape == (0, 64)
    norm.fused_add_rms_norm(x, x.clone(), weight, EPS)
    assert norm.silu_and_mul(x).shape == (0, 32)


@pytest.mark.parametrize("residual", [None, draw(4, 96, seed=1) * 100])
def test_module_in_plain_pytorch(residual) -> None:
    """What torch.compile fuses where custom operators are off, and CPUs run."""
    with set_current_vllm_config(VllmConfig()):
        layer = RMSNorm(96, EPS, dtype=torch.bfloat16)
    layer.weight.data.copy_(draw(1, 96, seed=2)[0])
    x = draw(4, 96)
    out = layer(x, residual)
    bounds = norm_bounds(x, layer.weight.data, EPS, residual)
    bounds.check(out if residual is None else out[0])


def test_bad_arguments(norm) -> None:
    x, weight = draw(4, 64), draw(1, 64)[0]
    with pytest.raises(ValueError, match="weight must be"):
        norm.rms_norm(x, weight[:32], EPS)
    with pytest.raises(ValueError, match="unit inner stride"):
        norm.fused_add_rms_norm(x.t(), x.t(), weight[:4], EPS)
    with pytest.raises(ValueError, match="residual must be"):
        norm.fused_add_rms_norm(x, x[:2], weight, EPS)
