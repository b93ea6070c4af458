# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The comparison as Markdown."""

from collections.abc import Iterable
from typing import Any

from enginebench.engines import ENGINES
from enginebench.results import FIRST, STEP, milliseconds


def title(name: str) -> str:
    """An engine's name in tables and plots."""
    return ENGINES[name].title if name in ENGINES else name


def decode_points(engines: dict[str, dict[str, Any]]) -> list[tuple[int, int]]:
    """Context and batch of every decode point that any engine has, in order."""
    rows = (row for engine in engines.values() for row in engine.get(STEP, ()))
    return sorted({(row["context"], row["batch"]) for row in rows})


def _cells(times: list[float | None]) -> list[str]:
    """Milliseconds, the lowest in bold."""
    best = min((ms for ms in times if ms is not None), default=None)
    cells = []
    for ms in times:
        text = "-" if ms is None else f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"
        cells.append(f"**{text}**" if ms is not None and ms == best else text)
    return cells


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _gib(engine: dict[str, Any], name: str) -> str:
    memory = engine.get("memory")
    return "-" if memory is None else f"{memory[name] / 2**30:.1f}"


def markdown(content: dict[str, Any]) -> str:
    """Milliseconds a token, milliseconds to the first token, memory and start-up."""
    engines = content["engines"]
    names = list(engines)
    lines = [
        _line(["", *map(title, names)]),
        _line(["---"] * (len(names) + 1)),
    ]
    for context, batch in decode_points(engines):
        times = [
            milliseconds(engines[n], STEP, context=context, batch=batch) for n in names
        ]
        label = f"ms a token, context {context}, batch {batch}"
        lines.append(_line([label, *_cells(times)]))
    prompts = {r["prompt"] for e in engines.values() for r in e.get(FIRST, ())}
    for prompt in sorted(prompts):
        times = [milliseconds(engines[n], FIRST, prompt=prompt) for n in names]
        lines.append(_line([f"ms to first token, prompt {prompt}", *_cells(times)]))
    graphs = [engines[n].get("cuda_graph") for n in names]
    if point := next(filter(None, graphs), None):
        label = (
            f"GPU ms of a step's CUDA graph, context {point['context']}, "
            f"batch {point['batch']}"
        )
        lines.append(_line([label, *_cells([g and g["ms"] for g in graphs])]))
        launches = [g and g.get("host_ms") for g in graphs]
        if any(launches):
            lines.append(_line(["host ms to launch it", *_cells(launches)]))
    for label, key in (("GiB of weights", "weights"), ("GiB of KV cache", "kv_cache")):
        lines.append(_line([label, *(_gib(engines[n], key) for n in names)]))
    starts = (engines[n].get("startup_s") for n in names)
    cells = ("-" if s is None else f"{s:.0f}" for s in starts)
    lines.append(_line(["seconds to start", *cells]))
    notes = []
    if together := [title(n) for n in names if engines[n].get("started_together")]:
        notes.append(
            f"Started at the same time, which takes longer: {'; '.join(together)}"
        )
    notes += [
        f"{title(n)}: {engines[n]['error']}" for n in names if "error" in engines[n]
    ]
    return "\n".join([*lines, *notes])
