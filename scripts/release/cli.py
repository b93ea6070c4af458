# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line of a release."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from patchset.errors import PatchsetError
from patchset.repo import Repo, load_repo


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args, load_repo())
    except PatchsetError as exc:
        print(f"release {args.command}: {exc}", file=sys.stderr)
        return exc.exit_code
    except OSError as exc:
        print(f"release {args.command}: {exc}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="release", description="Makes what a release publishes."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub = commands.add_parser("check", help="say whether a tag may be released")
    sub.add_argument("tag")
    sub.set_defaults(run=_check)
    sub = commands.add_parser(
        "build", help="make wheels, bill of materials, checksums and notes"
    )
    sub.add_argument("--out", type=Path, required=True, help="an empty folder")
    sub.add_argument(
        "--kind", action="append", help="a wheel's name in pin.toml (default: all)"
    )
    sub.set_defaults(run=_build)
    return parser


def _check(args: argparse.Namespace, repo: Repo) -> int:
    from release.build import check

    print(check(repo, args.tag), end="")
    return 0


def _build(args: argparse.Namespace, repo: Repo) -> int:
    from release import build

    notes = build.notes_of(repo)
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        raise PatchsetError(f"{args.out} is not empty; name a new folder")
    build.write_sbom(repo, args.out)
    build.build_wheels(repo, args.kind or list(repo.pin.wheels), args.out)
    (args.out / build.NOTES).write_text(notes, encoding="utf-8")
    print(build.write_checksums(args.out).read_text(encoding="utf-8"), end="")
    return 0
