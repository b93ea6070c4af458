# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line of the image's build steps."""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from imagebuild.pairing import Pairing, load_image_pin
from patchset.errors import PatchsetError
from patchset.repo import Repo, load_repo

_EPILOG = "exit codes: as scripts/patchset has them (0 done, 1 conflict, 2 wrong use)"


def main(argv: list[str] | None = None) -> int:
    """Run one step; returns the exit code."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return args.run(args, load_repo())
    except PatchsetError as exc:
        print(f"imagebuild {args.command}: {exc}", file=sys.stderr)
        return exc.exit_code
    except OSError as exc:
        print(f"imagebuild {args.command}: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"imagebuild {args.command}: interrupted", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="imagebuild",
        description="The steps of docker/Dockerfile, one by one.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=_EPILOG)
        sub.set_defaults(run=run)
        return sub

    sub = add("source", _source, "make the patched source tree and verify it")
    sub.add_argument("target", type=Path, help="a new folder")
    sub.add_argument(
        "--from",
        dest="origin",
        choices=("git", "archive"),
        default="git",
        help="a clone of the base's tag, or its source archive (default: git)",
    )
    sub.add_argument("--repository", help="clone from here (default: pin.toml's)")
    sub.add_argument("--archive", type=Path, help="the archive (default: fetched)")
    sub = add("requirements", _requirements, "print what pip is to install")
    sub.add_argument("tree", type=Path, help="the patched source tree")
    sub.add_argument("--for-build", action="store_true", help="to compile, not to run")
    sub.add_argument(
        "--torch-index",
        default="",
        metavar="URL",
        help="PyTorch's own wheel index for this CUDA version, where one is needed",
    )
    _add_cuda(sub)
    sub = add("wheel", _wheel, "make the patched wheel and check it")
    sub.add_argument("tree", type=Path, help="the patched source tree")
    sub.add_argument("--out", type=Path, required=True, help="an empty folder")
    sub.add_argument(
        "--mode",
        choices=("compile", "repack", "python"),
        default="compile",
        help="compile it; repack the official one; or leave out what is compiled",
    )
    sub.add_argument("--arch-list", help="GPU architectures (default: pin.toml's)")
    sub.add_argument(
        "--jobs", type=_positive, default=2, help="compilers at once, 4 GB each (2)"
    )
    sub.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter with the build requirements (default: this one)",
    )
    _add_cuda(sub)
    add("bake", _bake, "print arguments and labels for docker buildx bake, as JSON")
    return parser


def _add_cuda(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--cuda", help="the full CUDA version (default: pin.toml's)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _pairing(args: argparse.Namespace, repo: Repo) -> Pairing:
    image = load_image_pin(repo.root)
    return image.for_cuda(args.cuda) if args.cuda else image.pairings[image.default]


# Steps load what they need: bake runs without a download library.


def _source(args: argparse.Namespace, repo: Repo) -> int:
    from imagebuild.source import source_from_archive, source_from_git

    if args.origin == "git":
        repository = args.repository or load_image_pin(repo.root).repository
        report = source_from_git(args.target, repo, repository)
    else:
        report = source_from_archive(args.target, repo, args.archive)
    print(report.text())
    return report.exit_code


def _requirements(args: argparse.Namespace, repo: Repo) -> int:
    from imagebuild.requirements import build_requirements, runtime_requirements

    pairing = _pairing(args, repo)
    wanted = build_requirements if args.for_build else runtime_requirements
    if pairing.torch_local and not args.torch_index:
        raise PatchsetError(
            f"torch {pairing.torch_version} is on PyTorch's own wheel index only; name "
            "it by --torch-index (TORCH_INDEX_URL of the image's build)"
        )
    if args.torch_index:
        print(f"--extra-index-url {args.torch_index}")
    print("\n".join(wanted(args.tree, pairing)))
    return 0


def _wheel(args: argparse.Namespace, repo: Repo) -> int:
    from imagebuild import requirements, wheel

    image, pairing = load_image_pin(repo.root), _pairing(args, repo)
    if args.mode == "repack":
        from patchset.wheel_command import wheel_command

        kind = wheel.repacked_kind(image, pairing, platform.machine())
        report = wheel_command(repo, kind, None, args.out)
        print(report.text())
        return report.exit_code
    if args.mode == "python":
        made = wheel.python_wheel(args.tree, args.out, repo, args.python)
    else:
        for line in requirements.write_into(args.tree, pairing):
            print(f"requires, for CUDA {pairing.cuda}: {line}")
        arch_list = args.arch_list or image.arch_list
        options = wheel.CompileOptions(arch_list, args.jobs)
        made = wheel.compile_wheel(args.tree, args.out, repo, options, args.python)
    print(f"{made}: package tree {repo.pin.identity.package}, as pinned")
    return 0


def _bake(args: argparse.Namespace, repo: Repo) -> int:
    from imagebuild.bake import bake_file

    print(json.dumps(bake_file(repo, load_image_pin(repo.root)), indent=2))
    return 0
