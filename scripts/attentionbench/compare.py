# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The comparison: every contender on every case, checked, timed, as a table."""

import time

import torch
from tqdm import tqdm

from attentionbench.peers import Contender
from attentionbench.problems import Case, Inputs
from gemvbench.table import Rows
from gemvbench.timing import graph_us
from gemvbench.tune import Results

# More than rounding P and the output to BF16 explains.
_WRONG = 2e-2
# Microseconds that the launches of a graph should take together, about.
_GRAPH_US = 4000.0
_BANDWIDTH = 3.0e6  # bytes a microsecond, to guess how long a case takes


def launches(case: Case) -> int:
    """How many to capture: few of the long ones."""
    return max(2, min(48, int(_GRAPH_US / (4 + case.n_bytes / _BANDWIDTH))))


def compare(
    results: Results,
    cases: list[Case],
    kinds: list[type[Contender]],
    seconds: float,
) -> None:
    """Adds a row for each case and contender.

    A contender that fails is recorded with its error and left out of that case. What
    `seconds` do not suffice for is left out, and said.
    """
    end = time.monotonic() + seconds
    for case in tqdm(cases, desc="compare"):
        if time.monotonic() > end:
            tqdm.write(f"no time left for {case}")
            results.failures.append(vars(case) | {"error": "no time left"})
            continue
        inputs = Inputs.rotated(case)
        expected = inputs[0].expected(case.window)
        for kind in kinds:
            _time(results, case, kind, inputs, expected)
        results.save()
        del inputs
        torch.cuda.empty_cache()


def _time(
    results: Results,
    case: Case,
    kind: type[Contender],
    inputs: list[Inputs],
    expected: torch.Tensor,
) -> None:
    try:
        contenders = [kind(case, x) for x in inputs]
        inputs[0].out.fill_(float("nan"))
        contenders[0]()
        error = (inputs[0].out[0].double() - expected).norm() / expected.norm()
        us = graph_us(list(contenders), launches(case))
        results.add(
            case.n_bytes,
            us,
            **vars(case),
            contender=kind.name,
            error=float(f"{error.item():.1e}"),
            right=error.item() < _WRONG,
        )
    except Exception as error:
        # A peer may lack a library or a shape; the others still count.
        text = f"{type(error).__name__}: {error}"[:300]
        tqdm.write(f"{kind.name} on {case}: {text}")
        results.failures.append(vars(case) | {"contender": kind.name, "error": text})


def _cell(rows: Rows) -> str:
    if not rows:
        return "-"
    mark = "" if rows[0]["right"] else "!"
    return f"{rows[0]['us']:.2f} {rows[0]['percent']:.0f}%{mark}"


def text_table(rows: Rows) -> str:
    """Microseconds and percent of the copy bandwidth, a line a case."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    head = "".join(f"{name:>16}" for name in names)
    lines = [f"{'layer':<8}{'batch':>6}{'context':>9}{head}"]
    for case in dict.fromkeys(_case(row) for row in rows):
        here = [row for row in rows if _case(row) == case]
        cells = [_cell([r for r in here if r["contender"] == n]) for n in names]
        layer = "sliding" if case.sliding else "full"
        text = "".join(f"{cell:>16}" for cell in cells)
        lines.append(f"{layer:<8}{case.batch:>6}{case.context:>9}{text}")
    lines.append("us and percent of the copy bandwidth; ! wrong results")
    return "\n".join(lines)


def _case(row: dict) -> Case:
    return Case(row["batch"], row["context"], row["sliding"])
