# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Names that both sides added are seen wherever they stand in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchset.basis import read_basis
from patchset.gittree import Blob
from patchset.rebase.place import Placed, place_patch
from patchset.rebase.rows import rows_of, without_rows
from patchset.rebase.store import Store
from patchset.rebase.trees import Tree
from patchset.repo import Repo

CONFIG = "vllm/transformers_utils/config.py"
REGISTRY = "vllm/model_executor/models/registry.py"
SPECULATORS = "bugfix-honor-hf-config-path-when-looking-for-speculators"


@pytest.fixture(scope="module")
def base(real_repo: Repo, real_archive: Path, tmp_path_factory) -> Tree:
    store = Store(tmp_path_factory.mktemp("base") / "store.git")
    return Tree(store, {}, read_basis(real_archive, real_repo).blobs)


def place(repo: Repo, name: str, base: Tree, path: str, old: str, new: str) -> Placed:
    """Place a patch on the base with one edit."""
    text = base.text(path)
    assert text is not None and text.count(old) == 1
    edited = base.changed({path: Blob(text.replace(old, new).encode())})
    (patch,) = (patch for patch in repo.series if patch.name == name)
    return place_patch(patch, edited, base, {})


def test_upstream_fixed_it_otherwise(real_repo: Repo, base: Tree) -> None:
    """The fix is upstream's to have: ours is left out, and nothing is mixed."""
    old = "    vllm_speculative_config: dict[str, Any] | None = None,\n    hf_token"
    new = f"    hf_config_path: str = '',\n{old}"
    placed = place(real_repo, SPECULATORS, base, CONFIG, old, new)
    assert (placed.status, placed.dropped) == ("superseded", True)
    assert placed.changes == {}
    (file,) = (file for file in placed.files if file.path == CONFIG)
    assert file.rows == ["maybe_override_with_speculators.(hf_config_path)"]


def test_upstream_registers_it_otherwise(real_repo: Repo, base: Tree) -> None:
    """The row is ours to have: upstream's goes, wherever it stood."""
    old = '    "GemmaForCausalLM": ("gemma", "GemmaForCausalLM"),\n'
    new = old + '    "FlintForCausalLM": ("flint", "FlintForCausalLM"),\n'
    placed = place(real_repo, "model-register-flint", base, REGISTRY, old, new)
    assert (placed.status, placed.dropped) == ("superseded", False)
    blob = placed.changes[REGISTRY]
    assert blob is not None
    assert blob.data.count(b'"FlintForCausalLM"') == 2  # one row: key and class
    assert b'("vllm.models.flint", "FlintForCausalLM")' in blob.data


@pytest.mark.parametrize(
    ("path", "text", "keys"),
    [
        ("a.py", "X = {'a': 1}\n", {"X", "X['a']"}),
        ("a.py", "X: dict = f(a=1)\n", {"X", "Xf(a=)"}),
        ("a.py", "X = ['a', B]\n", {"X", "X{'a'}", "X{B}"}),
        ("a.py", "def f(a): ...\nclass C:\n    b = 1\n", {"f", "f.(a)", "C", "C.b"}),
        (
            "a.py",
            "X = {'a': g(k=1), 'b': g(k=2)}\n",
            {"X", "X['a']", "X['b']"} | {"X['a'](k=)", "X['b'](k=)"},
        ),
        ("a.py", "x = 1\nx = 2\n", set()),
        ("a.py", "def\n", set()),
        ("a.md", "| `A` | x |\ntext\n", {"`A`"}),
        ("requirements/a.txt", "gguf >= 1 # why\n# no\n", {"gguf"}),
        ("a.txt", "gguf >= 1\n", set()),
    ],
)
def test_rows(path: str, text: str, keys: set[str]) -> None:
    assert set(rows_of(path, text)) == keys


def test_row_of_several_lines_goes_whole() -> None:
    text = "X = {\n    'a': f(\n        1,\n    ),\n    'b': 2,\n}\n"
    row = rows_of("a.py", text)["X['a']"]
    assert row.whole
    assert without_rows(text, [row]) == "X = {\n    'b': 2,\n}\n"
