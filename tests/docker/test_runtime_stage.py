# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The runtime stage: entry point and health check, in .venv instead of an image."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from patchset.repo import Repo
from quickstart.server import group_members
from support.image_steps import DOCKER, ROOT

ENTRYPOINT = DOCKER / "entrypoint.sh"
START_S = 600


def environment(**more: str) -> dict[str, str]:
    """The image's: programs of the environment first, then the system's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {
        **os.environ,
        **offline,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PATH": path,
        **more,
    }


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ENTRYPOINT), *arguments],
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
    )


def health(port: int) -> int:
    command = [sys.executable, str(DOCKER / "healthcheck.py")]
    return subprocess.run(
        # A proxy that is not there: it must not be asked for this machine.
        command,
        env=environment(PORT=str(port), http_proxy="http://127.0.0.1:9"),
        capture_output=True,
        check=False,
    ).returncode


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny Flint behind the entry point; yields its log."""
    work = tmp_path_factory.mktemp("runtime")
    command = [sys.executable, str(ROOT / "scripts" / "tinymodel"), "--spec", "tiny"]
    command += ["--format", "safetensors", "--out", str(work / "model")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (model,) = made.stdout.split()
    log = work / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(ENTRYPOINT), model, "--max-model-len", "1024", "--enforce-eager"],
            env=environment(PORT=str(port)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + START_S
        while health(port):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(1)
        yield log
    finally:
        # As `docker stop` does: to the first process only, which must pass it on.
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 30
        while group_members(process.pid) and time.monotonic() < end:
            process.poll()
            time.sleep(0.2)
        left = group_members(process.pid)
        if left:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert left == []


def test_nothing_is_healthy_before_it_serves(port: int):
    assert health(port) == 1


def test_serves_the_tiny_model(server: Path, port: int, repo: Repo):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"http://127.0.0.1:{port}/v1"
    with opener.open(f"{url}/models") as answer:
        (model,) = json.load(answer)["data"]
    body = {"model": model["id"], "prompt": "hello", "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with opener.open(request) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] > 0
    first = server.read_text().splitlines()[0]
    assert first == f"verified: this is vLLM {repo.pin.release}, as pinned"


def test_the_health_check_asks_at_the_port(server: Path, port: int):
    assert health(port) == 0


@pytest.mark.parametrize("arguments", [(), ("--port", "8000")])
def test_without_a_model_it_says_so(arguments: tuple[str, ...]):
    done = run(*arguments)
    assert done.returncode == 2
    assert "name the model first" in done.stderr


def test_verify_only_serves_nothing(repo: Repo):
    done = run("--verify-only")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"verified: this is vLLM {repo.pin.release}, as pinned\n"


@pytest.fixture
def altered(tmp_path: Path) -> Path:
    """An environment like this one, with one line more in one file of Flint's."""
    place = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    here = Path(sysconfig.get_path("purelib"))
    site = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    shutil.copytree(here / "vllm", site / "vllm", copy_function=os.symlink)
    (info,) = here.glob("vllm-*.dist-info")
    shutil.copytree(info, site / info.name)
    target = site / "vllm" / "models" / "flint" / "model.py"
    text = target.read_text()
    target.unlink()
    target.write_text(f"{text}# one line more\n")
    return place


def test_an_altered_installation_does_not_serve(altered: Path):
    path = f"{altered / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run("model", PATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "vllm/models/flint/model.py" in done.stderr
    assert done.stderr.endswith("not the vLLM that was built and tested; not serving\n")


NOBODY = ["setpriv", "--reuid=2000", "--regid=0", "--clear-groups"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_verifies_as_a_user_who_owns_nothing(tmp_path: Path):
    """As in the image, where the environment is root's and the user is not."""
    patchset = str(ROOT / "scripts" / "patchset")
    probe = subprocess.run([*NOBODY, sys.executable, "-I", "-c", ""], check=False)
    if probe.returncode:
        pytest.skip("this Python lies in a folder that is closed to others")
    command = [*NOBODY, sys.executable, "-I", "-B", patchset, "verify"]
    done = subprocess.run(
        [*command, sysconfig.get_path("purelib")],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
