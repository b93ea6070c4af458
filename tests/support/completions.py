# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A stand-in for an OpenAI-compatible server, which can be wrong in chosen ways."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from aiohttp import web

_TOKEN_S = 0.002
_MIB = 2**20
# Requests after which one that is to die does.
_LIFE = 12
# What a token is given alone, and what the next likely one is.
_FIRST, _SECOND = -0.5, -4.0


class Completions:
    """Answers /v1/completions, /v1/models, /version and /metrics.

    Attributes:
        url: Base of its addresses, while it runs.
        ways: What it does wrong; empty for nothing.
        made: Requests that it got.
        closed: Streams that the client closed.
        salts: Of the prefix cache, one for each request with log-probabilities.
    """

    def __init__(self, *ways: str) -> None:
        self.url = ""
        self.ways = ways
        self.made = 0
        self.closed = 0
        self.salts: list[str] = []
        self._open = 0

    @contextlib.contextmanager
    def running(self, port: int = 0) -> Iterator["Completions"]:
        """Serves from a thread of its own; any free port is 0."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(port), loop).result()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _start(self, port: int) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, port, *_ = runner.addresses[0]
        self.url = f"http://{host}:{port}"
        return runner

    def _die_if_told(self, request: web.Request) -> None:
        """Closes every connection without a word, once the load is on."""
        if "dies" in self.ways and self.made > _LIFE:
            assert request.transport is not None
            request.transport.abort()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a-model", "max_model_len": 512}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0"})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._die_if_told(request)
        if "deaf" in self.ways:
            return web.Response(text="other 1\n")
        held = self.made > 0
        values = {
            "vllm:num_requests_running": self._open + ("running" in self.ways and held),
            "vllm:num_requests_waiting": int("waiting" in self.ways and held),
            "vllm:kv_cache_usage_perc": 0.25 * ("pages" in self.ways and held),
            "process_resident_memory_bytes": _MIB * (self.made * ("host" in self.ways)),
        }
        lines = (f'{name}{{engine="0"}} {value}' for name, value in values.items())
        return web.Response(text="\n".join([*lines, ""]))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.made += 1
        self._die_if_told(request)
        if "refuses" in self.ways and self._open > 1:
            return web.json_response({"error": "overloaded"}, status=503)
        self._open += 1
        stream = web.StreamResponse()
        try:
            await stream.prepare(request)
            await self._write(stream, body, loaded=self._open > 1)
        except (asyncio.CancelledError, ConnectionError):
            self.closed += 1
            raise
        finally:
            self._open -= 1
        return stream

    async def _write(
        self, stream: web.StreamResponse, body: dict[str, Any], loaded: bool
    ) -> None:
        number = body["max_tokens"]
        if loaded and "short" in self.ways:
            number -= 1
        for place in range(number):
            await asyncio.sleep(_TOKEN_S)
            if loaded and "stalls" in self.ways and place == 2:
                await asyncio.sleep(3600)
            if loaded and "breaks" in self.ways and place == 2:
                await stream.write(b'data: {"error": {"message": "engine died"}}\n\n')
                return
            choice = self._choice(body, place, loaded)
            if place == number - 1:
                choice["finish_reason"] = "length"
            event = json.dumps({"choices": [choice]})
            await stream.write(f"data: {event}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")

    def _choice(self, body: dict[str, Any], place: int, loaded: bool) -> dict[str, Any]:
        usual = 10 + (sum(body["prompt"]) + place) % 400
        other, first, second = usual + 1, _FIRST, _SECOND
        if "ties" in self.ways and place == 3:
            second = first - 0.1
        if loaded and place == 3 and {"wrong", "ties"} & set(self.ways):
            usual, other = other, usual
        if loaded and "drifts" in self.ways:
            first -= 1.0
        choice = {"token_ids": [usual], "finish_reason": None}
        if "logprobs" in body:
            self.salts += [body["cache_salt"]] * (place == 0)
            top = {f"token_id:{usual}": first, f"token_id:{other}": second}
            choice["logprobs"] = {"token_logprobs": [first], "top_logprobs": [top]}
        return choice
