# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Comparisons of an engine's logits with transformers' Flint class.

Float32 leaves no room for a wrong model: the largest difference seen is 2e-5, and
a window off by one, a sink left out or RoPE on a full layer is 0.1 or more. In
bfloat16 both engines round, at different places, so the engine is held to
transformers' own distance from float32.
"""

from pathlib import Path

import numpy as np

from support.engine import Answer
from tinymodel.reference import PromptReference, load_reference

_REFERENCE = Path(__file__).parents[1] / "reference"
FLOAT32_TOLERANCE = 1e-4
# Two independent roundings differ by sqrt(2) of one; the rest is for the sample.
BFLOAT16_RMS_RATIO = 2.0
BFLOAT16_MAX_RATIO = 3.0


def references(spec: str, family: str, dtype: str) -> list[PromptReference]:
    """Reads what transformers' Flint class says about the stored prompts."""
    return load_reference(_REFERENCE / f"{spec}-{family}.safetensors", dtype)


def prompts_of(refs: list[PromptReference]) -> list[list[int]]:
    """Returns the prompts as token ids."""
    return [r.prompt_ids.tolist() for r in refs]


def assert_float32(answers: list[Answer], refs: list[PromptReference]) -> None:
    """Holds prompt logprobs, likeliest tokens and greedy continuations to `refs`."""
    for answer, ref in zip(answers, refs, strict=True):
        got = answer.next_token_logprobs(ref.prompt_ids.tolist())
        np.testing.assert_allclose(
            got, ref.token_logprobs, rtol=0, atol=FLOAT32_TOLERANCE
        )
        for position, ids, logprobs in zip(
            answer.prompt_logprobs, ref.top_ids, ref.top_logprobs, strict=True
        ):
            for token, logprob in zip(ids.tolist(), logprobs, strict=True):
                # Ties at rounding level may swap the last of the likeliest.
                if token in position:
                    assert abs(position[token] - logprob) < FLOAT32_TOLERANCE
                else:
                    assert token == ids[-1]
        assert_greedy(answer, ref)


def assert_greedy(answer: Answer, ref: PromptReference) -> None:
    """Holds the greedy tokens and their logprobs to `ref`."""
    assert answer.token_ids == ref.greedy_ids.tolist()
    np.testing.assert_allclose(
        answer.logprobs, ref.greedy_logprobs, rtol=0, atol=FLOAT32_TOLERANCE
    )


def assert_bfloat16(
    answers: list[Answer], refs: list[PromptReference], exact: list[PromptReference]
) -> None:
    """Holds an engine that rounds to the distance of another one from float32.

    Args:
        answers: What the engine says, with prompt logprobs.
        refs: What transformers says in bfloat16.
        exact: What transformers says in float32.
    """
    prompts = prompts_of(refs)
    truth = np.concatenate([r.token_logprobs for r in exact])
    theirs = np.concatenate([r.token_logprobs for r in refs]) - truth
    ours = np.concatenate(
        [a.next_token_logprobs(p) for a, p in zip(answers, prompts, strict=True)]
    )
    ours -= truth
    rms = [np.sqrt(np.mean(e**2)) for e in (ours, theirs)]
    assert rms[0] <= BFLOAT16_RMS_RATIO * rms[1]
    assert np.abs(ours).max() <= BFLOAT16_MAX_RATIO * np.abs(theirs).max()
    # Greedy paths part only where the reference itself was undecided.
    undecided = 2 * np.abs(theirs).max()
    for answer, ref in zip(answers, refs, strict=True):
        for got, wanted, margin in zip(
            answer.token_ids, ref.greedy_ids, ref.greedy_margins, strict=True
        ):
            if got != wanted:
                assert margin <= undecided
                break
