# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""All streams at once, or a few requests alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
from tqdm import tqdm

from loadtest.plan import Request
from loadtest.stream import Answer, StreamError, Target, complete
from loadtest.watch import WatchError

_REDRAW_S = 0.5
# How often the server is looked at during the load.
_LOOKS = 30


@dataclass
class Load:
    """What became of the streams.

    Attributes:
        done: Streams that were read to their end.
        cancelled: Streams that the client closed.
        tokens: New tokens of both.
        seconds: From the first request to the last stream's end.
        failures: What was wrong with streams, one line each.
        answers: Samples' numbers and answers.
    """

    done: int = 0
    cancelled: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    answers: list[tuple[int, Answer]] = field(default_factory=list)

    def add(self, request: Request, answer: Answer) -> None:
        """Counts one stream that went as planned."""
        self.tokens += len(answer.tokens)
        if request.cancel_after is not None:
            self.cancelled += 1
            return
        self.done += 1
        if request.sample is not None:
            self.answers.append((request.sample, answer))


async def alone(
    session: aiohttp.ClientSession,
    target: Target,
    requests: Sequence[Request],
    label: str,
) -> list[Answer]:
    """Makes requests one after the other.

    Raises:
        StreamError: If one fails.
    """
    return [
        await complete(session, target, request)
        for request in tqdm(requests, label, disable=None)
    ]


async def load(
    session: aiohttp.ClientSession,
    target: Target,
    plan: Iterator[Request],
    streams: int,
    seconds: float,
    look: Callable[[float], None],
) -> Load:
    """Keeps so many streams going, and then lets those that run end.

    After a failure no new ones start: a server that hangs is found out once, not until
    the time is up.

    Args:
        look: Called now and then, with the share of the time that is over.
    """
    found = Load()
    start = time.monotonic()

    async def keep_one_going() -> None:
        while time.monotonic() < start + seconds and not found.failures:
            request = next(plan)
            try:
                found.add(request, await complete(session, target, request))
            except StreamError as error:
                found.failures.append(str(error))

    async def watch() -> None:
        due = 0.0
        with tqdm(
            total=seconds, desc="load", disable=None, bar_format=_BAR
        ) as progress:
            while True:
                await asyncio.sleep(min(_REDRAW_S, seconds / 10))
                passed = time.monotonic() - start
                if passed >= due:
                    due = passed + seconds / _LOOKS
                    try:
                        await asyncio.to_thread(look, passed / seconds)
                    except WatchError as error:
                        found.failures.append(str(error))
                progress.n = min(passed, seconds)
                progress.set_postfix_str(
                    f"{found.done} done, {found.cancelled} cancelled, "
                    f"{len(found.failures)} failed"
                )

    watching = asyncio.create_task(watch())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(keep_one_going())
    finally:
        found.seconds = time.monotonic() - start
        watching.cancel()
    return found


_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s, {postfix}"
