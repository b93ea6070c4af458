# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""One streaming completion, read token by token."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.plan import Request

# The most that vLLM gives unless it is told otherwise.
LIKELIEST = 20
_SHOWN = 300


class StreamError(Exception):
    """A stream failed; the message says which and how."""


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        url: Base of the server's addresses, without /v1.
        model: The served model's name.
        stall_s: Seconds without a new token after which a stream has failed.
    """

    url: str
    model: str
    stall_s: float


@dataclass
class Answer:
    """What came of one request.

    Attributes:
        tokens: New token ids.
        logprobs: Their log-probabilities; of samples only.
        likeliest: At each place, log-probabilities by token id; of samples only.
        reason: Why the server ended it.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    reason: str | None = None

    def add(self, event: dict[str, Any]) -> bool:
        """Takes one event of the stream; returns whether it had new tokens."""
        if "error" in event:
            raise StreamError(f"the server says {str(event['error'])[:_SHOWN]}")
        (choice,) = event["choices"]
        new = choice.get("token_ids") or []
        self.tokens += new
        self.reason = choice.get("finish_reason") or self.reason
        if new and (found := choice.get("logprobs")):
            self.logprobs += found["token_logprobs"]
            self.likeliest += [
                {
                    int(name.removeprefix("token_id:")): value
                    for name, value in top.items()
                }
                for top in found["top_logprobs"]
            ]
        return bool(new)


async def complete(
    session: aiohttp.ClientSession, target: Target, request: Request
) -> Answer:
    """Makes one request and reads its stream, or closes it midway as the plan says.

    Raises:
        StreamError: If it stalls, breaks, or does not end as it should.
    """
    answer = Answer()
    try:
        await _read(session, target, request, answer)
        if request.cancel_after is None and (
            len(answer.tokens) != request.max_tokens or answer.reason != "length"
        ):
            raise StreamError(
                f"ended after {len(answer.tokens)} tokens, reason {answer.reason}"
            )
    except TimeoutError:
        error = f"stalled: no new token for {target.stall_s:g} s"
    except (StreamError, aiohttp.ClientError, OSError) as exc:
        error = str(exc) or type(exc).__name__
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        error = f"not an event of a completion: {type(exc).__name__}: {exc}"
    else:
        return answer
    raise StreamError(f"{request}, {len(answer.tokens)} came: {error}")


async def _read(
    session: aiohttp.ClientSession, target: Target, request: Request, answer: Answer
) -> None:
    clock = asyncio.get_running_loop().time
    async with (
        asyncio.timeout(target.stall_s) as patience,
        session.post(
            f"{target.url}/v1/completions", json=_body(target.model, request)
        ) as response,
    ):
        if response.status != 200:
            text = await response.text()
            raise StreamError(f"HTTP {response.status}: {text[:_SHOWN]}")
        async for event in _events(response.content):
            if answer.add(event):
                patience.reschedule(clock() + target.stall_s)
            if len(answer.tokens) >= (request.cancel_after or float("inf")):
                # Not given back to the pool: the server sees it closed.
                response.close()
                return


def _body(model: str, request: Request) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if request.sample is not None:
        body |= {
            "logprobs": LIKELIEST,
            "return_tokens_as_token_ids": True,
            # Or the prefix cache would answer instead of a prefill under load.
            "cache_salt": uuid.uuid4().hex,
        }
    return body


async def _events(lines: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        text = line.strip()
        if not text.startswith(b"data:"):
            continue
        data = text.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise StreamError("the stream ended without [DONE]")
