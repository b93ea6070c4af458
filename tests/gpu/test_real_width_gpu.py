# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Four layers of Flint's real width in the engine, against the float64 reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.models.flint.attention_path import ATTENTION_KERNELS

from support.engine import STOCK_LAYERS, Answer, Pass, run_engine
from support.wide import WIDE, assert_no_further, wide_errors, wide_model

# One prompt fills more than the GEMV takes in a launch, the other less.
LENGTHS = (45, 7)
# Around the window, and past two of them.
LONG_LENGTHS = (1100, 513, 505, 7)
NEW_TOKENS = 12
ENGINE = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64]},
}


# What a server does besides: prompts in chunks, beside others' decodes; requests that
# wait for others to leave; pages for little more than one long request; a prefix cache.
BUSY = {
    "max_num_batched_tokens": 256,
    "max_num_seqs": 3,
    "max_model_len": 1152,
    "num_gpu_blocks_override": 2 * (1152 // 16) + 8,
    "enable_prefix_caching": True,
}


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(10, WIDE.vocab_size, n).tolist() for n in lengths]


def test_flint_linears_err_no_more_than_bf16_weights(checkpoint) -> None:
    prompts = prompts_of(LENGTHS)
    passes = [Pass(prompts, max_tokens=NEW_TOKENS, prompt_logprobs=0)]
    bf16 = checkpoint("wide", "nvfp4", "safetensors")
    (ours,) = run_engine(passes, **wide_model(checkpoint, "gguf"), **ENGINE, **GRAPHS)
    (theirs,) = run_engine(passes, model=str(bf16), **ENGINE, **STOCK_LAYERS)
    assert_no_further(
        wide_errors(ours, prompts, bf16), wide_errors(theirs, prompts, bf16)
    )


def both(
    checkpoint: Any, folder: Path, passes: list[Pass], **options: Any
) -> list[list[list[Answer]]]:
    """Answers with attention kernels and without them; the logs must say so."""
    found, logs = [], []
    for disabled in ("", ATTENTION_KERNELS):
        log = folder / f"{disabled or 'on'}.log"
        answers = run_engine(
            passes,
            environment={"VLLM_DISABLED_KERNELS": disabled},
            log=log,
            **wide_model(checkpoint, "gguf"),
            **ENGINE,
            **GRAPHS,
            **options,
        )
        found.append(answers)
        logs.append(log.read_text())
    not_used = ("fused QKV is not used", "attention kernels are not used")
    assert not any(text in logs[0] for text in not_used)
    assert not_used[1] in logs[1]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"attention_backend": "TRITON_ATTN"}, BUSY],
    ids=["plain", "triton", "busy"],
)
def test_attention_kernels_on_and_off(
    checkpoint, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Long prompts; few requests decode together, so QKV is fused."""
    prompts = prompts_of(LONG_LENGTHS)
    passes = [Pass(prompts, max_tokens=NEW_TOKENS, prompt_logprobs=0)]
    if options is BUSY:
        # With log-probabilities of its prompt a request does not read the cache.
        passes += 2 * [Pass(prompts, max_tokens=NEW_TOKENS, prompt_logprobs=None)]
    bf16 = checkpoint("wide", "nvfp4", "safetensors")
    errors = []
    for answers in both(checkpoint, tmp_path, passes, **options):
        if options is BUSY:
            assert any(answer.num_cached_tokens > 500 for answer in answers[-1])
        found = [wide_errors(answer, prompts, bf16) for answer in answers]
        errors.append(np.concatenate(found))
    assert_no_further(*errors)
