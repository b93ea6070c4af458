# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The GEMV on a GPU, through its public interface, against the contract."""

import functools
from collections.abc import Callable

import pytest
import torch
from vllm.models.flint.ops import nvfp4_gemv as ops
from vllm.models.flint.ops.fragments import to_fragments
from vllm.models.flint.ops.quack_gemm import gemm, quack_tiles

from gemvbench.sets import FRAGMENT_SHAPES, TEST_SHAPES
from gemvbench.shapes import layers_of
from support.gemv import QuantizedLinear, output_bounds

DEVICE = "cuda"
LAYERS = layers_of(1)
TOKENS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 70]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


@functools.lru_cache(maxsize=2)
def nvfp4_weight(n: int, k: int) -> QuantizedLinear:
    return QuantizedLinear.random(n, k, seeded(n * 31 + k))


def random_x(m: int, k: int, pad: int = 0) -> torch.Tensor:
    """[m, k] in rows that lie `pad` elements apart."""
    x = torch.randn(m, k + pad, device=DEVICE, generator=seeded(m + k)).bfloat16()
    return x[:, :k]


def check(
    x: torch.Tensor,
    n: int,
    silu: bool,
    bf16: bool,
    pdl: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Runs one layer twice: the same bits, and right ones."""
    k = x.shape[1]
    call: Callable[..., torch.Tensor]
    if bf16:
        dense = torch.randn(n, k, device=DEVICE, generator=seeded(n)).bfloat16()
        values, scale = dense.double(), 1.0
        call = functools.partial(ops.bf16_gemv, x, dense)
    else:
        w = nvfp4_weight(n, k)
        values, scale = w.values, w.global_scale.item()
        call = functools.partial(ops.nvfp4_gemv, x, w.codes, w.scales, w.global_scale)
    out = call(silu_mul=silu, pdl=pdl, out_dtype=out_dtype)
    again = call(silu_mul=silu, pdl=pdl, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert torch.equal(out, again)
    fp32 = out_dtype == torch.float32
    output_bounds(x, values, scale, silu, fp32).check(out)


@pytest.fixture(autouse=True)
def poisoned_allocator() -> None:
    """Fresh output memory holds NaN."""
    sizes = (256, 65536, 1 << 21)
    blocks = [torch.full((n,), float("nan"), device=DEVICE) for n in sizes]
    del blocks


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("n", "k", "silu"), TEST_SHAPES)
def test_small_and_odd_shapes(n: int, k: int, silu: bool, bf16: bool) -> None:
    for m in TOKENS:
        check(random_x(m, k, pad=8 * (m % 3)), n, silu, bf16)


@pytest.mark.parametrize(("n", "k", "silu"), FRAGMENT_SHAPES)
def test_fragments(n: int, k: int, silu: bool) -> None:
    w = nvfp4_weight(n, k)
    scale = w.global_scale.item()
    for m in TOKENS:
        x = random_x(m, k, pad=8 * (m % 3))
        out = ops.fragment_gemv(x, *w.fragments(), w.global_scale, silu)
        again = ops.fragment_gemv(x, *w.fragments(), w.global_scale, silu)
        assert torch.equal(out, again)
        output_bounds(x, w.values, scale, silu).check(out)


@pytest.mark.parametrize(("n", "k"), [(256, 128), (640, 2048)])
def test_fragments_without_pdl_and_fp32(n: int, k: int) -> None:
    w = nvfp4_weight(n, k)
    scale = w.global_scale.item()
    for m in (1, 17, 64):
        x = random_x(m, k)
        args = x, *w.fragments(), w.global_scale
        output_bounds(x, w.values, scale).check(ops.fragment_gemv(*args, pdl=False))
        out = ops.fragment_gemv(*args, out_dtype=torch.float32)
        output_bounds(x, w.values, scale, fp32_out=True).check(out)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("layer", LAYERS[:-1], ids=lambda layer: layer.name)
def test_layers_of_the_model(layer, bf16: bool) -> None:
    for m in (1, 5, 8, 16, 32):
        check(random_x(m, layer.k), layer.n, layer.silu_mul, bf16)


def test_head() -> None:
    for m in (1, 8, 16):
        x = random_x(m, LAYERS[-1].k)
        check(x, LAYERS[-1].n, False, False, out_dtype=torch.float32)


@pytest.mark.parametrize("bf16", [False, True])
def test_without_pdl_and_fp32(bf16: bool) -> None:
    for n, k, silu in ((640, 2048, False), (512, 2048, True)):
        for m in (1, 8, 17):
            check(random_x(m, k), n, silu, bf16, pdl=False)
            check(random_x(m, k), n, silu, bf16, out_dtype=torch.float32)


def test_exact_sums() -> None:
    """Sums that FP32 holds exactly leave one right answer, SiLU's rounding apart."""
    n, k = 512, 2048
    codes = torch.randint(
        0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE, generator=seeded(0)
    )
    one = torch.full((n, k // 16), 0x38, dtype=torch.uint8, device=DEVICE)
    w = QuantizedLinear.of(codes, one, 2.0**-6)
    scale = w.global_scale.item()
    for m in (1, 8, 32):
        shape = (m, k)
        x = torch.randint(-2, 3, shape, device=DEVICE, generator=seeded(m)).bfloat16()
        for silu in (False, True):
            out = ops.nvfp4_gemv(x, w.codes, w.scales, w.global_scale, silu)
            output_bounds(x, w.values, scale, silu, exact=True).check(out)


def test_unaligned_rows() -> None:
    """A row stride or a start that is no multiple of 16 bytes."""
    w = nvfp4_weight(640, 2048)
    shifted = random_x(3, 2049)[:, 1:]
    for view in (random_x(3, 2048, 3), shifted, random_x(1, 2048, 3), shifted[:1]):
        out = ops.nvfp4_gemv(view, w.codes, w.scales, w.global_scale)
        output_bounds(view, w.values, w.global_scale.item()).check(out)


def test_no_tokens() -> None:
    w = nvfp4_weight(256, 512)
    args = random_x(0, 512), w.codes, w.scales, w.global_scale
    assert ops.nvfp4_gemv(*args).shape == (0, 256)
    assert ops.nvfp4_gemv(*args, silu_mul=True).shape == (0, 128)


def test_every_code_times_every_scale() -> None:
    scales = torch.arange(256, device=DEVICE, dtype=torch.uint8)
    scales[[0x7F, 0xFF]] = 0
    nibble = torch.arange(16, device=DEVICE, dtype=torch.uint8)
    row = nibble[0::2] | nibble[1::2] << 4
    codes = torch.cat([row, row.flip(0)]).repeat(256, 1).contiguous()
    w = QuantizedLinear.of(codes, torch.stack([scales, scales.flip(0)], dim=1))
    rows = ops.dequantize_rows(w.codes, w.scales)
    assert torch.equal(rows.double(), w.values)
    assert torch.equal(rows.signbit(), w.values.signbit())
    eye = torch.eye(32, device=DEVICE).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        out = ops.nvfp4_gemv(eye, w.codes, w.scales, w.global_scale, out_dtype=dtype)
        assert torch.equal(out.double().T, w.values)


def test_every_code_times_every_scale_in_fragments() -> None:
    """Negative and zero scales too: preparing the weight takes them out."""
    scales = torch.arange(256, device=DEVICE, dtype=torch.uint8)
    scales[[0x7F, 0xFF]] = 0
    nibble = torch.arange(16, device=DEVICE, dtype=torch.uint8)
    row = nibble[0::2] | nibble[1::2] << 4
    codes = torch.cat([row, row.flip(0)]).repeat(256, 4).contiguous()
    raw = torch.stack([scales, scales.flip(0)], dim=1).repeat(1, 4).contiguous()
    w = QuantizedLinear.of(codes, raw)
    eye = torch.eye(128, device=DEVICE).bfloat16()
    own = to_fragments(codes, raw)
    for dtype in (torch.bfloat16, torch.float32):
        out = ops.fragment_gemv(eye, *own, w.global_scale, out_dtype=dtype)
        assert torch.equal(out.double().T, w.values)
        tiles = quack_tiles(256, 128, 128)
        out = gemm(eye, *own, 1.0, dtype, True, tiles)
        assert torch.equal(out.double().T, w.values)


@pytest.mark.parametrize(("n", "k"), [(130, 160), (640, 2048), (2048, 4096)])
def test_dequantize_rows(n: int, k: int) -> None:
    w = nvfp4_weight(n, k)
    assert torch.equal(ops.dequantize_rows(w.codes, w.scales).double(), w.values)


@pytest.mark.parametrize("silu", [False, True])
def test_graph_replay(silu: bool) -> None:
    """A chain of dependent launches, replayed on changed inputs."""
    w = nvfp4_weight(4096 if silu else 2048, 2048)

    def run(x: torch.Tensor) -> torch.Tensor:
        return ops.nvfp4_gemv(x, w.codes, w.scales, w.global_scale, silu)

    depth = 2 if silu else 8
    x = random_x(4, 2048).clone()
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(depth):
            y = run(y)
    for seed in range(5):
        x.copy_(torch.randn(4, 2048, device=DEVICE, generator=seeded(seed)))
        graph.replay()
        expected = x.clone()
        for _ in range(depth):
            expected = run(expected)
            torch.cuda.synchronize()
        assert torch.equal(y, expected)


def test_bad_arguments() -> None:
    w = nvfp4_weight(256, 512)
    x = random_x(2, 512)
    for args in (
        (x.float(), w.codes, w.scales, w.global_scale),
        (x[:, :256], w.codes, w.scales, w.global_scale),
        (x, w.codes.t(), w.scales, w.global_scale),
        (x, w.codes, w.scales[:-1], w.global_scale),
        (x, w.codes, w.scales, w.global_scale.double()),
    ):
        with pytest.raises(ValueError, match="must"):
            ops.nvfp4_gemv(*args)
