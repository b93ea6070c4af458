# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Makes the checkpoints, serves each, asks, sums up."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from quickstart.cli import Options
from quickstart.client import connect, greedy_text, run_checks
from quickstart.server import MODEL_NAME, Server
from quickstart.summary import Served, Summary

_SCRIPTS = Path(__file__).resolve().parents[1]
_JSON = "quickstart.json"
_SERVE_OPTIONS = [
    *("--served-model-name", MODEL_NAME),
    *("--max-model-len", "2048"),
    "--enforce-eager",
    *("--reasoning-parser", "glm47"),
    *("--tool-call-parser", "glm47"),
    "--enable-auto-tool-choice",
    "--exclude-tools-when-tool-choice-none",
]


class QuickstartError(Exception):
    """A step before serving failed; the message says which."""


def run(options: Options) -> int:
    """Run the quick start; returns 0 if every answer was right in form.

    Raises:
        QuickstartError: The checkpoints could not be made.
        ServerError: A server did not start or stop.
    """
    print("Making a tiny Flint checkpoint, as safetensors and as GGUF", flush=True)
    bf16, gguf = _make_checkpoints(options.out / "checkpoints")
    summary = Summary()
    try:
        return _serve_all(bf16, gguf, options, summary)
    finally:
        # Also of a run that failed or was stopped half-way.
        summary.write(options.out / _JSON)


def _serve_all(bf16: Path, gguf: Path, options: Options, summary: Summary) -> int:
    like_bf16 = ["--hf-config-path", str(bf16), "--tokenizer", str(bf16)]
    todo = [
        ("BF16 safetensors", [str(bf16)]),
        ("NVFP4 GGUF", [str(gguf), *like_bf16]),
    ]
    for number, (checkpoint, arguments) in enumerate(todo, 1):
        print(f"Serving the {checkpoint} checkpoint", flush=True)
        log = options.out / f"server-{checkpoint.split()[0].lower()}.log"
        with Server([*arguments, *_SERVE_OPTIONS], log, options.timeout) as server:
            _ask(server, checkpoint, summary)
            summary.complete = number == len(todo)
            if summary.complete and options.keep_serving:
                print(f"\n{summary.text()}", flush=True)
                print(f"Serving at {server.url}/v1 until Ctrl-C", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    server.wait()
    print(f"\n{summary.text()}\nas JSON: {options.out / _JSON}", flush=True)
    return 0 if summary.ok else 1


def _ask(server: Server, checkpoint: str, summary: Summary) -> None:
    served = Served(checkpoint, _version(server.url), round(server.start_s, 1))
    summary.served.append(served)
    client = connect(server.url)
    served.checks = run_checks(client)
    served.greedy_text = greedy_text(client)
    for check in served.checks:
        print(f"  {check.name}: {'ok' if check.ok else 'FAILED'}", flush=True)


def _make_checkpoints(place: Path) -> tuple[Path, Path]:
    command = [sys.executable, str(_SCRIPTS / "tinymodel"), "--spec", "tiny"]
    command += ["--format", "both", "--family", "nvfp4", "--overwrite"]
    command += ["--out", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise QuickstartError(f"making the checkpoints failed:\n{done.stderr}")
    bf16, gguf = (Path(line) for line in done.stdout.splitlines())
    return bf16, gguf


def _version(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/version", timeout=10) as answer:
        return json.load(answer)["version"]
