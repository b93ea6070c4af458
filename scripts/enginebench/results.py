# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The JSON file of a comparison: always whole, and never poorer than before."""

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
# Keys of an engine's measured points.
STEP, FIRST = "time_per_output_token", "time_to_first_token"
MEASURED = {STEP, FIRST}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_comparison(path: Path, weights: str) -> dict[str, Any]:
    """The comparison at `path`, or an empty one where there is no such file.

    Raises:
        ValueError: If the file is of a model with other weights.
    """
    if not path.exists():
        return {"weights": weights, "engines": {}}
    content = json.loads(path.read_text())
    if content.get("weights") != weights or "engines" not in content:
        raise ValueError(f"{path} is no comparison of {weights} engines: name another")
    return content


def add_engine(path: Path, weights: str, name: str, engine: dict[str, Any]) -> None:
    """Adds one engine's measurements to the comparison, and saves it.

    Engines of earlier runs stay, except one of this name: what it measured gives way
    to anything but nothing. Each has its own machine and command, so that a cut
    comparison can be completed on another day.
    """
    content = read_comparison(path, weights)
    engines = content["engines"]
    if MEASURED.isdisjoint(engine) and not MEASURED.isdisjoint(engines.get(name, {})):
        return
    engines[name] = engine
    write_json(path, content)


def milliseconds(engine: dict[str, Any], key: str, **wanted: int) -> float | None:
    """The time of one point of an engine, or None where it has none."""
    for row in engine.get(key, ()):
        if all(row[name] == value for name, value in wanted.items()):
            return row["ms"]
    return None
