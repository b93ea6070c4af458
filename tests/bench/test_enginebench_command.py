# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The engine benchmark's command and its processes, with engines that stand in."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from enginebench import cli, processes

# Stands in for `python -m enginebench.one`.
CHILD = """
import json, subprocess, sys, time
job, path = json.loads(sys.argv[1]), sys.argv[2]
rows = [{"context": 1024, "batch": 1, "ms": 1.0}]
open(path, "w").write(json.dumps({"time_per_output_token": rows}))
if job["engine"] == "off":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
sys.exit(3 if job["engine"] == "stock-marlin" else 0)
"""


# Starts at another pace each, is timed in its turn, and does not always exit by itself.
TOGETHER = """
import json, os, subprocess, sys, time
from enginebench.turn import Turn
job, path = json.loads(sys.argv[1]), sys.argv[2]
name = job["engine"]
turn = Turn(job["turn"])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
result = {"options": job["options"], "begun": time.monotonic()}
def save(**more):
    result.update(more)
    open(path + "x", "w").write(json.dumps(result))
    os.replace(path + "x", path)
save()
time.sleep({"flint": 1.0, "off": 1.3, "stock-marlin": 2.0}.get(name, 0))
if name == "stock-humming":
    sys.exit(3)
started = time.monotonic()
turn.wait()
measuring = time.monotonic()
rows = [{"context": 1024, "batch": 1, "ms": 1.0}]
save(started=started, measuring=measuring, time_per_output_token=rows)
time.sleep(60 if "endless" in job["options"] and name == "flint" else 0.4)
turn.end()
save(measured=time.monotonic(), status="done")
if name == "off":
    time.sleep(60)
"""


def wait_for_end(pid: int) -> None:
    status = Path(f"/proc/{pid}/stat")
    end = time.monotonic() + 5
    while status.exists() and " Z " not in status.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)


def run_command(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = folder / "x.json"
    logs = str(folder / "logs")
    code = cli.main(["--out", str(out), "--logs", logs, *arguments])
    return code, json.loads(out.read_text())["engines"]


class TestTogether:
    NAMES = ("flint", "off", "stock-marlin")

    @pytest.fixture(autouse=True)
    def child(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(processes, "_ENGINE", [sys.executable, "-c", TOGETHER])
        monkeypatch.setattr(processes, "_EXIT_SECONDS", 0.5)

    def run(
        self, folder: Path, *arguments: str, names: tuple[str, ...] = NAMES
    ) -> tuple[int, dict[str, Any]]:
        found = run_command(folder, "--together", *arguments, "--engines", *names)
        for log in (folder / "logs").iterdir():
            wait_for_end(int(log.read_text()))
        return found

    def test_all_start_at_once_and_are_timed_alone(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        code, engines = self.run(tmp_path)
        assert code == 0 and set(engines) == set(self.NAMES)
        found = sorted(engines.values(), key=lambda engine: engine["measuring"])
        assert max(e["begun"] for e in found) < min(e["started"] for e in found)
        last = max(engine["started"] for engine in found)
        assert found[0]["measuring"] >= last
        for one_, next_ in zip(found, found[1:]):
            # `off` hangs when it is done, and hands its turn on before.
            assert -0.2 < next_["measuring"] - one_["measured"] < 5
        for engine in found:
            assert "error" not in engine and engine["status"] == "done"
            assert engine["started_together"] is True
            assert engine["options"] == {"gpu_memory_utilization": 0.9 / 3}
        out = capsys.readouterr().out
        assert "flint, off, stock-marlin: starting" in out
        assert "Started at the same time, which takes longer: " in out

    def test_one_that_fails_does_not_hold_up_the_others(self, tmp_path: Path):
        options = '{"gpu_memory_utilization": 0.2, "seed": 1}'
        names = ("flint", "stock-humming", "flint")
        code, engines = self.run(tmp_path, "--options", options, names=names)
        assert code == 1 and set(engines) == set(names)
        assert "error" not in engines["flint"]
        failed = engines["stock-humming"]
        assert failed["error"] == "failed with exit code 3; see its output"
        for engine in engines.values():
            assert engine["options"] == json.loads(options)
            assert engine["started_together"] is True

    def test_the_time_limit_ends_those_that_wait_as_well(self, tmp_path: Path):
        limit = ("--seconds", "5", "--options", '{"endless": 1}')
        code, engines = self.run(tmp_path, *limit, names=("flint", "stock-marlin"))
        assert code == 1
        assert engines["flint"]["error"] == "stopped: the time is up"
        waiting = engines["stock-marlin"]
        # Whichever came first.
        assert waiting.get("status") == "done" or "error" in waiting

    def test_ctrl_c_ends_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        sleep, calls = time.sleep, []

        def interrupted(seconds: float) -> None:
            calls.append(seconds)
            sleep(seconds)
            # Once all have said what they are.
            logs = list((tmp_path / "logs").iterdir())
            if len(logs) == 3 and all(log.read_text() for log in logs):
                monkeypatch.setattr(processes.time, "sleep", sleep)
                raise KeyboardInterrupt

        monkeypatch.setattr(processes.time, "sleep", interrupted)
        code, engines = self.run(tmp_path, "--options", '{"endless": 1}')
        assert code == 130 and set(engines) == set(self.NAMES)
        for engine in engines.values():
            assert engine["error"] == "stopped by the user"


class TestCommand:
    @pytest.fixture(autouse=True)
    def child(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(processes, "_ENGINE", [sys.executable, "-c", CHILD])

    run = staticmethod(run_command)

    def test_one_engine_after_the_other(self, tmp_path: Path):
        code, engines = self.run(tmp_path, "--engines", "flint", "stock-humming")
        assert code == 0 and list(engines) == ["flint", "stock-humming"]
        assert engines["flint"]["command"].startswith("python3 scripts/")
        assert (tmp_path / "x.svg").exists()

    def test_an_engine_that_fails_leaves_its_points_and_the_others(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        code, engines = self.run(tmp_path, "--engines", "stock-marlin", "flint")
        assert code == 1
        assert engines["stock-marlin"]["status"] == "cut"
        assert engines["stock-marlin"]["time_per_output_token"]
        assert "error" not in engines["flint"]
        assert "stock-marlin: failed with exit code 3" in capsys.readouterr().out

    def test_the_time_limit_ends_the_engine_and_its_processes(self, tmp_path: Path):
        limit = ("--seconds", "3")
        code, engines = self.run(tmp_path, "--engines", "off", "flint", *limit)
        assert code == 1 and list(engines) == ["off"]
        assert engines["off"]["error"] == "stopped: the time is up"
        wait_for_end(int((tmp_path / "logs" / "off.log").read_text()))

    def test_ctrl_c_leaves_a_whole_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def sleep(seconds: float) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(processes.time, "sleep", sleep)
        code, engines = self.run(tmp_path, "--engines", "off", "flint")
        assert code == 130 and list(engines) == ["off"]
        assert engines["off"]["error"] == "stopped by the user"

    def test_what_the_engine_took_is_kept(self):
        start = "(EngineCore pid=7) INFO 11-30 06:23:45 "
        log = (
            f"{start}[nvfp4.py:240] Using 'MARLIN' NvFp4 MoE backend out of some.\n"
            f"{start}[core.py:1] Initializing an engine\n"
            f"{start}[nvfp4.py:240] Using 'MARLIN' NvFp4 MoE backend out of some.\n"
            f"{start}[__init__.py:9] Using MarlinNvFp4LinearKernel for NVFP4 GEMM\n"
        )
        assert processes.choices(log) == [
            "Using 'MARLIN' NvFp4 MoE backend out of some.",
            "Using MarlinNvFp4LinearKernel for NVFP4 GEMM",
        ]

    def test_show_runs_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        self.run(tmp_path, "--engines", "flint")
        capsys.readouterr()
        code, _ = self.run(tmp_path, "--engines", "off", "--show")
        assert code == 0
        assert "Flint's kernels" in capsys.readouterr().out
