# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which layers and batches Flint's attention kernels serve."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.models.flint import attention_path as path
from vllm.utils.torch_utils import set_default_torch_dtype


@pytest.fixture
def facts() -> path.AttentionFacts:
    """Of Flint's layers, as if on a GPU that the kernels serve."""
    name = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    attn: Any = SimpleNamespace(attn_backend=name, kv_cache_dtype="auto", head_size=128)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    with (
        set_current_vllm_config(VllmConfig(additional_config={"flint_kernels": True})),
        set_default_torch_dtype(torch.bfloat16),
    ):
        found = path.facts_of(attn, 32, 4, rope)
    return replace(found, capability=90, missing_compiler=None)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_served(facts: path.AttentionFacts, backend: str, cache_dtype: str):
    facts = replace(facts, backend=backend, cache_dtype=cache_dtype)
    assert path.why_not_kernels(facts) is None
    assert path.why_not_decode(facts) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": 80}, "sm_90"),
        ({"off": "they are switched off"}, "they are switched off"),
        ({"backend": "FLEX_ATTENTION"}, "FLEX_ATTENTION"),
        ({"disabled": ("FlintAttention",)}, "VLLM_DISABLED_KERNELS"),
    ],
)
def test_left_to_stock_layers(
    facts: path.AttentionFacts, change: dict[str, Any], reason: str
):
    assert reason in (path.why_not_kernels(replace(facts, **change)) or "")


@pytest.mark.parametrize(("longest", "is_decode"), [(1, True), (2, False)])
def test_only_decodes_leave_the_backend(longest: int, is_decode: bool):
    metadata = SimpleNamespace(
        num_actual_tokens=3,
        max_query_len=longest,
        causal=True,
        block_table=torch.arange(12).view(4, 3),
        seq_lens=torch.tensor([5, 1, 7, 0]),
    )
    batch = path.decode_batch("FLASH_ATTN", metadata, 4)
    if is_decode:
        assert isinstance(batch, path.DecodeBatch)
        assert batch.seq_lens.tolist() == [5, 1, 7]
    else:
        assert batch == path.NOT_A_DECODE
