# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tuned tables: from measured times to the data that the overlay reads."""

import collections
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.models.flint.ops.gemv import tables

Rows = list[dict[str, Any]]
# The two ways to compute on the same bytes; see `tune.time_paths`.
GEMV, PARTNER = "gemv", "partner"


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


def _shape(row: dict[str, Any]) -> tuple[int, int, bool, bool]:
    return row["n"], row["k"], row["silu_mul"], row["form"] == "bf16"


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


def limit_of(rows: Rows, bf16: bool) -> tuple[int, dict[str, dict[str, float]]]:
    """Up to how many tokens the GEMV is no slower than its partner, and the times."""
    by_m: dict[int, dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        by_m[row["m"]][row["path"]] = row["us"]
    both = {m: t for m, t in sorted(by_m.items()) if len(t) == 2}
    if not both:
        return (0 if bf16 else tables.DEFAULT_MAX_TOKENS), {}
    limit = 0
    for m, times in both.items():
        if times[GEMV] > times[PARTNER]:
            break
        limit = m
    return limit, {str(m): times for m, times in both.items()}


def make_table(results: dict[str, Any]) -> dict[str, Any]:
    """The content of a tuned table."""
    sweeps: dict[tuple, Rows] = collections.defaultdict(list)
    paths: dict[tuple, Rows] = collections.defaultdict(list)
    for row in results["rows"]:
        (paths if "path" in row else sweeps)[_shape(row)].append(row)
    shapes = []
    for shape, rows in sorted(sweeps.items()):
        n, k, silu_mul, bf16 = shape
        limit, measured = limit_of(paths[shape], bf16)
        shapes.append(
            {
                "n": n,
                "k": k,
                "silu_mul": silu_mul,
                "bf16": bf16,
                "max_tokens": limit,
                "schedules": fastest(rows),
                "paths_us": measured,
            }
        )
    return {
        "gpu": results["gpu"],
        "copy_tb_s": results["copy_tb_s"],
        "written_by": "python3 scripts/gemvbench table",
        "shapes": shapes,
    }


def write_table(results: dict[str, Any], path: Path) -> int:
    """Writes the tuned table, whole or not at all; returns how many shapes it has."""
    table = make_table(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(table, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(table["shapes"])
