# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The bootstrap's parts that need no network: what is missing, progress, .venv."""

import ctypes
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootstrap import environment, pip_run, system
from bootstrap.console import StatusLine
from bootstrap.errors import BootstrapError
from bootstrap.pip_run import PipOutput
from bootstrap.process import child


@pytest.fixture
def bare_debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without python3-venv and libnuma."""

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_nothing_is_missing_where_this_runs():
    assert system.missing_packages() == []


def test_a_user_who_is_not_root_gets_the_command(
    bare_debian: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    names = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv libnuma1"
    with pytest.raises(BootstrapError, match=f"sudo apt-get install {names}"):
        system.ensure_packages()


def test_root_installs_what_is_missing(
    bare_debian: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    commands = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        commands.append(command)
        if command[1] == "install":
            monkeypatch.setattr(system, "missing_packages", lambda: [])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(system.subprocess, "run", run)
    system.ensure_packages()
    assert commands[0] == ["apt-get", "update"]
    assert commands[1][-1] == "libnuma1"
    assert "libnuma1" in capsys.readouterr().out


def test_a_failing_apt_is_one_clear_error(
    bare_debian: None, monkeypatch: pytest.MonkeyPatch
):
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 100, "", "E: no network")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(system.subprocess, "run", run)
    with pytest.raises(BootstrapError, match="apt-get update failed:\nE: no network"):
        system.ensure_packages()


@pytest.mark.parametrize(("place", "value"), [("platform", "darwin")])
def test_another_system_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: str, value: str
):
    monkeypatch.setattr(sys, place, value)
    with pytest.raises(BootstrapError, match="runs on Linux"):
        system.check_platform()


def test_pip_output_is_condensed():
    output = PipOutput()
    said = [
        output.feed(line)
        for line in (
            "Collecting torch==2.13.0 (from -r engine.txt (line 1))",
            "  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (900.0 MB)",
            "Progress 450000000 of 900000000",
            "Requirement already satisfied: numpy in ./lib (2.0)",
            "Installing collected packages: numpy, torch",
        )
    ]
    assert said == [
        "1 packages found",
        "1 packages found, downloading torch",
        "1 packages found, downloading torch, 450 of 900 MB",
        "2 packages found",
        "unpacking 2 packages",
    ]


def test_a_failing_pip_shows_what_it_said():
    with pytest.raises(BootstrapError, match="no-such-file.txt"):
        pip_run.run_pip(
            Path(sys.executable), "nothing", ["--requirement", "no-such-file.txt"]
        )


def test_this_environment_fits_together():
    pip_run.check_environment(Path(sys.executable))


def test_a_log_gets_few_lines(capsys: pytest.CaptureFixture):
    line = StatusLine("step")
    for number in range(1000):
        line.update(f"at {number}")
    line.finish("done")
    assert capsys.readouterr().out == "  step: done (0:00)\n"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty clone with two finished environments below build/."""
    for name in ("env-old", "env-new"):
        (tmp_path / "build" / name / "bin").mkdir(parents=True)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "BUILD", tmp_path / "build")
    monkeypatch.setattr(environment, "LINK", tmp_path / ".venv")
    return tmp_path


def test_publishing_swaps_the_link_and_removes_the_old_one(clone: Path):
    (clone / ".venv").symlink_to("build/env-old")
    environment._publish(clone / "build" / "env-new")
    assert os.readlink(clone / ".venv") == "build/env-new"
    assert [path.name for path in (clone / "build").iterdir()] == ["env-new"]
    environment._publish(clone / "build" / "env-new")
    assert (clone / ".venv" / "bin").is_dir()


def test_a_folder_of_the_users_is_not_replaced(clone: Path):
    (clone / ".venv").mkdir()
    with pytest.raises(BootstrapError, match="in the way"):
        environment._publish(clone / "build" / "env-new")
    assert (clone / ".venv").is_dir()


def test_an_interrupted_environment_leaves_nothing(
    clone: Path, monkeypatch: pytest.MonkeyPatch
):
    place = clone / "build" / "env-next"

    def stop(*arguments: object) -> None:
        (place / "bin").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "output_of", stop)
    with pytest.raises(KeyboardInterrupt):
        environment._make(place, place / "bin" / "python")
    assert not place.exists()
    assert not (clone / ".venv").exists()


def test_the_launchers_answer_help_without_an_environment(tmp_path: Path):
    """In a copy without .venv: --help must not start to make one."""
    scripts = tmp_path / "scripts"
    source = Path(environment.__file__).resolve().parents[1]
    for name in ("quickstart.py", "bootstrap", "quickstart"):
        (scripts / name).parent.mkdir(exist_ok=True)
        (scripts / name).symlink_to(source / name)
    command = [sys.executable, "-S", str(scripts / "quickstart.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--keep-serving" in done.stdout
    bad = [*command[:-1], "--timeout", "-5"]
    refused = subprocess.run(bad, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr


def test_an_interrupt_ends_the_children_of_children(tmp_path: Path):
    """As pip below ensurepip below venv."""
    pid_file = tmp_path / "pid"
    inner = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))"
    inner += "; time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with (
        pytest.raises(KeyboardInterrupt),
        child([sys.executable, "-c", outer], subprocess.STDOUT),
    ):
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.02)
        raise KeyboardInterrupt
    grandchild = Path(f"/proc/{pid_file.read_text()}/stat")
    end = time.monotonic() + 5
    while grandchild.exists() and " Z " not in grandchild.read_text():
        assert time.monotonic() < end, "still running"
        time.sleep(0.02)
