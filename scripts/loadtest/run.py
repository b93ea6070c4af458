# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Samples alone, the load, the samples again, and what is left in use."""

from __future__ import annotations

import asyncio
from argparse import Namespace

import aiohttp

from enginebench.results import write_json
from loadtest.compare import agreement
from loadtest.load import alone, load
from loadtest.plan import check_lengths, requests, samples
from loadtest.report import Result, content, problems, table
from loadtest.stream import Answer, StreamError, Target
from loadtest.watch import Reading, Watch, WatchError
from provenance import command
from quickstart.server import Server

_CONNECT_S = 30.0


def run(options: Namespace) -> int:
    """Runs the load test; returns 0, or 1 if anything was wrong.

    Raises:
        PlanError: If the server cannot take such requests.
        ServerError: If a server does not start or stop.
        StreamError: If a request alone fails before the load.
        WatchError: If the server does not say what it has in use.
    """
    if options.url is not None:
        return _test(options, options.url.rstrip("/"), None)
    log = options.out.with_suffix(".log")
    with Server(options.serve, log, options.start_timeout) as server:
        return _test(options, server.url, server.group)


def _test(options: Namespace, url: str, group: int | None) -> int:
    watch = Watch(url, group)
    result, about = asyncio.run(_measure(options, url, watch))
    wrong = problems(result, options)
    found = {"command": command(), "gpus": watch.gpus(), **about}
    write_json(options.out, found | content(result, options, wrong))
    print(table(result, wrong), flush=True)
    return 1 if wrong else 0


async def _measure(
    options: Namespace, url: str, watch: Watch
) -> tuple[Result, dict[str, str]]:
    readings: dict[str, Reading] = {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        async with session.get(f"{url}/v1/models", raise_for_status=True) as answer:
            model = (await answer.json())["data"][0]
        async with session.get(f"{url}/version", raise_for_status=True) as answer:
            version = (await answer.json())["version"]
        check_lengths(options, model["max_model_len"])
        target = Target(url, model["id"], options.stall)
        chosen = samples(options)
        before = await alone(session, target, chosen, "samples before")
        readings["before"] = await asyncio.to_thread(watch.settle)

        most = 0

        def look(share: float) -> None:
            nonlocal most
            reading = watch.read()
            most = max(most, reading.running)
            # Pools and kernels come with the first batches.
            if share > 1 / 3:
                readings.setdefault("warm", reading)

        found = await load(
            session, target, requests(options), options.streams, options.seconds, look
        )
        after: list[Answer] = []
        try:
            if not found.failures:
                after = await alone(session, target, chosen, "samples after")
            readings["after"] = await asyncio.to_thread(watch.settle)
        except (StreamError, WatchError) as error:
            found.failures.append(f"after the load: {error}")
    bound = options.logprob_bound
    result = Result(
        found,
        agreement(before, found.answers, bound, "under load"),
        agreement(before, enumerate(after), bound, "after the load"),
        readings,
        most,
    )
    return result, {"model": model["id"], "vllm": version}
