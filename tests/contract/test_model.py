# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The whole-model reference, judged by transformers' Flint class (stored)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.model import reference_forward
from contract.numerics import Numerics
from contract.tiny import tiny_weights
from tinymodel import SPECS
from tinymodel.reference import PromptReference, load_reference
from tinymodel.specs import config_json

STORED = Path(__file__).resolve().parent.parent / "reference"
SEED = 0
# float32 against float64, in the log-probability of a token.
TOLERANCE = 1e-4

CASES = [(spec, family) for spec in SPECS for family in ("bf16", "nvfp4")]


def stored(spec: str, family: str, dtype: str) -> list[PromptReference]:
    return load_reference(STORED / f"{spec}-{family}.safetensors", dtype)


def logprobs_of(
    spec: str,
    family: str,
    token_ids: np.ndarray,
    numerics: Numerics = Numerics.EXACT,
    forgotten: str | None = None,
    **changes: Any,
) -> torch.Tensor:
    """Returns log-probabilities [T, vocab].

    Args:
        forgotten: Part of the names of weights that are replaced by ones.
        changes: Config fields that are replaced.
    """
    config = config_json(SPECS[spec]) | changes
    weights = tiny_weights(SPECS[spec], SEED, family)
    for name, weight in weights.items():
        if forgotten and forgotten in name:
            assert isinstance(weight, torch.Tensor)
            weights[name] = torch.ones_like(weight)
    logits = reference_forward(weights, config, token_ids.tolist(), numerics)
    return logits.log_softmax(-1)


def errors(logprobs: torch.Tensor, reference: PromptReference) -> np.ndarray:
    """Returns the errors at the stored tokens of each prompt position, [T - 1, 6]."""
    rows = torch.arange(len(reference.prompt_ids) - 1)
    following = torch.from_numpy(reference.prompt_ids[1:]).long()
    top = torch.from_numpy(reference.top_ids).long()
    return np.column_stack(
        (
            logprobs[rows, following].numpy() - reference.token_logprobs,
            logprobs[rows].gather(1, top).numpy() - reference.top_logprobs,
        )
    )


@pytest.mark.parametrize(("spec", "family"), CASES)
def test_float32_agrees(spec: str, family: str) -> None:
    for reference in stored(spec, family, "float32"):
        ids = np.concatenate((reference.prompt_ids, reference.greedy_ids))
        logprobs = logprobs_of(spec, family, ids)
        assert np.abs(errors(logprobs, reference)).max() < TOLERANCE
        answers = logprobs[len(reference.prompt_ids) - 1 : -1].max(-1)
        assert np.array_equal(answers.indices.numpy(), reference.greedy_ids)
        error = answers.values.numpy() - reference.greedy_logprobs
        assert np.abs(error).max() < TOLERANCE


@pytest.mark.parametrize("family", ["bf16", "nvfp4"])
def test_the_contract_rounds_no_more_than_bfloat16_does(family: str) -> None:
    """Both err at random about the exact values, so neither is much further off."""
    ours, theirs = [], []
    pairs = zip(
        stored("tiny", family, "float32"),
        stored("tiny", family, "bfloat16"),
        strict=True,
    )
    for exact, bfloat16 in pairs:
        logprobs = logprobs_of("tiny", family, exact.prompt_ids, Numerics.CONTRACT)
        ours.append(errors(logprobs, exact)[:, 0])
        theirs.append(bfloat16.token_logprobs - exact.token_logprobs)
    ours_rms, theirs_rms = (
        np.sqrt(np.mean(np.square(np.concatenate(e)))) for e in (ours, theirs)
    )
    assert TOLERANCE < ours_rms < theirs_rms


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 16},
        {"sliding_window": 18},
        {"no_rope_layer_indices": []},
        {"no_rope_layer_indices": [0, 1, 2, 3, 4]},
        {"rope_parameters": {"rope_theta": 20000.0}},
        {"layer_types": ["full_attention"] * 5},
        {"num_experts_per_tok": 3},
        {"norm_topk_prob": False},
        {"rms_norm_eps": 1e-3},
    ],
)
def test_a_wrong_config_is_seen(changes: dict[str, Any]) -> None:
    """What the stored logits must catch in an engine, they catch here."""
    reference = stored("tiny", "bf16", "float32")[-1]
    logprobs = logprobs_of("tiny", "bf16", reference.prompt_ids, **changes)
    assert np.abs(errors(logprobs, reference)).max() > 10 * TOLERANCE


@pytest.mark.parametrize(
    "forgotten",
    [
        "softmax_offset",
        "layers.3.self_attn.softmax_offset",
        "q_norm",
        "k_norm",
        "layers.4.post_attention_layernorm",
        "model.norm",
        "layers.2.mlp.gate.",
        "layers.3.mlp.experts.5.up_proj",
    ],
)
def test_a_weight_that_is_not_loaded_is_seen(forgotten: str) -> None:
    reference = stored("tiny", "bf16", "float32")[-1]
    ids = reference.prompt_ids
    logprobs = logprobs_of("tiny", "bf16", ids, forgotten=forgotten)
    assert np.abs(errors(logprobs, reference)).max() > 100 * TOLERANCE
