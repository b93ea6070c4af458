# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The base's requirements, with the versions that a CUDA version wants."""

from __future__ import annotations

import re
from pathlib import Path

from imagebuild.pairing import Pairing
from patchset.errors import PatchsetError

RUNTIME = "requirements/cuda.txt"
BUILD = "requirements/build/cuda.txt"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(\[[^\]]*\])?\s*(.*)")


def read_requirements(path: Path) -> list[str]:
    """Return a requirements file's lines, with the files it includes put in.

    Raises:
        PatchsetError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise PatchsetError(f"cannot read {path}: {exc.strerror}") from None
    lines: list[str] = []
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if line.startswith("-r "):
            lines += read_requirements(path.parent / line[3:].strip())
        elif line:
            lines.append(line)
    return lines


def runtime_requirements(tree: Path, pairing: Pairing, local: bool = True) -> list[str]:
    """What serving needs, besides the wheel.

    Args:
        tree: the base's source tree.
        pairing: the CUDA version.
        local: whether torch keeps its local version, which the ordinary index
            does not have.

    Raises:
        PatchsetError: the pairing changes a project that the base does not require.
    """
    lines = read_requirements(tree / RUNTIME)
    projects = {_split(line)[0] for line in lines}
    unused = sorted((pairing.versions.keys() | pairing.extras.keys()) - projects)
    if unused:
        raise PatchsetError(
            f"pin.toml changes {', '.join(unused)} for {pairing.name}, which the base "
            "does not require: take it out of [image.pairings]"
        )
    return _changed(lines, pairing, local)


def build_requirements(tree: Path, pairing: Pairing) -> list[str]:
    """What compiling the wheel needs."""
    return _changed(read_requirements(tree / BUILD), pairing, local=True)


def write_into(tree: Path, pairing: Pairing) -> list[str]:
    """Rewrite the tree's runtime requirements, which become the wheel's metadata.

    Returns:
        The lines that changed.
    """
    path = tree / RUNTIME
    before = read_requirements(path)
    after = runtime_requirements(tree, pairing, local=False)
    path.write_text("".join(f"{line}\n" for line in after), encoding="utf-8")
    return [line for line in after if line not in before]


def _split(line: str) -> tuple[str, str, str]:
    """Split a requirement into project, extras, and the rest."""
    match = _REQUIREMENT.fullmatch(line)
    if match is None:
        raise PatchsetError(f"the base requires {line!r}, which is no requirement")
    return match[1], match[2] or "", match[3]


def _changed(lines: list[str], pairing: Pairing, local: bool) -> list[str]:
    torch = pairing.torch_version if local else pairing.torch
    versions = {**pairing.versions, "torch": torch}
    changed = []
    for line in lines:
        name, extras, rest = _split(line)
        if name in pairing.extras:
            extra = pairing.extras[name]
            line = f"{name}[{extra}]{rest}" if extra else f"{name}{rest}"
        if name in versions:
            _, semicolon, marker = rest.partition(";")
            line = f"{name}{extras}=={versions[name]}{semicolon}{marker}"
        changed.append(line)
    return changed
