# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A disk that is full or cannot be written, and Ctrl-C: one error, no change."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stopping import Stopper, count_steps

from patchset.apply import apply_tree, status_tree
from patchset.cli import main
from patchset.errors import PatchsetError
from patchset.unapply import unapply_tree
from support.synthetic_vllm import ROOT, Synthetic, snapshot

COMMANDS = pytest.mark.parametrize("command", [apply_tree, unapply_tree])


def prepared(synthetic: Synthetic, command: Callable) -> Path:
    root = synthetic.source()
    if command is unapply_tree:
        apply_tree(root, synthetic.repo)
    return root


def fail(number: int) -> Callable[[], None]:
    def stop() -> None:
        raise OSError(number, os.strerror(number), "a file")

    return stop


@COMMANDS
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_failing_at_each_step(
    synthetic: Synthetic,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable,
    number: int,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    repo = synthetic.repo
    root = prepared(synthetic, command)
    before = snapshot(root)
    steps = count_steps(lambda: command(root, repo), after=True)
    opposite = apply_tree if command is unapply_tree else unapply_tree
    changed = "pristine" if command is unapply_tree else "patched"
    opposite(root, repo)
    assert snapshot(root) == before
    unchanged = 0
    for step in range(steps):
        with Stopper(step, fail(number), after=True) as stopper:
            try:
                command(root, repo)
                message = ""
            except PatchsetError as exc:
                message = str(exc)
                assert os.strerror(number) in message
        assert stopper.count > step
        if "is unchanged" in message:
            unchanged += 1
            assert snapshot(root) == before, f"step {step}"
        else:
            # Past the point of no return: the work is done, whatever failed.
            assert message == ""
            assert status_tree(root, repo).state == changed
            opposite(root, repo)
            assert snapshot(root) == before, f"step {step}"
    assert unchanged > steps // 2


@COMMANDS
def test_interrupt_at_each_step(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch, command: Callable
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    repo = synthetic.repo
    root = prepared(synthetic, command)
    before = snapshot(root)
    steps = count_steps(lambda: command(root, repo), after=True)
    opposite = apply_tree if command is unapply_tree else unapply_tree
    changed = "pristine" if command is unapply_tree else "patched"
    opposite(root, repo)
    undone = 0
    for step in range(steps):
        with Stopper(step, interrupt, after=True):
            try:
                command(root, repo)
            except KeyboardInterrupt:
                undone += 1
                assert snapshot(root) == before, f"step {step}"
                continue
        assert status_tree(root, repo).state == changed
        opposite(root, repo)
        assert snapshot(root) == before, f"step {step}"
    assert undone > steps // 2


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """The kernel refuses files beyond this size, as a full disk would.

    No fixture: pytest's own output, if it goes to a file, must not be refused.
    """
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_kernel_refuses_a_large_file(synthetic: Synthetic) -> None:
    root, repo = synthetic.source(), synthetic.repo
    before = snapshot(root)
    refused = pytest.raises(PatchsetError, match=r"File too large; .* is unchanged")
    with refused, small_files():
        apply_tree(root, repo)
    assert snapshot(root) == before


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def obey_permissions() -> None:
    """Make root obey file permissions, in this process: no capability is left."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = _Header(0x20080522, 0)  # version 3: two sets of three words
    if libc.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def run_obeying(*argv: str) -> tuple[int, str, str]:
    """Run a command in a child that obeys permissions: its code and output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                obey_permissions()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    code = main(list(argv))
                out.flush()
                err.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), err.read()


@pytest.mark.parametrize(
    ("command", "locked"),
    [
        ("apply", "."),
        ("apply", "vllm"),
        ("apply", "vllm/models"),
        ("unapply", "."),
        ("unapply", "vllm"),
        ("unapply", "vllm/models/flint"),
    ],
)
def test_read_only_folder(synthetic: Synthetic, command: str, locked: str) -> None:
    root = prepared(synthetic, apply_tree if command == "apply" else unapply_tree)
    before = snapshot(root)
    (root / locked).chmod(0o555)
    if (root / ".flint-patchset").exists():
        (root / ".flint-patchset").chmod(0o555 if locked == "." else 0o755)
    code, out, err = run_obeying(command, str(root), "--repo", str(synthetic.root))
    (root / locked).chmod(0o755)
    assert (code, out) == (2, ""), out + err
    assert len(err.splitlines()) == 1, err
    assert "Permission denied" in err
    assert "is unchanged" in err
    assert snapshot(root) == before


def test_read_only_tree_can_be_read(synthetic: Synthetic) -> None:
    root = synthetic.source()
    root.chmod(0o555)
    code, out, err = run_obeying("status", str(root), "--repo", str(synthetic.root))
    root.chmod(0o755)
    assert code == 0, err
    assert "pristine" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_real_command(synthetic: Synthetic, number: int) -> None:
    """Sent while it waits inside a rename, from a helper put before it."""
    root = synthetic.source()
    before = snapshot(root)
    code = (
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from patchset import fsops\n"
        "from patchset.cli import main\n"
        "real = fsops.rename\n"
        "def slow(source, target):\n"
        "    real(source, target)\n"
        "    if target.name == 'registry.py' and fsops.rename is slow:\n"
        "        fsops.rename = real\n"
        "        print('renamed', flush=True)\n"
        "        time.sleep(60)\n"
        "fsops.rename = slow\n"
        f"sys.exit(main(['apply', {str(root)!r}, '--repo', {str(synthetic.root)!r}]))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "renamed\n"
    assert snapshot(root) != before
    child.send_signal(number)
    _, message = child.communicate(timeout=30)
    assert child.returncode == 130
    assert message == "patchset apply: interrupted; the target is as it was\n"
    assert snapshot(root) == before
