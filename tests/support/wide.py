# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A model of four layers with every width of Flint, but for the count of experts.

Only machines with a GPU run it: each of its checkpoints takes a minute to write.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from contract.model import reference_forward
from contract.numerics import Numerics
from enginebench.models import FLINT
from support.engine import Answer
from tinymodel.specs import FULL, SLIDING, config_json

WIDE = replace(
    FLINT,
    name="wide",
    layer_types=(FULL, SLIDING, SLIDING, FULL),
    mlp_only_layers=(0, 1),
    num_experts=16,
    max_position_embeddings=4096,
    sink_range=(3.0, 9.0),
)

# How much further than stock layers an engine may be from float64.
RMS_RATIO, MAX_RATIO = 1.25, 1.5


def wide_model(
    checkpoint: Callable[[str, str, str], Path], form: str
) -> dict[str, str]:
    """An engine's arguments for the NVFP4 weights, as "gguf" or "safetensors"."""
    bf16 = str(checkpoint("wide", "nvfp4", "safetensors"))
    model = str(checkpoint("wide", "nvfp4", form))
    return {"model": model, "hf_config_path": bf16, "tokenizer": bf16}


def wide_errors(
    answers: list[Answer], prompts: list[list[int]], weights: Path
) -> np.ndarray:
    """What each token's log-probability is off by.

    New tokens, and prompts where the engine was asked for theirs.

    Args:
        answers: The engine's.
        prompts: Token ids.
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
        got = np.array(answer.logprobs)
        if answer.prompt_logprobs:
            got = np.append(answer.next_token_logprobs(prompt), got)
        found.append(got - exact[-len(got) :])
    return np.concatenate(found)


def assert_no_further(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Holds an engine's errors to those of stock layers, and the engines apart."""
    rms = [np.sqrt(np.mean(e**2)) for e in (ours, theirs)]
    worst = [np.abs(e).max() for e in (ours, theirs)]
    print(f"ours and stock: rms {rms}, largest {worst}")
    assert not np.array_equal(ours, theirs), "both engines ran stock layers"
    assert rms[0] <= RMS_RATIO * rms[1]
    assert worst[0] <= MAX_RATIO * worst[1]
