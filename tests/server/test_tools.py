"""Tool calls: what the model is shown of them, and how its answer is taken apart, however it is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher
from openai import OpenAI
from tokenizers import Tokenizer

from server.errors import ApiError
from server.openai.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    ToolCallParser,
    ToolFormat,
    forced_calls,
    format_of,
    strict_calls,
)
from tests.server.conftest import ServerThread, publish
from tests.server.fakes import FakeScheduler
from tests.server.test_chat import HELLO, events, script

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments.city }}</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}"
)
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>{"name": "clock"}</tool_call>\n'
)


@pytest.fixture(scope="module")
def tooled(shared_server: ServerThread, smollm2: Path) -> Iterator[str]:
    publish(shared_server.store, "tooled", smollm2, files={"chat_template.jinja": TEMPLATE})
    yield "tooled"
    shared_server.store.remove("tooled")


def test_the_template_is_given_tools_and_what_came_of_them(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer, tooled: str
) -> None:
    messages: list[Any] = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    openai.chat.completions.create(model=tooled, messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    shown, user, assistant, tool = tokenizer.decode(scheduler.submitted[0].prompt).strip().split("\n")
    assert json.loads(shown) == WEATHER
    assert (user, assistant, tool) == ("user: Hello?", "assistant: <tool_call>weather Rome</tool_call>", "tool: sunny")


def test_an_answer_with_calls(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer, tooled: str) -> None:
    scheduler.script = script(tokenizer, CALLS)
    answer = openai.chat.completions.create(model=tooled, messages=HELLO, tools=[WEATHER, CLOCK])  # type: ignore[arg-type,list-item]
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [  # type: ignore[union-attr]
        ("weather", {"city": "Rome"}),
        ("clock", {}),
    ]
    assert len({call.id for call in calls}) == 2


def test_a_stream_brings_each_call_in_one_chunk(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer, tooled: str
) -> None:
    scheduler.script = script(tokenizer, CALLS)
    text, calls, finish = "", [], None
    for chunk in openai.chat.completions.create(model=tooled, messages=HELLO, tools=[WEATHER, CLOCK], stream=True):  # type: ignore[call-overload]
        text += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
        finish = chunk.choices[0].finish_reason
    assert (text, finish) == ("Let me see.", "tool_calls")
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "weather", '{"city": "Rome"}'),
        (1, "clock", "{}"),
    ]


def test_without_parallel_calls_the_first_one_ends_the_answer(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer, tooled: str
) -> None:
    scheduler.script = script(tokenizer, CALLS)
    answer = openai.chat.completions.create(
        model=tooled,
        messages=HELLO,  # type: ignore[arg-type]
        tools=[WEATHER, CLOCK],  # type: ignore[list-item]
        parallel_tool_calls=False,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert len(answer.choices[0].message.tool_calls or []) == 1
    assert scheduler.cancelled == [scheduler.submitted[0].id]  # it does not run on for nobody


def test_a_call_that_was_cut_off_is_text(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer, tooled: str
) -> None:
    scheduler.script = script(tokenizer, '<tool_call>{"name": "weath', "length")
    answer = openai.chat.completions.create(model=tooled, messages=HELLO, tools=[WEATHER])  # type: ignore[arg-type,list-item]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == '<tool_call>{"name": "weath'
    assert answer.choices[0].message.tool_calls is None


def test_a_call_that_must_be_made_is_begun_in_the_prompt_and_held_to_the_schema(
    http: httpx.Client, scheduler: FakeScheduler, tokenizer: Tokenizer, tooled: str
) -> None:
    scheduler.script = script(tokenizer, '{"name": "clock", "arguments": {}}\n</tool_call>')
    choice = {"type": "function", "function": {"name": "clock"}}
    body = {"model": tooled, "messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["clock"]
    (request,) = scheduler.submitted
    assert tokenizer.decode(request.prompt).endswith("<tool_call>\n")
    assert request.sampling.grammar is not None
    assert "clock" in request.sampling.grammar
    assert "weather" not in request.sampling.grammar


def test_none_may_be_called(http: httpx.Client, scheduler: FakeScheduler, tokenizer: Tokenizer, tooled: str) -> None:
    scheduler.script = script(tokenizer, CALLS)
    body = {"model": tooled, "messages": HELLO, "tools": [WEATHER], "tool_choice": "none", "stream": True}
    text = "".join(
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in events(http.post("/v1/chat/completions", json=body))[:-1]
    )
    assert text == CALLS
    assert "weather" not in tokenizer.decode(scheduler.submitted[0].prompt)


def test_strict_tools_are_kept_by_a_grammar(http: httpx.Client, scheduler: FakeScheduler, tooled: str) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    body = {"model": tooled, "messages": HELLO, "tools": [strict, CLOCK]}
    http.post("/v1/chat/completions", json=body).raise_for_status()
    http.post("/v1/chat/completions", json=body | {"tools": [WEATHER]}).raise_for_status()
    assert [request.sampling.grammar is not None for request in scheduler.submitted] == [True, False]


def test_a_schema_that_cannot_be_kept(http: httpx.Client, tooled: str) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}
    body = {"model": tooled, "messages": HELLO, "tools": [broken], "tool_choice": "required"}
    error = http.post("/v1/chat/completions", json=body)
    assert error.status_code == 400
    assert error.json()["error"]["code"] == "invalid_json_schema"
    assert error.json()["error"]["param"] == "tools"


# ---- the formats


def parsed(format: ToolFormat, text: str, size: int, **options: bool) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(format, **options)
    shown, calls = "", []
    for start in range(0, len(text), size):
        more, made = parser.push(text[start : start + size])
        shown, calls = shown + more, calls + made
    more, made = parser.flush()
    return shown + more, [(call.name, call.arguments) for call in calls + made]


ROME = ("weather", '{"city": "Rome"}')
TIME = ("clock", "{}")
ANSWERS: list[tuple[ToolFormat, str, str, Sequence[tuple[str, str]]]] = [
    (HERMES, CALLS, "Let me see.", [ROME, TIME]),
    (HERMES, " plain <tool text> \n", " plain <tool text> \n", []),
    (HERMES, "<tool_call>nope</tool_call> ok\n", "<tool_call>nope</tool_call> ok\n", []),
    (HERMES, '<tool_call>{"name": "clock"}</tool_call>\nDone. ', "Done.", [TIME]),
    (HERMES, 'See.\n<tool_call>{"name": "clock"}</tool_call>\nDone. ', "See.\n\nDone.", [TIME]),
    (HERMES, ' \n<tool_call>{"name": "clock"}</tool_call> Done.', "Done.", [TIME]),
    (HERMES, '<tool_call>{"name": "clock"}', "", [TIME]),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    (LLAMA, '\n{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    (
        LLAMA,
        '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "clock", "parameters": {}}',
        "",
        [ROME, TIME],
    ),
    (LLAMA, '{"name": "f", "parameters": {"text": "a; b"}}', "", [("f", '{"text": "a; b"}')]),
    (LLAMA, '{"answer": 1}', '{"answer": 1}', []),
    (LLAMA, 'Say {"name": "clock"}', 'Say {"name": "clock"}', []),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", "arguments": {}}]',
        "",
        [ROME, TIME],
    ),
    (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    *(  # what JSON cannot say, or nobody could read
        (LLAMA, text, text, [])
        for text in (
            '{"name": "f", "parameters": {"x": NaN}}',
            '{"name": "f", "parameters": {"x": 1e999}}',
            '{"name": "f", "parameters": {"x": "\\ud800"}}',
            '{"name": "\\ud800"}',
            '{"name": "f", "parameters": {"x": ' + "[" * 100_000,
            '{"name": "f"} 1',
        )
    ),
    (LLAMA, '{"name": "f", "parameters": {"x": 100000000000000000000}}', "", [("f", '{"x": 100000000000000000000}')]),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("format", "text", "shown", "calls"), ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_is_taken_apart(
    format: ToolFormat, text: str, shown: str, calls: list[tuple[str, str]], size: int
) -> None:
    assert parsed(format, text, size) == (shown, calls)


@pytest.mark.parametrize("format", [HERMES, MISTRAL, LLAMA])
def test_what_a_model_is_made_to_write_is_what_is_read(format: ToolFormat) -> None:
    """Grammars allow what the parser takes for calls of those tools, and no other arguments."""
    opening, grammar = forced_calls(format, [WEATHER, CLOCK], single=False)
    texts = {
        HERMES: '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        MISTRAL: '[{"name": "weather", "arguments": {"city": "Rome"}}]',
        LLAMA: '{"name": "weather", "parameters": {"city": "Rome"}}',
    }
    assert matches(grammar, texts[format])
    assert not matches(grammar, texts[format].replace('"city"', '"town"'))
    assert parsed(format, texts[format], 5, begun=bool(opening)) == ("", [ROME])


def test_strict_arguments_among_free_text() -> None:
    strict = strict_calls(HERMES, [WEATHER])
    assert matches(strict, "Just text, with <tags>.")
    assert matches(strict, 'See: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    assert not matches(strict, '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>')
    strict = strict_calls(LLAMA, [WEATHER])
    assert matches(strict, "Just text.")
    assert not matches(strict, '{"name": "weather", "parameters": {"town": "Rome"}}')
    with pytest.raises(ApiError, match="strict"):
        strict_calls(MISTRAL, [WEATHER])


def matches(grammar: str, text: str) -> bool:
    """Whether a text, byte by byte, is a whole answer."""
    from llguidance import LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar))
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ tools }} <tool_call>", HERMES),
        ("{{ tools }} [TOOL_CALLS]", MISTRAL),
        ('{{ tools }} {"name": …, "parameters": …} ipython', LLAMA),
    ],
)
def test_a_template_shows_how_calls_are_written(template: str, format: ToolFormat) -> None:
    assert format_of(template) is format


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ tools }} <|call|>", "{{ tools }} <tool_call><function=f>"])
def test_a_model_that_cannot_be_given_tools_says_so(template: str) -> None:
    with pytest.raises(ApiError, match="cannot be given tools"):
        format_of(template)
