# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Four layers of Flint's real width in the engine, against the float64 reference."""

from pathlib import Path

import numpy as np
from vllm.models.flint.attention_path import ATTENTION_KERNELS

from support.engine import STOCK_LAYERS, Pass, run_engine
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


def test_attention_kernels_on_and_off(checkpoint, tmp_path: Path) -> None:
    """Long prompts; few requests decode together, so QKV is fused."""
    prompts = prompts_of(LONG_LENGTHS)
    passes = [Pass(prompts, max_tokens=NEW_TOKENS, prompt_logprobs=0)]
    bf16 = checkpoint("wide", "nvfp4", "safetensors")
    found, logs = [], []
    for disabled in ("", ATTENTION_KERNELS):
        log = tmp_path / f"{disabled or 'on'}.log"
        (answers,) = run_engine(
            passes,
            environment={"VLLM_DISABLED_KERNELS": disabled},
            log=log,
            **wide_model(checkpoint, "gguf"),
            **ENGINE,
            **GRAPHS,
        )
        found.append(wide_errors(answers, prompts, bf16))
        logs.append(log.read_text())
    not_used = ("fused QKV is not used", "attention kernels are not used")
    assert not any(text in logs[0] for text in not_used)
    assert not_used[1] in logs[1]
    assert_no_further(*found)
