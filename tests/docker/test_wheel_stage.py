# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The build stage as far as no compiler is needed."""

import importlib.util
import shutil
import zipfile
from pathlib import Path

import pytest

from imagebuild.pairing import ImagePin
from imagebuild.requirements import read_requirements, write_into
from imagebuild.wheel import check_wheel, repacked_kind
from patchset.errors import ConflictError, PatchsetError
from patchset.repo import Repo
from support.image_steps import imagebuild
from support.side_env import side_environment


@pytest.fixture(scope="module")
def python_part(source_stage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's Python part, made by vLLM's own setup.py."""
    place = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(source_stage, place / "vllm", symlinks=True)
    # `patchset probe` puts the MANIFEST.in without its patch beside the package.
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    manifest = Path(spec.origin).parents[1] / "MANIFEST.in"
    if manifest.is_file():
        shutil.copy(manifest, tree)
    python = side_environment("wheelbuild", with_engine=True) / "bin" / "python"
    mode = ("--mode", "python", "--python", python)
    done = imagebuild("wheel", tree, "--out", place / "dist", *mode)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "as pinned" in done.stdout
    (wheel,) = (place / "dist").glob("*.whl")
    return wheel


def test_the_python_part_is_as_pinned(python_part: Path, repo: Repo):
    """Among its files are the tuned tables, which setup.py does not name."""
    assert check_wheel(python_part, repo) == repo.pin.identity.package
    with zipfile.ZipFile(python_part) as wheel:
        assert "vllm/models/flint/ops/gemv/tuned/sm90.json" in wheel.namelist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm/models/flint/ops/gemv/tuned/sm90.json", "its tree id is"),
        ("vllm/models/flint/_patchset.json", "it lacks"),
    ],
)
def test_a_wheel_that_lacks_a_file_is_refused(
    python_part: Path, repo: Repo, tmp_path: Path, name: str, message: str
):
    less = tmp_path / python_part.name
    with zipfile.ZipFile(python_part) as old, zipfile.ZipFile(less, "w") as new:
        for member in old.namelist():
            if member != name:
                new.writestr(member, old.read(member))
    with pytest.raises(ConflictError, match=message):
        check_wheel(less, repo)


def test_the_metadata_asks_for_the_torch_of_the_cuda_version(
    own_tree: Path, image: ImagePin
):
    changed = write_into(own_tree, image.pairings["cu128"])
    assert "torch==2.11.0" in changed
    lines = read_requirements(own_tree / "requirements" / "cuda.txt")
    assert [line for line in lines if line.startswith("torch==")] == ["torch==2.11.0"]


def test_only_cuda_13_can_be_repacked(source_stage: Path, image: ImagePin, repo: Repo):
    kind = repacked_kind(image, image.pairings["cu130"], "x86_64")
    assert repo.pin.wheels[kind].torch == image.pairings["cu130"].torch
    with pytest.raises(PatchsetError, match="compile instead, or take CUDA 13.0.3"):
        repacked_kind(image, image.pairings["cu128"], "x86_64")


def test_a_failed_build_says_where(own_tree: Path, tmp_path: Path):
    (own_tree / "setup.py").write_text("raise SystemExit('no compiler here')")
    done = imagebuild("wheel", own_tree, "--out", tmp_path / "dist", "--mode", "python")
    assert done.returncode == 2
    assert "setup.py build_py failed" in done.stderr
    assert "no compiler here" in done.stderr
