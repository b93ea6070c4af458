# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Each engine in processes of its own, which never outlive the benchmark."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginebench.engines import ENGINES

_SCRIPTS = Path(__file__).resolve().parents[1]
_ENGINE = [sys.executable, "-m", "enginebench.one"]
_STOPPED = "stopped by the user"
_TIME_UP = "stopped: the time is up"
# Some engines hang when they are done.
_EXIT_SECONDS = 10.0
_POLL_SECONDS = 0.25


class _Process:
    """One engine's processes, and what it has measured so far."""

    def __init__(self, name: str, job: dict[str, Any], folder: Path, log: Path) -> None:
        self._found = folder / f"{name}.json"
        self._log = log
        self._done_at: float | None = None
        arguments = [json.dumps(job | {"engine": name}), str(self._found)]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*_ENGINE, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(ENGINES[name].env),
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Whether it is gone, or was done long enough ago."""
        if self._process.poll() is not None:
            return True
        if self._done_at is None and self._measured().get("status") == "done":
            self._done_at = time.monotonic()
        if self._done_at is None:
            return False
        return time.monotonic() - self._done_at >= _EXIT_SECONDS

    def result(self, stopped: str) -> dict[str, Any]:
        """Ends it; returns what it measured, with an error where it was not done.

        Args:
            stopped: the error of an engine that would have run on.
        """
        code = self._process.poll()
        self.kill()
        engine = self._measured()
        error = None
        if code:
            error = f"failed with exit code {code}; see its output"
        elif code is None and engine.get("status") != "done":
            error = stopped
        engine["choices"] = choices(self._log.read_text(errors="replace"))
        return engine if error is None else engine | {"status": "cut", "error": error}

    def kill(self) -> None:
        """Ends all its processes, which would keep the GPU's memory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _measured(self) -> dict[str, Any]:
        return json.loads(self._found.read_text()) if self._found.exists() else {}


def run_engines(
    jobs: dict[str, dict[str, Any]],
    seconds: float,
    logs: Path,
    ended: Callable[[str, dict[str, Any]], None],
    together: bool = False,
) -> bool:
    """Runs engines at the same time, until all have ended.

    A time limit, a signal or an error of an engine leaves what was there by then.

    Args:
        jobs: What `enginebench.one` gets, by the engine's name.
        seconds: Time limit of all of them.
        logs: Folder for their output.
        ended: Gets an engine's name and what it measured, however it ended.
        together: Time them one after the other, once all have started.

    Returns:
        False after Ctrl-C.
    """
    end = time.monotonic() + seconds
    running: dict[str, _Process] = {}
    with tempfile.TemporaryDirectory() as folder:
        turn = {"turn": str(Path(folder) / "turn")} if together else {}
        try:
            for name, job in jobs.items():
                log = logs / f"{name}.log"
                running[name] = _Process(name, job | turn, Path(folder), log)
            while running:
                time_up = time.monotonic() >= end
                for name, process in list(running.items()):
                    if process.has_ended() or time_up:
                        ended(name, process.result(_TIME_UP))
                        del running[name]
                if running:
                    time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            for name, process in running.items():
                ended(name, process.result(_STOPPED))
            return False
        finally:
            for process in running.values():
                process.kill()
    return True


def _environment(extra: dict[str, str]) -> dict[str, str]:
    """The engine's processes import this package, for the loader of its weights."""
    paths = [str(_SCRIPTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | extra


def choices(log: str) -> list[str]:
    """What the engine's output says of the kernels and backends that it took."""
    found = re.findall(r"\] (Using [^\n]*?(?:ackend|ernel)[^\n]*)", log)
    return list(dict.fromkeys(found))
