# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The quick start's options; needs nothing but the standard library."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

_DEFAULT_OUT = Path(__file__).resolve().parents[2] / "build" / "quickstart"


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        out: Folder for the checkpoints, the server logs and quickstart.json.
        timeout: Seconds that a server may take to start.
        keep_serving: Whether the last server stays up until Ctrl-C.
    """

    out: Path
    timeout: float
    keep_serving: bool


def parse(argv: list[str]) -> Options:
    """Parse the command line; exits on --help and on wrong use."""
    parser = argparse.ArgumentParser(
        prog="quickstart.py",
        description="Make the environment, make a tiny Flint checkpoint as BF16 "
        "safetensors and as NVFP4 GGUF, serve each with `vllm serve` on this CPU, and "
        "ask it for a streamed chat, a reasoning answer and a tool call.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=_DEFAULT_OUT,
        metavar="DIR",
        help="where checkpoints, logs and quickstart.json go (build/quickstart)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="seconds that a server may take to start (600)",
    )
    parser.add_argument(
        "--keep-serving",
        action="store_true",
        help="leave the last server up until Ctrl-C",
    )
    args = parser.parse_args(argv)
    return Options(args.out.resolve(), args.timeout, args.keep_serving)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value
