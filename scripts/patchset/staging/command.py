# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command `stage-pr`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from patchset.download import fetch
from patchset.errors import EXIT_CONFLICT, PatchsetError
from patchset.git import git, git_dir
from patchset.rebase.good import CPU_WHEEL
from patchset.rebase.site import make_site, run_python
from patchset.rebase.store import Store, archive_files
from patchset.rebase.trees import Tree
from patchset.rebase.upstream import BASE_REF
from patchset.repo import Repo
from patchset.staging.branch import commit_step, message_of, new_branch, signer
from patchset.staging.compose import compose
from patchset.staging.hooks import FAILED, NOT_RUN, Hooks
from patchset.staging.rules import (
    PERSON,
    WRONG,
    Ruling,
    Size,
    rule_all,
    rule_step,
    size_of,
)
from patchset.staging.steps import FOLDER, Plan, Step, load_steps
from patchset.staging.texts import TEMPLATE_NAME, pull_request
from patchset.tree import base_archive

_TIMEOUT = 900.0  # seconds for a step's tests
_RECIPE = "recipe.md"


@dataclass
class Staged:
    """One step on the branch.

    Attributes:
        tests: how its tests ended: "passed", "failed", or "not run".
        hooks: the result of each pre-commit hook, by name.
    """

    name: str
    commit: str
    size: Size
    tests: str = "not run"
    tests_detail: str = ""
    hooks: dict[str, str] = field(default_factory=dict)
    hooks_output: str = ""


@dataclass
class StageReport:
    """The outcome; `text`, `json` and `exit_code` as a Report has them."""

    checkout: str
    branch: str
    texts: str
    steps: list[Staged] = field(default_factory=list)
    rulings: list[Ruling] = field(default_factory=list)
    exit_code: int = 0

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=2)

    def text(self) -> str:
        """The report for a reader."""
        lines = [f"stage-pr {self.checkout}, branch {self.branch}"]
        for step in self.steps:
            size = f"{step.size.all} lines, {step.size.core} of them core"
            lines.append(f"  {step.commit[:12]} {step.name}: {size}")
            lines.append(f"      tests {step.tests} {step.tests_detail}".rstrip())
            counts = Counter(step.hooks.values())
            told = ", ".join(f"{count} {result}" for result, count in counts.items())
            lines.append(f"      pre-commit hooks: {told or 'not run'}")
            if step.hooks_output:
                lines += [f"      | {line}" for line in step.hooks_output.splitlines()]
        lines += [
            f"  {ruling.result:<8} {ruling.step}: {ruling.rule}"
            + (f" ({ruling.detail})" if ruling.detail else "")
            for ruling in self.rulings
        ]
        wrong = "something is wrong" if self.exit_code else "nothing is wrong"
        lines.append(
            f"staged {len(self.steps)} steps, {wrong}; nothing was pushed; the pull "
            f"requests' texts are in {self.texts}"
        )
        return "\n".join(lines)


def stage(
    repo: Repo,
    checkout: Path,
    out: Path,
    *,
    onto: str | None = None,
    branch: str = "flint",
    only: Sequence[str] = (),
    with_hooks: bool = True,
    with_tests: bool = True,
) -> StageReport:
    """Make the branch, check it, and write the pull requests' texts.

    Args:
        repo: the patch set.
        checkout: the upstream's git checkout.
        out: where the texts and the report go.
        onto: the commit to stand on; by default the base's tag, else HEAD.
        branch: the branch to make.
        only: stop after the last of these steps, and report on these alone.
        with_hooks: run the upstream's pre-commit configuration.
        with_tests: run each step's tests on a CPU.

    Raises:
        PatchsetError: wrong use; then there is no new branch.
    """
    plan = load_steps(repo)
    known = [step.name for step in plan.steps]
    if unknown := sorted(set(only) - set(known)):
        raise PatchsetError(
            f"no step is called {', '.join(unknown)}: {', '.join(known)}"
        )
    last = max((known.index(name) for name in only), default=len(known) - 1)
    if git_dir(checkout) is None:
        raise PatchsetError(f"{checkout} is no git checkout")
    person = signer(checkout)
    onto = onto or _default_base(checkout, repo)
    hooks = Hooks(checkout) if with_hooks else None
    report = StageReport(str(checkout), branch, str(out))
    with (
        tempfile.TemporaryDirectory(prefix="patchset-") as temporary,
        new_branch(checkout, branch, onto) as tree,
    ):
        store = Store(Path(temporary, "store.git"))
        store.borrow(_objects(checkout))
        try:
            before = git(tree, "rev-parse", "HEAD").decode().strip()
            origin = _origin(repo, store, before)
            for step in tqdm(plan.steps[: last + 1], "steps", disable=None):
                now = Tree.at(store, before)
                changes = compose(repo, plan, step, now, origin)
                message = message_of(plan, step, person)
                commit = commit_step(tree, changes, message)
                if not only or step.name in only:
                    after = Tree.at(store, commit)
                    numbers = git(tree, "diff", "--numstat", before, commit).decode()
                    staged = Staged(step.name, commit, size_of(numbers))
                    report.steps.append(staged)
                    report.rulings += rule_step(
                        step, message, staged.size, sorted(changes), after
                    )
                    if with_tests:
                        _test(staged, step, after, repo, Path(temporary))
                    if hooks is not None:
                        report.rulings += _hook(staged, hooks, tree, sorted(changes))
                before = commit
        finally:
            store.close()
        report.rulings += rule_all(plan)
        _judge(report)
        _write(report, plan, repo, out, tree)
    return report


def _origin(repo: Repo, store: Store, commit: str) -> Tree:
    """What the patches were made for: the checkout itself, or else the pinned base."""
    tree = Tree.at(store, commit)
    first: dict[str, str | None] = {}
    for patch in repo.series:
        for diff in patch.files:
            first.setdefault(diff.path, diff.old_blob)
    if all(path in tree and tree.entries[path].blob == first[path] for path in first):
        return tree
    files = archive_files(base_archive(repo), repo.pin.source_globs)
    return Tree.at(store, store.import_files(BASE_REF, files))


def _default_base(checkout: Path, repo: Repo) -> str:
    command = ("rev-parse", "--verify", "--quiet", repo.pin.base.tag)
    return repo.pin.base.tag if git(checkout, *command, check=False) else "HEAD"


def _objects(checkout: Path) -> Path:
    command = ("rev-parse", "--path-format=absolute", "--git-path", "objects")
    return Path(git(checkout, *command).decode().strip())


def _test(staged: Staged, step: Step, tree: Tree, repo: Repo, temporary: Path) -> None:
    """Run a step's tests against its own tree, with the CPU wheel's binaries.

    They run from a copy: in the checkout, Python would find its vllm first, which
    has no binaries.
    """
    site, place = temporary / "site", temporary / "tests"
    wheel = fetch(repo.pin.wheels[CPU_WHEEL])
    make_site(site, tree, wheel, repo.pin.base.version, repo.pin)
    shutil.rmtree(place, ignore_errors=True)
    for path in step.tests:
        blob = tree.read(path)
        if blob is None:
            raise PatchsetError(
                f"{step.name} names the test {path}, which is not there"
            )
        copy = place / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(blob.data)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *step.tests)
    ran = run_python(site, place, words, _TIMEOUT)
    staged.tests = "failed" if ran.code else "passed"
    lines = ran.output.strip().splitlines()
    staged.tests_detail = ran.tail if ran.code else lines[-1]


def _hook(staged: Staged, hooks: Hooks, tree: Path, changed: list[str]) -> list[Ruling]:
    """Run the hooks on a step's files; return those that a person has to run."""
    results, output = hooks.run(
        tree, [path for path in changed if (tree / path).exists()]
    )
    staged.hooks = {row.name: row.result for row in results}
    if any(row.result == FAILED for row in results):
        staged.hooks_output = output
    # What a hook rewrote is reported, not taken over.
    git(tree, "checkout", "--quiet", "--", ".")
    return [
        Ruling(
            staged.name, f"pre-commit hook {row.name}", PERSON, f"not run: {row.detail}"
        )
        for row in results
        if row.result == NOT_RUN
    ]


def _judge(report: StageReport) -> None:
    failed = any(
        step.tests == "failed" or FAILED in step.hooks.values() for step in report.steps
    )
    wrong = any(ruling.result == WRONG for ruling in report.rulings)
    report.exit_code = EXIT_CONFLICT if failed or wrong else 0


def _write(report: StageReport, plan: Plan, repo: Repo, out: Path, tree: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    template = (tree / TEMPLATE_NAME).read_text(encoding="utf-8")
    steps = {step.name: step for step in plan.steps}
    for number, staged in enumerate(report.steps, 1):
        step = steps[staged.name]
        names = " ".join(step.tests)
        validation = f"`pytest {names}`, on a CPU: {staged.tests}."
        if staged.tests == "passed":
            validation = f"`pytest {names}`, on a CPU: {staged.tests_detail}."
        text = pull_request(repo, step, template, validation, bool(plan.assisted_by))
        (out / f"{number:02}-{step.name}.md").write_text(text, encoding="utf-8")
    shutil.copy(repo.root / FOLDER / _RECIPE, out / _RECIPE)
    (out / "report.json").write_text(report.json() + "\n", encoding="utf-8")
