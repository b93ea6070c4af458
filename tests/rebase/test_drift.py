# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What the overlay relies on is compared without importing anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchset.gittree import Blob
from patchset.rebase.drift.compare import overlay_drift
from patchset.rebase.drift.modules import Missing, Modules, module_name
from patchset.rebase.drift.uses import uses_of
from patchset.rebase.results import Drift
from patchset.rebase.store import Store, archive_files
from patchset.rebase.trees import Tree
from patchset.repo import Repo, load_repo
from patchset.tree import base_archive

OVERLAY = "vllm/models/flint/model.py"
MODEL = """\
from vllm import envs
from vllm.config import Config
from vllm.layers import Kernel, Linear, helper
from vllm.layers.base import scale


class Ours(Kernel):
    def run(self, x, bias=None):
        return super().run(x, bias=bias)

    @classmethod
    def supported(cls):
        return True


def make(config: Config) -> None:
    layer = Linear(3, bias=False)
    layer.load("weight")
    helper(1, flag=True)
    scale(2)
    print(config.model.size, envs.FAST)
"""
BASE = {
    "vllm/__init__.py": "",
    "vllm/models/__init__.py": "",
    "vllm/models/flint/__init__.py": "",
    OVERLAY: MODEL,
    "vllm/envs.py": "FAST = True\n",
    "vllm/config.py": (
        "from dataclasses import dataclass\n\n\n@dataclass\nclass Model:\n"
        "    size: int = 1\n\n\n@dataclass\nclass Config:\n    model: Model\n"
    ),
    "vllm/layers/__init__.py": (
        "from .base import Linear\nfrom .kernel import *\n\n\n"
        "def helper(x, flag=False): ...\n"
    ),
    "vllm/layers/base.py": (
        "import torch\n\n\ndef scale(x): ...\n\n\nclass Linear(torch.nn.Module):\n"
        "    def __init__(self, size, bias=True): ...\n\n"
        "    def load(self, name): ...\n"
    ),
    "vllm/layers/kernel.py": (
        "class Kernel:\n    def run(self, x, bias=None): ...\n\n"
        "    @classmethod\n    def supported(cls): ...\n"
    ),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.git")


def tree(store: Store, files: dict[str, str]) -> Tree:
    return Tree(store, {}, {path: Blob(text.encode()) for path, text in files.items()})


def drift(store: Store, edits: dict[str, tuple[str, str] | None]) -> list[Drift]:
    after = dict(BASE)
    for path, edit in edits.items():
        if edit is None:
            del after[path]
        else:
            assert edit[0] in after[path]
            after[path] = after[path].replace(*edit)
    files = [OVERLAY, "vllm/models/flint/__init__.py"]
    return overlay_drift(files, tree(store, BASE), tree(store, after))


def test_same_tree_has_no_drift(store: Store) -> None:
    assert drift(store, {}) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "kind", "name"),
    [
        (
            "vllm/layers/__init__.py",
            "from .base import Linear\n",
            "",
            "import",
            "Linear",
        ),
        ("vllm/layers/base.py", "def scale(x)", "def scaled(x)", "import", "scale"),
        ("vllm/layers/kernel.py", "class Kernel", "class Core", "import", "Kernel"),
        ("vllm/envs.py", "FAST", "QUICK", "attribute", "FAST"),
        ("vllm/config.py", "size: int", "width: int", "attribute", "size"),
        ("vllm/config.py", "model: Model", "models: Model", "attribute", "model"),
        ("vllm/layers/base.py", "def load", "def load_all", "attribute", "load"),
        ("vllm/layers/base.py", "bias=True", "has_bias=True", "call", "Linear"),
        ("vllm/layers/base.py", "name)", "name, shard)", "call", "load"),
        ("vllm/layers/__init__.py", "flag=False", "flags=0", "call", "helper"),
        ("vllm/layers/base.py", "def scale(x)", "def scale(x, y)", "call", "scale"),
        ("vllm/layers/kernel.py", "x, bias=None", "x, b=None", "override", "Ours.run"),
        (
            "vllm/layers/kernel.py",
            "supported(cls)",
            "fits(cls)",
            "override",
            "supported",
        ),
    ],
)
def test_each_kind(
    store: Store, path: str, old: str, new: str, kind: str, name: str
) -> None:
    found = drift(store, {path: (old, new)})
    assert any(d.kind == kind and d.name.endswith(name) for d in found), found


def test_new_abstract_method(store: Store) -> None:
    edit = (
        "class Kernel:\n",
        "class Kernel:\n    @abstractmethod\n    def new(self): ...\n\n",
    )
    (found,) = drift(store, {"vllm/layers/kernel.py": edit})
    assert (found.kind, found.name) == ("abstract", "Ours")
    assert "new" in found.detail


def test_module_gone(store: Store) -> None:
    found = drift(store, {"vllm/config.py": None})
    assert [(d.kind, d.name) for d in found] == [("import", "vllm.config.Config")]


def test_harmless_changes(store: Store) -> None:
    """Moved with a re-export, an optional argument more, another module's names."""
    edits: dict[str, tuple[str, str] | None] = {
        "vllm/layers/__init__.py": ("flag=False", "flag=False, more=None"),
        "vllm/layers/base.py": ("def scale(x): ...", "from vllm.envs import scale"),
        "vllm/envs.py": ("FAST = True", "FAST = False\n\ndef scale(y): ..."),
    }
    assert drift(store, edits) == []


def test_names_that_come_at_run_time_are_not_missing(store: Store) -> None:
    edit = ("FAST = True", "def __getattr__(name): ...")
    assert drift(store, {"vllm/envs.py": edit}) == []


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Repo, Tree]:
    """The pinned base with the overlay laid over it."""
    repo = load_repo()
    store = Store(tmp_path_factory.mktemp("real") / "store.git")
    files = archive_files(base_archive(repo), repo.pin.source_globs)
    commit = store.import_files("refs/base/pinned", files)
    overlay: dict[str, Blob | None] = {file.path: file.blob for file in repo.overlay}
    return repo, Tree.at(store, commit).changed(overlay)


def test_real_overlay_is_understood(real: tuple[Repo, Tree]) -> None:
    """On the base every import resolves and every call fits; and there are many."""
    repo, base = real
    modules = Modules(base)
    kinds: dict[str, int] = {}
    missing = []
    for file in repo.overlay:
        if not file.path.endswith(".py"):
            continue
        module = modules.get(module_name(file.path))
        assert module is not None
        for use in uses_of(modules, module):
            kinds[use.kind] = kinds.get(use.kind, 0) + 1
            if use.state == "missing" and use.kind in ("import", "call"):
                missing.append((file.path, use))
    assert missing == []
    assert kinds["import"] > 150 and kinds["call"] > 150 and kinds["attribute"] > 50
    linear = "vllm.model_executor.layers.linear"
    module = modules.get(linear)
    assert module is not None
    assert isinstance(modules.member(module, "NoSuchLinear"), Missing)


def test_real_base_class_is_followed(real: tuple[Repo, Tree]) -> None:
    """The kernel's base class renames a method: what overrides it is named."""
    repo, base = real
    path = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
    blob = base.read(path)
    assert blob is not None
    renamed = blob.data.replace(b"def apply_weights(", b"def apply_all_weights(")
    changed = base.changed({path: Blob(renamed, blob.mode)})
    found = overlay_drift([file.path for file in repo.overlay], base, changed)
    names = {d.name for d in found if d.kind == "override"}
    assert "FlintNvFp4LinearKernel.apply_weights" in names
