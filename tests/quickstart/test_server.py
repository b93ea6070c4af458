# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Starting and stopping a server: nothing may be left running, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quickstart import server
from quickstart.server import Server, ServerError, group_members

SCRIPTS = Path(server.__file__).resolve().parents[1]


def running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Return the processes that still run after so many seconds."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def read_pids(path: Path) -> list[int]:
    return [int(text) for text in path.read_text().split()]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STOP_GRACE_S", 1.0)


def test_comes_up_and_leaves_nothing_behind(fake_vllm: Path, tmp_path: Path):
    log = tmp_path / "deep" / "server.log"
    with Server(["a-model"], log, timeout=30) as up:
        pids = read_pids(fake_vllm)
        assert all(running(pid) for pid in pids)
        assert up.start_s > 0
        assert set(pids) <= set(group_members(pids[0]))
    assert wait_until_gone(pids, 0) == []
    assert "fake server: serve a-model --host 127.0.0.1" in log.read_text()


def test_a_server_that_ignores_sigterm_is_killed(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_MODE", "stubborn")
    with Server([], tmp_path / "log", timeout=30):
        pids = read_pids(fake_vllm)
    assert wait_until_gone(pids, 0) == []


def test_a_second_interrupt_does_not_wait(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_MODE", "stubborn")
    monkeypatch.setattr(server, "_STOP_GRACE_S", 60.0)
    start = time.monotonic()
    with Server([], tmp_path / "log", timeout=30):
        pids = read_pids(fake_vllm)
        interrupt = f"sleep 1; kill -INT {os.getpid()}"
        subprocess.Popen(["sh", "-c", interrupt])
    assert wait_until_gone(pids, 0) == []
    assert time.monotonic() - start < 30


def test_an_error_of_the_client_stops_the_server(fake_vllm: Path, tmp_path: Path):
    with pytest.raises(ZeroDivisionError), Server([], tmp_path / "log", timeout=30):
        pids = read_pids(fake_vllm)
        raise ZeroDivisionError
    assert wait_until_gone(pids, 0) == []


def test_a_crash_shows_the_end_of_the_log(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_MODE", "crash")
    with pytest.raises(ServerError) as error, Server([], tmp_path / "log", timeout=30):
        pass
    text = str(error.value)
    assert "ended with code 3" in text and "ValueError: no such model" in text
    assert str(tmp_path / "log") in text
    assert max(len(line) for line in text.splitlines()[1:]) < 400


def test_a_server_that_never_comes_up_is_given_up(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_MODE", "never")
    with pytest.raises(ServerError, match=r"not up after 2 s"):
        Server([], tmp_path / "log", timeout=2).__enter__()
    assert wait_until_gone(read_pids(fake_vllm), 0) == []


_CHILD = """\
import sys
sys.path.insert(0, {scripts!r})
from pathlib import Path
from bootstrap.environment import stop_on_sigterm
from quickstart import server
stop_on_sigterm()
server._STOP_GRACE_S = 1.0
with server.Server([], Path({log!r}), 30) as up:
    print("up", flush=True)
    up.wait()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name
)
def test_a_signal_to_the_quick_start_ends_the_server(
    fake_vllm: Path, tmp_path: Path, number: signal.Signals
):
    code = _CHILD.format(scripts=str(SCRIPTS), log=str(tmp_path / "log"))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    lines = iter(child.stdout.readline, b"")
    assert any(line == b"up\n" for line in lines)
    main, worker = read_pids(fake_vllm)
    child.send_signal(number)
    child.wait(timeout=20)
    if number is signal.SIGKILL:
        # Nobody is left to kill the group: the kernel sends the server SIGTERM, on
        # which a real vLLM ends its workers; this one's must be ended here.
        left = wait_until_gone([main], 10)
        os.kill(worker, signal.SIGKILL)
    else:
        left = wait_until_gone([main, worker], 0)
    assert left == []


def test_without_a_command_this_pythons_vllm_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    program, *arguments = server._vllm()
    assert program == sys.executable
    done = subprocess.run(
        [program, *arguments, "serve", "--help=model"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--model" in done.stdout
