# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The engine on a GPU: every attention backend with sinks, CUDA graphs, NVFP4."""

import numpy as np
import pytest

from support.engine import Pass, run_engine
from support.logits import assert_bfloat16, prompts_of, references

# How much memory of the GPU these tiny models may take.
SMALL = {"gpu_memory_utilization": 0.2}


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_bfloat16(checkpoint, backend: str, eager: bool) -> None:
    refs = references("heads", "bf16", "bfloat16")
    (answers,) = run_engine(
        [Pass(prompts_of(refs))],
        model=str(checkpoint("heads", "bf16", "safetensors")),
        dtype="bfloat16",
        attention_backend=backend,
        enforce_eager=eager,
        **SMALL,
    )
    assert_bfloat16(answers, refs, references("heads", "bf16", "float32"))


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_gguf_stays_nvfp4(checkpoint, eager: bool) -> None:
    refs = references("heads", "nvfp4", "bfloat16")
    config = str(checkpoint("heads", "nvfp4", "safetensors"))
    (answers,) = run_engine(
        [Pass(prompts_of(refs))],
        model=str(checkpoint("heads", "nvfp4", "gguf")),
        hf_config_path=config,
        tokenizer=config,
        dtype="bfloat16",
        enforce_eager=eager,
        **SMALL,
    )
    assert_bfloat16(answers, refs, references("heads", "nvfp4", "float32"))


def test_gguf_is_near_its_dequantization(checkpoint) -> None:
    """Tensor scales that BF16 cannot hold: the kernels differ by rounding alone."""
    prompts = prompts_of(references("heads", "nvfp4", "bfloat16"))
    config = str(checkpoint("heads", "nvfp4-odd", "safetensors"))
    logprobs = []
    for form in ("gguf", "safetensors"):
        (answers,) = run_engine(
            [Pass(prompts)],
            model=str(checkpoint("heads", "nvfp4-odd", form)),
            hf_config_path=config,
            tokenizer=config,
            dtype="bfloat16",
            **SMALL,
        )
        pairs = zip(answers, prompts, strict=True)
        logprobs.append(np.concatenate([a.next_token_logprobs(p) for a, p in pairs]))
    exact = references("heads", "nvfp4", "float32")
    rounded = references("heads", "nvfp4", "bfloat16")
    # Same architecture and scale of weights, so the same size of rounding.
    theirs = np.concatenate(
        [
            r.token_logprobs - e.token_logprobs
            for r, e in zip(rounded, exact, strict=True)
        ]
    )
    difference = logprobs[0] - logprobs[1]
    assert np.sqrt(np.mean(difference**2)) <= 2 * np.sqrt(np.mean(theirs**2))
