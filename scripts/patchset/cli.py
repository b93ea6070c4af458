# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line of the patch set."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from patchset.errors import PatchsetError
from patchset.repo import Repo, load_repo
from patchset.report import Report

if TYPE_CHECKING:
    from patchset.rebase.command import Outcome
    from patchset.staging.command import StageReport

_EPILOG = """\
exit codes:
  0  done, or nothing to do (it says which)
  1  conflict: a patch does not fit, or something verified or linted is wrong
  2  wrong base, wrong use, or the disk or network failed
  3  dirty tree: edited, half-patched, or patched by another version

How a tree is judged: if every file that the series does not touch is as the base
has it, and every file that it touches is as the base or as the result has it, the
tree is pristine or patched. Otherwise it is dirty (3), unless an edit lies where a
hunk must go: then it is a conflict (1) and every patch is reported. A source tree
is compared as a whole, an installed package without generated files.

A killed or failed command never leaves a silent half: the next command on that
folder finds its journal, rolls it back or finishes it, and says so.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        result = args.run(args, load_repo(args.repo))
        print(result.json() if args.json else result.text())
        return result.exit_code
    except PatchsetError as exc:
        return _fail(args, str(exc), exc.exit_code)
    except KeyboardInterrupt:
        return _fail(args, "interrupted; the target is as it was", 130)
    except BrokenPipeError:
        # The reader of our output left, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _fail(args: argparse.Namespace, message: str, code: int) -> int:
    if args.json:
        target = str(getattr(args, "target", ""))
        print(Report(args.command, target, exit_code=code, summary=message).json())
    else:
        print(f"patchset {args.command}: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="report as JSON")
    common.add_argument(
        "--repo", type=Path, help="the patch set's repository (default: this one)"
    )
    parser = argparse.ArgumentParser(
        prog="patchset",
        description="Applies, checks and maintains the Flint patch set on vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            parents=[common],
            help=help_text,
            description=help_text,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    folder = "a source tree, git checkout, or site-packages folder"
    sub = add("apply", _apply, "apply the patch set to a folder, all or nothing")
    sub.add_argument("target", type=Path, help=folder)
    sub.add_argument("--dry-run", action="store_true", help="write nothing")
    sub.add_argument(
        "--no-identity", action="store_true", help="accept a result other than pinned"
    )
    sub = add("unapply", _unapply, "restore the base's own bytes")
    sub.add_argument("target", type=Path, help=folder)
    sub.add_argument("--dry-run", action="store_true", help="write nothing")
    sub = add("status", _status, "say what a folder is and where each patch stands")
    sub.add_argument("target", type=Path, help=folder)
    sub = add("verify", _verify, "say whether a target is exactly what is pinned")
    sub.add_argument(
        "target", type=Path, help=f"{folder}, a wheel, or the source archive"
    )
    sub = add("fetch", _fetch, "download a pinned file into the cache, verified")
    sub.add_argument("artifact", help="source, or a wheel's name in pin.toml")
    sub.add_argument(
        "--from", dest="source", type=Path, help="take it from this file instead"
    )
    sub = add("tree", _tree, "unpack the source archive and apply the patch set")
    sub.add_argument("target", type=Path, help="a new folder")
    sub.add_argument("--archive", type=Path, help="the archive (default: fetched)")
    sub.add_argument(
        "--no-identity", action="store_true", help="accept a result other than pinned"
    )
    sub = add("wheel", _wheel, "repack an official wheel with the patch set in it")
    sub.add_argument("--kind", default="cpu-x86_64", help="a wheel's name in pin.toml")
    sub.add_argument("--wheel", type=Path, help="the wheel (default: fetched)")
    sub.add_argument("--out", type=Path, default=Path("dist"), help="default: dist/")
    sub.add_argument(
        "--no-identity", action="store_true", help="accept a result other than pinned"
    )
    sub = add("lint", _lint, "check headers, names, and what patches and overlay touch")
    sub.add_argument("--archive", type=Path, help="the base (default: fetched)")
    sub = add("import", _import, "make a git checkout with one commit for each patch")
    sub.add_argument("target", type=Path, help="a new folder")
    sub.add_argument("--archive", type=Path, help="the base (default: fetched)")
    sub = add("export", _export, "write the commits of a checkout as the series")
    sub.add_argument("target", type=Path, help="a checkout, as `import` makes one")
    sub.add_argument("--onto", help="the commit that the patches stand on")
    sub = add(
        "refresh", _refresh, "import, export again, and renew pin.toml's identity"
    )
    sub.add_argument("--archive", type=Path, help="the base (default: fetched)")
    sub = add("probe", _probe, "show that each patch is needed: its test fails without")
    sub.add_argument("patches", nargs="*", help="names of patches (default: all)")
    sub = add("rebase", _rebase, "carry the patch set to another upstream, and report")
    sub.add_argument(
        "--onto", required=True, help="a vLLM version, a folder, or a git ref"
    )
    sub.add_argument(
        "--checkout", type=Path, help="the upstream's checkout, for a git ref"
    )
    sub.add_argument(
        "--gear",
        choices=("applies", "good"),
        default="applies",
        help="stop when it applies, or run the engine and compile the kernels too",
    )
    sub.add_argument(
        "--report", type=Path, help="a folder for report.md and report.json"
    )
    sub.add_argument(
        "--work", type=Path, help="where to work (default: in the download cache)"
    )
    sub = add("stage-pr", _stage, "make a branch of reviewable commits on vLLM")
    sub.add_argument("target", type=Path, help="a git checkout of vLLM")
    sub.add_argument("--onto", help="the commit to stand on (default: the base's tag)")
    sub.add_argument("--branch", default="flint", help="default: flint")
    sub.add_argument(
        "--step", action="append", default=[], help="stage up to, and report, this one"
    )
    sub.add_argument(
        "--out", type=Path, default=Path("build/pull-requests"), help="for the texts"
    )
    sub.add_argument("--no-hooks", action="store_true", help="do not run pre-commit")
    sub.add_argument("--no-tests", action="store_true", help="do not run the tests")
    return parser


# Heavy or optional modules are loaded by the command that needs them.


def _apply(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.apply import apply_tree

    return apply_tree(
        args.target, repo, dry_run=args.dry_run, check_identity=not args.no_identity
    )


def _unapply(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.unapply import unapply_tree

    return unapply_tree(args.target, repo, dry_run=args.dry_run)


def _status(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.apply import status_tree

    return status_tree(args.target, repo)


def _verify(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.verify import verify

    return verify(args.target, repo)


def _fetch(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.download import fetch, seed

    artifact = repo.pin.artifacts.get(args.artifact)
    if artifact is None:
        known = ", ".join(repo.pin.artifacts)
        raise PatchsetError(f"no artifact {args.artifact!r} in pin.toml: {known}")
    if args.source:
        path = seed(artifact, args.source)
    else:
        path = fetch(artifact, progress=sys.stderr.isatty() or not args.json)
    summary = f"{artifact.filename}, as pinned: {path}"
    return Report("fetch", args.artifact, summary=summary)


def _tree(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.tree import base_archive, make_tree

    archive = base_archive(repo, args.archive)
    return make_tree(args.target, repo, archive, check_identity=not args.no_identity)


def _wheel(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.wheel_command import wheel_command

    return wheel_command(repo, args.kind, args.wheel, args.out)


def _lint(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.lint import lint
    from patchset.tree import base_archive

    return lint(repo, base_archive(repo, args.archive))


def _import(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.gitio import import_series
    from patchset.tree import base_archive

    return import_series(args.target, repo, base_archive(repo, args.archive))


def _export(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.gitio import export_series

    return export_series(args.target, repo, onto=args.onto)


def _refresh(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.gitio import refresh
    from patchset.tree import base_archive

    return refresh(repo, base_archive(repo, args.archive))


def _probe(args: argparse.Namespace, repo: Repo) -> Report:
    from patchset.rebase.probe import probe

    return probe(repo, args.patches)


def _rebase(args: argparse.Namespace, repo: Repo) -> Outcome:
    from patchset.rebase.command import rebase

    return rebase(
        repo,
        args.onto,
        checkout=args.checkout,
        gear=args.gear,
        work_folder=args.work,
        report_folder=args.report,
    )


def _stage(args: argparse.Namespace, repo: Repo) -> StageReport:
    from patchset.staging.command import stage

    return stage(
        repo,
        args.target,
        args.out,
        onto=args.onto,
        branch=args.branch,
        only=args.step,
        with_hooks=not args.no_hooks,
        with_tests=not args.no_tests,
    )
