# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""One `vllm serve` process: started, waited for, and stopped with all its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from bootstrap.console import StatusLine

HOST = "127.0.0.1"
MODEL_NAME = "flint-tiny"
_TAIL_LINES = 25
_TAIL_WIDTH = 300
_POLL_S = 0.5
_STOP_GRACE_S = 20.0
_KILL_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


class ServerError(Exception):
    """The server did not start, or did not stop; the message shows its log's end."""


class Server:
    """A context manager around one server.

    Attributes:
        url: Base of its addresses, without /v1.
        start_s: Seconds from start to a healthy server.
    """

    def __init__(self, arguments: list[str], log: Path, timeout: float) -> None:
        self._port = _free_port()
        self.url = f"http://{HOST}:{self._port}"
        self.start_s = 0.0
        self._arguments = arguments
        self._log = log
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        command = [*_vllm(), "serve", *self._arguments]
        command += ["--host", HOST, "--port", str(self._port)]
        environment = {
            # One GB of KV cache, no look-ups in a hub, no usage reports.
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
        }
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log.open("wb") as log:
                log.write(f"$ {' '.join(command)}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    # Ctrl-C goes to us alone; we stop the whole group in order.
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def group(self) -> int:
        """The process group of the running server."""
        assert self._process is not None
        return self._process.pid

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server and everything it started; a no-op when it is stopped.

        Raises:
            ServerError: A process is left that even SIGKILL does not end.
        """
        process, self._process = self._process, None
        if process is None:
            return
        for number, grace in (
            (signal.SIGTERM, _STOP_GRACE_S),
            (signal.SIGKILL, _KILL_GRACE_S),
        ):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            # A second Ctrl-C means: do not wait any longer.
            with contextlib.suppress(KeyboardInterrupt):
                if _ended(process, grace):
                    return
        left = group_members(process.pid)
        raise ServerError(f"processes of the server are still running: {left}")

    def wait(self) -> None:
        """Return when the server ends by itself."""
        assert self._process is not None
        self._process.wait()

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        line = StatusLine("vllm serve")
        start = time.monotonic()
        while True:
            self.start_s = time.monotonic() - start
            if _healthy(self.url):
                line.finish(f"up at {self.url}")
                return
            code = self._process.poll()
            if code is not None:
                line.clear()
                raise ServerError(f"vllm serve ended with code {code}. {self._tail()}")
            if self.start_s > self._timeout:
                line.clear()
                raise ServerError(
                    f"vllm serve was not up after {self._timeout:.0f} s. {self._tail()}"
                )
            line.update(f"starting; {_last_line(self._log)}")
            time.sleep(_POLL_S)

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        text = "\n  ".join(line[:_TAIL_WIDTH] for line in lines[-_TAIL_LINES:])
        return f"The end of its log, {self._log}:\n  {text}"


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the whole group is gone after at most so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        process.poll()
        if not group_members(process.pid):
            process.wait()
            return True
        time.sleep(0.1)
    return False


def _vllm() -> list[str]:
    """The command; where PATH has none, that of this Python's vLLM."""
    if shutil.which("vllm") is not None:
        return ["vllm"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def group_members(group: int) -> list[int]:
    """Return the processes of a group that still run (a zombie does not)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name) state parent group ...; the name may hold anything.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def _die_with_parent() -> None:
    """Have the kernel stop the server should this program be killed outright."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _healthy(url: str) -> bool:
    # Without a proxy, whatever the environment says: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    text = next((line for line in reversed(lines) if line.strip()), "")
    return text.rpartition("] ")[2][:60]
