# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The engine with Flint's attention kernels on and off, on every attention backend."""

from pathlib import Path

import numpy as np
import pytest
from vllm.models.flint.attention_path import ATTENTION_KERNELS, DECODE_KERNEL

from support.backends import need_sinks
from support.engine import OWN_MEMORY, Answer, Pass, preemptions, run_engine
from support.logits import assert_bfloat16, prompts_of, references

REFS = references("heads", "bf16", "bfloat16")
EXACT = references("heads", "bf16", "float32")
PROMPTS = prompts_of(REFS)


def run(
    checkpoint, passes: list[Pass], disabled: str = "", **engine
) -> list[list[Answer]]:
    """Serves `passes` with some of VLLM_DISABLED_KERNELS."""
    options = {"dtype": "bfloat16"} | OWN_MEMORY | engine
    return run_engine(
        passes,
        environment={"VLLM_DISABLED_KERNELS": disabled},
        model=str(checkpoint("heads", "bf16", "safetensors")),
        **options,
    )


def logprobs(answers: list[Answer]) -> np.ndarray:
    pairs = zip(answers, PROMPTS, strict=True)
    return np.concatenate([a.next_token_logprobs(p) for a, p in pairs])


def decoded(answers: list[Answer]) -> np.ndarray:
    return np.concatenate([a.logprobs for a in answers])


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"])
def test_on_and_off(checkpoint, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched and alone, prompts shorter and longer than the window, with graphs."""
    need_sinks(backend, monkeypatch)
    found = {}
    for disabled in ("", DECODE_KERNEL, ATTENTION_KERNELS):
        batched, alone = run(
            checkpoint,
            [Pass(PROMPTS), Pass(PROMPTS, batched=False)],
            disabled,
            attention_backend=backend,
            enforce_eager=False,
        )
        for answers in (batched, alone):
            assert_bfloat16(answers, REFS, EXACT)
        found[disabled] = logprobs(batched), decoded(batched)
    # Different roundings show that different kernels ran.
    assert not np.array_equal(found[""][0], found[ATTENTION_KERNELS][0])
    assert not np.array_equal(found[""][1], found[DECODE_KERNEL][1])


def test_eager(checkpoint) -> None:
    (answers,) = run(checkpoint, [Pass(PROMPTS)], enforce_eager=True)
    assert_bfloat16(answers, REFS, EXACT)


def test_chunks_and_requests_that_join_and_leave(checkpoint) -> None:
    """64 tokens a step: prompts are cut up, and mixed with others' decodes."""
    (answers,) = run(
        checkpoint,
        [Pass(PROMPTS)],
        enforce_eager=False,
        max_num_batched_tokens=64,
        max_num_seqs=3,
    )
    assert_bfloat16(answers, REFS, EXACT)


def test_prefix_cache(checkpoint) -> None:
    """The second time around long prompts come from the cache, and say the same."""
    once = Pass(PROMPTS, prompt_logprobs=None)
    fresh, cached = run(
        checkpoint, [once, once], enforce_eager=False, enable_prefix_caching=True
    )
    assert any(answer.num_cached_tokens > 500 for answer in cached)
    for one, other in zip(fresh, cached, strict=True):
        same = [a == b for a, b in zip(one.token_ids, other.token_ids, strict=True)]
        upto = same.index(False) if False in same else len(same)
        assert upto > 0
        np.testing.assert_allclose(
            one.logprobs[:upto], other.logprobs[:upto], atol=0.25, rtol=0
        )


def test_preemption(checkpoint, tmp_path: Path) -> None:
    """77 pages of 32 tokens hold the prompts, but not all that is added to them."""
    log = tmp_path / "log"
    (answers,) = run(
        checkpoint,
        [Pass(PROMPTS)],
        log=log,
        enforce_eager=False,
        block_size=32,
        max_model_len=704,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=77,
        disable_log_stats=False,
    )
    assert preemptions(log.read_text())
    assert_bfloat16(answers, REFS, EXACT)


def test_fp8_cache(checkpoint) -> None:
    """E4M3 keys and values: the kernels are as near as the backend on its own."""
    truth = np.concatenate([r.token_logprobs for r in EXACT])
    errors = []
    for disabled in ("", ATTENTION_KERNELS):
        (answers,) = run(
            checkpoint,
            [Pass(PROMPTS)],
            disabled,
            enforce_eager=False,
            kv_cache_dtype="fp8",
        )
        errors.append(np.sqrt(np.mean((logprobs(answers) - truth) ** 2)))
    assert errors[0] <= 1.5 * errors[1]
