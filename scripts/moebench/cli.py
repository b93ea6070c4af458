# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line."""

import argparse
import sys
from pathlib import Path

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
        command.add_argument("--out", type=Path, required=True)
        return command

    compare = add("compare", "time all contenders, print a table, write JSON", _TOKENS)
    compare.add_argument(
        "--peers",
        nargs="+",
        default=["ours", "marlin", "humming"],
        choices=["ours", "marlin", "humming"],
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

    layer = add("layer", "time a decoder layer, stage by stage", [1, 4, 8])
    layer.add_argument("--context", type=int, default=1024)
    layer.add_argument(
        "--layer", nargs="+", default=["full", "sliding"], help="full, sliding"
    )
    return parser


def _compare(args: argparse.Namespace) -> int:
    import vllm._custom_ops  # noqa: F401  registers vLLM's CUDA operators

    from gemvbench.tune import Results
    from moebench.compare import compare, text_table

    results = Results(args.out, args.seconds)
    compare(results, args.peers, args.tokens, args.copies)
    print(text_table(results.rows))
    return 0 if results.rows and all(row["right"] for row in results.rows) else 1


def _tune(args: argparse.Namespace) -> int:
    from gemvbench.tune import Results
    from moebench import tune

    results = Results(args.out, args.seconds)
    decode = [kind for kind in args.kinds if kind in (tune.GATE_UP, tune.DOWN)]
    if decode:
        tune.time_decode(results, decode, args.tokens, args.copies)
    if tune.GROUPED in args.kinds:
        tune.time_grouped(results, args.tokens, args.copies)
    if "path" in args.kinds:
        tune.time_limits(results, args.tokens, args.copies)
    print(tune.best_table(results.rows))
    return 0


def _layer(args: argparse.Namespace) -> int:
    from attentionbench.problems import Case
    from gemvbench.tune import Results
    from moebench.layer import text_table, time_layer

    results = Results(args.out, args.seconds)
    cases = [
        Case(batch, args.context, kind == "sliding")
        for kind in args.layer
        for batch in args.tokens
    ]
    time_layer(results, cases, args.copies)
    print(text_table(results.rows))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    args = _parser().parse_args(argv)
    run = {"compare": _compare, "tune": _tune, "layer": _layer}
    try:
        return run[args.command](args)
    except (OSError, ValueError, KeyError) as error:
        print(f"moebench: {error}", file=sys.stderr)
        return 2
