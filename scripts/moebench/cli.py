# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.models.flint.ops.gemv.config import Layout

_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moebench",
        description="Tune and compare the sparse block on this machine's GPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, tokens: list[int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--tokens", type=int, nargs="+", default=tokens)
        command.add_argument(
            "--copies", type=int, default=8, help="blocks in rotation, past the L2"
        )
        command.add_argument("--seconds", type=float, default=3600.0, help="time limit")
        command.add_argument("--library", type=Path, help="made by `build`")
        if name != "compare":
            command.add_argument(
                "--packed", action="store_true", help="experts with packed codes"
            )
        command.add_argument("--out", type=Path, required=True)
        return command

    build = commands.add_parser(
        "build", help="compile variants ahead of time, without a GPU"
    )
    build.add_argument("--arch", default="sm_90a")
    build.add_argument("--form", default="mul", choices=["mul", "packed", "cvt"])
    build.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    build.add_argument("--sweep", action="store_true", help="what `tune` tries, too")
    build.add_argument("--out", type=Path, required=True, help="folder of the library")

    compare = add("compare", "time all contenders, print a table, write JSON", _TOKENS)
    compare.add_argument(
        "--peers",
        nargs="+",
        default=["ours", "marlin", "humming"],
        choices=["ours", "packed", "marlin", "humming"],
        help="contenders",
    )

    tune = add("tune", "time schedules and paths, and write JSON", [1, 8, 64])
    tune.add_argument(
        "--kinds",
        nargs="+",
        default=["gate_up", "down_combine"],
        choices=["gate_up", "down_combine", "grouped", "path"],
        help="kernels, or the paths around the limits between them",
    )
    tune.add_argument(
        "--block-t",
        type=int,
        nargs="+",
        default=[],
        help="rows of an expert in a tile of the grouped GEMM (the picked ones)",
    )

    exercise = commands.add_parser(
        "exercise", help="launch every variant once, for compute-sanitizer"
    )
    exercise.add_argument(
        "--library", type=Path, nargs="+", default=[], help="made by `build`"
    )
    exercise.add_argument("--tokens", type=int, nargs="+", help="(a part's own)")
    exercise.add_argument("--only", nargs="+", help="parts (all)")

    layer = add("layer", "time a decoder layer, stage by stage", [1, 4, 8])
    layer.add_argument("--context", type=int, default=1024)
    layer.add_argument(
        "--layer", nargs="+", default=["full", "sliding"], help="full, sliding"
    )
    return parser


def _layout(form: str) -> "Layout":
    """Of a dense weight: as SM90, whose decode form is `mul`, has it with quack."""
    from vllm.models.flint.ops.fragments import missing_quack

    return _layouts(form)[0] if missing_quack() is None else "row_major"


def _layouts(form: str) -> "tuple[Layout, ...]":
    """All that a dense weight may have with a decode form, the usual one first."""
    return ("row_major",) if form == "cvt" else ("fragments", "row_major")


def _form(args: argparse.Namespace) -> str:
    """How the experts are decoded."""
    from vllm.models.flint.ops.nvfp4_gemv import decode_form

    return "packed" if args.packed else decode_form()


def _build(args: argparse.Namespace) -> int:
    from gemvbench.library import build
    from moebench import sets

    layouts = _layouts(args.form)
    wanted = [v for layout in layouts for v in sets.served(args.form, layout)]
    if args.sweep:
        wanted += sets.swept(args.form, layouts[0])
    build(wanted, args.out, args.arch, args.jobs)
    return 0


def _offer(args: argparse.Namespace, form: str) -> None:
    from gemvbench.library import Library
    from moebench import sets

    layout = _layout(form)
    wanted = sets.served(form, layout) + sets.swept(form, layout)
    count = Library(args.library).offer(wanted)
    print(f"{count} variants were compiled before", flush=True)


def _compare(args: argparse.Namespace) -> int:
    import vllm._custom_ops  # noqa: F401  registers vLLM's CUDA operators
    from vllm.models.flint.ops.nvfp4_gemv import decode_form

    from gemvbench.tune import Results
    from moebench.compare import compare, text_table

    _offer(args, decode_form())
    results = Results(args.out, args.seconds)
    compare(results, args.peers, args.tokens, args.copies)
    print(text_table(results.rows))
    return 0 if results.rows and all(row["right"] for row in results.rows) else 1


def _tune(args: argparse.Namespace) -> int:
    from gemvbench.tune import Results
    from moebench import tune

    form = _form(args)
    _offer(args, form)
    results = Results(args.out, args.seconds)
    decode = [kind for kind in args.kinds if kind in (tune.GATE_UP, tune.DOWN)]
    if decode:
        kernels = form, _layout(form)
        tune.time_decode(results, decode, args.tokens, args.copies, *kernels)
    if tune.GROUPED in args.kinds:
        more = args.block_t, args.packed
        tune.time_grouped(results, args.tokens, args.copies, *more)
    if "path" in args.kinds:
        tune.time_limits(results, args.tokens, args.copies, args.packed)
    print(tune.best_table(results.rows))
    return 0


def _layer(args: argparse.Namespace) -> int:
    from attentionbench.problems import Case
    from gemvbench.tune import Results
    from moebench.layer import text_table, time_layer

    _offer(args, _form(args))
    results = Results(args.out, args.seconds)
    cases = [
        Case(batch, args.context, kind == "sliding")
        for kind in args.layer
        for batch in args.tokens
    ]
    time_layer(results, cases, args.copies, args.packed)
    print(text_table(results.rows))
    return 0


def _exercise(args: argparse.Namespace) -> int:
    from vllm.models.flint.ops.nvfp4_gemv import decode_form

    from gemvbench.exercise import run_parts
    from gemvbench.library import Library
    from moebench import sets
    from moebench.exercise import PARTS

    form = decode_form()
    for path in args.library:
        for layout in _layouts(form):
            Library(path).offer(sets.served(form, layout))
    run_parts(PARTS, args.only or PARTS, args.tokens)
    return 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    args = _parser().parse_args(argv)
    if args.command != "build" and not _has_gpu():
        print("moebench: torch finds no CUDA device on this machine", file=sys.stderr)
        return 2
    run = {"build": _build, "compare": _compare, "tune": _tune, "layer": _layer}
    run |= {"exercise": _exercise}
    try:
        return run[args.command](args)
    except (OSError, ValueError, KeyError) as error:
        print(f"moebench: {error}", file=sys.stderr)
        return 2
