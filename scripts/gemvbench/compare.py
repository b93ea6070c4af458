# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The comparison: every contender on every layer, checked, timed, as a table."""

import functools
import time

import torch
from tqdm import tqdm

from gemvbench.peers import Contender, Ours
from gemvbench.shapes import Layer
from gemvbench.table import Rows
from gemvbench.timing import graph_us
from gemvbench.tune import Results
from gemvbench.weights import Weight, copies_of, weight_bytes

# More than rounding to BF16 once or twice explains.
_WRONG = 1e-2


def _error(
    contender: Contender, weight: Weight, x: torch.Tensor, layer: Layer
) -> float:
    """Norm of the error over that of the float64 result."""
    y = x.double() @ weight.dequantized().double().T
    if not contender.bf16:
        y = y * weight.global_scale.item()
    if layer.silu_mul:
        gate, up = y.bfloat16().double().chunk(2, dim=1)
        y = gate * torch.sigmoid(gate) * up
    return ((contender(x).double() - y).norm() / y.norm()).item()


def compare(
    results: Results,
    layers: list[Layer],
    kinds: list[type[Contender]],
    tokens: list[int],
    seconds: float,
) -> None:
    """Adds a row for each layer, contender and count of tokens.

    A contender that fails is recorded with its error and left out of that layer.
    What `seconds` do not suffice for is left out, and said.
    """
    end = time.monotonic() + seconds
    for layer in tqdm(layers, desc="compare"):
        count = copies_of(weight_bytes(layer.n, layer.k, False))
        weights = [Weight.random(layer.n, layer.k) for _ in range(count)]
        for kind in kinds:
            if time.monotonic() > end:
                tqdm.write(f"no time left for {kind.name} on {layer.name}")
                continue
            _time(results, layer, kind, weights, tokens)
        results.save()


def _time(
    results: Results,
    layer: Layer,
    kind: type[Contender],
    weights: list[Weight],
    tokens: list[int],
) -> None:
    size = weight_bytes(layer.n, layer.k, kind.bf16)
    used = weights[: copies_of(size)]
    common = {"n": layer.n, "k": layer.k, "silu_mul": layer.silu_mul}
    try:
        contenders = [kind(layer, weight) for weight in used]
        for m in tokens:
            if layer.fp32_out and m > 256:
                continue
            x = torch.randn(m, layer.k, device="cuda").bfloat16()
            error = _error(contenders[0], used[0], x, layer)
            us = graph_us([functools.partial(c, x) for c in contenders])
            picked = {"path": kind.path(layer, m)} if issubclass(kind, Ours) else {}
            results.add(
                size,
                us,
                **common,
                **picked,
                m=m,
                contender=kind.name,
                error=float(f"{error:.1e}"),
                right=error < _WRONG,
            )
    except Exception as error:
        # A peer may lack a library or a shape; the others still count.
        text = f"{type(error).__name__}: {error}"[:300]
        tqdm.write(f"{kind.name} on {layer.name}: {text}")
        results.failures.append(common | {"contender": kind.name, "error": text})
    torch.cuda.empty_cache()


def _cell(rows: Rows, best: float) -> str:
    if not rows:
        return "-"
    row = rows[0]
    mark = "" if row["right"] else "!"
    slow = "*" if row["contender"] == Ours.name and row["us"] > 1.05 * best else ""
    return f"{row['us']:.2f} {row['percent']:.0f}%{mark}{slow}"


def text_table(rows: Rows, layers: list[Layer]) -> str:
    """Microseconds and percent of the copy bandwidth, a line a layer and M."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = [f"{'N x K':<20}{'M':>5}" + "".join(f"{name:>15}" for name in names)]
    for layer in layers:
        shape = (layer.n, layer.k, layer.silu_mul)
        mine = [r for r in rows if (r["n"], r["k"], r["silu_mul"]) == shape]
        for m in sorted({row["m"] for row in mine}):
            here = [row for row in mine if row["m"] == m]
            best = min(row["us"] for row in here)
            cells = [[r for r in here if r["contender"] == name] for name in names]
            text = "".join(f"{_cell(cell, best):>15}" for cell in cells)
            lines.append(f"{layer.name:<20}{m:>5}{text}")
    lines.append(
        "us and percent of the copy bandwidth; ! wrong results; * more than 5 % slower "
        "than the fastest"
    )
    return "\n".join(lines)
