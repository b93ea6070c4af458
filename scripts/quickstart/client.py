# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What an OpenAI client asks the server, and what counts as an answer.

The model is tiny and its weights are random: left alone it writes noise. Every
request below is driven by features of the server alone, the ones that one uses with
a real model too, and the server's own parsers do the splitting:

- the chat is free text;
- the reasoning is free text that the thinking budget ends, and the answer after it
  is one of the choices that structured output allows;
- the tool call is one that `tool_choice="required"` with a strict schema allows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from quickstart.server import MODEL_NAME

_CHAT_TOKENS = 48
_THINKING_TOKENS = 24
_CHOICES = ["yes", "no"]
_CITIES = ["Oslo", "Lima"]
_NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city for the coming days.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": _CITIES},
                "days": {"type": "integer", "enum": [1, 2, 3]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Check:
    """One request and its outcome.

    Attributes:
        name: What was asked for.
        driven_by: What made a random model give such an answer.
        ok: Whether the answer is right in form.
        seconds: From request to the end of the answer.
        tokens: Generated tokens.
        answer: The parts of the answer, or what was wrong with it.
    """

    name: str
    driven_by: str
    ok: bool = False
    seconds: float = 0.0
    tokens: int = 0
    answer: dict[str, Any] = field(default_factory=dict)


def connect(url: str) -> OpenAI:
    """Return a client of the server at this address."""
    # Proxy settings of this machine do not concern a server on it.
    http = DefaultHttpxClient(trust_env=False, timeout=120)
    return OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)


def run_checks(client: OpenAI) -> list[Check]:
    """Make all requests; a failing one does not keep the others from running."""
    checks: list[tuple[Check, Callable[[OpenAI, Check], None]]] = [
        (Check("streamed chat", "free text"), _chat),
        (Check("reasoning", "thinking budget, choice"), _reasoning),
        (Check("tool call", "tool_choice=required"), _tool_call),
    ]
    for check, ask in checks:
        start = time.monotonic()
        try:
            ask(client, check)
        except Exception as exc:  # any failure of the server or of the parsing
            check.ok = False
            check.answer["error"] = f"{type(exc).__name__}: {exc}"
        check.seconds = time.monotonic() - start
    return [check for check, _ in checks]


def greedy_text(client: OpenAI) -> str:
    """Return a greedy completion, to compare the formats of one model."""
    done = client.completions.create(
        model=MODEL_NAME,
        prompt="the people of the new place",
        max_tokens=32,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return done.choices[0].text


def _chat(client: OpenAI, check: Check) -> None:
    start = time.monotonic()
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Say something about the sea."}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=_CHAT_TOKENS,
        seed=1,
        extra_body={**_NO_THINKING, "ignore_eos": True},
    )
    parts: list[str] = []
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            if not parts:
                check.answer["first_token_s"] = round(time.monotonic() - start, 3)
            parts.append(event.choices[0].delta.content)
        if event.usage:
            check.tokens = event.usage.completion_tokens
    check.answer["content"] = "".join(parts)
    check.answer["parts"] = len(parts)
    check.ok = len(parts) > 1 and check.tokens == _CHAT_TOKENS


def _reasoning(client: OpenAI, check: Check) -> None:
    done = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Is the sea wet?"}],
        max_tokens=_THINKING_TOKENS + 16,
        seed=1,
        extra_body={
            "thinking_token_budget": _THINKING_TOKENS,
            "structured_outputs": {"choice": _CHOICES},
            # Noise may hold a stop token or the markup of a call.
            "min_tokens": _THINKING_TOKENS,
            "bad_words": ["<think>", "<tool_call>"],
        },
    )
    message = done.choices[0].message
    reasoning = (message.model_extra or {}).get("reasoning")
    check.tokens = done.usage.completion_tokens if done.usage else 0
    check.answer |= {"reasoning": reasoning, "content": message.content}
    check.ok = bool(reasoning) and message.content in _CHOICES


def _tool_call(client: OpenAI, check: Check) -> None:
    done = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "How is the weather in Oslo?"}],
        tools=[_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=512,
        seed=1,
        # The call's grammar lets white space stand around a value, and a random model
        # would stay in it: make what it repeats ever less likely.
        temperature=2,
        top_p=1,
        frequency_penalty=2,
        extra_body={**_NO_THINKING, "top_k": -1},
    )
    check.tokens = done.usage.completion_tokens if done.usage else 0
    calls = done.choices[0].message.tool_calls or []
    check.answer["calls"] = [call.model_dump()["function"] for call in calls]
    (call,) = check.answer["calls"]
    arguments = json.loads(call["arguments"])
    check.ok = (
        call["name"] == "get_weather"
        and set(arguments) == {"city", "days"}
        and arguments["city"].strip() in _CITIES
        and arguments["days"] in (1, 2, 3)
        and done.choices[0].finish_reason == "tool_calls"
    )
