# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The table and the JSON file at the end of the quick start."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quickstart.client import Check

_SHOWN = 48


@dataclass
class Served:
    """What one server did.

    Attributes:
        checkpoint: Which format it served.
        version: What the server calls itself.
        start_s: Seconds from start to healthy.
        greedy_text: A greedy completion.
        checks: The client's requests.
    """

    checkpoint: str
    version: str
    start_s: float
    greedy_text: str = ""
    checks: list[Check] = field(default_factory=list)


@dataclass
class Summary:
    """What the quick start did.

    Attributes:
        served: One entry for each server that came up.
        complete: Whether every server was asked everything.
    """

    served: list[Served] = field(default_factory=list)
    complete: bool = False

    @property
    def formats_agree(self) -> bool:
        """Whether all formats of the model gave the same greedy text."""
        return len({served.greedy_text for served in self.served}) == 1

    @property
    def ok(self) -> bool:
        """Whether everything that ran gave what it should."""
        checks = [check for served in self.served for check in served.checks]
        return self.complete and self.formats_agree and all(c.ok for c in checks)

    def text(self) -> str:
        """Return the table."""
        row = "{:<18} {:<14} {:<23} {:>6} {:>7} {:>7}  {}"
        head = ("checkpoint", "request", "driven by", "ok", "s", "tok/s", "answer")
        lines = [row.format(*head)]
        for served in self.served:
            for check in served.checks:
                rate = check.tokens / check.seconds if check.seconds else 0.0
                lines.append(
                    row.format(
                        served.checkpoint,
                        check.name,
                        check.driven_by,
                        "yes" if check.ok else "NO",
                        f"{check.seconds:.2f}",
                        f"{rate:.0f}",
                        _shown(check),
                    )
                )
        for served in self.served:
            lines.append(
                f"{served.checkpoint}: vLLM {served.version}, "
                f"up after {served.start_s:.0f} s"
            )
        agree = "the same" if self.formats_agree else "DIFFERENT"
        lines.append(f"greedy text of the formats: {agree}")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        data = {
            "ok": self.ok,
            "formats_agree": self.formats_agree,
            "machine": {
                "system": platform.platform(),
                "processor": platform.machine(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            },
            "served": [asdict(served) for served in self.served],
        }
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def _shown(check: Check) -> str:
    if "error" in check.answer:
        return check.answer["error"][:_SHOWN]
    if "calls" in check.answer:
        parts = [f"{c['name']}({c['arguments']})" for c in check.answer["calls"]]
    else:
        parts = [
            f"{key}={check.answer[key]!r}"
            for key in ("reasoning", "content")
            if check.answer.get(key)
        ]
        parts.reverse()  # the short answer first, then the long thought
    text = " ".join(parts)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
