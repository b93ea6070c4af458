# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The load test against a server that is right, or wrong in one way at a time."""

import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from loadtest import cli, plan, watch
from loadtest.compare import agreement, compare
from loadtest.stream import Answer
from support.completions import Completions

SCRIPT = Path(cli.__file__).parent


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SETTLE_S", 0.5)


def arguments(url: str, out: Path, *more: str) -> list[str]:
    words = ["--url", url, "--out", str(out / "load.json"), "--streams", "6"]
    words += ["--seconds", "1.2", "--prompts", "4", "64", "--outputs", "5", "30"]
    words += ["--samples", "2", "--cancelled", "0.3", "--stall", "1", *more]
    return words


def run(
    out: Path, *ways: str, more: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    with Completions(*ways).running() as server:
        code = cli.main(arguments(server.url, out, *more))
    return code, json.loads((out / "load.json").read_text())


def test_a_good_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Completions().running() as server:
        assert cli.main(arguments(server.url, tmp_path)) == 0
        assert server.made - server.closed > 20 and server.closed > 3
        assert len(set(server.salts)) == len(server.salts) > 4
        assert not list(tmp_path.glob("*.log"))
    found = json.loads((tmp_path / "load.json").read_text())
    assert found["ok"] and found["problems"] == [] and found["model"] == "a-model"
    assert found["load"]["done"] > 20
    # A stream that the client closes at its last token has ended for the server.
    assert 0 < server.closed <= found["load"]["cancelled"]
    assert found["under_load"]["identical"] == found["under_load"]["answers"] > 2
    assert found["after"]["equal_share"] == 1.0
    assert list(found["in_use"]) == ["before", "warm", "after"]
    assert 2 < found["load"]["most_running"] <= 6
    text = capsys.readouterr().out
    assert "| read to the end |" in text and text.endswith("nothing was wrong\n")


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        ("stalls", r"request \d+ \(\d+ prompt tokens, \d+ new ones\), 2 came: stalled"),
        ("breaks", "the server says {'message': 'engine died'}"),
        ("refuses", "HTTP 503: .*overloaded"),
        ("short", r"ended after \d+ tokens, reason length"),
        ("wrong", "sample 0 under load: token 3 is another one, by 3.5 nats"),
        (
            "drifts",
            "sample 1 under load: an equal token's log-probability differs by 1",
        ),
        ("running", "leak: 1 requests run and 0 wait"),
        ("waiting", "leak: 0 requests run and 1 wait"),
        ("pages", r"leak: 25\.00% of the KV cache"),
    ],
)
def test_what_is_wrong_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str, problem: str
) -> None:
    start = time.monotonic()
    code, found = run(tmp_path, way)
    assert code == 1 and not found["ok"]
    assert any(re.search(problem, line) for line in found["problems"]), found[
        "problems"
    ]
    assert found["problems"][0] in capsys.readouterr().out
    assert time.monotonic() - start < 15


def test_memory_that_grows_is_a_leak(tmp_path: Path) -> None:
    code, found = run(tmp_path, "host", more=("--host-mib", "10"))
    assert code == 1
    (problem,) = found["problems"]
    assert problem.startswith("leak: host memory grew by")
    assert run(tmp_path, "host", more=("--host-mib", "100000"))[0] == 0


def test_gpu_memory_that_grows_is_a_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grows = itertools.count(1000, 100)
    monkeypatch.setattr(watch, "_gpu_mib", lambda _: float(next(grows)))
    code, found = run(tmp_path)
    assert code == 1
    (problem,) = found["problems"]
    assert re.match(r"leak: gpu memory grew by \d+00 MiB in", problem)


@pytest.mark.parametrize(
    ("own", "known", "mib"),
    [({7, 9}, True, 600), ({8}, True, 1536), ({7}, False, 1536)],
)
def test_gpus_and_memory_of_the_server_or_of_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: set[int],
    known: bool,
    mib: float,
) -> None:
    lines = "7, 400\\n9, 200\\n11, 300\\n" if known else "7, [N/A]\\n"
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"""#!/bin/sh
case "$1" in
--query-compute-apps=*) printf '{lines}' ;;
--query-gpu=name) printf 'NVIDIA H200\\nNVIDIA H100\\n' ;;
*) printf '1024\\n512\\n' ;;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert watch._gpu_mib(own) == mib
    near, far = (watch.Watch(f"http://{host}:1", None) for host in ("localhost", "far"))
    assert near.gpus() == ["NVIDIA H200", "NVIDIA H100"]
    assert far.gpus() == []
    program.write_text("#!/bin/sh\nexit 9\n")
    assert watch._gpu_mib(own) is None


def test_ties_are_no_mistakes(tmp_path: Path) -> None:
    code, found = run(tmp_path, "ties")
    assert code == 0
    under_load = found["under_load"]
    assert under_load["identical"] == 0 and under_load["equal_share"] < 1
    assert under_load["margin"] == pytest.approx(0.1)
    assert run(tmp_path, "ties", more=("--logprob-bound", "0.05"))[0] == 1


def test_a_stall_ends_the_load(tmp_path: Path) -> None:
    """No new streams start, so that a hang costs no minutes."""
    start = time.monotonic()
    code, found = run(tmp_path, "stalls", more=("--seconds", "600"))
    assert code == 1 and time.monotonic() - start < 15
    assert len(found["load"]["failures"]) <= 6


def test_a_server_without_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Completions("deaf").running() as server:
        assert cli.main(arguments(server.url, tmp_path)) == 1
    assert "/metrics has no 'vllm:num_requests_running'" in capsys.readouterr().err


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Completions().running() as server:
        pass
    assert cli.main(arguments(server.url, tmp_path)) == 1
    assert "loadtest: " in capsys.readouterr().err


def test_a_server_that_dies_under_load(tmp_path: Path) -> None:
    """The report is still made, and says what was seen."""
    with Completions("dies").running() as server:
        code = cli.main(arguments(server.url, tmp_path))
    assert code == 1
    problems = json.loads((tmp_path / "load.json").read_text())["problems"]
    assert any(line.startswith("request ") for line in problems)
    assert any("/metrics: " in line for line in problems)


def test_requests_that_the_server_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Completions().running() as server:
        more = ("--prompts", "4", "500")
        assert cli.main(arguments(server.url, tmp_path, *more)) == 1
        assert server.made == 0
    assert "530 tokens, and the server takes 512" in capsys.readouterr().err


def test_wrong_use() -> None:
    for words in (["--out", "x"], ["--out", "x", "--serve"], ["--url", "a"]):
        with pytest.raises(SystemExit) as error:
            cli.main(words)
        assert error.value.code == 2


OPTIONS = Namespace(
    seed=3,
    samples=4,
    cancelled=0.25,
    prompts=(8, 1024),
    outputs=(4, 64),
    vocabulary=512,
)


class TestPlan:
    def test_the_same_seed_gives_the_same_requests(self) -> None:
        first = list(itertools.islice(plan.requests(OPTIONS), 64))
        assert first == list(itertools.islice(plan.requests(OPTIONS), 64))
        other = Namespace(**vars(OPTIONS) | {"seed": 4})
        assert first != list(itertools.islice(plan.requests(other), 64))

    def test_lengths_are_mixed_and_in_range(self) -> None:
        found = list(itertools.islice(plan.requests(OPTIONS), 4000))
        prompts = [len(r.prompt) for r in found]
        assert min(prompts) == 8 and max(prompts) > 900
        assert 0.4 < sum(n < 91 for n in prompts) / len(prompts) < 0.6
        assert {r.max_tokens for r in found} <= set(range(4, 65))
        assert {t for r in found for t in r.prompt} == set(range(10, 512))

    def test_a_share_is_cancelled_and_never_a_sample(self) -> None:
        found = list(itertools.islice(plan.requests(OPTIONS), 4000))
        closed = [r for r in found if r.cancel_after is not None]
        others = [r for r in found if r.sample is None]
        assert 0.2 < len(closed) / len(others) < 0.3
        assert all(r.sample is None and r.cancel_after <= r.max_tokens for r in closed)

    def test_all_samples_come_soon(self) -> None:
        chosen = plan.samples(OPTIONS)
        found = itertools.islice(plan.requests(OPTIONS), 64)
        again = [r for r in found if r.sample is not None]
        assert {r.sample for r in again} == {0, 1, 2, 3}
        assert all(r.prompt == chosen[r.sample].prompt for r in again)
        assert all(r.max_tokens == chosen[r.sample].max_tokens for r in again)


def answer(tokens: list[int], first: float = -0.2, second: float = -3.0) -> Answer:
    tops = [{t: first, t + 1: second} for t in tokens]
    return Answer(tokens, [first] * len(tokens), tops, "length")


class TestCompare:
    def test_the_same(self) -> None:
        found = compare(answer([1, 5, 9]), answer([1, 5, 9], first=-0.3))
        assert (found.length, found.equal, found.margin) == (3, 3, None)
        assert found.drift == pytest.approx(0.1)

    def test_the_larger_margin_counts(self) -> None:
        """Whichever of the two runs is sure of its own token."""
        alone, loaded = answer([1, 5, 9], second=-0.3), answer([1, 6, 0])
        loaded.likeliest[1] = {6: -0.2, 5: -2.2}
        for pair in ((alone, loaded), (loaded, alone)):
            found = compare(*pair)
            assert found.equal == 1 and found.margin == pytest.approx(2.0)

    def test_a_token_that_is_not_named_is_at_least_as_far(self) -> None:
        found = compare(answer([1, 5]), answer([1, 300]))
        assert found.margin == pytest.approx(2.8)

    def test_what_follows_a_difference_does_not_count(self) -> None:
        alone, loaded = answer([1, 5, 9], second=-0.3), answer([1, 6, 9], second=-0.3)
        loaded.likeliest[1] = {6: -0.2, 5: -0.3}
        loaded.logprobs[2] = -7.0
        found = agreement([alone], [(0, loaded)], 0.5, "x")
        assert found.wrong == [] and found.drift == 0.0
        assert found.equal_share == pytest.approx(1 / 3)


# Stands in for `vllm serve`.
VLLM = """\
#!{python}
import sys, time
sys.path[:0] = {paths!r}
from support.completions import Completions
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[1:3] == ["serve", "a-model"], sys.argv
with Completions().running(port):
    time.sleep(60)
"""


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a load test that starts the stand-in."""
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    paths = [str(Path(__file__).parents[1]), str(SCRIPT.parent)]
    vllm.write_text(VLLM.format(python=sys.executable, paths=paths))
    vllm.chmod(0o755)
    monkeypatch.setenv("PATH", str(vllm.parent), prepend=":")
    return [sys.executable, str(SCRIPT), *arguments("", tmp_path)[2:]]


SERVE = ("--serve", "a-model", "--max-model-len")


def test_a_server_of_its_own(tmp_path: Path, own_server: list[str]) -> None:
    done = subprocess.run(
        [*own_server, *SERVE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "load.json").read_text())
    # Of the server's process group, Python and all.
    assert found["in_use"]["after"]["host_mib"] > 10
    assert "$ vllm serve a-model --max-model-len" in (tmp_path / "load.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_load_and_the_server(
    tmp_path: Path, own_server: list[str], number: signal.Signals
) -> None:
    words = [*own_server, "--seconds", "600", *SERVE]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    (up,) = itertools.islice((x for x in child.stdout if b"up at" in x), 1)
    # Late enough for the load to be on.
    time.sleep(2)
    child.send_signal(number)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130 and b"loadtest: stopped" in errors
    port = int(re.search(rb"127.0.0.1:(\d+)", up)[1])
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
