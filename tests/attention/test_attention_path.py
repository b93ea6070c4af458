# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which layers and batches the attention kernels serve, and why not others."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.models.flint import attention
from vllm.models.flint import attention_path as path

FACTS = path.AttentionFacts(
    off=None,
    capability=90,
    missing_compiler=None,
    backend="FLASH_ATTN",
    dtype=torch.bfloat16,
    cache_dtype="auto",
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("capability", [90, 100, 103, 120])
def test_served(backend: str, cache_dtype: str, capability: int) -> None:
    facts = replace(
        FACTS, backend=backend, cache_dtype=cache_dtype, capability=capability
    )
    assert path.why_not_kernels(facts) is None
    assert path.why_not_decode(facts) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": None}, "require CUDA"),
        ({"capability": 80}, "sm_90"),
        ({"off": "they are switched off"}, "they are switched off"),
        ({"disabled": ("FlintAttention",)}, "VLLM_DISABLED_KERNELS"),
        ({"batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
        ({"missing_compiler": "4.8 is needed, found 4.9"}, "4.8 is needed"),
        ({"backend": "CPU_ATTN"}, "CPU_ATTN"),
        ({"backend": "FLEX_ATTENTION"}, "FLEX_ATTENTION"),
        ({"dtype": torch.float16}, "float16"),
        ({"cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"microbatches": True}, "two microbatches"),
        ({"scales_by_head": True}, "one scale for all heads"),
        ({"context_parallel": True}, "context parallelism"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [8]}}, "mrope"),
    ],
)
def test_left_to_stock_layers(change: dict[str, Any], reason: str) -> None:
    assert reason in (path.why_not_kernels(replace(FACTS, **change)) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"disabled": ("FlintDecodeAttention",)}, "VLLM_DISABLED_KERNELS"),
        ({"head_dim": 64}, "these are 64 and 8"),
        ({"num_heads": 4}, "these are 128 and 1"),
    ],
)
def test_decodes_left_to_the_backend(change: dict[str, Any], reason: str) -> None:
    facts = replace(FACTS, **change)
    assert path.why_not_kernels(facts) is None
    assert reason in (path.why_not_decode(facts) or "")


def query_lens(**change: Any) -> SimpleNamespace:
    """What FlashAttention's and Triton's builders make of four decodes."""
    fields: dict[str, Any] = {
        "num_actual_tokens": 4,
        "max_query_len": 1,
        "causal": True,
        "block_table": torch.arange(12).view(4, 3),
        "seq_lens": torch.tensor([5, 1, 0, 7]),
    }
    return SimpleNamespace(**(fields | change))


def flashinfer(decode: dict[str, Any] | None = None, **change: Any) -> SimpleNamespace:
    """What FlashInfer's builder makes of the same."""
    same = query_lens()
    fields: dict[str, Any] = {
        "block_tables": same.block_table,
        "seq_lens": same.seq_lens,
        "q_len_per_req": 1,
        "q_cu_seq_lens": None,
    }
    whole = {
        "num_actual_tokens": 4,
        "num_prefills": 0,
        "causal": True,
        "decode": SimpleNamespace(**(fields | (decode or {}))),
    }
    return SimpleNamespace(**(whole | change))


@pytest.mark.parametrize(
    ("backend", "make"),
    [
        ("FLASH_ATTN", query_lens),
        ("TRITON_ATTN", query_lens),
        ("FLASHINFER", flashinfer),
    ],
)
@pytest.mark.parametrize(("tokens", "rows"), [(4, 4), (3, 3), (8, 4)])
def test_decode_batch(backend: str, make, tokens: int, rows: int) -> None:
    """Padding of requests, or of tokens, is left out."""
    batch = path.decode_batch(backend, make(num_actual_tokens=tokens), 4)
    assert isinstance(batch, path.DecodeBatch)
    assert batch.seq_lens.tolist() == [5, 1, 0, 7][:rows]
    assert batch.block_tables.shape == (rows, 3)


@pytest.mark.parametrize(
    ("backend", "metadata", "reason"),
    [
        ("FLASH_ATTN", None, path.PROFILING),
        ("FLASH_ATTN", query_lens(max_query_len=2), path.NOT_A_DECODE),
        ("TRITON_ATTN", query_lens(causal=torch.ones(4)), "attention is not causal"),
        ("FLASHINFER", None, path.PROFILING),
        ("FLASHINFER", flashinfer(num_prefills=1), path.NOT_A_DECODE),
        ("FLASHINFER", flashinfer({"q_len_per_req": 3}), path.NOT_A_DECODE),
        ("FLASHINFER", flashinfer({"q_cu_seq_lens": torch.ones(5)}), path.NOT_A_DECODE),
        ("FLASHINFER", flashinfer(causal=False), "attention is not causal"),
    ],
)
def test_backend_serves_it(backend: str, metadata: Any, reason: str) -> None:
    assert path.decode_batch(backend, metadata, 256) == reason


def test_flashinfers_own_decode_is_named() -> None:
    metadata = flashinfer(decode=None)
    del metadata.decode.block_tables
    assert "no block table" in str(path.decode_batch("FLASHINFER", metadata, 4))


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A layer of two kernels that only record what they are asked to do."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        attention,
        "flint_decode_attention",
        lambda *a, **more: calls.append(("decode", a, more)),
    )
    impl = SimpleNamespace(
        scale=0.5,
        supports_quant_query_input=False,
        forward=lambda *a, **more: calls.append(("backend", a, more)),
    )
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    fake = SimpleNamespace(
        num_heads=8,
        num_kv_heads=1,
        head_dim=16,
        window=513,
        sinks=torch.zeros(8),
        calls=calls,
        decodes=True,
        _workspace="workspace",
        _early_reads=True,
        _max_decode_batch=4,
        attn=SimpleNamespace(
            impl=impl,
            attn_backend=backend,
            query_quant=None,
            kv_cache_dtype="auto",
            _k_scale=torch.ones(1),
            _v_scale=torch.ones(1),
        ),
    )
    fake._decode = lambda *a: attention.FlintAttention._decode(fake, *a)
    return fake


def attend(layer: SimpleNamespace, metadata: Any) -> tuple[Any, ...]:
    query = torch.zeros(6, 128)
    attention.FlintAttention.attend(
        layer, query, torch.zeros(1), metadata, torch.empty_like(query)
    )
    (call,) = layer.calls
    return call


def test_decodes_go_to_the_kernel(layer: SimpleNamespace) -> None:
    kind, (q, _, tables, lens, sinks, window, scale, out), more = attend(
        layer, query_lens()
    )
    assert kind == "decode"
    assert q.shape == out.shape == (4, 8, 16)
    assert (len(tables), lens.tolist()) == (4, [5, 1, 0, 7])
    assert (sinks.dtype, window, scale) == (torch.float32, 513, 0.5)
    assert more == {"workspace": "workspace", "early_reads": True}


def test_fp8_cache_comes_with_its_scales(layer: SimpleNamespace) -> None:
    layer.attn.kv_cache_dtype = "fp8"
    assert set(attend(layer, query_lens())[2]) >= {"k_scale", "v_scale"}


@pytest.mark.parametrize("metadata", [None, query_lens(max_query_len=6)])
def test_others_go_to_the_backend(layer: SimpleNamespace, metadata: Any) -> None:
    kind, (_, q, k, v, _, given), more = attend(layer, metadata)
    assert kind == "backend"
    assert given is metadata
    assert q.shape == more["output"].shape == (6, 8, 16)
    assert k.shape == v.shape == (6, 1, 16)


def test_large_batches_go_to_the_backend(layer: SimpleNamespace) -> None:
    layer._max_decode_batch = 3
    assert attend(layer, query_lens())[0] == "backend"


def test_kernel_can_be_turned_off(layer: SimpleNamespace) -> None:
    layer.decodes = False
    assert attend(layer, query_lens())[0] == "backend"
