# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Rules that every file of this repository keeps."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0",
    "# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set",
)
# Put together here, so that this file does not break its own rule.
FORBIDDEN = re.compile(
    "|".join(
        re.escape(first + rest)
        for first, rest in (
            ("/wo", "rk/"),
            ("/ro", "ot/"),
            ("/tm", "p/h/"),
            ("py", "pi.org"),
            ("python", "hosted"),
            ("registry.", "npmjs"),
            ("deb.", "debian.org"),
        )
    )
)


def text_of(name: str) -> str | None:
    """Return a text file, or None for binary data."""
    data = (ROOT / name).read_bytes()
    return None if b"\0" in data else data.decode()


def own_python(files: list[str]) -> list[str]:
    return [
        name
        for name in files
        if name.endswith(".py") and name.split("/")[0] in ("scripts", "tests")
    ]


@pytest.mark.parametrize("command", [("check",), ("format", "--check")])
def test_ruff(command: tuple[str, ...]):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "scripts", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_mypy(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "scripts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_python_files_start_with_spdx_lines(files: list[str]):
    def head(name: str) -> list[str]:
        lines = (text_of(name) or "").splitlines()
        return [line for line in lines[:3] if not line.startswith("#!")][:2]

    wrong = [name for name in own_python(files) if tuple(head(name)) != SPDX]
    assert wrong == []


def test_files_are_short(files: list[str]):
    kinds = (".py", ".sh", ".md", ".toml", ".jinja", ".patch")
    long = {}
    for name in files:
        if name.endswith(kinds):
            lines = len((text_of(name) or "").splitlines())
            if lines > MAX_LINES:
                long[name] = lines
    assert long == {}


def test_no_file_names_a_machine_or_a_registry(files: list[str]):
    found = {}
    for name in files:
        match = FORBIDDEN.search(text_of(name) or "")
        if match:
            found[name] = match[0]
    assert found == {}


def test_no_module_hides_sympys_flint(files: list[str]):
    """Torch imports sympy, and sympy imports a module of this name."""
    # Their parents are never where Python looks for modules.
    allowed = ("vllm_overlay/vllm/models/flint/", "staging/files/")
    wrong = [
        name
        for name in files
        if re.search(r"(^|/)flint(\.py|/.*\.py)$", name)
        and not name.startswith(allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ROOT / "requirements").glob("*.txt"))
)
def test_lock_files_pin_public_versions_only(name: str):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pin = re.compile(r'[a-z0-9-]+==[0-9][^+;@ ]*(; platform_machine == "x86_64")?')
    wrong = [
        line for line in lines if not line.startswith("#") and not pin.fullmatch(line)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["tools.txt", "engine.txt"])
def test_what_runs_here_is_what_is_locked(name: str):
    different = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        # A CPU build of torch has a local version, which the lock leaves open.
        found = metadata.version(requirement.name).partition("+")[0]
        if not requirement.specifier.contains(found, prereleases=True):
            different[requirement.name] = found
    assert different == {}
