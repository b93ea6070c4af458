# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The GEMV's own PTX, in the emulator, against the contract."""

import numpy as np
import pytest
import torch
from vllm.models.flint.ops.gemv.config import GemvConfig, GemvSpec

from contract.nvfp4 import fragment_scales, fragment_weight
from ptx import gemv as emulated
from support.gemv import QuantizedLinear, output_bounds

C = GemvConfig


def check(
    n: int,
    k: int,
    m: int,
    form: str,
    config: GemvConfig,
    silu: bool = False,
    fp32: bool = False,
    pad: int = 0,
    fragments: bool = False,
) -> None:
    """Runs one variant on random data whose rows lie `pad` elements apart."""
    generator = torch.Generator().manual_seed(n + k + m)
    width = n // 2 if silu else n
    layout = "fragments" if fragments else "row_major"
    spec = GemvSpec(k, form, silu, fp32, width % 128 == 0, layout=layout)
    text = emulated.compile_ptx(spec, config)
    x = torch.randn(m, k + pad, generator=generator).bfloat16()
    bits = x.view(torch.int16).numpy().view(np.uint16)
    if form == "bf16":
        dense = torch.randn(n, k, generator=generator).bfloat16()
        values, scale = dense.double(), 1.0
        weight = dense.view(torch.int16).numpy().view(np.uint16)
        actual = emulated.run_gemv(text, spec, config, bits, weight)
    else:
        linear = QuantizedLinear.random(n, k, generator)
        values, scale = linear.values, linear.global_scale.item()
        raw = linear.fragments() if fragments else (linear.codes, linear.scales)
        actual = emulated.run_gemv(
            text, spec, config, bits, *(x.numpy() for x in raw), scale
        )
    bounds = output_bounds(x[:, :k], values, scale, silu, fp32)
    bounds.check(torch.from_numpy(actual))


@pytest.mark.parametrize("form", ["mul", "bf16"])
@pytest.mark.parametrize(
    ("n", "k", "m", "config", "silu", "pad"),
    [
        (128, 512, 1, C(1, 4, 1, 2, 1, 2), False, 0),
        (128, 512, 8, C(1, 2, 2, 2, 2, 1), False, 0),
        (256, 512, 3, C(1, 2, 2, 1, 4, 1, 1), True, 0),
        (256, 512, 7, C(1, 4, 1, 1, 2, 2, 1), True, 8),
        (130, 160, 11, C(2, 2, 1, 2, 1, 1), False, 16),
        (257, 1056, 29, C(4, 4, 2, 2, 1, 3), False, 0),
        (128, 1024, 2, C(1, 1, 1, 2, 4, 1), False, 0),
    ],
)
def test_matches_contract(n, k, m, config, silu, pad, form) -> None:
    check(n, k, m, form, config, silu, pad=pad)


@pytest.mark.parametrize(
    ("n", "k", "m", "config", "silu", "pad"),
    [
        (128, 256, 1, C(1, 4, 1, 2, 1, 1), False, 0),
        (128, 512, 8, C(1, 2, 2, 2, 2, 1), False, 8),
        (256, 512, 3, C(1, 2, 2, 1, 4, 1, 1), True, 0),
        (384, 192, 11, C(2, 1, 2, 2, 1, 1), False, 16),
        (256, 320, 61, C(8, 4, 2, 1, 1, 2), False, 0),
    ],
)
def test_fragments_match_contract(n, k, m, config, silu, pad) -> None:
    check(n, k, m, "mul", config, silu, pad=pad, fragments=True)


def test_fp32_output() -> None:
    check(128, 256, 5, "mul", C(1, 4, 1, 2, 1, 1), fp32=True)


def test_every_code_times_every_scale() -> None:
    """Exact, signs of zero included, through the GEMV and the dequantization."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales[[0x7F, 0xFF]] = 0
    nibble = torch.arange(16, dtype=torch.uint8)
    row = nibble[0::2] | nibble[1::2] << 4
    codes = torch.cat([row, row.flip(0)]).repeat(256, 1).contiguous()
    linear = QuantizedLinear.of(codes, torch.stack([scales, scales.flip(0)], dim=1))
    raw = linear.codes.numpy(), linear.scales.numpy()
    expected = linear.values.numpy()
    rows = emulated.run_dequantize(32, "mul", *raw)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(np.signbit(rows), np.signbit(expected))
    spec, config = GemvSpec(32, "mul", fp32_out=True), C(4, 2, 1, 1, 1, 1)
    text = emulated.compile_ptx(spec, config)
    eye = torch.eye(32).bfloat16().view(torch.int16).numpy().view(np.uint16)
    out = emulated.run_gemv(text, spec, config, eye, *raw, 1.0)
    np.testing.assert_array_equal(out.T, expected)


def test_every_code_times_every_scale_in_fragments() -> None:
    """Negative and zero scales are what preparing a weight takes out."""
    scales = torch.arange(128, dtype=torch.uint8) % 127
    scales = scales.repeat(4).view(128, 4)
    nibble = torch.arange(16, dtype=torch.uint8)
    row = nibble[0::2] | nibble[1::2] << 4
    codes = torch.cat([row.repeat(64, 4), row.flip(0).repeat(64, 4)])
    codes[scales.repeat_interleave(8, dim=1) == 0] &= 0x88
    linear = QuantizedLinear.of(codes, scales)
    spec = GemvSpec(64, "mul", fp32_out=True, layout="fragments")
    config = C(8, 4, 2, 1, 1, 1)
    text = emulated.compile_ptx(spec, config)
    eye = torch.eye(64).bfloat16().view(torch.int16).numpy().view(np.uint16)
    raw = fragment_weight(codes).numpy(), fragment_scales(scales).numpy()
    out = emulated.run_gemv(text, spec, config, eye, *raw, 1.0)
    np.testing.assert_array_equal(out.T, linear.values.numpy())
