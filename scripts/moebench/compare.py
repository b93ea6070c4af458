# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The comparison: sparse blocks of every contender, checked, timed, as a table."""

import functools
import statistics
from collections.abc import Callable

import torch
from tqdm import tqdm

from enginebench.models import FLINT
from gemvbench.table import Rows
from gemvbench.timing import graph_us
from gemvbench.tune import Results
from moebench.weights import BlockWeights, Sizes, Tokens, chosen, expected, met

# More than the roundings of all steps explain, together.
_WRONG = 2e-2
# So many tokens are checked.
_CHECKED = 8
# vLLM wants a step to hold a request of each of its sequences.
_LEAST_TOKENS = 8192

# On Flint's kernels: with ModelOpt's codes, and with packed ones.
OURS = ("ours", "packed")

Block = Callable[[Tokens], tuple[torch.Tensor, torch.Tensor]]


def make_blocks(
    name: str, weights: list[BlockWeights], most_tokens: int
) -> list[Block]:
    """The blocks of one contender: ours, or one of vLLM's MoE backends."""
    if name in OURS:
        from moebench.ours import Ours

        return [Ours(w, name == "packed") for w in weights]
    from moebench.stock import StockModel

    model = StockModel(f"stock-{name}", FLINT, max(most_tokens, _LEAST_TOKENS))
    return [model.block(w) for w in weights]


def error(block: Block, tokens: Tokens, weights: BlockWeights) -> float:
    """Norm of the error over that of the result; the median of some tokens.

    A token whose last expert rounding exchanged for its next one does not count: its
    error is large, and both answers are right.
    """
    few = Tokens(tokens.x[:_CHECKED], tokens.residual[:_CHECKED])
    found = block(tokens)[0][:_CHECKED].float()
    wanted = expected(few, weights)
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    # NaN is no number to sort by.
    return statistics.median(errors.nan_to_num(nan=float("inf")).tolist())


def compare(results: Results, names: list[str], tokens: list[int], copies: int) -> None:
    """Adds a row for each contender and count of tokens.

    A contender that fails is recorded with its error, at the count where it did. What
    there is no time for is left out, and said.

    Args:
        results: Where rows go.
        names: Contenders.
        tokens: Counts of tokens.
        copies: Blocks in rotation: with other tokens each, so that each launch reads
            other experts.
    """
    sizes = Sizes.of(FLINT)
    weights = [BlockWeights.random(sizes) for _ in range(copies)]
    inputs = {m: [Tokens.random(m, sizes.hidden) for _ in weights] for m in tokens}
    experts = {
        m: statistics.mean(
            met(chosen(t.normed(w), w)) for t, w in zip(inputs[m], weights)
        )
        for m in tokens
    }
    for name in names:
        if results.out_of_time(name):
            continue
        done = 0
        try:
            blocks = make_blocks(name, weights, max(tokens))
            for m in tqdm(tokens, desc=name):
                if results.out_of_time(f"{name} at {m} tokens"):
                    break
                done = m
                wrong = error(blocks[0], inputs[m][0], weights[0])
                calls: list[Callable[[], object]] = [
                    functools.partial(b, t) for b, t in zip(blocks, inputs[m])
                ]
                us = graph_us(calls)
                results.add(
                    round(sizes.n_bytes(experts[m])),
                    us,
                    m=m,
                    contender=name,
                    experts=round(experts[m], 1),
                    error=float(f"{wrong:.1e}"),
                    right=wrong < _WRONG,
                )
                results.save()
            del blocks
        except Exception as problem:
            # A peer may lack a library or a shape; the others still count.
            text = f"{type(problem).__name__}: {problem}"[:300]
            tqdm.write(f"{name} at {done} tokens: {text}")
            results.failures.append({"contender": name, "m": done, "error": text})
        results.save()
        torch.cuda.empty_cache()


def _cell(rows: Rows) -> str:
    if not rows:
        return "-"
    row = rows[0]
    return f"{row['us']:.1f} {row['percent']:.0f}%{'' if row['right'] else '!'}"


def text_table(rows: Rows) -> str:
    """Microseconds and percent of the copy bandwidth, a line a count of tokens."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    head = "".join(f"{name:>15}" for name in names)
    lines = [f"{'tokens':>6}{'experts':>9}{'MB':>8}{head}"]
    for m in sorted({row["m"] for row in rows}):
        here = [row for row in rows if row["m"] == m]
        cells = [_cell([r for r in here if r["contender"] == name]) for name in names]
        first = here[0]
        size = first["tb_s"] * first["us"]
        text = "".join(f"{cell:>15}" for cell in cells)
        lines.append(f"{m:>6}{first['experts']:>9.1f}{size:>8.1f}{text}")
    lines.append(
        "us of norm, router, experts and shared expert, and percent of the copy "
        "bandwidth; ! wrong results"
    )
    return "\n".join(lines)
