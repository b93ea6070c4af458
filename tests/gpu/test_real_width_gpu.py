# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Four layers of Flint's real width in the engine, against the float64 reference."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contract.model import reference_forward
from contract.numerics import Numerics
from support.engine import FLINT_KERNELS, Answer, Pass, run_engine
from support.wide import WIDE
from tinymodel.specs import config_json

# One prompt fills more than the GEMV takes in a launch, the other less.
LENGTHS = (45, 7)
NEW_TOKENS = 12
# How much further than stock layers on BF16 weights an engine may be from float64.
RMS_RATIO = 1.25
MAX_RATIO = 1.5
ENGINE = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64]},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(10, WIDE.vocab_size, n).tolist() for n in LENGTHS]


def errors(
    answers: list[Answer], prompts: list[list[int]], weights: Path
) -> np.ndarray:
    """What each token's log-probability is off by, prompts and new tokens.

    Args:
        weights: The dequantized checkpoint, which BF16 holds exactly.
    """
    tensors = load_file(weights / "model.safetensors", "cuda")
    found = []
    for answer, prompt in zip(answers, prompts, strict=True):
        ids = prompt + answer.token_ids
        with torch.device("cuda"):
            logits = reference_forward(tensors, config_json(WIDE), ids, Numerics.EXACT)
            following = torch.tensor(ids[1:])[:, None]
        exact = logits.log_softmax(-1)[:-1].gather(1, following)[:, 0].cpu().numpy()
        got = np.append(answer.next_token_logprobs(prompt), answer.logprobs)
        found.append(got - exact)
    return np.concatenate(found)


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
    (ours,) = run_engine(passes, **gguf, **ENGINE, **GRAPHS, **FLINT_KERNELS)
    (theirs,) = run_engine(passes, model=str(bf16), **ENGINE)
    ours_off, theirs_off = errors(ours, prompts, bf16), errors(theirs, prompts, bf16)
    rms = [np.sqrt(np.mean(e**2)) for e in (ours_off, theirs_off)]
    worst = [np.abs(e).max() for e in (ours_off, theirs_off)]
    print(f"ours and stock: rms {rms}, largest {worst}")
    assert not np.array_equal(ours_off, theirs_off), "both engines ran stock layers"
    assert rms[0] <= RMS_RATIO * rms[1]
    assert worst[0] <= MAX_RATIO * worst[1]
