# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The engine's logits are those of transformers' Flint class, however it is run."""

import pytest

from support.engine import Pass, run_engine
from support.logits import (
    assert_bfloat16,
    assert_float32,
    assert_greedy,
    prompts_of,
    references,
)


@pytest.mark.parametrize("spec", ["tiny", "heads"])
def test_float32(checkpoint, spec: str) -> None:
    """Batched and alone, prompts shorter and longer than the window."""
    refs = references(spec, "bf16", "float32")
    prompts = prompts_of(refs)
    batched, alone = run_engine(
        [Pass(prompts), Pass(prompts, batched=False)],
        model=str(checkpoint(spec, "bf16", "safetensors")),
        dtype="float32",
    )
    assert_float32(batched, refs)
    assert_float32(alone, refs)


@pytest.mark.parametrize("spec", ["tiny", "heads"])
def test_float32_in_chunks(checkpoint, spec: str) -> None:
    """Prompts cut into chunks of 64 tokens, mixed with other requests' decodes."""
    refs = references(spec, "bf16", "float32")
    (chunked,) = run_engine(
        [Pass(prompts_of(refs))],
        model=str(checkpoint(spec, "bf16", "safetensors")),
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    assert_float32(chunked, refs)


def test_float32_without_chunked_prefill(checkpoint) -> None:
    refs = references("tiny", "bf16", "float32")
    (whole,) = run_engine(
        [Pass(prompts_of(refs))],
        model=str(checkpoint("tiny", "bf16", "safetensors")),
        dtype="float32",
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
    )
    assert_float32(whole, refs)


def test_float32_from_the_prefix_cache(checkpoint) -> None:
    """The second time around, long prompts come from the cache."""
    refs = references("heads", "bf16", "float32")
    prompts = prompts_of(refs)
    # vLLM does not use the cache for a request that wants prompt logprobs.
    once = Pass(prompts, prompt_logprobs=None)
    fresh, cached = run_engine(
        [once, once],
        model=str(checkpoint("heads", "bf16", "safetensors")),
        dtype="float32",
        enable_prefix_caching=True,
        block_size=32,
    )
    assert max(len(p) for p in prompts) > 600
    for answer, ref, prompt in zip(cached, refs, prompts, strict=True):
        assert answer.num_cached_tokens >= len(prompt) // 32 * 32 - 32
        assert_greedy(answer, ref)
    for answer, ref in zip(fresh, refs, strict=True):
        assert_greedy(answer, ref)


@pytest.mark.parametrize("spec", ["tiny", "heads"])
def test_bfloat16(checkpoint, spec: str) -> None:
    refs = references(spec, "bf16", "bfloat16")
    (answers,) = run_engine(
        [Pass(prompts_of(refs))],
        model=str(checkpoint(spec, "bf16", "safetensors")),
        dtype="bfloat16",
    )
    assert_bfloat16(answers, refs, references(spec, "bf16", "float32"))


def test_gguf_float32(checkpoint) -> None:
    """NVFP4 with power-of-two tensor scales: the reference's exact weights."""
    refs = references("tiny", "nvfp4", "float32")
    (answers,) = run_engine(
        [Pass(prompts_of(refs))],
        model=str(checkpoint("tiny", "nvfp4", "gguf")),
        hf_config_path=str(checkpoint("tiny", "nvfp4", "safetensors")),
        tokenizer=str(checkpoint("tiny", "nvfp4", "safetensors")),
        dtype="float32",
    )
    assert_float32(answers, refs)


@pytest.mark.parametrize("family", ["nvfp4", "nvfp4-odd"])
def test_gguf_equals_its_dequantization(checkpoint, family: str) -> None:
    """Bit for bit: a GGUF and the BF16 safetensors of its dequantized weights."""
    prompts = prompts_of(references("tiny", "nvfp4", "bfloat16"))
    bf16 = str(checkpoint("tiny", family, "safetensors"))
    answers = []
    for model in (str(checkpoint("tiny", family, "gguf")), bf16):
        answers += run_engine(
            [Pass(prompts)],
            model=model,
            hf_config_path=bf16,
            tokenizer=bf16,
            dtype="bfloat16",
        )
    assert answers[0] == answers[1]
