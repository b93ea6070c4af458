# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Makes a tree importable: its Python, with the binaries of a CPU wheel.

What lies in the folder comes before the installed vLLM, when PYTHONPATH names it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchset.gittree import Blob, blob_id
from patchset.overlay import MARKER_PATH
from patchset.pin import Pin
from patchset.rebase.trees import Tree

_METADATA = "Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n"
_LAST_LINES = 12  # of a failed program, in a report


@dataclass(frozen=True)
class Ran:
    """A program that ended.

    Attributes:
        code: its exit code.
        tail: its last lines.
    """

    code: int
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        """The last lines of what it printed."""
        return "\n".join(self.output.strip().splitlines()[-_LAST_LINES:])


def make_site(folder: Path, tree: Tree, wheel: Path, version: str, pin: Pin) -> None:
    """Write the package of `tree` as the new `folder`.

    Args:
        folder: must not exist, or is made anew.
        tree: the source.
        wheel: the CPU wheel whose binaries serve it.
        version: what it calls itself; vLLM knows its CPU build by "cpu" in it.
        pin: which files are generated, and which the CPU wheel has of its own.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name in pin.package_globs and name != MARKER_PATH:
                archive.extract(name, folder)
    for path in tree:
        if path.startswith("vllm/") and path not in pin.package_globs:
            blob = tree.read(path)
            if blob is not None:
                write(folder, path, blob)
    own = f"{version}.cpu" if "+" in version else f"{version}+cpu"
    numbers = tuple(int(part) for part in version.partition("+")[0].split("."))
    write(
        folder,
        "vllm/_version.py",
        Blob(f"__version__ = {own!r}\n__version_tuple__ = {numbers!r}\n".encode()),
    )
    info = folder / f"vllm-{own}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(_METADATA.format(version=own), encoding="utf-8")


def write(folder: Path, path: str, blob: Blob | None) -> None:
    """Write or remove one file below a folder."""
    place = folder / path
    if blob is None:
        place.unlink(missing_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_file() or blob_id(place.read_bytes()) != blob_id(blob.data):
        place.write_bytes(blob.data)


def run_python(
    site: Path | None, root: Path, words: Sequence[str], timeout: float
) -> Ran:
    """Run this interpreter with the site's vLLM before the installed one.

    Args:
        site: as `make_site` makes it; None for the installed vLLM.
        root: the working directory.
        words: the arguments.
        timeout: in seconds; a program that takes longer has failed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": "" if site is None else str(site),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as exc:
        held = exc.stdout or b""
        text = held.decode(errors="replace") if isinstance(held, bytes) else held
        code, output = 124, f"{text}\nstopped after {timeout:.0f} s"
    return Ran(code, output, time.monotonic() - began)
