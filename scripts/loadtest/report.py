# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What was wrong, the table and the JSON file."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.compare import Agreement
from loadtest.load import Load
from loadtest.watch import Reading


@dataclass(frozen=True)
class Result:
    """All that a load test found.

    Attributes:
        load: The streams.
        under_load: Samples under load against before.
        after: Samples alone after the load against before.
        readings: What the server had in use "before" the load, when it was "warm"
            (after a third of the time) and "after"; fewer after a failure.
        most_running: Most requests that the engine was seen to work on at once.
    """

    load: Load
    under_load: Agreement
    after: Agreement
    readings: dict[str, Reading]
    most_running: int


def problems(result: Result, options: Namespace) -> list[str]:
    """All that makes the load test fail, one line each."""
    load = result.load
    found = [*load.failures, *result.under_load.wrong, *result.after.wrong]
    if not result.under_load.answers:
        found.append("no sample was answered under load")
    if options.cancelled and not load.cancelled:
        found.append("no stream was cancelled: the load was too short")
    return found + _leaks(result.readings, options)


def _leaks(readings: dict[str, Reading], options: Namespace) -> list[str]:
    warm, end = readings.get("warm"), readings.get("after")
    if warm is None or end is None:
        return ["leaks: what is in use was not read under the load and after it"]
    found = []
    if end.running or end.waiting:
        found.append(
            f"leak: {end.running} requests run and {end.waiting} wait after the load"
        )
    if end.kv_cache:
        found.append(f"leak: {end.kv_cache:.2%} of the KV cache is held by no request")
    # What grows after the first batches leaks.
    for what, allowed in (("host", options.host_mib), ("gpu", options.gpu_mib)):
        first, last = getattr(warm, f"{what}_mib"), getattr(end, f"{what}_mib")
        if first is not None and last is not None and last - first > allowed:
            found.append(
                f"leak: {what} memory grew by {last - first:.0f} MiB in two thirds of "
                f"the load ({allowed:g} allowed)"
            )
    return found


def table(result: Result, wrong: list[str]) -> str:
    """Streams, answers and memory as Markdown, and what was wrong."""
    load = result.load
    lines = [
        "| streams | |",
        "| --- | --- |",
        f"| read to the end | {load.done} |",
        f"| cancelled | {load.cancelled} |",
        f"| failed | {len(load.failures)} |",
        f"| most running at once | {result.most_running} |",
        f"| tokens a second | {load.tokens / load.seconds:.0f} |",
        "",
        "| answers against before | under load | after |",
        "| --- | --- | --- |",
    ]
    both = (result.under_load, result.after)
    for label, cells in (
        ("samples", [f"{a.answers}" for a in both]),
        ("the same throughout", [f"{a.identical}" for a in both]),
        ("tokens before a difference", [f"{a.equal_share:.1%}" for a in both]),
        ("largest drift, nats", [f"{a.drift:.3f}" for a in both]),
        ("largest margin, nats", [_number(a.margin, 3) for a in both]),
    ):
        lines.append(f"| {' | '.join([label, *cells])} |")
    names = list(result.readings)
    lines += ["", f"| in use | {' | '.join(names)} |"]
    lines.append(f"|{' --- |' * (len(names) + 1)}")
    readings = result.readings.values()
    for label, cells in (
        ("requests running", [f"{r.running}" for r in readings]),
        ("requests waiting", [f"{r.waiting}" for r in readings]),
        ("KV cache", [f"{r.kv_cache:.1%}" for r in readings]),
        ("MiB of host memory", [_number(r.host_mib) for r in readings]),
        ("MiB of GPU memory", [_number(r.gpu_mib) for r in readings]),
    ):
        lines.append(f"| {' | '.join([label, *cells])} |")
    return "\n".join([*lines, "", *(wrong or ["nothing was wrong"])])


def content(result: Result, options: Namespace, wrong: list[str]) -> dict[str, Any]:
    """The JSON file's content."""
    load = {k: v for k, v in vars(result.load).items() if k != "answers"}
    return {
        "ok": not wrong,
        "problems": wrong,
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "load": load | {"most_running": result.most_running},
        "under_load": asdict(result.under_load),
        "after": asdict(result.after),
        "in_use": {name: asdict(r) for name, r in result.readings.items()},
    }


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
