# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Four layers of Flint's real width in the engine, against the float64 reference."""

import numpy as np
import pytest

from support.engine import STOCK_LAYERS, Pass, run_engine
from support.wide import WIDE, assert_no_further, wide_errors

# One prompt fills more than the GEMV takes in a launch, the other less.
LENGTHS = (45, 7)
NEW_TOKENS = 12
ENGINE = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64]},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(10, WIDE.vocab_size, n).tolist() for n in LENGTHS]


def test_flint_linears_err_no_more_than_bf16_weights(
    checkpoint, prompts: list[list[int]]
) -> None:
    passes = [Pass(prompts, max_tokens=NEW_TOKENS, prompt_logprobs=0)]
    bf16 = checkpoint("wide", "nvfp4", "safetensors")
    gguf = {
        "model": str(checkpoint("wide", "nvfp4", "gguf")),
        "hf_config_path": str(bf16),
        "tokenizer": str(bf16),
    }
    (ours,) = run_engine(passes, **gguf, **ENGINE, **GRAPHS)
    (theirs,) = run_engine(passes, model=str(bf16), **ENGINE, **STOCK_LAYERS)
    assert_no_further(
        wide_errors(ours, prompts, bf16), wide_errors(theirs, prompts, bf16)
    )
