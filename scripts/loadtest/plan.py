# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The requests of a load test: the same ones for the same seed."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

# Ids below are a checkpoint's control tokens, as in the benchmarks.
_FIRST_ID = 10
# One in so many requests is a sample, so that every stream meets some.
_SAMPLE_EVERY = 8


class PlanError(ValueError):
    """The server cannot take such requests."""


@dataclass(frozen=True)
class Request:
    """One completion.

    Attributes:
        number: Its place in the plan.
        prompt: Token ids.
        max_tokens: New tokens, all of which must come.
        cancel_after: Close the stream after so many tokens; None to read it all.
        sample: Which of the samples it is, whose log-probabilities are read, or None.
    """

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    cancel_after: int | None = None
    sample: int | None = None

    def __str__(self) -> str:
        return (
            f"request {self.number} ({len(self.prompt)} prompt tokens, "
            f"{self.max_tokens} new ones)"
        )


def check_lengths(options: Namespace, max_model_len: int) -> None:
    """Refuses a plan whose longest request the server would refuse.

    Raises:
        PlanError: If there is one, or if a range is empty.
    """
    for name in ("prompts", "outputs"):
        low, high = getattr(options, name)
        if low > high:
            raise PlanError(f"--{name}: {low} is more than {high}")
    if options.vocabulary <= _FIRST_ID:
        raise PlanError(f"--vocabulary must be more than {_FIRST_ID}")
    longest = options.prompts[1] + options.outputs[1]
    if longest > max_model_len:
        raise PlanError(
            f"the longest request has {longest} tokens, and the server takes "
            f"{max_model_len}: see --prompts and --outputs"
        )


def samples(options: Namespace) -> list[Request]:
    """The requests that are made alone, too; numbered from 0."""
    rng = random.Random(f"samples {options.seed}")
    return [_request(rng, options, n, sample=n) for n in range(options.samples)]


def requests(options: Namespace) -> Iterator[Request]:
    """Requests without an end; samples take turns among them."""
    rng = random.Random(f"load {options.seed}")
    alone = samples(options)
    number = len(alone)
    while True:
        turn, rest = divmod(number, _SAMPLE_EVERY)
        if rest == 0:
            again = alone[turn % len(alone)]
            yield Request(number, again.prompt, again.max_tokens, sample=again.sample)
        else:
            request = _request(rng, options, number)
            if rng.random() < options.cancelled:
                after = rng.randint(1, request.max_tokens)
                request = Request(number, request.prompt, request.max_tokens, after)
            yield request
        number += 1


def _request(
    rng: random.Random, options: Namespace, number: int, sample: int | None = None
) -> Request:
    prompt = rng.choices(
        range(_FIRST_ID, options.vocabulary), k=_length(rng, *options.prompts)
    )
    return Request(number, tuple(prompt), _length(rng, *options.outputs), sample=sample)


def _length(rng: random.Random, low: int, high: int) -> int:
    """As many lengths between 16 and 32 as between 2048 and 4096."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))
