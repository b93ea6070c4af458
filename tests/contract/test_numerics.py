# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Rounding to BF16 in one step, judged by exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.numerics import Numerics, round_bf16


def nearest_bf16(x: float) -> float:
    """Rounds by the definition: the nearest multiple of the step, ties to even."""
    if not math.isfinite(x) or x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 8, -133)
    step = Fraction(2) ** exponent
    rounded = float(round(Fraction(x) / step) * step)
    return math.copysign(math.inf, x) if abs(rounded) >= 2.0**128 else rounded


def rounded(x: float) -> float:
    return round_bf16(torch.tensor([x], dtype=torch.float64)).item()


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),
        (1 + 3 * 2**-8, 1 + 2**-6),
        # Above a tie by less than float32 can hold: two roundings give 1.
        (1 + 2**-8 + 2**-40, 1 + 2**-7),
        (-(1 + 2**-8 + 2**-40), -(1 + 2**-7)),
        (1 + 3 * 2**-8 - 2**-40, 1 + 2**-7),
        (2.0**-133, 2.0**-133),
        (2.0**-134, 0.0),
        (2.0**-134 + 2.0**-170, 2.0**-133),
        (3.3895313892515355e38, 3.3895313892515355e38),
        (3.4e38, math.inf),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_known_values(x: float, expected: float) -> None:
    assert rounded(x) == expected
    assert nearest_bf16(x) == expected


@given(st.floats(allow_nan=False, min_value=-1e39, max_value=1e39))
def test_any_value(x: float) -> None:
    assert rounded(x) == nearest_bf16(x)


@given(st.integers(1, 255), st.integers(-20, 20), st.sampled_from((-1, 0, 1)))
def test_near_ties(mantissa: int, exponent: int, nudge: int) -> None:
    tie = (mantissa + 0.5) * 2.0**exponent
    x = tie + nudge * math.ulp(tie)
    assert rounded(x) == nearest_bf16(x)


def test_not_a_number_stays() -> None:
    assert math.isnan(rounded(math.nan))


def test_exact_rounds_nowhere() -> None:
    x = torch.tensor([1 + 2.0**-30], dtype=torch.float64)
    assert torch.equal(Numerics.EXACT.bf16(x), x)
    assert not torch.equal(Numerics.CONTRACT.bf16(x), x)
