# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The releases of a project on the package index."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from patchset.errors import PatchsetError
from patchset.pin import Artifact

_TIMEOUT = (20, 60)  # seconds to connect, and between two pieces


@functools.cache
def _files(project: str) -> tuple[Artifact, ...]:
    """Every file of a project that has a hash and a size, as the index lists it."""
    try:
        import pypi_simple
        import requests
    except ImportError as exc:
        raise PatchsetError(
            f"looking releases up needs the Python package {exc.name}: "
            "pip install pypi-simple"
        ) from None
    index = os.environ.get("PIP_INDEX_URL", pypi_simple.PYPI_SIMPLE_ENDPOINT)
    try:
        with pypi_simple.PyPISimple(index) as client:
            page = client.get_project_page(project, _TIMEOUT)
    except pypi_simple.NoSuchProjectError:
        raise PatchsetError(f"the package index has no project {project}") from None
    except requests.RequestException as exc:
        raise PatchsetError(f"cannot ask the package index for {project}: {exc}") from (
            None
        )
    return tuple(
        Artifact(file.filename, project, file.filename, digest, file.size or 0)
        for file in page.packages
        if (digest := file.digests.get("sha256")) and not file.is_yanked
    )


def source_archives(project: str) -> dict[Version, Artifact]:
    """The source archive of each final release, oldest first.

    Raises:
        PatchsetError: no network, or no such project.
    """
    found = {}
    for artifact in _files(project):
        if not artifact.filename.endswith(".tar.gz"):
            continue
        try:
            version = parse_sdist_filename(artifact.filename)[1]
        except InvalidSdistFilename:
            continue
        if not version.is_prerelease:
            found[version] = artifact
    return dict(sorted(found.items()))


def source_archive(project: str, version: str) -> Artifact:
    """One release's source archive.

    Raises:
        PatchsetError: the index has none of that version.
    """
    archives = source_archives(project)
    artifact = archives.get(Version(version))
    if artifact is None:
        near = ", ".join(map(str, list(archives)[-6:]))
        raise PatchsetError(
            f"the package index has no source archive of {project} {version}; "
            f"the last ones are {near}"
        )
    return artifact


def wheels(project: str, version: str) -> list[Artifact]:
    """The wheels of one release."""
    found = []
    for artifact in _files(project):
        if Path(artifact.filename).suffix != ".whl":
            continue
        try:
            if parse_wheel_filename(artifact.filename)[1] == Version(version):
                found.append(artifact)
        except InvalidWheelFilename:
            continue
    return found
