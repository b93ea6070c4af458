# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""vLLM's rules are judged right: each can be broken, and then says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchset.gittree import Blob
from patchset.rebase.store import Store
from patchset.rebase.trees import Tree
from patchset.staging.branch import Person, message_of
from patchset.staging.rules import neighbours, rule_all, rule_step, size_of
from patchset.staging.steps import Plan, Step

SPDX = b"# SPDX-License-Identifier: Apache-2.0\n"
STEP = Step("fix", "[Bugfix] Do it right", "Because.", (), (), ())
PLAN = Plan((STEP,), "AI coding tools", frozenset(), {})
MESSAGE = message_of(PLAN, STEP, Person("A Person", "person@example.org"))


def judged(
    tmp_path: Path,
    step: Step = STEP,
    message: str = MESSAGE,
    numstat: str = "3\t1\tvllm/core.py\n",
    files: dict[str, bytes] | None = None,
) -> dict[str, str]:
    found = {"vllm/core.py": SPDX} if files is None else files
    tree = Tree(
        Store(tmp_path / "store.git"), {}, {k: Blob(v) for k, v in found.items()}
    )
    rulings = rule_step(step, message, size_of(numstat), sorted(found), tree)
    return {ruling.rule: ruling.result for ruling in rulings}


def test_all_is_well(tmp_path: Path) -> None:
    assert set(judged(tmp_path).values()) == {"ok"}


@pytest.mark.parametrize("trailer", ["Signed-off-by", "Assisted-by"])
def test_missing_trailer(tmp_path: Path, trailer: str) -> None:
    lines = [line for line in MESSAGE.splitlines() if not line.startswith(trailer)]
    found = judged(tmp_path, message="\n".join(lines))
    assert sorted(found.values()).count("wrong") == 1


def test_title_without_tag(tmp_path: Path) -> None:
    step = Step("fix", "Do it right", "", (), (), ())
    assert judged(tmp_path, step)["title starts with tags"] == "wrong"


def test_file_without_spdx_lines(tmp_path: Path) -> None:
    assert judged(tmp_path, files={"vllm/a.py": b"x = 1\n"})["SPDX lines"] == "wrong"


def test_file_that_does_not_compile(tmp_path: Path) -> None:
    found = judged(tmp_path, files={"vllm/a.py": SPDX + b"def\n"})
    assert found["Python compiles"] == "wrong"


def test_large_bug_fix(tmp_path: Path) -> None:
    found = judged(tmp_path, numstat="200\t50\ttests/test_it.py\n")
    assert found["bug fix below 250 lines"] == "wrong"


def test_core_lines_leave_out_kernels_tests_and_data() -> None:
    rows = {
        "vllm/core.py": 7,
        "vllm/models/flint/model.py": 11,
        "vllm/models/flint/ops/kernel.py": 100,
        "vllm/models/flint/ops/gemv/tuned/sm90.json": 100,
        "vllm/model_executor/kernels/linear/it.py": 100,
        "tests/test_it.py": 100,
        "docs/it.md": 100,
    }
    size = size_of("".join(f"{n}\t0\t{path}\n" for path, n in rows.items()))
    assert (size.core, size.all, size.files) == (18, 518, 7)


def test_core_lines_above_the_limit_need_a_person(tmp_path: Path) -> None:
    found = judged(tmp_path, numstat="501\t0\tvllm/core.py\n")
    assert found["RFC above 500 core lines"] == "a person"


TABLE = """\
NAMES = {
    "FalconModel": ("falcon", {
        "hf": 1,
    }),
    "FlintModel": ("flint", "FlintModel"),
    "GemmaModel": ("gemma", "GemmaModel"),
}
"""


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (TABLE, "FlintModel", ("FalconModel", "GemmaModel")),
        (TABLE, "FalconModel", ("", "FlintModel")),
        (TABLE, "NoModel", None),
        ("| `A` | x |\n| `B` | y |\n| `C` | z |\n", "B", ("A", "C")),
        ('X = [\n    "A",\n    "B",\n]\n', "B", ("A", "")),
    ],
)
def test_neighbours(text: str, name: str, expected: tuple[str, str] | None) -> None:
    assert neighbours(text, name) == expected


def test_row_out_of_order(tmp_path: Path) -> None:
    step = Step("fix", "[Bugfix] It", "", (), (), (), {"vllm/t.py": "FlintModel"})
    swapped = TABLE.replace("FalconModel", "Zebra").encode()
    assert (
        judged(tmp_path, step, files={"vllm/t.py": SPDX + swapped})[
            "alphabetical order"
        ]
        == "wrong"
    )


def test_too_many_pull_requests() -> None:
    def first(count: int) -> str:
        return next(rule_all(Plan((STEP,) * count, "", frozenset(), {}))).result

    assert (first(6), first(7)) == ("ok", "a person")
