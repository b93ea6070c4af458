# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tree ids and path patterns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchset.gittree import MODE_EXEC, MODE_FILE, Entry, Globs, blob_id, tree_id

# Names around "/" and "." show that folders sort as if they ended with a slash.
NAMES = st.text(alphabet="a.-0_b", min_size=1, max_size=3).filter(
    lambda name: name not in (".", "..")
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


def compatible(paths: list[str]) -> list[str]:
    """Without those that would be a folder as well as a file."""
    return [
        path
        for path in paths
        if not any(other.startswith(path + "/") for other in paths)
    ]


@settings(max_examples=60, deadline=None)
@given(
    paths=st.lists(PATHS, min_size=1, max_size=12, unique=True).map(compatible),
    data=st.binary(max_size=20),
    executable=st.booleans(),
)
def test_same_as_git(
    tmp_path_factory: pytest.TempPathFactory,
    paths: list[str],
    data: bytes,
    executable: bool,
) -> None:
    root = tmp_path_factory.mktemp("tree")
    mode = MODE_EXEC if executable else MODE_FILE
    blob = git(root, "init", "--quiet") or git(
        root, "hash-object", "-w", "--stdin", data=data
    )
    assert blob == blob_id(data)
    index = "".join(f"{mode:o} {blob}\t{path}\n" for path in paths)
    git(root, "update-index", "--index-info", data=index.encode())
    entries = {path: Entry(mode, blob) for path in paths}
    assert tree_id(entries) == git(root, "write-tree")


def git(root: Path, *args: str, data: bytes = b"") -> str:
    return (
        subprocess.run(
            ["git", *args], cwd=root, input=data, capture_output=True, check=True
        )
        .stdout.decode()
        .strip()
    )


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("vllm/_version.py", "vllm/_version.py", True),
        ("vllm/_version.py", "vllm/a/_version.py", False),
        ("vllm/**/*.so", "vllm/x.so", True),
        ("vllm/**/*.so", "vllm/a/b/x.so", True),
        ("vllm/**/*.so", "vllm/x.sox", False),
        ("vllm/**/*.so", "csrc/x.so", False),
        ("*.egg-info/**", "vllm.egg-info/PKG-INFO", True),
        ("*.egg-info/**", "a/vllm.egg-info/PKG-INFO", False),
        ("**/__pycache__/**", "__pycache__/x", True),
        ("**/__pycache__/**", "a/b/__pycache__/c/x", True),
        ("**/__pycache__/**", "a/my__pycache__/x", False),
        ("build/**", "requirements/build/x.txt", False),
    ],
)
def test_globs(pattern: str, path: str, expected: bool) -> None:
    assert (path in Globs([pattern])) is expected


def test_globs_cover_folders() -> None:
    globs = Globs(["a/b/**", "**/__pycache__/**", "c/**/*.so"])
    assert globs.covers_folder("a/b")
    assert globs.covers_folder("x/__pycache__")
    assert not globs.covers_folder("a")
    assert not globs.covers_folder("c")
    assert "anything" not in Globs([])
