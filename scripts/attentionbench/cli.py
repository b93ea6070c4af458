# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line."""

import argparse
import itertools
import os
import sys
from pathlib import Path

from attentionbench import sets

_BATCHES = [1, 2, 4, 8, 16, 32, 64]
_CONTEXTS = [128, 1024, 8192, 32768, 100000]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attentionbench",
        description="Build, tune and compare decode attention on this machine's GPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        if name == "build":
            return command
        command.add_argument("--library", type=Path, help="made by `build`")
        command.add_argument("--batch", type=int, nargs="+", default=_BATCHES)
        command.add_argument("--context", type=int, nargs="+", default=_CONTEXTS)
        command.add_argument(
            "--layer", nargs="+", default=["full", "sliding"], help="full, sliding"
        )
        command.add_argument("--out", type=Path, required=True)
        return command

    build = add("build", "compile variants ahead of time, without a GPU")
    build.add_argument("--arch", default="sm_90a")
    build.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    build.add_argument("--sweep", action="store_true", help="what `tune` tries, too")
    build.add_argument("--out", type=Path, required=True, help="folder of the library")

    exercise = commands.add_parser(
        "exercise", help="launch every variant once, for compute-sanitizer"
    )
    exercise.add_argument(
        "--library",
        type=Path,
        nargs="+",
        default=[],
        help="made by `build`, here and of gemvbench",
    )
    exercise.add_argument("--tokens", type=int, nargs="+", help="(a part's own)")
    exercise.add_argument("--only", nargs="+", help="parts (all)")

    tune = add("tune", "time schedules and write JSON")
    tune.add_argument("--factor", type=float, nargs="+", default=[1.0])

    compare = add("compare", "time all contenders, print a table and write JSON")
    compare.add_argument("--peers", nargs="+", help="contenders (all)")
    compare.add_argument("--seconds", type=float, default=3600.0, help="time limit")
    return parser


def _cases(args: argparse.Namespace) -> list:
    from attentionbench.problems import Case

    shapes = itertools.product(args.layer, args.context, args.batch)
    return [Case(batch, n, layer == "sliding") for layer, n, batch in shapes]


def _build(args: argparse.Namespace) -> int:
    from gemvbench.library import build

    wanted = sets.served() + sets.tested() + (sets.sweep() if args.sweep else [])
    build(wanted, args.out, args.arch, args.jobs)
    return 0


def _tune(args: argparse.Namespace) -> int:
    from attentionbench.tune import best_table, time_schedules
    from gemvbench.library import Library
    from gemvbench.tune import Results

    results = Results(args.out)
    library = Library(args.library)
    time_schedules(results, library, _cases(args), sets.sweep(), args.factor)
    print(best_table(results))
    return 0


def _compare(args: argparse.Namespace) -> int:
    import vllm._custom_ops  # noqa: F401  registers vLLM's CUDA operators

    from attentionbench.compare import compare, text_table
    from attentionbench.peers import CONTENDERS
    from gemvbench.library import Library
    from gemvbench.tune import Results

    Library(args.library).offer(sets.served())
    results = Results(args.out)
    kinds = [CONTENDERS[name] for name in args.peers or CONTENDERS]
    compare(results, _cases(args), kinds, args.seconds)
    print(text_table(results.rows))
    return 0 if all(row["right"] for row in results.rows) else 1


def _exercise(args: argparse.Namespace) -> int:
    from vllm.models.flint.ops.nvfp4_gemv import decode_form

    from attentionbench.exercise import PARTS
    from gemvbench import sets as gemv
    from gemvbench.exercise import run_parts
    from gemvbench.library import Library

    qkv = gemv.served("sm90", decode_form())
    for path in args.library:
        Library(path).offer([*sets.served(), *qkv])
    run_parts(PARTS, args.only or PARTS, args.tokens)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    args = _parser().parse_args(argv)
    run = {"build": _build, "tune": _tune, "compare": _compare}
    run |= {"exercise": _exercise}
    try:
        return run[args.command](args)
    except (OSError, ValueError, KeyError) as error:
        print(f"attentionbench: {error}", file=sys.stderr)
        return 2
