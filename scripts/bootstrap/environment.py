# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The environment in .venv: made once, and made again when its inputs change.

It is built below build/ under a name that tells its dependencies, and .venv becomes
a link to it when it is complete: a run that is stopped leaves .venv as it was. The
patched wheel is replaced in place when only the patch set changed; while that goes
on, the mark that says which wheel is installed is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from bootstrap import pip_run, system
from bootstrap.errors import BootstrapError
from bootstrap.process import output_of

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
LINK = ROOT / ".venv"
_REQUIREMENTS = ROOT / "requirements"
_LOCKS = ("tools.txt", "engine.txt", "torch-cuda.txt")
_COMPLETE = "dependencies-complete"
_WHEEL_MARK = "installed-wheel"
_FOREIGN = ("PYTHONHOME", "PYTHONPATH")  # would leak other packages into .venv
_FORMAT = "1"  # raise it when this file makes environments differently


def ensure() -> Path:
    """Return the interpreter of an environment that is complete and up to date.

    Raises:
        BootstrapError: It could not be made.
    """
    system.check_platform()
    BUILD.mkdir(exist_ok=True)
    with _lock(BUILD / ".bootstrap.lock"):
        place = BUILD / f"env-{_dependency_key()[:16]}"
        python = place / "bin" / "python"
        wheel_key = _wheel_key()
        dependencies = (place / _COMPLETE).is_file()
        wheel_mark = place / _WHEEL_MARK
        if not dependencies or _read(wheel_mark) != wheel_key:
            system.ensure_packages()
            if not dependencies:
                _make(place, python)
            wheel = _build_wheel(python)
            if not dependencies:
                _install_engine(place, python)
            wheel_mark.unlink(missing_ok=True)
            arguments = ["--no-deps", "--force-reinstall", str(wheel)]
            pip_run.run_pip(python, "the patched vLLM", arguments)
            pip_run.check_environment(python)
            wheel_mark.write_text(wheel_key, encoding="utf-8")
        _publish(place)
    return LINK / "bin" / "python"


def variables() -> dict[str, str]:
    """Return the process environment for programs that run in .venv."""
    path = f"{LINK / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    clean = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
    return {**clean, "PATH": path, "VIRTUAL_ENV": str(LINK)}


def _dependency_key() -> str:
    base = f"{_FORMAT} {sys.version} {platform.machine()} {sys.base_prefix}"
    return _digest([_REQUIREMENTS / name for name in _LOCKS], base)


def _wheel_key() -> str:
    tool = sorted((ROOT / "scripts" / "patchset").glob("wheel*.py"))
    files = [ROOT / "pin.toml", *tool]
    for folder in ("patches", "vllm_overlay"):
        files += sorted(
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
    return _digest(files, _FORMAT)


def _digest(files: Iterable[Path], salt: str) -> str:
    digest = hashlib.sha256(salt.encode())
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"\n{path.relative_to(ROOT)} {content}".encode())
    return digest.hexdigest()


def _make(place: Path, python: Path) -> None:
    """Make the environment with pip and the tools in it."""
    print("Making the environment .venv (some minutes, about 4 GB)", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    with _removed_on_failure(place):
        command = [sys.executable, "-I", "-m", "venv", str(place)]
        code, text = output_of(command, subprocess.STDOUT)
        if code:
            raise BootstrapError(f"python -m venv failed:\n{text}".rstrip())
        tools = _REQUIREMENTS / "tools.txt"
        pins = tools.read_text(encoding="utf-8").splitlines()
        pip = next(line for line in pins if line.startswith("pip=="))
        pip_run.run_pip(python, "pip", [pip], raw=False)
        pip_run.run_pip(python, "tools", ["--requirement", str(tools)])


def _install_engine(place: Path, python: Path) -> None:
    constraints = str(_REQUIREMENTS / "torch-cuda.txt")
    arguments = ["--requirement", str(_REQUIREMENTS / "engine.txt")]
    arguments += ["--constraint", constraints]
    with _removed_on_failure(place):
        pip_run.run_pip(python, "the engine's packages", arguments)
        (place / _COMPLETE).touch()


def _build_wheel(python: Path) -> Path:
    """Download the official CPU wheel and repack it; return the patched one."""
    out = BUILD / "wheels"
    for old in out.glob("*.whl"):
        old.unlink()
    command = [str(python), str(ROOT / "scripts" / "patchset"), "wheel"]
    command += ["--kind", f"cpu-{platform.machine()}", "--out", str(out), "--json"]
    # Its progress goes to stderr, and so to the user.
    code, text = output_of(command, None)
    try:
        report = json.loads(text)
    except ValueError:
        raise BootstrapError(
            "the patched wheel could not be made (see above)"
        ) from None
    if code:
        notes = "".join(f"\n  {note}" for note in report["notes"])
        raise BootstrapError(
            f"the patched wheel could not be made: {report['summary']}{notes}"
        )
    tree = report["trees"]["package"]["actual"]
    print(f"  the patched wheel: made and verified, package tree {tree}", flush=True)
    return next(out.glob("*.whl"))


def _publish(place: Path) -> None:
    """Let .venv be this environment, and remove the ones before it."""
    target = place.relative_to(ROOT)
    if LINK.is_symlink() and Path(os.readlink(LINK)) == target:
        return
    if LINK.exists() and not LINK.is_symlink():
        raise BootstrapError(
            f"{LINK} is in the way and was not made by this script; move it elsewhere"
        )
    new = LINK.with_name(".venv.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target, target_is_directory=True)
    new.replace(LINK)
    for old in BUILD.glob("env-*"):
        if old != place:
            shutil.rmtree(old, ignore_errors=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


@contextlib.contextmanager
def _removed_on_failure(place: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep two runs from making the same environment at once."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another run that makes the environment", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stop_on_sigterm() -> None:
    """Let SIGTERM end the program as Ctrl-C does, so that it cleans up."""

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
