# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The quick start as a user runs it, inside the environment that is there already."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def servers_of(out: Path) -> list[str]:
    """Return processes that serve a checkpoint below this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and any(str(out).encode() in word for word in words):
            found.append(entry.parent.name)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("quickstart")
    environment = dict(os.environ)
    programs = Path(sys.executable).parent
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    # A proxy that is not there: the client must not ask it for a local server.
    environment["HTTP_PROXY"] = environment["http_proxy"] = "http://127.0.0.1:9"
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "quickstart"), "--out", str(out)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return out, done.stdout


def test_serves_both_formats_and_gets_every_answer(finished: tuple[Path, str]):
    result = json.loads((finished[0] / "quickstart.json").read_text())
    assert result["ok"] and result["formats_agree"]
    served = {entry["checkpoint"]: entry for entry in result["served"]}
    assert set(served) == {"BF16 safetensors", "NVFP4 GGUF"}
    for entry in served.values():
        assert entry["version"].startswith("0.32.0+flint.")
        answers = {check["name"]: check["answer"] for check in entry["checks"]}
        assert answers["streamed chat"]["parts"] > 1
        # The parsers split: the markup itself is in no part of any answer.
        reasoning = answers["reasoning"]
        assert reasoning["content"] in ("yes", "no")
        assert reasoning["reasoning"] and "</think>" not in reasoning["reasoning"]
        (call,) = answers["tool call"]["calls"]
        assert call["name"] == "get_weather"
        assert json.loads(call["arguments"])["days"] in (1, 2, 3)


def test_ends_with_a_table(finished: tuple[Path, str]):
    lines = finished[1].splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("checkpoint "))
    assert [line[19:33].strip() for line in lines[head + 1 : head + 7]] == [
        "streamed chat",
        "reasoning",
        "tool call",
    ] * 2


def test_the_server_says_which_patch_set_it_is(finished: tuple[Path, str]):
    logs = sorted(finished[0].glob("server-*.log"))
    assert len(logs) == 2
    for log in logs:
        assert "Flint patch set 0.32.0+flint." in log.read_text()


def test_leaves_no_server_behind(finished: tuple[Path, str]):
    assert servers_of(finished[0]) == []
