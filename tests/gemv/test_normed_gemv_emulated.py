# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The GEMV of norm(x + residual): its PTX, in the emulator, against the contract."""

import numpy as np
import pytest
import torch
from vllm.models.flint.ops.gemv.config import GemvConfig, GemvSpec
from vllm.models.flint.ops.gemv.tables import Shape, load_table

from contract import ops
from contract.numerics import Numerics
from ptx import gemv as emulated
from support.gemv import QuantizedLinear, normed_output_bounds
from support.norm_rope import norm_bounds

EPS = 1e-6
C = GemvConfig


def bits(x: torch.Tensor) -> np.ndarray:
    """BF16 rows, where they lie, as uint16."""
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("form", ["mul", "bf16"])
@pytest.mark.parametrize(
    ("n", "k", "m", "config", "repeated"),
    [
        (128, 512, 1, C(1, 4, 1, 2, 1, 2), False),
        (128, 512, 8, C(1, 2, 2, 2, 2, 1), False),
        (128, 1024, 3, C(1, 2, 2, 1, 4, 1, 1), True),
        (130, 160, 11, C(2, 4, 1, 2, 1, 1), False),
        (128, 1056, 5, C(1, 4, 2, 2, 2, 2), False),
    ],
)
def test_matches_contract(n, k, m, config, repeated, form) -> None:
    """One CTA a row block and clusters, a partial last slice, a repeated residual."""
    check(n, k, m, config, form, repeated)


@pytest.mark.parametrize(
    ("n", "k", "m", "config", "repeated"),
    [
        (128, 256, 1, C(1, 4, 1, 2, 1, 1), False),
        (128, 512, 8, C(1, 2, 2, 2, 2, 1), False),
        (256, 1024, 3, C(1, 2, 2, 1, 4, 1, 1), True),
        (384, 192, 11, C(2, 2, 2, 2, 1, 1), False),
    ],
)
def test_fragments_match_contract(n, k, m, config, repeated) -> None:
    check(n, k, m, config, "mul", repeated, fragments=True)


@pytest.mark.parametrize("m", [1, 8])
def test_the_tuned_schedule_matches_contract(m: int) -> None:
    """What the H200's table has for QKV, on a few of its rows."""
    config = load_table("sm90")[Shape(5120, 2048, layout="fragments")].schedules[1]
    check(256, 2048, m, config, "mul", m == 1, fragments=True)


def check(
    n: int,
    k: int,
    m: int,
    config: GemvConfig,
    form: str,
    repeated: bool,
    fragments: bool = False,
) -> None:
    """Runs one variant on random data, in which the residual may be one row."""
    generator = torch.Generator().manual_seed(n + k + m)
    x = torch.randn(m, k, generator=generator).bfloat16()
    residual = (torch.randn(m, k, generator=generator) * 30).bfloat16()
    if repeated:
        residual[:] = 0
    norm_weight = torch.randn(k, generator=generator).bfloat16()
    layout = "fragments" if fragments else "row_major"
    spec = GemvSpec(k, form, full_blocks=n % 128 == 0, layout=layout, norm_eps=EPS)
    text = emulated.compile_ptx(spec, config)
    total = np.full((m, k), 0xFFFF, np.uint16)
    row = bits(residual)
    if repeated:
        row = np.lib.stride_tricks.as_strided(row, (m, k), (0, 2))
    norm = row, bits(norm_weight), total
    if form == "bf16":
        dense = torch.randn(n, k, generator=generator).bfloat16()
        values, scale = dense.double(), 1.0
        out = emulated.run_gemv(text, spec, config, bits(x), bits(dense), norm=norm)
    else:
        linear = QuantizedLinear.random(n, k, generator)
        values, scale = linear.values, linear.global_scale.item()
        raw = linear.fragments() if fragments else (linear.codes, linear.scales)
        arrays = (array.numpy() for array in raw)
        out = emulated.run_gemv(text, spec, config, bits(x), *arrays, scale, norm=norm)
    _, exact = ops.rms_norm(
        x.double(), norm_weight, EPS, Numerics.CONTRACT, residual.double()
    )
    stored = torch.from_numpy(total.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(stored.double(), exact)
    normed = norm_bounds(x, norm_weight, EPS, residual)
    normed_output_bounds(normed, values, scale).check(torch.from_numpy(out))
