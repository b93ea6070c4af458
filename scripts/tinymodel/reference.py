# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""How an independent engine's results on a tiny model are stored and read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

TOP = 5
GREEDY_TOKENS = 32


@dataclass(frozen=True)
class PromptReference:
    """What the engine says about one prompt of T tokens.

    Attributes:
        prompt_ids: int16 [T].
        token_logprobs: float32 [T - 1]; entry i is the log-probability of token
            i + 1 after tokens 0 to i.
        top_ids: int16 [T - 1, TOP], the likeliest tokens there, best first.
        top_logprobs: float32 [T - 1, TOP].
        greedy_ids: int16 [GREEDY_TOKENS], the greedy continuation; it does not
            stop at an end-of-text token.
        greedy_logprobs: float32 [GREEDY_TOKENS].
        greedy_margins: float32 [GREEDY_TOKENS], how far each greedy token's logit
            is above the second best.
    """

    prompt_ids: NDArray[np.int16]
    token_logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int16]
    top_logprobs: NDArray[np.float32]
    greedy_ids: NDArray[np.int16]
    greedy_logprobs: NDArray[np.float32]
    greedy_margins: NDArray[np.float32]


_PER_POSITION = ("token_logprobs", "top_ids", "top_logprobs")
_GREEDY = ("greedy_ids", "greedy_logprobs", "greedy_margins")


def save_reference(
    path: Path, results: Mapping[str, Sequence[PromptReference]]
) -> None:
    """Writes the results on the same prompts by dtype ("float32", "bfloat16")."""
    prompts = [r.prompt_ids for r in next(iter(results.values()))]
    arrays: dict[str, NDArray[Any]] = {
        "prompt_ids": np.concatenate(prompts),
        "prompt_lengths": np.array([len(p) for p in prompts], np.int32),
    }
    for dtype, references in results.items():
        for field in _PER_POSITION:
            parts = [getattr(r, field) for r in references]
            arrays[f"{dtype}.{field}"] = np.concatenate(parts)
        for field in _GREEDY:
            parts = [getattr(r, field) for r in references]
            arrays[f"{dtype}.{field}"] = np.stack(parts)
    save_file(arrays, path)
    path.chmod(0o644)  # the library leaves it readable by its owner alone


def load_reference(path: Path, dtype: str) -> list[PromptReference]:
    """Reads the results of one dtype, in the order of the prompts."""
    arrays = load_file(path)
    references = []
    start = 0
    for i, length in enumerate(arrays["prompt_lengths"].tolist()):
        # Each earlier prompt has one position less than it has tokens.
        rows = slice(start - i, start - i + length - 1)
        references.append(
            PromptReference(
                prompt_ids=arrays["prompt_ids"][start : start + length],
                **{f: arrays[f"{dtype}.{f}"][rows] for f in _PER_POSITION},
                **{f: arrays[f"{dtype}.{f}"][i] for f in _GREEDY},
            )
        )
        start += length
    return references
