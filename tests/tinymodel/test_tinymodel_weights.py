# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The tiny models' weights: reproducible, exact, and hard enough."""

import json
from pathlib import Path

import numpy as np
import pytest

from tinymodel import FAMILIES, SPECS, TinySpec, matrix, tensor
from tinymodel.layout import TensorDef, tensor_defs
from tinymodel.nvfp4 import Nvfp4Matrix
from tinymodel.weights import bf16_bits, checksum

INDEX = Path(__file__).resolve().parent.parent / "reference" / "index.json"
QUANTIZED = ("nvfp4", "nvfp4-odd")


def matrices(spec: TinySpec, family: str) -> list[tuple[TensorDef, Nvfp4Matrix]]:
    found = []
    for d in tensor_defs(spec):
        stored = matrix(spec, 0, family, d) if d.is_matrix else None
        if isinstance(stored, Nvfp4Matrix):
            found.append((d, stored))
    return found


@pytest.mark.parametrize(
    "case", json.loads(INDEX.read_text())["cases"], ids=lambda c: c["file"]
)
def test_the_stored_logits_are_of_these_weights(case: dict[str, str]) -> None:
    spec = SPECS[case["spec"]]
    assert checksum(spec, 0, case["family"]) == case["weights_sha256"]


def test_seed_and_family_matter() -> None:
    sums = {checksum(SPECS["tiny"], 0, family) for family in FAMILIES}
    sums.add(checksum(SPECS["tiny"], 1, "bf16"))
    assert len(sums) == len(FAMILIES) + 1


def test_unknown_family_is_refused() -> None:
    spec = SPECS["tiny"]
    d = next(d for d in tensor_defs(spec) if d.is_matrix)
    with pytest.raises(ValueError, match="fp8"):
        matrix(spec, 0, "fp8", d)


@pytest.mark.parametrize("family", QUANTIZED)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_code_and_scale_byte_occurs(spec: TinySpec, family: str) -> None:
    found = matrices(spec, family)
    codes = np.concatenate([m.codes.ravel() for _, m in found])
    scales = np.concatenate([m.scales.ravel() for _, m in found])
    assert np.array_equal(np.unique(codes), np.arange(16))
    assert np.array_equal(np.unique(scales), np.arange(0x7F))


@pytest.mark.parametrize("family", QUANTIZED)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_fused_matrices_share_a_tensor_scale(spec: TinySpec, family: str) -> None:
    by_fusion: dict[str, set[float]] = {}
    for d, m in matrices(spec, family):
        by_fusion.setdefault(d.fused, set()).add(m.tensor_scale)
    assert {len(scales) for scales in by_fusion.values()} == {1}
    assert len(set.union(*by_fusion.values())) > 4


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_powers_of_two_keep_the_dequantization_in_bf16(spec: TinySpec) -> None:
    for d, m in matrices(spec, "nvfp4"):
        assert np.frexp(m.tensor_scale)[0] == 0.5
        exact = m.unscaled().astype(np.float64) * m.tensor_scale
        assert np.array_equal(tensor(spec, 0, "nvfp4", d).astype(np.float64), exact)


def test_odd_scales_do_not() -> None:
    spec = SPECS["tiny"]
    found = matrices(spec, "nvfp4-odd")
    assert all(np.frexp(m.tensor_scale)[0] != 0.5 for _, m in found)
    rounded = [not np.array_equal(m.dequantize(), tensor(spec, 0, "nvfp4-odd", d))
               for d, m in found]  # fmt: skip
    assert all(rounded)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_shapes_suit_nvfp4_blocks(spec: TinySpec) -> None:
    for d in tensor_defs(spec):
        if d.is_matrix:
            assert all(size % 64 == 0 for size in d.shape), d.name


def test_rounding_to_bf16() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -1.01, 3.0e38], np.float32)
    assert bf16_bits(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF81, 0x7F62]
