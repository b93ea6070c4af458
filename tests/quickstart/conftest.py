# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A stand-in for the `vllm` command, to see how it is started and stopped."""

import os
import sys
from pathlib import Path

import pytest

_FAKE = """\
#!{python}
import http.server, os, signal, subprocess, sys, time
print("fake server:", *sys.argv[1:], flush=True)
mode = os.environ["FAKE_MODE"]
if mode == "crash":
    print("x" * 5000)
    print("ValueError: no such model", flush=True)
    sys.exit(3)
# A worker of its own, as vLLM's, that no SIGTERM ends.
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
ignore += "print('worker up', flush=True); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", ignore])
open(os.environ["FAKE_PIDS"], "w").write(f"{{os.getpid()}} {{worker.pid}}")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if mode == "never" else 200)
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in first on PATH; returns the file with its process ids."""
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(_FAKE.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    pids = tmp_path / "pids"
    monkeypatch.setenv("FAKE_PIDS", str(pids))
    monkeypatch.setenv("FAKE_MODE", "ok")
    return pids
