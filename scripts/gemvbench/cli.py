# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line."""

import argparse
import itertools
import os
import sys
from pathlib import Path

from vllm.models.flint.ops import gemv
from vllm.models.flint.ops.gemv.config import GemvConfig, Layout
from vllm.models.flint.ops.gemv.tables import load_table

from gemvbench import sets
from gemvbench.shapes import Layer, layers_of
from gemvbench.table import read_results, write_table

TUNED = Path(gemv.__path__[0]) / "tuned"
ALL_TOKENS = [1, 2, 4, 8, 16, 32, 64, 256, 4096]
PATH_TOKENS = [32, 64, 96, 128, 192, 256, 512]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gemvbench",
        description="Build, tune and compare the small-M GEMV on this machine's GPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--table", default="sm90", help="GPU family (sm90)")
        command.add_argument("--form", default="mul", choices=["mul", "cvt"])
        command.add_argument("--tp", type=int, nargs="+", default=[1])
        return command

    build = add("build", "compile variants ahead of time, without a GPU")
    build.add_argument("--arch", default="sm_90a")
    build.add_argument("--out", type=Path, required=True, help="folder of the library")

    tune = add("tune", "time schedules and paths, and write JSON")
    tune.add_argument("--library", type=Path, required=True)
    tune.add_argument("--no-paths", action="store_true", help="time schedules only")
    tune.add_argument("--out", type=Path, required=True)
    tune.add_argument("--seconds", type=float, default=3600.0, help="time limit")
    for command in (build, tune):
        command.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
        command.add_argument(
            "--weights",
            default="fragments",
            choices=["fragments", "row_major", "bf16"],
            help="what is tuned",
        )
        command.add_argument(
            "--schedules", type=int, default=7, help="how many to try for a layer"
        )
        command.add_argument(
            "--tiles", type=int, nargs="*", default=[1, 2, 4, 8], help="of 8 tokens"
        )

    compare = add("compare", "time all contenders, print a table and write JSON")
    compare.add_argument("--library", type=Path)
    compare.add_argument("--tokens", type=int, nargs="+", default=ALL_TOKENS)
    compare.add_argument("--peers", nargs="+", help="contenders (all)")
    compare.add_argument("--seconds", type=float, default=3600.0, help="time limit")
    compare.add_argument("--out", type=Path, required=True)

    exercise = add("exercise", "launch every variant once, for compute-sanitizer")
    exercise.add_argument("--library", type=Path)
    exercise.add_argument("--tokens", type=int, nargs="+", help="(a set of ours)")
    exercise.add_argument("--only", nargs="+", help="layers, as 2048x1024 (all)")

    table = add("table", "write a tuned table from the JSON of `tune`")
    table.add_argument("results", type=Path, nargs="+")
    return parser


def _layers(args: argparse.Namespace) -> list[Layer]:
    found = [layer for tp in args.tp for layer in layers_of(tp)]
    return list(dict.fromkeys(found))


def _known(layer: Layer, args: argparse.Namespace) -> list[GemvConfig]:
    """Tuned schedules of the most similar shape, of this layout if there are any."""
    wanted = layer.shape(_form(args), _layout(args))
    table = load_table(args.table)
    similar = [
        shape
        for shape in table
        if (shape.k, shape.silu_mul, shape.bf16)
        == (wanted.k, wanted.silu_mul, wanted.bf16)
    ]
    if not similar:
        return []
    nearest = min(
        similar, key=lambda s: (s.layout != wanted.layout, abs(s.n - wanted.n))
    )
    return list(table[nearest].schedules.values())


def _form(args: argparse.Namespace) -> str:
    return "bf16" if args.weights == "bf16" else args.form


def _layout(args: argparse.Namespace) -> Layout:
    return "fragments" if args.weights == "fragments" else "row_major"


def _sweeps(args: argparse.Namespace) -> dict[Layer, list[sets.Variant]]:
    form, layout = _form(args), _layout(args)
    found = {}
    for layer in _layers(args):
        known = _known(layer, args)
        sweeps = (
            sets.sweep(layer, form, nt, args.schedules, known, layout)
            for nt in args.tiles
        )
        found[layer] = list(itertools.chain(*sweeps))
    return found


def _build(args: argparse.Namespace) -> int:
    from gemvbench.library import build

    wanted = sets.served(args.table, args.form) + sets.tested(args.table, args.form)
    wanted += itertools.chain(*_sweeps(args).values())
    build(wanted, args.out, args.arch, args.jobs)
    return 0


def _tune(args: argparse.Namespace) -> int:
    from gemvbench.library import Library
    from gemvbench.tune import Results, time_paths, time_schedules

    library, results = Library(args.library), Results(args.out, args.seconds)
    library.offer(sets.served(args.table, args.form))
    form, layout = _form(args), _layout(args)
    if layout == "fragments" and not args.no_paths:
        from gemvbench.partner import compile_tiles, time_tiles

        compile_tiles(_layers(args), args.jobs)
        time_schedules(results, library, _sweeps(args))
        time_tiles(results, _layers(args))
        return 0
    time_schedules(results, library, _sweeps(args))
    if not args.no_paths:
        tokens = [1, 8, 16, 32, 64] if form == "bf16" else PATH_TOKENS
        time_paths(results, _layers(args), form, tokens)
    return 0


def _compare(args: argparse.Namespace) -> int:
    import vllm._custom_ops  # noqa: F401  registers vLLM's CUDA operators

    from gemvbench.compare import compare, text_table
    from gemvbench.library import Library
    from gemvbench.peers import CONTENDERS
    from gemvbench.tune import Results

    Library(args.library).offer(sets.served(args.table, args.form))
    results = Results(args.out)
    layers = _layers(args)
    kinds = [CONTENDERS[name] for name in args.peers or CONTENDERS]
    compare(results, layers, kinds, args.tokens, args.seconds)
    print(text_table(results.rows, layers))
    return 0 if all(row["right"] for row in results.rows) else 1


def _exercise(args: argparse.Namespace) -> int:
    from gemvbench.exercise import parts_of, run_parts
    from gemvbench.library import Library

    Library(args.library).offer(sets.served(args.table, args.form))
    parts = parts_of(_layers(args))
    run_parts(parts, args.only or parts, args.tokens)
    return 0


def _table(args: argparse.Namespace) -> int:
    path = TUNED / f"{args.table}.json"
    count = write_table(read_results(args.results), path)
    print(f"{count} shapes in {path}")
    return 0


def main() -> int:
    """Runs one command; returns its exit code."""
    args = _parser().parse_args()
    run = {"build": _build, "tune": _tune, "compare": _compare}
    run |= {"exercise": _exercise, "table": _table}
    try:
        return run[args.command](args)
    except (OSError, ValueError, KeyError) as error:
        print(f"gemvbench: {error}", file=sys.stderr)
        return 2
