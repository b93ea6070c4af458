# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The engine with Flint's expert kernels on and off, on every path for a batch."""

import numpy as np
import pytest
from vllm.models.flint.moe_path import BF16_EXPERTS, NVFP4_EXPERTS

from support.engine import ALL_KERNELS, OWN_MEMORY, Answer, Pass, run_engine
from support.wide import WIDE, wide_errors, wide_model

# Requests that decode together: three launches, two, and the GEMM (or vLLM's MoE).
BATCHES = (1, 5, 40, 100)
NEW_TOKENS = 6
# Answers of each batch that are held to the float64 reference.
SAMPLE = 4
# How much further than vLLM's own MoE the kernels may be from it.
RMS_RATIO, MAX_RATIO = 1.25, 1.5
ENGINE = {
    **OWN_MEMORY,
    "dtype": "bfloat16",
    "max_num_seqs": 128,
    "enforce_eager": False,
    # 5 and 100 requests run with rows of padding.
    "compilation_config": {"cudagraph_capture_sizes": [1, 8, 40, 64, 104]},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    lengths = rng.integers(3, 12, max(BATCHES))
    return [rng.integers(10, WIDE.vocab_size, n).tolist() for n in lengths]


def serve(prompts: list[list[int]], disabled: str, **model: str) -> list[list[Answer]]:
    passes = [
        Pass(prompts[:batch], max_tokens=NEW_TOKENS, prompt_logprobs=0)
        for batch in BATCHES
    ]
    return run_engine(
        passes,
        environment={"VLLM_DISABLED_KERNELS": disabled},
        **model,
        **ENGINE,
        **ALL_KERNELS,
    )


@pytest.mark.parametrize(
    ("form", "kernel"), [("gguf", NVFP4_EXPERTS), ("safetensors", BF16_EXPERTS)]
)
def test_on_and_off(
    checkpoint, prompts: list[list[int]], form: str, kernel: str
) -> None:
    bf16 = checkpoint("wide", "nvfp4", "safetensors")
    model = wide_model(checkpoint, form)
    found = {}
    for disabled in ("", kernel):
        answers = serve(prompts, disabled, **model)
        found[disabled] = [
            wide_errors(batch[-SAMPLE:], prompts[:size][-SAMPLE:], bf16)
            for batch, size in zip(answers, BATCHES, strict=True)
        ]
    for size, ours, theirs in zip(BATCHES, found[""], found[kernel], strict=True):
        rms = [np.sqrt(np.mean(e**2)) for e in (ours, theirs)]
        worst = [np.abs(e).max() for e in (ours, theirs)]
        print(f"batch {size}, kernels on and off: rms {rms}, largest {worst}")
        assert not np.array_equal(ours, theirs), "both engines ran vLLM's MoE"
    rms = [np.sqrt(np.mean(np.concatenate(e) ** 2)) for e in found.values()]
    worst = [np.abs(np.concatenate(e)).max() for e in found.values()]
    assert rms[0] <= RMS_RATIO * rms[1]
    assert worst[0] <= MAX_RATIO * worst[1]
