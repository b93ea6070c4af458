# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import aiohttp

from loadtest.plan import PlanError
from loadtest.run import run
from loadtest.stream import StreamError
from loadtest.watch import WatchError
from quickstart.server import ServerError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest",
        description="Keep many streaming completions of mixed lengths going, close "
        "some of them midway, and look for stalls, wrong answers and leaks. The exit "
        "code is 0 if there were none.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running server, without /v1")
    where.add_argument(
        "--serve",
        nargs=argparse.REMAINDER,
        metavar="MODEL",
        help="start `vllm serve` with all that follows, and stop it in the end",
    )
    number = parser.add_argument
    number("--streams", type=_count, default=128, help="at the same time (128)")
    number("--seconds", type=_positive, default=180.0, help="of load (180)")
    number(
        "--prompts",
        type=_count,
        nargs=2,
        default=(16, 4096),
        metavar="N",
        help="shortest and longest prompt, in tokens (16 4096)",
    )
    number(
        "--outputs",
        type=_count,
        nargs=2,
        default=(16, 512),
        metavar="N",
        help="fewest and most new tokens (16 512)",
    )
    number(
        "--cancelled",
        type=_share,
        default=0.1,
        help="share of the streams that the client closes midway (0.1)",
    )
    number(
        "--samples",
        type=_count,
        default=8,
        help="requests that are also made alone, before and after (8)",
    )
    number(
        "--vocabulary",
        type=_count,
        default=512,
        help="prompts are of token ids below this; every Flint has 512 (512)",
    )
    number("--seed", type=int, default=0)
    number(
        "--stall",
        type=_positive,
        default=60.0,
        metavar="SECONDS",
        help="a stream without a new token for as long has failed (60)",
    )
    # BF16 logits of the tiny model are up to 0.21 off; two tokens' errors add up.
    number(
        "--logprob-bound",
        type=_positive,
        default=0.5,
        metavar="NATS",
        help="how far log-probabilities may be apart between load and alone (0.5)",
    )
    number(
        "--host-mib",
        type=_positive,
        default=256.0,
        metavar="MIB",
        help="how much the server's processes may grow (256)",
    )
    number(
        "--gpu-mib",
        type=_positive,
        default=64.0,
        metavar="MIB",
        help="how much GPU memory in use may grow (64)",
    )
    number(
        "--start-timeout",
        type=_positive,
        default=900.0,
        metavar="SECONDS",
        help="that a server may take to start (900)",
    )
    number(
        "--out",
        type=Path,
        required=True,
        help="JSON file; a server's log is beside it (.log)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the load test; returns 0, or 1 if anything was wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.url is None and not options.serve:
        parser.error("--serve needs a model")
    try:
        return run(options)
    except (
        PlanError,
        ServerError,
        StreamError,
        WatchError,
        OSError,
        aiohttp.ClientError,
    ) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("loadtest: stopped", file=sys.stderr)
        return 130


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
