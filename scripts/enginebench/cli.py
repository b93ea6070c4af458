# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line: runs engines, writes JSON, table and plot."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from enginebench.engines import ENGINES, POINTS
from enginebench.plot import svg
from enginebench.processes import run_engines
from enginebench.results import STEP, add_engine, read_comparison
from enginebench.table import markdown
from provenance import command

# Of the GPU's memory, as vLLM takes it for one engine.
_MEMORY_SHARE = 0.9


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enginebench",
        description="Time vLLM engines on this machine's GPU with a model of Flint's "
        "size and random weights: each in a process of its own, timed one after the "
        "other.",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=["flint", "stock-marlin", "stock-humming"],
        help="in this order; an engine that the JSON has already is timed again",
    )
    parser.add_argument("--weights", choices=("bf16", "nvfp4"), default="nvfp4")
    parser.add_argument("--points", choices=POINTS, default="quick")
    parser.add_argument(
        "--options", default="{}", help="more LLM arguments for every engine, as JSON"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="start all engines at once, each with its share of the GPU's memory; "
        "they are still timed one after the other, once all have started",
    )
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="time limit of all engines"
    )
    parser.add_argument("--logs", type=Path, help="folder for the engines' output")
    parser.add_argument(
        "--show", action="store_true", help="only table and plot of the JSON"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON; the plot is beside it (.svg)"
    )
    return parser


def _say(name: str, engine: dict[str, Any], log: Path) -> None:
    points = len(engine.get(STEP, ()))
    start = engine.get("startup_s", "?")
    text = engine.get("error", "done")
    print(
        f"{name}: {text}; start {start} s, {points} decode points ({log})", flush=True
    )


def _run(args: argparse.Namespace) -> int:
    end = time.monotonic() + args.seconds
    parts = [[name] for name in args.engines]
    options = json.loads(args.options)
    more: dict[str, Any] = {"command": command()}
    if args.together:
        parts = [list(dict.fromkeys(args.engines))]
        share = {"gpu_memory_utilization": _MEMORY_SHARE / len(parts[0])}
        options = share | options
        more["started_together"] = True
    job = {"points": args.points, "weights": args.weights, "options": options}
    read_comparison(args.out, args.weights)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="enginebench-"))
    logs.mkdir(parents=True, exist_ok=True)
    errors: list[str] = []

    def ended(name: str, engine: dict[str, Any]) -> None:
        add_engine(args.out, args.weights, name, engine | more)
        _say(name, engine, logs / f"{name}.log")
        if "error" in engine:
            errors.append(engine["error"])

    for part in parts:
        left = end - time.monotonic()
        if left <= 0:
            print(f"{part[0]}: no time left")
            return 1
        print(f"{', '.join(part)}: starting", flush=True)
        jobs = dict.fromkeys(part, job)
        if not run_engines(jobs, left, logs, ended, args.together):
            return 130
    return int(bool(errors))


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 0, or 1 if an engine did not end well."""
    args = _parser().parse_args(argv)
    try:
        code = 0 if args.show else _run(args)
        content = json.loads(args.out.read_text())
    except (OSError, ValueError) as error:
        print(f"enginebench: {error}", file=sys.stderr)
        return 2
    print(markdown(content))
    if any(e.get(STEP) for e in content["engines"].values()):
        args.out.with_suffix(".svg").write_text(svg(content))
    return code
