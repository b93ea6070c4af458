# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The official wheels and this repository's patch set: what is released."""

import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from patchset.download import fetch
from patchset.repo import Repo, load_repo
from patchset.wheel import repack
from patchset.wheel_verify import verify_wheel

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
KINDS = ["cpu-x86_64", "cuda13-x86_64"]


@pytest.fixture(scope="module")
def repo() -> Repo:
    return load_repo()


@pytest.fixture(scope="module", params=KINDS)
def official(request: pytest.FixtureRequest, repo: Repo) -> Path:
    return fetch(repo.pin.wheels[request.param])


def test_repacks_fast_verifies_and_repeats(official: Path, repo: Repo, tmp_path: Path):
    start = time.monotonic()
    first = repack(official, tmp_path / "a", repo).path
    assert time.monotonic() - start < 60
    report = verify_wheel(first, repo)
    assert (report.exit_code, report.notes) == (0, []), report.text()
    second = repack(official, tmp_path / "b", repo).path
    assert first.name == second.name
    with first.open("rb") as one, second.open("rb") as two:
        while chunk := one.read(1 << 24):
            assert chunk == two.read(1 << 24)
        assert two.read() == b""


def test_the_name_is_a_version_after_the_base(official: Path, repo: Repo):
    made = repack_name(official, repo)
    name, version, _, tags = parse_wheel_filename(made)
    assert name == "vllm"
    assert Version("0.32.0") < version < Version("0.32.1")
    assert tags == parse_wheel_filename(official.name)[3]


def repack_name(official: Path, repo: Repo) -> str:
    local = ".cpu" if "cpu" in official.name else ""
    tags = official.name.split("-", 2)[2]
    return f"vllm-{repo.pin.release}{local}-{tags}"


def test_one_changed_byte_in_a_library_fails(repo: Repo, tmp_path: Path):
    wheel = repack(fetch(repo.pin.wheels["cpu-x86_64"]), tmp_path, repo).path
    with wheel.open("r+b") as file:
        file.seek(wheel.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    report = verify_wheel(wheel, repo)
    assert report.exit_code == 1
    assert any(".so" in note for note in report.notes), report.notes


def test_the_installed_vllm_is_this_patch_set(repo: Repo):
    """What all other tests run is the result of the present series."""
    package = metadata.distribution("vllm")
    assert package.version == f"{repo.pin.release}.cpu"
    site = package.locate_file("")
    command = [sys.executable, str(SCRIPTS / "patchset"), "verify", str(site), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report


def test_the_installed_vllm_says_its_version():
    code = "import vllm, vllm.platforms as p; print(vllm.__version__)"
    code += "; print(p.current_platform.device_type)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-2:] == [metadata.version("vllm"), "cpu"]
