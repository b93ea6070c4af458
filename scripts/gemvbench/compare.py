# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The comparison: every contender on every layer, checked, timed, as a table."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from gemvbench.peers import Contender, Ours
from gemvbench.shapes import Layer
from gemvbench.table import Rows
from gemvbench.timing import Timed, capture, us_in_turn
from gemvbench.tune import Results
from gemvbench.weights import Weight, copies_of, weight_bytes

# More than rounding to BF16 once or twice explains.
_WRONG = 1e-2
# Logits are for the tokens of one step, not for a prompt.
_HEAD_TOKENS = 256


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
    Layers that `seconds` do not suffice for are left out, and that is said.
    """
    end = time.monotonic() + seconds
    for layer in tqdm(layers, desc="compare"):
        if time.monotonic() > end:
            tqdm.write(f"no time left for {layer.name}")
            continue
        count = copies_of(weight_bytes(layer.n, layer.k, False))
        weights = [Weight.random(layer.n, layer.k) for _ in range(count)]
        entries = [_Entry(kind, layer, weights) for kind in kinds]
        for m in tokens:
            if not layer.fp32_out or m <= _HEAD_TOKENS:
                _time(results, layer, entries, m)
        for entry in entries:
            if entry.failure is not None:
                tqdm.write(f"{entry.kind.name} on {layer.name}: {entry.failure}")
                row = _common(layer) | {"contender": entry.kind.name}
                results.failures.append(row | {"error": entry.failure})
        results.save()
        del entries
        torch.cuda.empty_cache()


class _Entry:
    """One contender on copies of a layer's weight, until it fails.

    A peer may lack a library or a shape; the others still count.

    Attributes:
        failure: The error that put it out, or None.
    """

    def __init__(
        self, kind: type[Contender], layer: Layer, weights: list[Weight]
    ) -> None:
        self.kind = kind
        self.failure: str | None = None
        self._layer, self._weight = layer, weights[0]
        self._contenders: list[Contender] = []
        used = weights[: copies_of(weight_bytes(layer.n, layer.k, kind.bf16))]
        with self._noting():
            self._contenders = [kind(layer, weight) for weight in used]

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Keeps an error instead of raising it."""
        try:
            yield
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"[:300]

    def capture(self, x: torch.Tensor) -> tuple[Timed, float] | None:
        """A graph of launches on every copy of the weight, and see `_error`.

        None if it fails, or has failed before.
        """
        if self.failure is not None:
            return None
        launches: list[Callable[[], object]] = [
            functools.partial(contender, x) for contender in self._contenders
        ]
        with self._noting():
            error = _error(self._contenders[0], self._weight, x, self._layer)
            return capture(launches), error
        return None


def _common(layer: Layer) -> dict[str, Any]:
    return {"n": layer.n, "k": layer.k, "silu_mul": layer.silu_mul}


def _time(results: Results, layer: Layer, entries: list[_Entry], m: int) -> None:
    """Adds a row for each contender, whose launches are timed in turn."""
    x = torch.randn(m, layer.k, device="cuda").bfloat16()
    captured = [
        (entry.kind, *found) for entry in entries if (found := entry.capture(x))
    ]
    times = us_in_turn([graph for _, graph, _ in captured])
    for (kind, _, error), us in zip(captured, times, strict=True):
        picked = {"path": kind.path(layer, m)} if issubclass(kind, Ours) else {}
        results.add(
            weight_bytes(layer.n, layer.k, kind.bf16),
            us,
            **_common(layer),
            **picked,
            m=m,
            contender=kind.name,
            error=float(f"{error:.1e}"),
            right=error < _WRONG,
        )


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
