# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tuned tables: from measured times to the data that the overlay reads."""

import collections
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from vllm.models.flint.ops.gemv import tables

Rows = list[dict[str, Any]]
# The two ways to compute on the same bytes; see `tune.time_paths`.
GEMV, PARTNER = "gemv", "partner"
# The partner's own choice stays where others gain less: times differ as much by run.
_WORTH = 0.95


def read_results(paths: Iterable[Path]) -> dict[str, Any]:
    """Merges result files of one GPU; of equal measurements the last one counts.

    Raises:
        ValueError: If the files come from different GPUs.
    """
    merged: dict[str, Any] = {"rows": []}
    for path in paths:
        result = json.loads(path.read_text())
        if merged.setdefault("gpu", result["gpu"]) != result["gpu"]:
            raise ValueError(f"{path} is from a {result['gpu']}, not {merged['gpu']}")
        merged["copy_tb_s"] = result["copy_tb_s"]
        merged["rows"] += result["rows"]
    return merged


def _shape(row: dict[str, Any]) -> tables.Shape:
    n, k, silu_mul = row["n"], row["k"], row["silu_mul"]
    return tables.Shape(n, k, silu_mul, row["form"] == "bf16", row["layout"])


def fastest(rows: Rows) -> list[dict[str, Any]]:
    """The schedule that is fastest over all measured M, for each count of tiles."""
    times: dict[int, dict[tuple, dict[int, float]]] = collections.defaultdict(dict)
    for row in rows:
        config = tuple(row["config"].items())
        by_m = times[row["config"]["nt"]].setdefault(config, {})
        by_m[row["m"]] = row["us"]
    found = []
    for _, configs in sorted(times.items()):
        complete = max(len(by_m) for by_m in configs.values())
        full = [item for item in configs.items() if len(item[1]) == complete]
        config, by_m = min(full, key=lambda item: sum(item[1].values()))
        us = {str(m): by_m[m] for m in sorted(by_m)}
        found.append({"config": dict(config), "us": us})
    return found


def fastest_tiles(rows: Rows) -> list[dict[str, Any]]:
    """The partner's fastest tiles at each count of tokens, or its own choice."""
    by_m: dict[int, Rows] = collections.defaultdict(list)
    for row in rows:
        by_m[row["m"]].append(row)
    best = []
    for m in sorted(by_m):
        row = min(by_m[m], key=lambda row: row["us"])
        own = next((other for other in by_m[m] if other.get("partners_own")), row)
        best.append(own if row["us"] > _WORTH * own["us"] else row)
    return [{key: row[key] for key in ("m", "tiles", "us")} for row in best]


def _paths(
    schedules: list[dict[str, Any]], tiles: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Rows of both paths from what was timed of each alone."""
    for schedule in schedules:
        for m, us in schedule["us"].items():
            yield {"m": int(m), "path": GEMV, "us": us}
    for entry in tiles:
        yield {"m": entry["m"], "path": PARTNER, "us": entry["us"]}


def limit_of(rows: Iterable[dict[str, Any]], untuned: int) -> tuple[int, dict]:
    """Up to how many tokens the GEMV is no slower than its partner, and the times."""
    by_m: dict[int, dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        by_m[row["m"]][row["path"]] = row["us"]
    both = {m: t for m, t in sorted(by_m.items()) if len(t) == 2}
    if not both:
        return untuned, {}
    limit = 0
    for m, times in both.items():
        if times[GEMV] > times[PARTNER]:
            break
        limit = m
    return limit, {str(m): times for m, times in both.items()}


def make_table(results: dict[str, Any]) -> dict[str, Any]:
    """The content of a tuned table."""
    kinds: dict[str, dict[tables.Shape, Rows]] = {
        kind: collections.defaultdict(list) for kind in ("config", "tiles", "path")
    }
    for row in results["rows"]:
        kind = next(kind for kind in kinds if kind in row)
        kinds[kind][_shape(row)].append(row)
    shapes = []
    for shape, rows in sorted(kinds["config"].items(), key=lambda s: astuple(s[0])):
        schedules, tiles = fastest(rows), fastest_tiles(kinds["tiles"][shape])
        paths = kinds["path"][shape] or list(_paths(schedules, tiles))
        untuned = 0 if shape.bf16 else tables.DEFAULT_MAX_TOKENS[shape.layout]
        limit, measured = limit_of(paths, untuned)
        entry = asdict(shape) | {"max_tokens": limit, "schedules": schedules}
        shapes.append(entry | {"gemm_tiles": tiles, "paths_us": measured})
    return {
        "gpu": results["gpu"],
        "copy_tb_s": results["copy_tb_s"],
        "written_by": "python3 scripts/gemvbench table",
        "shapes": shapes,
    }


def _with_kept(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """Adds the shapes that only the table at `path` has, of the same GPU.

    Raises:
        ValueError: If that table is of another GPU.
    """
    if not path.exists():
        return table
    old = json.loads(path.read_text())
    if old["gpu"] != table["gpu"]:
        raise ValueError(f"{path} is of a {old['gpu']}, not of a {table['gpu']}")
    names = [field.name for field in fields(tables.Shape)]

    def key(row: dict[str, Any]) -> tuple:
        return tuple(row[name] for name in names)

    rows = {key(row): row for row in [*old["shapes"], *table["shapes"]]}
    return table | {"shapes": [rows[k] for k in sorted(rows)]}


def write_table(results: dict[str, Any], path: Path) -> int:
    """Writes the tuned table, whole or not at all; returns how many shapes it has.

    Shapes that these results lack stay as they are.
    """
    table = _with_kept(make_table(results), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(table, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(table["shapes"])
