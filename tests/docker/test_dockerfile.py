# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""docker/Dockerfile is linted, and every reference in it leads somewhere."""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from imagebuild.pairing import ImagePin
from patchset.repo import Repo
from support.image_steps import DOCKER, ROOT
from support.side_env import lint

VARIABLE = re.compile(r"\$(?:\{(\w+)[^}]*\}|(\w+))")
# Set by the base images, or by the shell command that uses them.
FROM_OUTSIDE = {"PATH", "cuda", "pairing"}
MODES = ("compile", "repack")


@dataclass
class Stage:
    """One stage: its base, and the instructions after FROM."""

    base: str
    name: str
    commands: list[dict] = field(default_factory=list)

    def of(self, *kinds: str) -> list[dict]:
        return [command for command in self.commands if command["cmd"] in kinds]

    @property
    def arguments(self) -> dict[str, str]:
        return dict(map(argument, self.of("ARG")))


def argument(command: dict) -> tuple[str, str]:
    name, _, default = command["value"][0].partition("=")
    return name, default.strip('"')


def names_used(text: str) -> set[str]:
    return {first or second for first, second in VARIABLE.findall(text)}


def filled(text: str, values: dict[str, str]) -> str:
    return VARIABLE.sub(lambda match: values[match[1] or match[2]], text)


def references(stage: Stage) -> set[str]:
    """Stages and images that a stage is made from."""
    found = {stage.base}
    for command in stage.of("COPY", "RUN"):
        for flag in command["flags"]:
            found |= set(re.findall(r"from=([^,\s]+)", flag))
    return found


@pytest.fixture(scope="module")
def commands() -> list[dict]:
    """The Dockerfile, taken apart by Docker's own parser."""
    code = (
        "import dockerfile, json, sys\n"
        "found = dockerfile.parse_file(sys.argv[1])\n"
        "print(json.dumps([c._asdict() for c in found]))"
    )
    found = json.loads(lint("python", "-c", code, DOCKER / "Dockerfile"))
    return [{**command, "cmd": command["cmd"].upper()} for command in found]


@pytest.fixture(scope="module")
def for_from(commands: list[dict]) -> dict[str, str]:
    """ARGs before the first FROM, which FROM lines may use."""
    first = next(n for n, command in enumerate(commands) if command["cmd"] == "FROM")
    return dict(map(argument, commands[:first]))


@pytest.fixture(scope="module")
def stages(commands: list[dict]) -> list[Stage]:
    found: list[Stage] = []
    for command in commands:
        if command["cmd"] == "FROM":
            base, word, name = command["value"]
            assert word.upper() == "AS"
            found.append(Stage(base, name))
        elif found:
            found[-1].commands.append(command)
    return found


def test_hadolint():
    lint("hadolint", DOCKER / "Dockerfile")


def test_shellcheck():
    lint("shellcheck", *DOCKER.glob("*.sh"), ROOT / ".ci" / "run")


def test_hadolint_sees_a_mistake(tmp_path: Path):
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM ubuntu\nRUN sudo apt-get install gcc\n")
    with pytest.raises(AssertionError, match="DL3004"):
        lint("hadolint", wrong)


def test_defaults_are_those_of_the_pin_file(
    for_from: dict[str, str], stages: list[Stage], image: ImagePin
):
    assert for_from["CUDA_VERSION"] == image.pairings[image.default].cuda
    assert for_from["UBUNTU_VERSION"] == image.ubuntu
    lists = [s.arguments["ARCH_LIST"] for s in stages if "ARCH_LIST" in s.arguments]
    assert lists == [image.arch_list]


def test_no_other_version_stands_in_docker(repo: Repo, image: ImagePin):
    """Versions that pin.toml has are written down there alone."""
    values = {repo.pin.base.version, repo.pin.base.commit, repo.pin.release}
    values |= {pairing.torch for pairing in image.pairings.values()}
    values |= {p.cuda for n, p in image.pairings.items() if n != image.default}
    for path in (DOCKER / "Dockerfile", DOCKER / "docker-bake.hcl"):
        text = path.read_text()
        assert [value for value in sorted(values) if value in text] == [], path


def test_every_argument_is_declared_and_used(
    for_from: dict[str, str], stages: list[Stage]
):
    assert set().union(*(names_used(s.base) for s in stages)) == set(for_from)
    for stage in stages:
        known, used = set(FROM_OUTSIDE), set()
        for command in stage.commands:
            if command["cmd"] == "ARG":
                known.add(argument(command)[0])
                continue
            here = names_used(" ".join((*command["flags"], *command["value"])))
            assert here <= known, f"{stage.name}: {command['original']}"
            used |= here
            if command["cmd"] == "ENV":
                known |= set(command["value"][::2])
        assert set(stage.arguments) <= used, f"{stage.name}: unused ARG"
        # An ARG without a default repeats one of those before the first FROM.
        empty = {name for name, default in stage.arguments.items() if not default}
        assert empty - {"TORCH_INDEX_URL"} <= set(for_from), stage.name


@pytest.mark.parametrize("mode", MODES)
def test_every_stage_that_is_named_exists(
    mode: str, for_from: dict[str, str], stages: list[Stage]
):
    values = {**for_from, "BUILD_MODE": mode}
    known: set[str] = set()
    for stage in stages:
        for name in (filled(name, values) for name in references(stage)):
            outside = name.startswith(("ubuntu:", "nvidia/cuda:"))
            assert name in known or outside, f"{stage.name} is made from {name}"
        known.add(stage.name)


def test_every_stage_is_needed(for_from: dict[str, str], stages: list[Stage]):
    by_name = {stage.name: stage for stage in stages}
    reached: set[str] = set()
    for mode in MODES:
        values = {**for_from, "BUILD_MODE": mode}
        todo = [stages[-1].name]
        while todo:
            name = todo.pop()
            if name in by_name:
                reached.add(name)
                todo += [filled(x, values) for x in references(by_name[name])]
    assert reached == set(by_name)


def in_context(path: Path, rules: list[str]) -> bool:
    """Whether .dockerignore lets a file of the repository through."""
    parts = path.relative_to(ROOT).parts
    paths = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    allowed = True
    for rule in rules:
        pattern = rule.removeprefix("!")
        hit = any(fnmatch.fnmatchcase(path, pattern) for path in paths)
        if hit or (pattern.startswith("**/") and pattern[3:] in parts):
            allowed = rule.startswith("!")
    return allowed


def test_what_is_copied_exists_and_is_not_ignored(stages: list[Stage]):
    text = (ROOT / ".dockerignore").read_text()
    rules = [line for line in text.splitlines() if line and not line.startswith("#")]
    copied: set[str] = set()
    for command in (c for stage in stages for c in stage.of("COPY", "ADD")):
        if not any(flag.startswith("--from=") for flag in command["flags"]):
            copied |= set(command["value"][:-1])
    for source in copied:
        path = ROOT / source
        assert path.exists(), source
        files = [path] if path.is_file() else [f for f in path.rglob("*.*")]
        files = [f for f in files if "__pycache__" not in f.parts and f.suffix != ".in"]
        assert files and all(in_context(file, rules) for file in files), source
    # And nothing is let in that no stage copies.
    for rule in rules:
        if rule.startswith("!"):
            assert any(rule[1:] == c or rule[1:].startswith(f"{c}/") for c in copied)
    assert not in_context(ROOT / "tests" / "conftest.py", rules)
    assert not in_context(ROOT / "patches" / "__pycache__" / "x.pyc", rules)


def test_the_image_serves_as_nobody_special(stages: list[Stage]):
    last = stages[-1]
    (user,) = last.of("USER")
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", user["value"][0])
    after = last.commands[last.commands.index(user) :]
    kinds = [command["cmd"] for command in after]
    assert {"HEALTHCHECK", "ENTRYPOINT"} <= set(kinds)
    assert not {"RUN", "COPY", "ADD"} & set(kinds)
