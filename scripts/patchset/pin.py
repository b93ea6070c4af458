# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The pin file: the base, its artifacts, and the expected identity."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from patchset.errors import PatchsetError
from patchset.gittree import Globs

PIN_NAME = "pin.toml"


@dataclass(frozen=True)
class Artifact:
    """One file on the package index, known by its hash."""

    name: str
    project: str
    filename: str
    sha256: str
    size: int


@dataclass(frozen=True)
class WheelArtifact(Artifact):
    """An official wheel; `flavour` ("cuda" or "cpu") says which tree id it has."""

    flavour: str
    torch: str


@dataclass(frozen=True)
class Base:
    """The vLLM release; `commit` may be abbreviated."""

    version: str
    tag: str
    commit: str


@dataclass(frozen=True)
class TreeIds:
    """Git tree ids: the source tree, and ``vllm/`` as each flavour ships it."""

    source: str
    package: str
    package_cpu: str

    def for_package(self, flavour: str) -> str:
        """The id of ``vllm/`` in a source tree or a wheel of that flavour."""
        return self.package_cpu if flavour == "cpu" else self.package


@dataclass(frozen=True)
class Pin:
    """Everything pinned; see the comments in pin.toml."""

    base: Base
    flint: int
    sdist: Artifact
    wheels: dict[str, WheelArtifact]
    torch: dict[str, str]
    supersedes: frozenset[str]
    generated_package: tuple[str, ...]
    generated_source: tuple[str, ...]
    cpu_blobs: dict[str, str]
    pristine: TreeIds
    identity: TreeIds
    series_sha256: str

    @property
    def release(self) -> str:
        """The patched version, for example ``0.32.0+flint.1``."""
        return f"{self.base.version}+flint.{self.flint}"

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """Every pinned download by name: ``source`` and the wheels."""
        return {"source": self.sdist, **self.wheels}

    @cached_property
    def package_globs(self) -> Globs:
        """Generated files of the package."""
        return Globs(self.generated_package)

    @cached_property
    def source_globs(self) -> Globs:
        """Generated files of the whole source tree, the package's among them."""
        return Globs(self.generated_package + self.generated_source)


def load_pin(root: Path) -> Pin:
    """Read ``pin.toml`` at the repository root.

    Raises:
        PatchsetError: it is missing, is no TOML, or lacks a field.
    """
    path = root / PIN_NAME
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise PatchsetError(f"cannot read the pin file {path}: {exc}") from None
    except ValueError as exc:
        raise PatchsetError(f"{path} is not valid TOML: {exc}") from None
    try:
        pin = _parse(raw)
    except KeyError as exc:
        raise PatchsetError(f"{path} lacks the field {exc}") from None
    except TypeError as exc:
        raise PatchsetError(f"{path} has a field of the wrong kind: {exc}") from None
    _check(pin, path)
    return pin


def _parse(raw: dict[str, Any]) -> Pin:
    def trees(table: dict[str, Any]) -> TreeIds:
        return TreeIds(table["source"], table["package"], table["package_cpu"])

    def artifact(name: str, table: dict[str, Any]) -> Artifact:
        keys = ("project", "filename", "sha256", "size")
        return Artifact(name, *(table[key] for key in keys))

    def wheel(name: str, table: dict[str, Any]) -> WheelArtifact:
        plain = vars(artifact(name, table))
        return WheelArtifact(**plain, flavour=table["flavour"], torch=table["torch"])

    base = raw["base"]
    return Pin(
        base=Base(base["version"], base["tag"], base["commit"]),
        flint=raw["release"]["flint"],
        sdist=artifact("source", raw["sdist"]),
        wheels={name: wheel(name, table) for name, table in raw["wheels"].items()},
        torch=dict(raw["torch"]),
        supersedes=frozenset(raw["overlay"]["supersedes"]),
        generated_package=tuple(raw["generated"]["package"]),
        generated_source=tuple(raw["generated"]["source"]),
        cpu_blobs=dict(raw["cpu_blobs"]),
        pristine=trees(raw["pristine"]),
        identity=trees(raw["identity"]),
        series_sha256=raw["identity"]["series_sha256"],
    )


def _check(pin: Pin, path: Path) -> None:
    if not isinstance(pin.flint, int) or pin.flint < 1:
        raise PatchsetError(f"{path}: release.flint must be 1 or more")
    if not re.fullmatch(r"[0-9a-f]{7,40}", pin.base.commit):
        raise PatchsetError(f"{path}: base.commit must be 7 to 40 hex digits")
    for artifact in pin.artifacts.values():
        if not re.fullmatch(r"[0-9a-f]{64}", artifact.sha256):
            raise PatchsetError(f"{path}: {artifact.name}: sha256 is not one")
        if not isinstance(artifact.size, int) or artifact.size < 1:
            raise PatchsetError(f"{path}: {artifact.name}: size must be in bytes")
    for wheel in pin.wheels.values():
        if wheel.flavour not in ("cuda", "cpu"):
            raise PatchsetError(f"{path}: {wheel.name}: flavour is cuda or cpu")


def write_identity(root: Path, series_sha256: str, trees: TreeIds) -> bool:
    """Rewrite the values of ``[identity]``; every other byte stays.

    Returns:
        Whether the file changed.
    """
    path = root / PIN_NAME
    text = path.read_text(encoding="utf-8")
    table = re.search(r"^\[identity\]", text, re.M)
    start = table.end() if table else len(text)
    head, tail = text[:start], text[start:]
    values = {
        "series_sha256": series_sha256,
        "source": trees.source,
        "package": trees.package,
        "package_cpu": trees.package_cpu,
    }
    for key, value in values.items():
        tail, count = re.subn(
            rf'^{key} = "[^"]*"', f'{key} = "{value}"', tail, count=1, flags=re.M
        )
        if not count:
            raise PatchsetError(f'{path}: [identity] lacks {key} = ""')
    new = head + tail
    if new == text:
        return False
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(new, encoding="utf-8")
    temporary.replace(path)
    return True
