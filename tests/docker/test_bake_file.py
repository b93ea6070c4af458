# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""docker-bake.hcl together with what `imagebuild bake` prints."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from imagebuild.bake import TARGET_PREFIX, bake_file
from imagebuild.pairing import ImagePin
from patchset.errors import PatchsetError
from patchset.repo import Repo
from support.image_steps import DOCKER, imagebuild
from support.side_env import lint


@pytest.fixture(scope="module")
def bake() -> dict[str, dict[str, dict]]:
    """Blocks of docker-bake.hcl: kind -> name -> body."""
    code = "import hcl2, json, sys; print(json.dumps(hcl2.load(open(sys.argv[1]))))"
    parsed = json.loads(lint("python", "-c", code, DOCKER / "docker-bake.hcl"))
    found: dict[str, dict[str, dict]] = {}
    for kind in ("variable", "group", "target"):
        for block in parsed[kind]:
            for name, body in block.items():
                found.setdefault(kind, {})[name.strip('"')] = body
    return found


def plain(values: list[str]) -> set[str]:
    return {value.strip('"') for value in values}


@pytest.fixture(scope="module")
def declared() -> set[str]:
    """Every ARG of the Dockerfile."""
    text = (DOCKER / "Dockerfile").read_text()
    return set(re.findall(r"^ARG (\w+)", text, re.M))


def test_targets_inherit_what_exists(bake: dict, repo: Repo, image: ImagePin):
    made = set(bake_file(repo, image)["target"])
    targets = bake["target"]
    for name, target in targets.items():
        assert plain(target.get("inherits", [])) <= set(targets) | made, name
    public = {name for name in targets if not name.startswith("_")}
    assert {f"{TARGET_PREFIX}{name}" for name in public} == made
    for name in public:
        assert f"{TARGET_PREFIX}{name}" in plain(targets[name]["inherits"])
    (group,) = bake["group"].values()
    assert plain(group["targets"]) == {image.default}


def test_arguments_are_those_of_the_dockerfile(
    bake: dict, repo: Repo, image: ImagePin, declared: set[str]
):
    passed = {name for name in bake["target"]["_image"]["args"] if name[0] != "_"}
    for target in bake_file(repo, image)["target"].values():
        assert set(target["args"]) & passed == set()
        assert set(target["args"]) | passed == declared


def test_variables_are_declared_and_used(bake: dict):
    target = bake["target"]["_image"]
    used = {value for name, value in target["args"].items() if name[0] != "_"}
    for other in bake["target"].values():
        for tag in other.get("tags", []):
            used |= set(re.findall(r"\$\{(\w+)\}", tag))
    assert used == set(bake["variable"])


def test_the_dockerfile_and_its_last_stage_are_named(bake: dict):
    target = bake["target"]["_image"]
    assert plain([target["dockerfile"]]) == {"docker/Dockerfile"}
    stages = re.findall(
        r"^FROM .* AS (\S+)$", (DOCKER / "Dockerfile").read_text(), re.M
    )
    assert plain([target["target"]]) == {stages[-1]}


def test_labels_say_what_the_image_holds(repo: Repo, image: ImagePin):
    done = imagebuild("bake")
    assert done.returncode == 0, done.stderr
    targets = json.loads(done.stdout)["target"]
    assert targets == bake_file(repo, image)["target"]
    for name, pairing in image.pairings.items():
        target = targets[f"{TARGET_PREFIX}{name}"]
        assert target["args"]["CUDA_VERSION"] == pairing.cuda
        labels = target["labels"]
        assert labels["flint.base.version"] == repo.pin.base.version
        assert labels["flint.base.commit"] == repo.pin.base.commit
        assert labels["flint.series.sha256"] == repo.series_sha256
        assert labels["flint.tree.package"] == repo.pin.identity.package
        assert labels["flint.torch"] == pairing.torch_version
        assert labels["org.opencontainers.image.version"] == repo.pin.release


def test_stale_ids_are_refused(repo: Repo, image: ImagePin):
    stale = replace(repo, pin=replace(repo.pin, series_sha256="0" * 64))
    with pytest.raises(PatchsetError, match="patchset refresh"):
        bake_file(stale, image)
