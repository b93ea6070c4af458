# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""NVFP4 decoding, judged by PyTorch's E4M3, by gguf and by vLLM's own layout."""

import itertools

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import (
    swizzle_blockscale,
)

from contract import nvfp4


def random_bytes(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8)


def ggml_block(scales: list[int], codes: list[list[int]]) -> list[int]:
    """Builds one 36-byte block from 4 scale bytes and 4 x 16 codes."""
    packed = [
        group[j] | group[j + 8] << 4 for group, j in itertools.product(codes, range(8))
    ]
    return scales + packed


def test_every_code() -> None:
    assert nvfp4.E2M1.tolist() == [
        *(0, 0.5, 1, 1.5, 2, 3, 4, 6),
        *(0, -0.5, -1, -1.5, -2, -3, -4, -6),
    ]


def test_every_scale_byte_is_e4m3() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    expected = every.view(torch.float8_e4m3fn).double()
    assert torch.equal(nvfp4.E4M3.isnan(), expected.isnan())
    assert nvfp4.E4M3.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    known = ~expected.isnan()
    assert torch.equal(nvfp4.E4M3[known], expected[known])


def test_every_code_with_every_scale_byte_as_gguf_reads_it() -> None:
    codes = list(range(16))
    blocks = [ggml_block([byte] * 4, [codes] * 4) for byte in range(0xFF)]
    raw = np.array(blocks, np.uint8)
    expected = gguf_dequantize(raw, GGMLQuantizationType.NVFP4)
    weight, scales = nvfp4.ggml_to_modelopt(torch.from_numpy(raw))
    values = nvfp4.dequantize(weight, scales)
    assert values.shape == (255, 64)
    assert np.array_equal(values.numpy(), expected.astype(np.float64))


def test_random_blocks_as_gguf_reads_them() -> None:
    raw = random_bytes(5, 7, 3 * 36)
    raw.unflatten(-1, (-1, 36))[..., :4].clamp_(max=0xFE)
    weight, scales = nvfp4.ggml_to_modelopt(raw)
    expected = gguf_dequantize(raw.numpy(), GGMLQuantizationType.NVFP4)
    values = nvfp4.dequantize(weight, scales)
    assert np.array_equal(values.numpy(), expected.astype(np.float64))


def test_scale_byte_that_is_not_a_number_is_refused() -> None:
    block = ggml_block([0x38, 0x38, 0xFF, 0x38], [[0] * 16] * 4)
    with pytest.raises(ValueError, match="0xFF"):
        nvfp4.ggml_to_modelopt(torch.tensor([block], dtype=torch.uint8))


def test_ggml_nibble_order() -> None:
    codes = [list(range(16)), list(range(15, -1, -1)), [7] * 16, [9] * 16]
    block = torch.tensor(ggml_block([1, 2, 3, 4], codes), dtype=torch.uint8)
    weight, scales = nvfp4.ggml_to_modelopt(block)
    assert scales.tolist() == [1, 2, 3, 4]
    assert nvfp4.unpack_codes(weight).tolist() == sum(codes, [])


def test_modelopt_nibble_order() -> None:
    packed = torch.tensor([0x21, 0x43], dtype=torch.uint8)
    assert nvfp4.unpack_codes(packed).tolist() == [1, 2, 3, 4]
    assert torch.equal(nvfp4.pack_codes(nvfp4.unpack_codes(packed)), packed)


def test_bf16_holds_every_product() -> None:
    known = nvfp4.E4M3[~nvfp4.E4M3.isnan()]
    products = torch.outer(nvfp4.E2M1, known)
    assert torch.equal(products.bfloat16().double(), products)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (384, 8), (1, 1), (200, 6)])
def test_swizzle(rows: int, columns: int) -> None:
    scales = random_bytes(rows, columns)
    flat = nvfp4.swizzle_scales(scales)
    across = -(-columns // 4)
    for row, column in itertools.product(range(rows), range(columns)):
        tile = row // 128 * across + column // 4
        inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert flat[tile * 512 + inside] == scales[row, column]
    assert torch.equal(nvfp4.unswizzle_scales(flat, rows, columns), scales)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (512, 8), (200, 6)])
def test_swizzle_matches_the_engine(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It moves its result to the GPU; the layout does not depend on that.
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    scales = random_bytes(rows, columns)
    flat = nvfp4.swizzle_scales(scales)
    theirs = swizzle_blockscale(scales.view(torch.float8_e4m3fn))
    assert torch.equal(flat, theirs.view(torch.uint8).flatten())
