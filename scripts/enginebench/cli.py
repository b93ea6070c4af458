# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line: runs engines one after the other, writes JSON, table and plot."""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from enginebench.engines import ENGINES, POINTS
from enginebench.plot import svg
from enginebench.results import STEP, add_engine, read_comparison
from enginebench.table import markdown
from provenance import command

_SCRIPTS = Path(__file__).resolve().parents[1]
_ENGINE = [sys.executable, "-m", "enginebench.one"]
STOPPED = "stopped by the user"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enginebench",
        description="Time vLLM engines on this machine's GPU with a model of Flint's "
        "size and random weights: each in a process of its own, one after the other.",
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


def _environment(extra: dict[str, str]) -> dict[str, str]:
    """The engine's processes import this package, for the loader of its weights."""
    paths = [str(_SCRIPTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | extra


def run_engine(
    name: str, job: dict[str, Any], seconds: float, log: Path
) -> dict[str, Any]:
    """Runs one engine; returns what it measured, however it ended.

    A time limit, a signal or an error of the engine leaves what was there by then.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "engine.json"
        arguments = [json.dumps(job | {"engine": name}), str(found)]
        error = None
        with log.open("w") as output:
            process = subprocess.Popen(
                [*_ENGINE, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(ENGINES[name].env),
                start_new_session=True,
            )
        try:
            if code := process.wait(seconds):
                error = f"failed with exit code {code}; see its output"
        except subprocess.TimeoutExpired:
            error = "stopped: the time is up"
        except KeyboardInterrupt:
            error = STOPPED
        finally:
            # The engine's own processes would keep the GPU's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        engine = json.loads(found.read_text()) if found.exists() else {}
    engine["choices"] = choices(log.read_text(errors="replace"))
    return engine if error is None else engine | {"status": "cut", "error": error}


def choices(log: str) -> list[str]:
    """What the engine's output says of the kernels and backends that it took."""
    found = re.findall(r"\] (Using [^\n]*?(?:ackend|ernel)[^\n]*)", log)
    return list(dict.fromkeys(found))


def _say(name: str, engine: dict[str, Any], log: Path) -> None:
    points = len(engine.get(STEP, ()))
    start = engine.get("startup_s", "?")
    text = engine.get("error", "done")
    print(
        f"{name}: {text}; start {start} s, {points} decode points ({log})", flush=True
    )


def _run(args: argparse.Namespace) -> int:
    end = time.monotonic() + args.seconds
    job = {
        "points": args.points,
        "weights": args.weights,
        "options": json.loads(args.options),
    }
    read_comparison(args.out, args.weights)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="enginebench-"))
    logs.mkdir(parents=True, exist_ok=True)
    code = 0
    for name in args.engines:
        left = end - time.monotonic()
        if left <= 0:
            print(f"{name}: no time left")
            return 1
        log = logs / f"{name}.log"
        print(f"{name}: starting", flush=True)
        engine = run_engine(name, job, left, log)
        add_engine(args.out, args.weights, name, engine | {"command": command()})
        _say(name, engine, log)
        code = code or int("error" in engine)
        if engine.get("error") == STOPPED:
            return 130
    return code


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
