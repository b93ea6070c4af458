# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Diffs are read and applied exactly as git does, and never more loosely."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from patchset.diff import DiffError, FileDiff, parse_diff
from patchset.gittree import MODE_EXEC, MODE_FILE, Blob, blob_id
from patchset.hunks import apply_file

# Few different lines, so that a hunk often fits in more than one place.
LINES = st.one_of(
    st.sampled_from([b"a", b"b"]),
    st.sampled_from([b"c", b"d", b"", b"a ", b"\tb", b"c\r", b"x\ry"]),
)
TEXTS = st.tuples(st.lists(LINES, max_size=30), st.booleans()).map(
    lambda drawn: b"\n".join(drawn[0]) + b"\n" * bool(drawn[0] and drawn[1])
)
# (where, how many lines go, what comes)
EDITS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 3), st.lists(LINES, max_size=3)),
    max_size=4,
)


def edit(text: bytes, edits: list) -> bytes:
    lines = text.split(b"\n")
    for where, gone, new in edits:
        lines[where : where + gone] = new
    return b"\n".join(lines)


def run_git(folder: Path, *args: str, code: int | None = 0) -> bytes:
    env = os.environ | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
    }
    done = subprocess.run(
        ["git", *args], cwd=folder, env=env, capture_output=True, check=False
    )
    assert code is None or done.returncode == code, done.stderr
    return done.stdout if code is not None else bytes([done.returncode])


def make_diff(folder: Path, old: bytes, new: bytes, context: int) -> bytes:
    for name, data in (("a", old), ("b", new)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "file").write_bytes(data)
    return run_git(
        folder,
        *("diff", "--no-index", "--no-prefix", "--full-index", "--no-color"),
        *(f"-U{context}", "a/file", "b/file"),
        code=1,
    )


def git_apply(folder: Path, diff: bytes, before: bytes, *flags: str) -> bytes | None:
    """What git makes of it, or None where it refuses."""
    target = folder / "target"
    target.mkdir()
    (target / "file").write_bytes(before)
    (folder / "the.diff").write_bytes(diff)
    status = run_git(target, "apply", *flags, str(folder / "the.diff"), code=None)
    return (target / "file").read_bytes() if status == b"\0" else None


@settings(max_examples=300, deadline=None)
@given(
    old=TEXTS,
    change=EDITS,
    drift=EDITS,
    context=st.integers(1, 3),
    reverse=st.booleans(),
)
# A hunk at line 1 fits nowhere else.
@example(b"b\na\nb\nb\na\na\n", [(0, 1, [b"a"])], [(0, 2, [b"a"] * 2)], 1, False)
# Of two places as near as each other, the later one is taken.
@example(
    old=b"b\na\na\nb\na\nb\n",
    change=[(4, 0, [b"b", b"a"])],
    drift=[(1, 1, [b"a"]), (2, 0, [b"b"])],
    context=1,
    reverse=False,
)
# No hunk takes lines that an earlier one has left.
@example(
    old=b"a\nb\nb\na\nb\nb\na\nb\na\nb\n",
    change=[(1, 1, [b"b", b"a"]), (8, 2, [b"a", b"a"])],
    drift=[(8, 0, [b"b"]), (7, 0, [b"a"])],
    context=1,
    reverse=False,
)
def test_same_verdict_and_bytes_as_git(
    old: bytes, change: list, drift: list, context: int, reverse: bool
) -> None:
    new = edit(old, change)
    if new == old:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        diff = make_diff(folder, old, new, context)
        (parsed,) = parse_diff(diff, "a diff")
        assert (parsed.old_blob, parsed.new_blob) == (blob_id(old), blob_id(new))
        before = edit(new if reverse else old, drift)
        flags = ("--reverse",) if reverse else ()
        expected = git_apply(folder, diff, before, *flags)
    wanted = parsed.reversed() if reverse else parsed
    if ends_inside_a_line(wanted):
        return
    result = apply_file(wanted, Blob(before))
    assert (result.after and result.after.data) == expected


def ends_inside_a_line(diff: FileDiff) -> bool:
    """Whether it expects a last line without its end.

    Git takes that for the start of any longer text, and then glues lines together;
    see `test_last_line_without_its_end`.
    """
    return any(not hunk.old[-1].endswith(b"\n") for hunk in diff.hunks if hunk.old)


def test_last_line_without_its_end(tmp_path: Path) -> None:
    """Git makes b"a\\na\\naa" of the first, where it takes the wrong "a"."""
    (diff,) = parse_diff(make_diff(tmp_path, b"a\na\na", b"a\na\na\na", 1), "a diff")
    assert apply_file(diff, Blob(b"a\na\na\na")).after == Blob(b"a\na\na\na\na")
    assert apply_file(diff, Blob(b"a\na\na\n")).after is None
    assert apply_file(diff, Blob(b"a\na\nab")).after is None


@settings(max_examples=100, deadline=None)
@given(old=TEXTS, change=EDITS, context=st.integers(0, 3))
def test_there_and_back(old: bytes, change: list, context: int) -> None:
    new = edit(old, change)
    if new == old or context == 0:
        return
    with tempfile.TemporaryDirectory() as temporary:
        (diff,) = parse_diff(make_diff(Path(temporary), old, new, context), "a diff")
    there = apply_file(diff, Blob(old))
    assert there.after == Blob(new)
    assert there.offsets == ()
    assert apply_file(diff.reversed(), there.after).after == Blob(old)


def numbered(count: int) -> bytes:
    return b"".join(b"line %d\n" % index for index in range(1, count + 1))


@pytest.fixture
def one_line(tmp_path: Path) -> FileDiff:
    old = numbered(40)
    new = old.replace(b"line 20\n", b"twenty\n")
    return parse_diff(make_diff(tmp_path, old, new, 3), "a diff")[0]


def test_every_hunk_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    old = numbered(60)
    new = old
    for number in (10, 30, 50):
        new = new.replace(b"line %d\n" % number, b"new %d\n" % number)
    (diff,) = parse_diff(make_diff(tmp_path, old, new, 3), "a diff")
    before = old.replace(b"line 11\n", b"mine\n").replace(b"line 51\n", b"mine\n")
    result = apply_file(diff, Blob(before))
    assert result.after is None
    assert [conflict.line for conflict in result.conflicts] == [7, 47]
    assert "line 11" in result.conflicts[0].expected
    assert "mine" in result.conflicts[0].found


def test_offset_is_told(one_line: FileDiff) -> None:
    result = apply_file(one_line, Blob(b"first\nsecond\n" + numbered(40)))
    assert result.after is not None
    assert [by for _, by in result.offsets] == [2]


def test_no_fuzz(one_line: FileDiff) -> None:
    """Plain `patch` would take two wrong lines of context."""
    before = numbered(40).replace(b"line 17\n", b"mine\n")
    assert apply_file(one_line, Blob(before)).after is None


HEAD = b"diff --git a/f b/f\n"
INDEX = b"index " + b"1" * 40 + b".." + b"2" * 40 + b" 100644\n"
MAKE = b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+b\n"
BODY = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"


def test_smallest_diff_is_read() -> None:
    (diff,) = parse_diff(HEAD + INDEX + BODY, "a diff")
    assert apply_file(diff, Blob(b"a\n")).after == Blob(b"b\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD + b"rename from f\nrename to g\n", "renames"),
        (HEAD + b"similarity index 90%\n", "renames"),
        (HEAD + INDEX + b"GIT binary patch\n", "binary"),
        (HEAD + INDEX + b"Binary files a/f and b/f differ\n", "binary"),
        (HEAD + b"index 1111111..2222222 100644\n" + BODY, "full ids"),
        (HEAD + BODY, "full ids"),
        (HEAD + b"new file mode 120000\n", "plain files"),
        (HEAD + b"new file mode 160000\n", "plain files"),
        (HEAD + b"new file mode 100644\n" + INDEX + MAKE, "contradicts"),
        (b"diff --git a/f b/g\n" + INDEX + BODY, "one file"),
        (b"diff --git a/../f b/../f\n", "unsafe"),
        (b"diff --git a/.git/f b/.git/f\n", "unsafe"),
        (b"diff --git a//f b//f\n", "unsafe"),
        (b'diff --git "a/\\303" "b/\\303"\n', "one file"),
        (HEAD + INDEX + BODY.replace(b"+++ b/f", b"+++ b/g"), "another file"),
        (HEAD + INDEX + b"@@ -1 +1 @@\n-a\n+b\n", "without ---"),
        (HEAD + INDEX + b"--- a/f\n+++ b/f\n", "no hunk"),
        (HEAD + INDEX + BODY[:-3], "ends early"),
        (HEAD + INDEX + BODY[:-1], "cut off"),
        (HEAD + INDEX + BODY.replace(b"-1 +1", b"-1,2 +1"), "ends early"),
        (HEAD + INDEX + BODY + b"+c\n", "not a 'diff --git' line"),
        (HEAD + INDEX + BODY + b"-- \n2.39.5\n", "not a 'diff --git' line"),
        (HEAD + INDEX + BODY.replace(b"+b\n", b"+b\n\n"), "not a 'diff --git' line"),
        (HEAD + INDEX + BODY.replace(b"-a\n+b\n", b" a\n"), "changes nothing"),
        (HEAD + INDEX, "changes nothing"),
        (HEAD + INDEX + BODY.replace(b"-a\n", b"*a\n"), "not a line of a hunk"),
        (2 * (HEAD + INDEX + BODY), "occurs twice"),
    ],
)
def test_what_is_not_served_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(DiffError, match=why):
        parse_diff(text, "a diff")


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_damage_never_crashes(noise: bytes, place: int) -> None:
    text = HEAD + INDEX + BODY
    try:
        parse_diff(text[:place] + noise + text[place:], "a diff")
    except DiffError as exc:
        assert "a diff, line" in str(exc) or "occurs twice" in str(exc)


def commit_diff(folder: Path) -> tuple[FileDiff, ...]:
    run_git(folder, "add", "--all")
    return parse_diff(
        run_git(folder, "diff", "--cached", "--full-index", "--no-renames"), "a diff"
    )


def test_new_deleted_empty_and_mode(tmp_path: Path) -> None:
    """Files that come, go, are empty, or change only their mode, as git has them."""
    run_git(tmp_path, "init", "--quiet")
    files = {"gone": b"x\ny", "empty-gone": b"", "script": b"#!\n", "both": b"1\n"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    run_git(tmp_path, "add", "--all")
    person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    run_git(tmp_path, *person, "commit", "--quiet", "-m", "base")
    (tmp_path / "gone").unlink()
    (tmp_path / "empty-gone").unlink()
    (tmp_path / "script").chmod(0o755)
    (tmp_path / "both").write_bytes(b"2\n")
    (tmp_path / "both").chmod(0o755)
    (tmp_path / "new").write_bytes(b"no line end")
    (tmp_path / "empty-new").write_bytes(b"")
    diffs = {diff.path: diff for diff in commit_diff(tmp_path)}
    after = {
        "gone": None,
        "empty-gone": None,
        "script": Blob(b"#!\n", MODE_EXEC),
        "both": Blob(b"2\n", MODE_EXEC),
        "new": Blob(b"no line end"),
        "empty-new": Blob(b""),
    }
    assert diffs.keys() == after.keys()
    for path, diff in diffs.items():
        before = Blob(files[path], MODE_FILE) if path in files else None
        result = apply_file(diff, before)
        assert result.conflicts == ()
        assert result.after == after[path]
        back = apply_file(diff.reversed(), result.after)
        assert back.conflicts == ()
        assert back.after == before


def test_existence_and_mode_conflict(tmp_path: Path, one_line: FileDiff) -> None:
    assert apply_file(one_line, None).conflicts[0].why == "no such file"
    wrong_mode = apply_file(one_line, Blob(numbered(40), MODE_EXEC))
    assert "mode is 100755" in wrong_mode.conflicts[0].why
    making = parse_diff(
        HEAD
        + b"new file mode 100644\nindex "
        + b"0" * 40
        + b".."
        + b"2" * 40
        + b"\n"
        + MAKE,
        "a diff",
    )[0]
    assert "exists" in apply_file(making, Blob(b"")).conflicts[0].why
    extra = apply_file(making.reversed(), Blob(b"b\nmore\n"))
    assert extra.after is None
    assert extra.conflicts
