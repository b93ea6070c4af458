# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Fills in the upstream's own pull request template."""

from __future__ import annotations

import re

from patchset.errors import PatchsetError
from patchset.repo import Repo
from patchset.staging.steps import FOLDER, Step

TEMPLATE_NAME = ".github/PULL_REQUEST_TEMPLATE.md"
_HEADING = re.compile(r"^## (.+)$", re.M)
_OPEN = "**[to be filled in by the submitter]**"


def pull_request(
    repo: Repo, step: Step, template: str, validation: str, assisted: bool
) -> str:
    """The text of one pull request.

    Args:
        repo: the patch set; the sections are in staging/pr.
        step: the step.
        template: the upstream's template.
        validation: what was run here, and how it ended.
        assisted: whether AI tools helped; the template has a box for it.

    Raises:
        PatchsetError: the sections are not those of the template.
    """
    path = repo.root / FOLDER / "pr" / f"{step.name}.md"
    try:
        written = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise PatchsetError(f"cannot read {path}: {exc.strerror}") from None
    wanted, have = _HEADING.findall(template), _HEADING.findall(written)
    if wanted != have:
        raise PatchsetError(
            f"{path} has the sections {', '.join(have)}; the template has "
            f"{', '.join(wanted)}"
        )
    sections = dict(zip(have, _HEADING.split(written)[2::2]))
    text = template
    for heading, section in sections.items():
        filled = section.strip().replace("{validation}", validation)
        filled = filled.replace("{evaluations}", _OPEN)
        place = re.search(rf"## {re.escape(heading)}\n\n(<!--.*?-->)", text, re.S)
        if place is None:
            raise PatchsetError(f"the template's section {heading} has another form")
        text = text[: place.start(1)] + filled + text[place.end(1) :]
    if assisted:
        text = text.replace("- [ ] AI assistance", "- [x] AI assistance", 1)
    return f"# {step.subject}\n\n{text}"
