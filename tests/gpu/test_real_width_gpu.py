# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Four layers of Flint's real width in the engine, against the float64 reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.models.flint.attention_path import ATTENTION_KERNELS

from support.backends import need_sinks
from support.engine import (
    OWN_MEMORY,
    STOCK_LAYERS,
    Answer,
    Pass,
    preemptions,
    run_engine,
)
from support.wide import WIDE, assert_no_further, wide_errors, wide_model

# One prompt fills more than the GEMV takes in a launch, the other less.
LENGTHS = (45, 7)
# Around the window, and past two of them. The first three fill 101 pages of 32 tokens,
# and two of them grow past their last one.
LONG_LENGTHS = (540, 513, 505, 1100, 7)
NEW_TOKENS = 12
ENGINE = {"dtype": "bfloat16"} | OWN_MEMORY
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64]},
}

# What a server does besides: prompts in chunks, beside others' decodes, and requests
# that wait for others to leave.
BUSY = {"max_num_batched_tokens": 256, "max_num_seqs": 3, "max_model_len": 1152}
# So few that a running request loses its own.
FEW_PAGES = BUSY | {
    "block_size": 32,
    "num_gpu_blocks_override": 101,
    "disable_log_stats": False,
}
PREFIX_CACHE = BUSY | {"enable_prefix_caching": True}


def on(backend: str) -> dict[str, Any]:
    return {"attention_backend": backend}


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
) -> tuple[list[list[list[Answer]]], list[str]]:
    """Answers with attention kernels and without them, and logs, which must say so."""
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
    return found, logs


@pytest.mark.parametrize(
    "options",
    [*map(on, ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")), FEW_PAGES, PREFIX_CACHE],
    ids=["flash", "triton", "flashinfer", "few pages", "prefix cache"],
)
def test_attention_kernels_on_and_off(
    checkpoint,
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long prompts; few requests decode together, so QKV is fused."""
    need_sinks(options.get("attention_backend", "FLASH_ATTN"), monkeypatch)
    prompts = prompts_of(LONG_LENGTHS)
    passes = [Pass(prompts, max_tokens=NEW_TOKENS, prompt_logprobs=0)]
    if options is PREFIX_CACHE:
        # With log-probabilities of its prompt a request does not read the cache.
        passes += 2 * [Pass(prompts, max_tokens=NEW_TOKENS, prompt_logprobs=None)]
    bf16 = checkpoint("wide", "nvfp4", "safetensors")
    found, logs = both(checkpoint, tmp_path, passes, **options)
    if options is FEW_PAGES:
        assert all(preemptions(log) for log in logs)
    errors = []
    for answers in found:
        if options is PREFIX_CACHE:
            assert any(answer.num_cached_tokens > 500 for answer in answers[-1])
        each = [wide_errors(answer, prompts, bf16) for answer in answers]
        errors.append(np.concatenate(each))
    assert_no_further(*errors)
