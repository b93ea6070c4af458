# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The tokenizer and the chat template, as the engine loads them."""

from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from tinymodel import tokenizer as tiny_tokenizer
from tinymodel import vocab

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.write(directory, 4096)
    return AutoTokenizer.from_pretrained(directory)


def render(
    tokenizer: PreTrainedTokenizerBase, *messages: dict[str, Any], **options: Any
) -> str:
    options.setdefault("add_generation_prompt", True)
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    assert isinstance(text, str)
    return text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_it_fills_the_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == vocab.SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab.SIZE))


@given(st.text())
def test_any_text_survives(text: str) -> None:
    built = tiny_tokenizer.build()
    for marker in (*vocab.CONTROL, *vocab.MARKUP):
        text = text.replace(marker, "")
    assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text


def test_merges_are_used(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "this is what they would have said"
    assert len(tokenizer(text)["input_ids"]) < len(text) / 2


def test_markers_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for marker in (*vocab.CONTROL, *vocab.MARKUP):
        ids = tokenizer(f"a{marker}b", add_special_tokens=False)["input_ids"]
        assert ids == [ids[0], tokenizer.convert_tokens_to_ids(marker), ids[-1]]
    ids = tokenizer("<|user|><think>x</think><tool_call>")["input_ids"]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded == "<think>x</think><tool_call>"


def test_a_turn_opens_with_thinking(tokenizer: PreTrainedTokenizerBase) -> None:
    system = {"role": "system", "content": "Be brief."}
    text = render(tokenizer, system, user("Hi"))
    assert text == "<|system|>\nBe brief.<|user|>\nHi<|assistant|>\n<think>"
    text = render(tokenizer, user("Hi"), enable_thinking=False)
    assert text == "<|user|>\nHi<|assistant|>\n<think></think>"
    text = render(tokenizer, user("Hi"), add_generation_prompt=False)
    assert text == "<|user|>\nHi"


def test_content_parts(tokenizer: PreTrainedTokenizerBase) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = render(tokenizer, {"role": "user", "content": parts})
    assert text.startswith("<|user|>\nab<|assistant|>")
    image = [{"type": "image_url", "image_url": "x"}]
    with pytest.raises(jinja2.exceptions.TemplateError, match="image_url"):
        render(tokenizer, {"role": "user", "content": image})


def test_old_reasoning_is_dropped(tokenizer: PreTrainedTokenizerBase) -> None:
    old = {"role": "assistant", "content": "Yes.", "reasoning": "hm"}
    text = render(tokenizer, user("same"), old, user("same"))
    assert "<|assistant|>\n<think></think>Yes.<|user|>" in text


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_tool_turns(tokenizer: PreTrainedTokenizerBase, field: str) -> None:
    call = {"role": "assistant", "content": None, field: "ask", "tool_calls": [CALL]}
    results = [{"role": "tool", "content": c} for c in ("rain", "sun")]
    text = render(tokenizer, user("?"), call, *results, tools=[TOOL])
    assert '{"name": "weather", "parameters": {"type": "object"' in text
    assert text.endswith(
        "<|user|>\n?<|assistant|>\n<think>ask</think>"
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
        "<|observation|>\n<tool_response>rain</tool_response>"
        "<tool_response>sun</tool_response><|assistant|>\n<think>"
    )


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "robot", "content": "x"}, "robot"),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
            "arguments",
        ),
    ],
)
def test_bad_messages_are_refused(
    tokenizer: PreTrainedTokenizerBase, message: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(jinja2.exceptions.TemplateError, match=complaint):
        render(tokenizer, message)


def test_parsers_of_the_engine_read_a_rendered_turn(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    turn = {
        "role": "assistant",
        "content": "Wait.",
        "reasoning": "ask",
        "tool_calls": [CALL],
    }
    prompt = render(tokenizer, user("?"))
    whole = render(tokenizer, user("?"), turn, add_generation_prompt=False)
    assert whole.startswith(prompt)
    answer = whole[len(prompt) :]
    request = ChatCompletionRequest.model_validate(
        {"messages": [user("?")], "tools": [TOOL]}
    )

    reasoning_parser: Any = ReasoningParserManager.get_reasoning_parser("glm47")
    reasoning = reasoning_parser(tokenizer)
    thought, rest = reasoning.extract_reasoning(answer, request)
    assert thought == "ask"
    assert rest == answer.partition("</think>")[2]
    tool_parser: Any = ToolParserManager.get_tool_parser("glm47")
    tools = tool_parser(tokenizer, request.tools)
    found = tools.extract_tool_calls(rest, request)
    assert found.tools_called
    (called,) = found.tool_calls
    assert called.function.name == "weather"
    assert called.function.arguments == '{"city": "Oslo", "days": 2}'
    assert found.content == "Wait."
