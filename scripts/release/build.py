# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The files of a release."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from patchset.download import file_sha256
from patchset.errors import ConflictError, PatchsetError
from patchset.repo import Repo
from patchset.wheel_command import wheel_command
from release.changelog import section

CHANGELOG = "CHANGELOG.md"
CHECKSUMS = "SHA256SUMS"
NOTES = "NOTES.md"
SBOM = "sbom.cdx.json"
LOCK = "requirements/image-cu130.txt"
"""What the wheels for CUDA 13.0 were resolved with."""


def tag_of(repo: Repo) -> str:
    """The git tag of the release that pin.toml describes."""
    return f"v{repo.pin.release}"


def check(repo: Repo, tag: str) -> str:
    """Say whether a tag may be released; returns its notes.

    Raises:
        PatchsetError: the tag, the changelog and pin.toml do not agree.
    """
    if tag != tag_of(repo):
        raise PatchsetError(
            f"the tag is {tag}, but pin.toml describes {tag_of(repo)}; raise `flint` "
            "in [release], or tag another commit"
        )
    if repo.series_sha256 != repo.pin.series_sha256:
        raise PatchsetError(
            "patches/ or vllm_overlay/ changed since pin.toml was written; run "
            "`python3 scripts/patchset refresh`"
        )
    return section(repo.root / CHANGELOG, repo.pin.release, dated=True)


def notes_of(repo: Repo) -> str:
    """What the changelog says of this version, released or not.

    Raises:
        PatchsetError: nothing.
    """
    return section(repo.root / CHANGELOG, repo.pin.release)


def build_wheels(repo: Repo, kinds: list[str], out: Path) -> list[Path]:
    """Make the wheels; returns them.

    Raises:
        PatchsetError: one could not be made, or is not as pinned.
    """
    for kind in kinds:
        report = wheel_command(repo, kind, None, out)
        print(report.text(), file=sys.stderr)
        if report.exit_code:
            raise ConflictError(f"the wheel {kind} is not as pinned")
    return sorted(out.glob("*.whl"))


def write_sbom(repo: Repo, out: Path) -> Path:
    """Write the bill of materials in CycloneDX form, by cyclonedx-bom.

    Raises:
        PatchsetError: cyclonedx-bom is not installed, or failed.
    """
    made = out / SBOM
    with tempfile.TemporaryDirectory() as folder:
        # The component that the bill is of.
        project = Path(folder, "pyproject.toml")
        project.write_text(
            f'[project]\nname = "vllm"\nversion = "{repo.pin.release}"\n'
            'description = "vLLM with the Flint patch set"\n'
            'license = { text = "Apache-2.0" }\n',
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "cyclonedx_py", "requirements"]
        command += ["--pyproject", str(project), "--output-reproducible"]
        command += ["--output-format", "JSON", "--output-file", str(made)]
        command += [str(repo.root / LOCK)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PatchsetError(
            "no bill of materials (pip install -r requirements/sbom.txt, if "
            f"cyclonedx-bom is missing):\n{done.stderr.strip()}"
        )
    json.loads(made.read_text(encoding="utf-8"))
    return made


def write_checksums(out: Path) -> Path:
    """Write SHA256SUMS of all other files, as `sha256sum --check` reads it."""
    made = out / CHECKSUMS
    files = sorted(path for path in out.iterdir() if path.name != CHECKSUMS)
    rows = [f"{file_sha256(path)}  {path.name}\n" for path in files]
    made.write_text("".join(rows), encoding="utf-8")
    return made
