# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Answers under load against answers to the same requests alone.

Greedy decoding is exact only as long as sums are: a batch of another size takes other
kernels and other orders of additions, which moves every log-probability by rounding
errors. So where two tokens are almost equally likely, either answer is right, and from
there on the texts differ. A difference is all right only where each run puts the
other's token that near to its own; and before it, the same token must have almost the
same log-probability in both runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from loadtest.stream import Answer


@dataclass(frozen=True)
class Difference:
    """How one answer differs from the same request's alone.

    Attributes:
        length: Tokens of the answer.
        equal: Tokens before the first that differs.
        drift: Largest difference of the log-probabilities of these.
        margin: How much less likely the one run's token is to the other run, where
            they differ first, the larger of both; None where they do not. At least as
            much, where it is not among the likeliest that the server names.
    """

    length: int
    equal: int
    drift: float
    margin: float | None


def compare(reference: Answer, answer: Answer) -> Difference:
    """Compares two answers of the same length, with log-probabilities."""
    pairs = zip(reference.tokens, answer.tokens, strict=True)
    equal = next((n for n, (a, b) in enumerate(pairs) if a != b), len(answer.tokens))
    drift = max(
        (
            abs(a - b)
            for a, b in zip(
                reference.logprobs[:equal], answer.logprobs[:equal], strict=True
            )
        ),
        default=0.0,
    )
    margin = None
    if equal < len(answer.tokens):
        margin = max(
            _margin(reference, equal, answer.tokens[equal]),
            _margin(answer, equal, reference.tokens[equal]),
        )
    return Difference(len(answer.tokens), equal, drift, margin)


def _margin(answer: Answer, place: int, other: int) -> float:
    likeliest = answer.likeliest[place]
    return answer.logprobs[place] - likeliest.get(other, min(likeliest.values()))


@dataclass
class Agreement:
    """How a set of answers agrees with the same requests alone.

    Attributes:
        answers: How many there are.
        identical: How many have the same tokens throughout.
        equal_share: Share of all tokens that stand before the first difference.
        drift: Largest difference of an equal token's log-probability.
        margin: Largest margin where answers differ; None where none does.
        wrong: What is not explained by rounding, one line each.
    """

    answers: int = 0
    identical: int = 0
    equal_share: float = 0.0
    drift: float = 0.0
    margin: float | None = None
    wrong: list[str] = field(default_factory=list)


def agreement(
    references: Sequence[Answer],
    answers: Iterable[tuple[int, Answer]],
    bound: float,
    when: str,
) -> Agreement:
    """Compares answers, each with the number of its sample.

    Args:
        bound: How far log-probabilities may be apart.
        when: When the answers were given, for messages.
    """
    found = Agreement()
    equal = total = 0
    for sample, answer in answers:
        it = compare(references[sample], answer)
        found.answers += 1
        found.identical += it.margin is None
        equal += it.equal
        total += it.length
        found.drift = max(found.drift, it.drift)
        if it.margin is not None:
            found.margin = max(it.margin, found.margin or 0.0)
            if it.margin > bound:
                found.wrong.append(
                    f"sample {sample} {when}: token {it.equal} is another one, by "
                    f"{it.margin:.3g} nats less likely"
                )
        if it.drift > bound:
            found.wrong.append(
                f"sample {sample} {when}: an equal token's log-probability differs by "
                f"{it.drift:.3g} nats"
            )
    found.equal_share = equal / total if total else 0.0
    return found
