# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention refuses what it cannot serve, and is right against float64."""

import pytest
import torch

from vllm.models.flint.ops.decode_attention import flint_decode_attention
from vllm.models.flint.ops.gemv.variants import missing_compiler
from vllm.platforms import current_platform

KV_HEADS, HEADS, DIM, PAGE = 4, 32, 128, 16
SCALE = DIM**-0.5

needs_gpu = pytest.mark.skipif(
    not current_platform.is_cuda()
    or not current_platform.has_device_capability(90)
    or missing_compiler() is not None,
    reason="needs SM90 or later, and nvidia-cutlass-dsl",
)


def reference(
    q: torch.Tensor, keys: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """One request: q [H, 128], keys [n, KV heads, 256] with the values, float64."""
    keys = keys if window is None else keys[-window:]
    k, v = keys.repeat_interleave(HEADS // KV_HEADS, dim=1).split(DIM, dim=-1)
    logits = torch.einsum("hd,nhd->hn", q, k) * SCALE
    weights = torch.cat([logits, sinks[:, None]], dim=1).softmax(dim=1)[:, :-1]
    return torch.einsum("hn,nhd->hd", weights, v)


def test_wrong_arguments_are_refused():
    q = torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16)
    cache = torch.zeros(1, KV_HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    lens, sinks = torch.ones(1, dtype=torch.int32), torch.zeros(HEADS)
    with pytest.raises(ValueError, match="a page must be a multiple of 16 keys"):
        flint_decode_attention(
            q, cache[:, :, :8], tables, lens, sinks, None, SCALE, torch.empty_like(q)
        )
    with pytest.raises(ValueError, match="window must be at least 1"):
        flint_decode_attention(
            q, cache, tables, lens, sinks, 0, SCALE, torch.empty_like(q)
        )


@needs_gpu
@pytest.mark.parametrize("window", [None, 513])
@pytest.mark.parametrize("lengths", [[1], [700], [3, 513, 2000, 16]])
def test_against_float64(lengths: list[int], window: int | None):
    generator = torch.Generator().manual_seed(sum(lengths))
    pages = -(-max(lengths) // PAGE)
    shape = (len(lengths) * pages, KV_HEADS, PAGE, 2 * DIM)
    cache = torch.randn(shape, generator=generator).bfloat16()
    q = torch.randn(len(lengths), HEADS, DIM, generator=generator).bfloat16()
    sinks = torch.randn(HEADS, generator=generator)
    order = torch.randperm(shape[0], generator=generator).int()
    tables = order.view(len(lengths), pages)
    out = torch.empty_like(q, device="cuda")
    flint_decode_attention(
        q.cuda(),
        cache.cuda(),
        tables.cuda(),
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        sinks.cuda(),
        window,
        SCALE,
        out,
    )
    for row, length in enumerate(lengths):
        keys = cache[tables[row].long()].transpose(1, 2).reshape(-1, KV_HEADS, 2 * DIM)
        expected = reference(
            q[row].double(), keys[:length].double(), sinks.double(), window
        )
        # Probabilities are rounded to BF16 before they meet the values.
        torch.testing.assert_close(
            out[row].double().cpu(), expected, rtol=2**-7, atol=2**-7
        )
